"""Options that several commands have, and the target that they mean."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from arbordraft.target import RaggedModel


class Dtype(StrEnum):
    """Precision of the weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Linears(StrEnum):
    """How weights are read on a CPU; see ``RaggedModel``."""

    packed = "packed"
    native = "native"
    onednn = "onednn"
    plain = "plain"


ModelOption = Annotated[
    str, typer.Option(help="Hub name or folder of a causal LM; 'smollm2' fetches SmolLM2-135M-Instruct.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Precision of the weights.")]


def load_target(
    model: str, dtype: Dtype, linears: Linears = Linears.plain
) -> "tuple[RaggedModel, PreTrainedTokenizerBase]":
    """The model, ready for ragged batches, and its tokenizer."""
    import torch

    from arbordraft.target import RaggedModel

    precision: torch.dtype = getattr(torch, dtype)
    if model == "smollm2":
        from arbordraft.pretrained import load_smollm2

        found: PreTrainedModel
        found, tokenizer = load_smollm2(precision)
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        found = AutoModelForCausalLM.from_pretrained(model, dtype=precision)
        tokenizer = AutoTokenizer.from_pretrained(model)
    return RaggedModel(found.eval(), tokenizer, linears=linears), tokenizer
