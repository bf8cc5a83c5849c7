"""Torch operators of the kernels: the schema of each, and its implementation for each device.

``torch.ops.arbordraft.NAME`` runs in Triton on a GPU, in the C++ kernels on a CPU once they are loaded, and otherwise
by the reference. Its overload ``portable`` runs no compiled code: it runs the reference, or Triton in its interpreter.
Importing this module imports no Triton and loads no library.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from pkgutil import resolve_name
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.native import load

# Not torch.library.custom_op, which costs more per call: see examples/benchmarks/dispatch.py. The operators disappear
# when this object is deleted, so the module keeps it.
LIBRARY = torch.library.Library("arbordraft", "DEF")
NATIVE = (torch.float32, torch.bfloat16)  # types that the C++ kernels compute with
SINGLE = (*NATIVE, torch.float16)  # types that the Triton kernels take: float32 holds them exactly
P = ParamSpec("P")
R = TypeVar("R")


def define(schema: str, fake: Callable[..., Any] | None = None, run: Callable[..., Any] | None = None) -> Any:
    """Defines an operator and returns it.

    Args:
        schema: its name, or ``name.overload``, and its signature, in torch's notation.
        fake: makes outputs without data, for ``torch.compile`` and ``torch.export``.
        run: implementation for every device that has no kernel of its own.
    """
    name, _, overload = schema.partition("(")[0].partition(".")
    LIBRARY.define(schema)
    for function, key in ((fake, "Meta"), (run, "CompositeExplicitAutograd")):
        if function is not None:
            LIBRARY.impl(schema.partition("(")[0], function, key)
    return getattr(getattr(torch.ops.arbordraft, name), overload or "default")


class Operator(Generic[P, R]):
    """An operator with a reference; its arguments are positional, the first one a tensor or a list of tensors.

    Args:
        schema: its name and signature, in torch's notation.
        reference: implementation in plain PyTorch, the truth for the kernels.
        fake: see :func:`define`.
        triton: the function that launches the Triton kernel, as ``"package.module:function"``.
        triton_takes: types of the first tensor that the Triton kernel takes; by default any.
        native: whether a C++ kernel of the operator's name exists.
        native_takes: types of the first tensor that the C++ kernel takes; by default any.
    """

    def __init__(
        self,
        schema: str,
        reference: Callable[P, R],
        fake: Callable[..., Any],
        *,
        triton: str | None = None,
        triton_takes: Sequence[torch.dtype] | None = None,
        native: bool = False,
        native_takes: Sequence[torch.dtype] | None = None,
    ) -> None:
        name = schema.partition("(")[0]
        self.reference = reference
        self.triton, self.triton_takes = triton, triton_takes
        self.native, self.native_takes = native, native_takes
        self.default: Callable[P, R] = define(schema, fake, reference)
        self.portable: Callable[P, R] = define(schema.replace("(", ".portable(", 1), fake, self._portable)
        if triton:
            LIBRARY.impl(name, self._launch, "CUDA")
        self._in_triton, self._natively, self._by_reference = f"{name}/triton", f"{name}/native", f"{name}/reference"

    def __call__(self, *arguments: P.args, **_: P.kwargs) -> R:
        """Runs the implementation that :meth:`pick` picks."""
        first: Any = arguments[0]
        return self.pick(first if isinstance(first, Tensor) else first[0])(*arguments, **_)

    def pick(self, tensor: Tensor, *, native: bool = True) -> Callable[P, R]:
        """Picks the implementation for the first tensor argument, and counts it in :data:`choice.ran`.

        Args:
            tensor: first tensor argument; its device and type decide.
            native: whether the C++ kernel may run.

        Returns:
            The overload ``default`` or ``portable``, or ``reference``. A trace never gets ``reference``.

        Raises:
            ValueError: if Triton was chosen and there is neither a GPU nor the interpreter.
        """
        if torch.compiler.is_compiling():  # a trace cannot read the context variable
            on_cpu = native and tensor.is_cpu and self._native_takes(tensor)
            return self.default if on_cpu or (tensor.is_cuda and self._triton_takes(tensor)) else self.portable
        if self.triton and choice.triton_chosen(tensor):
            if self._triton_takes(tensor):
                choice.ran[self._in_triton] += 1
                return self.default if tensor.is_cuda else self.portable
        elif native and self.runs_natively(tensor):
            choice.ran[self._natively] += 1
            return self.default
        choice.ran[self._by_reference] += 1
        return self.reference

    def runs_natively(self, tensor: Tensor) -> bool:
        """Returns whether the C++ kernel runs for the first tensor argument, unless Triton was chosen."""
        return self._native_takes(tensor) and tensor.is_cpu and choice.native_allowed() and load()

    def _triton_takes(self, tensor: Tensor) -> bool:
        return self.triton is not None and (self.triton_takes is None or tensor.dtype in self.triton_takes)

    def _native_takes(self, tensor: Tensor) -> bool:
        return self.native and (self.native_takes is None or tensor.dtype in self.native_takes)

    def _portable(self, *arguments: Any) -> Any:
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        if choice.interpreted() and self._triton_takes(first):
            return self._launch(*arguments)
        return self.reference(*arguments)  # type: ignore[call-arg]

    def _launch(self, *arguments: Any) -> Any:
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        if first.is_cuda and first.get_device() != torch.cuda.current_device():  # Triton uses the current one
            with torch.cuda.device(first.get_device()):
                return self._launcher(*arguments)
        return self._launcher(*arguments)

    @cached_property
    def _launcher(self) -> Callable[..., Any]:
        assert self.triton is not None
        found: Callable[..., Any] = resolve_name(self.triton)
        return found


__all__ = ["LIBRARY", "NATIVE", "SINGLE", "Operator", "define"]
