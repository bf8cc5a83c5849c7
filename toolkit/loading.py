"""Loading a trained drafter of whatever kind a folder holds."""

import json
import os
from pathlib import Path

from arbordraft.drafters import Drafter, EagleDrafter
from arbordraft.target import RaggedModel

_KINDS = {"arbordraft_eagle": EagleDrafter}


def load_drafter(path: str | os.PathLike[str], target: RaggedModel) -> Drafter:
    """The drafter that a training saved in a folder.

    Args:
        path: the folder.
        target: the model that it drafts for.

    Raises:
        ValueError: if there is no trained drafter, or one for another target.
    """
    config = Path(path) / "config.json"
    try:
        kind = json.loads(config.read_text())["model_type"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} holds no trained drafter: its config.json cannot be read ({error})") from error
    if kind not in _KINDS:
        raise ValueError(f"{path} holds a model of type {kind!r}, not a drafter ({', '.join(_KINDS)})")
    return _KINDS[kind].from_pretrained(path, target)
