"""Loading a model or a target by its name, and a trained drafter of whatever kind a folder holds."""

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.checkpoints import load_causal_lm, load_tokenizer, read_config
from arbordraft.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    LanguageModelDrafter,
    MedusaDrafter,
    NGramDrafter,
    NoDrafter,
)
from arbordraft.drafters.base import check_ragged
from arbordraft.onnx_graph import FUSE, MODEL, Graph
from arbordraft.onnx_networks import OnnxEagle, OnnxMedusa, OnnxModel
from arbordraft.pretrained import load_smollm2
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SMALL = "smollm2"  # what SmolLM2-135M-Instruct is called wherever a model is named

# By the model_type in config.json; whatever else transformers can load counts as a language model.
_KINDS: dict[str, Any] = {
    "arbordraft_eagle": EagleDrafter,
    "arbordraft_exit_adapter": EarlyExitDrafter,
    "arbordraft_medusa": MedusaDrafter,
}


class Dtype(StrEnum):
    """Precision of the weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Kernels(StrEnum):
    """How weights are read on a CPU; see ``RaggedModel``."""

    auto = "auto"
    native = "native"
    onednn = "onednn"
    torch = "torch"


def load_model(
    name: str, dtype: torch.dtype, revision: str | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase | None]":
    """A causal LM in eval mode, all of it, and its tokenizer, which pads on the left, if it has one.

    Args:
        name: a folder, a hub name, or ``smollm2`` for SmolLM2-135M-Instruct.
        dtype: of its weights.
        revision: of the hub's repository.

    Raises:
        ValueError: if it is no causal LM, or it is damaged, incomplete or pickled.
    """
    if name == SMALL:
        return load_smollm2(dtype)
    place = {} if revision is None else {"revision": revision}
    return load_causal_lm(name, dtype, **place), load_tokenizer(name, **place)


def load_target(
    model: str, dtype: Dtype, kernels: Kernels = Kernels.auto
) -> "tuple[RaggedModel, PreTrainedTokenizerBase]":
    """The model, ready for ragged batches, and its tokenizer.

    Raises:
        ValueError: if the model is damaged, incomplete or no causal LM, or it has no tokenizer.
    """
    found, tokenizer = load_model(model, getattr(torch, dtype))
    if tokenizer is None:
        raise ValueError(
            f"{model} has no tokenizer, and prompts are texts: save it beside the model, "
            "tokenizer.save_pretrained(folder)"
        )
    return RaggedModel(found, tokenizer, kernels=kernels), tokenizer


def drafter_named(name: str, target: RaggedModel) -> Drafter:
    """The drafter that a command line means by ``ngram``, ``none``, ``early-exit:LAYERS``, a folder or a hub name.

    Args:
        name: as above; a name on the hub is that of a draft model.
        target: the model that it drafts for.

    Raises:
        ValueError: if it means nothing, or what it means is damaged.
    """
    if name in ("ngram", "none"):
        return NGramDrafter() if name == "ngram" else NoDrafter()
    if name.startswith("early-exit:"):
        layers = name.partition(":")[2]
        if not layers.isdecimal():
            raise ValueError(f"drafter {name!r}: write early-exit:LAYERS, such as early-exit:4")
        return EarlyExitDrafter(target, int(layers))
    if Path(name).is_dir():
        return load_drafter(name, target)
    return LanguageModelDrafter.from_pretrained(name, target)


def load_drafter(path: str | os.PathLike[str], target: RaggedModel) -> Drafter:
    """The drafter that a training saved in a folder, one that was exported as graphs, or a small language model.

    Args:
        path: the folder.
        target: the model that it drafts for.

    Raises:
        ImportError: if it was exported and onnxruntime is not installed.
        ValueError: if there is no trained drafter, a damaged one, or one for another target or tokenizer.
    """
    if (Path(path) / MODEL).exists():
        return _exported(Path(path), target)
    config = read_config(path)
    if "model_type" not in config:
        raise ValueError(f"{path} holds no trained drafter but a {config['class']}: name the folder of a drafter")
    drafter: Drafter = _KINDS.get(config["model_type"], LanguageModelDrafter).from_pretrained(path, target)
    return drafter


def _exported(folder: Path, target: RaggedModel) -> Drafter:
    """The drafter of a folder of graphs: its kind of torch, around the network that runs them."""
    check_ragged(target)
    graph = Graph(folder / MODEL)
    match graph.kind:
        case "causal-lm" | "early-exit":
            return LanguageModelDrafter(OnnxModel(graph, target))
        case "eagle":
            return EagleDrafter(OnnxEagle(graph, Graph(folder / FUSE), target), target)
        case "medusa":
            return MedusaDrafter(OnnxMedusa(graph, target), target)
    raise ValueError(f"{folder} holds a graph of the kind {graph.kind!r}, which is no drafter")
