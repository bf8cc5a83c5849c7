"""Options that several commands have, and the target that they mean."""

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from arbordraft.target import RaggedModel
    from arbordraft.topology import TreeTopology

SHAPES = "chain:5 | k:4,2,2 | fork:3x4 | parents:-1,0,0,1 | sequoia:0.6,0.2,0.1@16"


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


def parse_topology(text: str) -> "TreeTopology":
    """A topology from its description on the command line.

    Raises:
        typer.BadParameter: if the description is not one of ``SHAPES``, or describes no tree.
    """
    from arbordraft.topology import TreeTopology

    kind, _, values = text.partition(":")
    try:
        match kind:
            case "chain":
                return TreeTopology.chain(int(values))
            case "k":
                return TreeTopology.from_k_config([int(k) for k in values.split(",")])
            case "fork":
                width, depth = values.split("x")
                return TreeTopology.fork(int(width), int(depth))
            case "parents":
                return TreeTopology.from_parents([int(parent) for parent in values.split(",")])
            case "sequoia":
                rates, nodes = values.split("@")
                return TreeTopology.sequoia([float(rate) for rate in rates.split(",")], int(nodes))
    except ValueError as error:
        raise typer.BadParameter(f"tree {text!r}: {error}; write {SHAPES}") from error
    raise typer.BadParameter(f"unknown tree {text!r}; write {SHAPES}")
