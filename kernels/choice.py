"""Choice between the implementations of the kernels: Triton, C++ or plain PyTorch.

``auto`` takes Triton for tensors on a GPU, the C++ kernels on a CPU if the caller asks for them, and otherwise plain
PyTorch. ``reference`` takes plain PyTorch everywhere. ``triton`` takes Triton everywhere, on a CPU in its interpreter.
If Triton cannot run, ``triton`` raises an error: there is no silent fallback. ``RaggedModel`` chooses separately how a
model's own matrices are multiplied.
"""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

PATHS = ("auto", "reference", "triton")
INTERPRETER = "TRITON_INTERPRET"
_path: ContextVar[str] = ContextVar("path", default="auto")
ran: Counter[str] = Counter()  # calls by "operator/implementation": triton, native or reference


@contextmanager
def use(path: str) -> Iterator[None]:
    """Chooses the implementation for all calls inside a ``with`` statement.

    Args:
        path: ``"auto"``, ``"reference"`` or ``"triton"``.

    Raises:
        ValueError: if there is no such path, or ``path`` is ``"triton"`` and Triton is not installed.
    """
    if path not in PATHS:
        raise ValueError(f"there are no kernels called {path!r}; choose one of {', '.join(PATHS)}")
    if path == "triton" and not installed():
        raise ValueError("Triton is not installed; run: pip install 'arbordraft[triton]'")
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def interpreted() -> bool:
    """Returns whether Triton runs in its interpreter, on a CPU."""
    return os.environ.get(INTERPRETER) == "1"


def triton_chosen(tensor: Tensor) -> bool:
    """Returns whether operators run in Triton on a tensor.

    Raises:
        ValueError: if Triton was chosen and there is neither a GPU nor the interpreter.
    """
    path = _path.get()
    if path == "reference" or (path == "auto" and not (tensor.is_cuda and installed())):
        return False
    if not tensor.is_cuda and not interpreted():
        raise ValueError(f"on a CPU Triton runs in its interpreter only: set {INTERPRETER}=1 before Python starts")
    return True


def uses_triton(name: str, tensor: Tensor) -> bool:
    """Returns whether to compute in Triton on a tensor, and counts the call as ``name``.

    Raises:
        ValueError: see :func:`triton_chosen`.
    """
    if torch.compiler.is_compiling():
        return tensor.is_cuda  # as `Operator.pick` decides: a trace cannot read the context variable
    wanted = triton_chosen(tensor)
    ran[f"{name}/{'triton' if wanted else 'reference'}"] += 1
    return wanted


def native_allowed() -> bool:
    """Returns whether the C++ kernels may run."""
    return _path.get() == "auto"


@cache
def installed() -> bool:
    """Returns whether Triton is installed."""
    return find_spec("triton") is not None


__all__ = [
    "INTERPRETER",
    "PATHS",
    "installed",
    "interpreted",
    "native_allowed",
    "ran",
    "triton_chosen",
    "use",
    "uses_triton",
]
