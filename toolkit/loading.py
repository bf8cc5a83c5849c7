"""Loading a trained drafter of whatever kind a folder holds."""

import json
import os
from pathlib import Path
from typing import Any

from arbordraft.drafters import (
    Drafter,
    EagleDrafter,
    EarlyExitDrafter,
    LanguageModelDrafter,
    MedusaDrafter,
    NGramDrafter,
    NoDrafter,
    OnnxDrafter,
)
from arbordraft.graphs import MODEL
from arbordraft.target import RaggedModel

# By the model_type in config.json; whatever else transformers can load counts as a language model.
_KINDS: dict[str, Any] = {
    "arbordraft_eagle": EagleDrafter,
    "arbordraft_exit_adapter": EarlyExitDrafter,
    "arbordraft_medusa": MedusaDrafter,
}


def drafter_named(name: str, target: RaggedModel) -> Drafter:
    """The drafter that a command line means by ``ngram``, ``none``, ``early-exit:LAYERS``, a folder or a hub name.

    Args:
        name: as above; a name on the hub is that of a draft model.
        target: the model that it drafts for.

    Raises:
        ValueError: if it means nothing.
    """
    if name in ("ngram", "none"):
        return NGramDrafter() if name == "ngram" else NoDrafter()
    if name.startswith("early-exit:"):
        return EarlyExitDrafter(target, int(name.partition(":")[2]))
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
        ValueError: if there is no trained drafter, or one for another target.
    """
    if (Path(path) / MODEL).exists():
        return OnnxDrafter.from_pretrained(path, target)
    config = Path(path) / "config.json"
    try:
        kind = json.loads(config.read_text())["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} holds no trained drafter: its config.json cannot be read ({error})") from error
    drafter: Drafter = _KINDS.get(kind, LanguageModelDrafter).from_pretrained(path, target)
    return drafter
