"""Which implementation of the kernels runs.

``auto`` takes Triton for tensors on a GPU, the C++ kernels on a CPU where the caller asks for them, and else plain
PyTorch. ``reference`` takes plain PyTorch everywhere. ``triton`` takes Triton everywhere, on a CPU in its interpreter,
and fails where it cannot run: nothing falls back silently. How a model's own matrices are multiplied is another choice,
that of ``RaggedModel``.
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
ran: Counter[str] = Counter()  # how often each implementation ran, as "operator/implementation"


@contextmanager
def use(path: str) -> Iterator[None]:
    """Chooses the implementation for everything inside of a ``with`` statement.

    Args:
        path: ``"auto"``, ``"reference"`` or ``"triton"``.

    Raises:
        ValueError: if there is no such path, or Triton is not installed.
    """
    if path not in PATHS:
        raise ValueError(f"there are no kernels called {path!r}; choose one of {', '.join(PATHS)}")
    if path == "triton" and not _installed():
        raise ValueError("Triton is not installed; run: pip install 'arbordraft[triton]'")
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def interpreted() -> bool:
    """Whether Triton runs in its interpreter, on a CPU."""
    return os.environ.get(INTERPRETER) == "1"


def wants_triton(operator: str, tensor: Tensor) -> bool:
    """Whether an operator runs in Triton on a tensor; counts what runs.

    Raises:
        ValueError: if it should and cannot: there is neither a GPU nor the interpreter.
    """
    if torch.compiler.is_compiling():
        return tensor.is_cuda  # as operators decide; a trace can read no context
    path = _path.get()
    wanted = path == "triton" or (path == "auto" and tensor.is_cuda and _installed())
    if wanted and not tensor.is_cuda and not interpreted():
        raise ValueError(f"on a CPU Triton runs in its interpreter only: set {INTERPRETER}=1 before Python starts")
    ran[f"{operator}/{'triton' if wanted else 'other'}"] += 1
    return wanted


def wants_native() -> bool:
    """Whether the C++ kernels may run."""
    return _path.get() == "auto"


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


__all__ = ["INTERPRETER", "PATHS", "interpreted", "ran", "use", "wants_native", "wants_triton"]
