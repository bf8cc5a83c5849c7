"""Checks the checkpoint that a training is to go on with, before anything is loaded or begun."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from arbordraft.checkpoints.reader import check_finite, few

_KEYWORDS = ("best", "last", "hpc", "registry")  # of Lightning, which resolves them itself


def check_resumable(path: str | os.PathLike[str], *, fit: bool) -> None:
    """Checks a training's checkpoint without unpickling anything but tensors and plain data.

    Args:
        path: value of ``--ckpt_path``. Keywords, addresses and folders (sharded checkpoints) are left to Lightning.
        fit: whether a training goes on with it, and not only a validation.

    Raises:
        ValueError: if the file is missing, damaged, or no checkpoint of a training.
    """
    file = Path(path)
    if str(path).partition(":")[0] in _KEYWORDS or "://" in str(path) or file.is_dir():
        return
    if not file.is_file():
        raise ValueError(f"--ckpt_path: there is no {file}; name a file such as checkpoints/last.ckpt, or leave it out")
    try:
        # Mapped into memory, not copied, although the checks below read most of it.
        checkpoint: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # damaged bytes make the unpickler raise errors of any class
        raise ValueError(
            f"--ckpt_path: {file} is truncated, damaged or no checkpoint of a training ({type(error).__name__}): go on "
            "with an older one beside it, or leave --ckpt_path out to begin anew"
        ) from error
    wanted = ["state_dict", *(("optimizer_states", "loops") if fit else ())]
    keys = checkpoint.keys() if isinstance(checkpoint, dict) else ()
    if missing := [name for name in wanted if name not in keys]:
        raise ValueError(
            f"--ckpt_path: {file} is no checkpoint of a training, it lacks {few(missing)}; name one that Lightning "
            "wrote, such as checkpoints/last.ckpt"
        )
    weights = checkpoint["state_dict"]
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise ValueError(f"--ckpt_path: the state_dict of {file} holds something other than tensors")
    check_finite(weights, f"--ckpt_path: {file}")


def check_fit(module: nn.Module, checkpoint: Mapping[str, Any]) -> None:
    """Raises ValueError if a checkpoint's weights do not fit the network in training.

    Args:
        module: the module in training.
        checkpoint: the checkpoint as Lightning read it; strategies that keep weights elsewhere check them themselves.
    """
    ours = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint.get("state_dict", {}).items()}
    changed = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    if theirs and changed:
        raise ValueError(
            f"the checkpoint is that of another training: {few(changed)} are missing, unexpected or of another shape; "
            "go on with the configuration that it was written with, or leave --ckpt_path out to begin anew"
        )
