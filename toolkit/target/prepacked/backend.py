"""Chooses the kernels that run a model's layers on this machine."""

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.kernels import choice, native
from arbordraft.kernels.dispatch import SINGLE
from arbordraft.kernels.machine import available_memory
from arbordraft.target.prepacked.memory import copy_bytes

KERNELS = ("auto", "native", "torch", "triton")


class Choice(NamedTuple):
    """Backend that runs a model's layers.

    Args:
        backend: ``"torch"``, ``"native"`` or ``"triton"``.
        reason: reason against a faster one; empty if there is none.
    """

    backend: str
    reason: str = ""


def choose(kernels: str, model: nn.Module, *, weights: str | None = None) -> Choice:
    """Returns the backend that ``kernels`` selects for this model on this machine.

    Raises:
        ValueError: if ``kernels`` is unknown, or a backend asked for by name cannot be used.
    """
    if kernels not in KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(KERNELS)}, got {kernels!r}")
    if kernels == "torch":
        return Choice("torch", "asked for")
    weight = next(model.parameters())
    if kernels == "triton" or (kernels == "auto" and weight.is_cuda):
        problem = _triton_problem(weight)
        if problem is None:
            return Choice("triton")
        if kernels == "triton":
            raise ValueError(f"kernels='triton' cannot be used: {problem}")
        return Choice("torch", problem)
    unsupported = None
    if not weight.is_cpu or weight.dtype not in (torch.float32, torch.bfloat16):
        unsupported = f"weights must be float32 or bfloat16 on the CPU, not {weight.dtype} on {weight.device}"
    elif kernels == "auto":
        unsupported = _too_large(model, weights)
    problem = unsupported or native.problem()  # in this order: `native.problem` may build the kernels
    if problem is None:
        return Choice("native")
    if kernels != "auto":
        raise ValueError(f"kernels={kernels!r} cannot be used: {problem}")
    if weight.is_cpu and unsupported:
        warnings.warn(f"kernels='auto' uses the model's own linears: {unsupported}", stacklevel=3)
    return Choice("torch", problem)


def _triton_problem(weight: Tensor) -> str | None:
    """Returns why layers with such weights cannot run in Triton, or ``None`` if they can."""
    if not choice.installed():
        return "Triton is not installed; run: pip install 'arbordraft[triton]'"
    if not (weight.is_cuda or choice.interpreted()):
        return f"weights must be on a GPU, not on {weight.device}; Triton's interpreter wants TRITON_INTERPRET=1"
    return None if weight.dtype in SINGLE else f"weights must be float32, bfloat16 or float16, not {weight.dtype}"


def _too_large(model: nn.Module, weights: str | None) -> str | None:
    """Returns why no prepacked copy of a model's weights fits into memory, or ``None`` if it does."""
    needed, free = copy_bytes(model, weights), available_memory()
    if free is None or needed <= 0.9 * free:  # KV caches need memory, too
        return None
    return (
        f"a prepacked copy of the weights takes {needed / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free; "
        "kernels='native' makes the copy anyway"
    )


__all__ = ["KERNELS", "Choice", "choose"]
