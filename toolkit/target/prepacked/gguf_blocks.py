"""Matrices that stay in a file, in quantised blocks or another dtype; kernels read them without converting them.

Shapes: O outputs, I inputs.
"""

import warnings
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from arbordraft.kernels.dispatch import NATIVE
from arbordraft.kernels.prepacked_linear import BLOCKS, check_finite_blocks, dequantize_blocks, float_blocks

TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # kinds without blocks
# Names that GGUF gives to the kinds of blocks that kernels read.
READABLE = tuple(kind for kind in BLOCKS if kind != "INT4" and kind not in TORCH_DTYPES)
_Array = np.ndarray[Any, Any]
_DENSE = 1 << 24  # weights that are dequantised at a time
_SAME = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class FileBlocks(Tensor):
    """A parameter ``[..., I]`` that stays in blocks in its file and takes memory only during a computation.

    Torch sees a dense matrix. Each operator gets a temporary dense copy, and an embedding lookup only the rows that it
    needs. The parameter cannot be written to.

    Args:
        raw: ``[O, bytes]`` uint8, the file's memory-mapped rows; O is the product of the leading sizes.
        kind: GGUF's name of the type of blocks.
        shape: ``(O, I)``, or ``(E, O / E, I)`` for stacked experts.
        dtype: dtype of the dequantised numbers.
        order: ``[O]`` int64 index of each row in the file; by default in the file's order.
    """

    raw: _Array
    kind: str
    order: Tensor | None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(
        cls,
        raw: _Array,
        kind: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        order: Tensor | None = None,
    ) -> "FileBlocks":
        """Describes the matrix to torch; nothing is read yet."""
        self: FileBlocks = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device("cpu"))
        self.raw, self.kind, self.order = raw, kind, order
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _SAME:
            return args[0]._again()
        if function is torch.ops.aten.embedding.default and isinstance(args[0], cls):
            return args[0].rows(args[1].flatten()).unflatten(0, args[1].shape)
        if function is torch.ops.aten.slice.Tensor and args[1:2] == (0,) and args[0].ndim == 2:
            return args[0].rows(torch.arange(len(args[0]))[slice(*args[2:])])
        for value, declared in zip(args, function._schema.arguments, strict=False):
            if isinstance(value, cls) and declared.alias_info is not None and declared.alias_info.is_write:
                raise RuntimeError(
                    "weights that stay in their file cannot be written to: load the model with kernels='torch'"
                )
        return function(*tree_map_only(cls, cls.dense, args), **tree_map_only(cls, cls.dense, kwargs or {}))

    def untyped_storage(self) -> NoReturn:
        """Raises RuntimeError: there is no storage, and savers of models ask for one."""
        raise RuntimeError("blocks of a file are not saved again: copy the file, or load it with kernels='torch'")

    storage = untyped_storage

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return nn.Parameter(self._again(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _parameter, (np.asarray(self.raw), self.kind, tuple(self.shape), self.dtype, self.order)

    def rows(self, index: Tensor) -> Tensor:
        """Returns the ``[n, I]`` numbers of ``[n]`` rows."""
        places = index if self.order is None else self.order[index]
        return self._read(self.raw[places.numpy()], torch.empty(len(index), self.shape[-1], dtype=self.dtype))

    def dense(self) -> Tensor:
        """Returns all numbers."""
        found = torch.empty(len(self.raw), self.shape[-1], dtype=self.dtype)
        step = max(1, _DENSE // found.shape[1])
        for first in range(0, len(found), step):
            part = slice(first, first + step)
            self._read(self.raw[part if self.order is None else self.order[part].numpy()], found[part])
        return found.view(self.shape)

    def _read(self, raw: _Array, numbers: Tensor) -> Tensor:
        """Writes the numbers of ``[n, bytes]`` rows to a tensor and returns it."""
        if self.kind in TORCH_DTYPES:
            return numbers.copy_(torch.from_numpy(raw).view(TORCH_DTYPES[self.kind]))
        if self.kind in BLOCKS and self.dtype in NATIVE:
            return dequantize_blocks(torch.from_numpy(raw), self.kind, numbers)
        from gguf import GGMLQuantizationType, dequantize

        return numbers.copy_(torch.from_numpy(dequantize(raw, GGMLQuantizationType[self.kind])))

    def finite(self) -> bool:
        """Returns whether all numbers are finite, which the scales of blocks tell; unknown kinds are dequantised."""
        if self.kind not in READABLE:
            indices = torch.arange(len(self.raw)).split(max(1, _DENSE // self.shape[-1]))
            return all(bool(self.rows(index).isfinite().all()) for index in indices)
        try:
            check_finite_blocks(self.blocks(), self.kind)
        except ValueError:
            return False
        return True

    def blocks(self) -> Tensor:
        """Returns the ``[O, bytes]`` uint8 rows of the file, in its order, without reading them."""
        with warnings.catch_warnings(action="ignore"):  # nothing writes to these rows, which cannot be written to
            return torch.from_numpy(np.asarray(self.raw))

    def _again(self) -> "FileBlocks":
        return FileBlocks(self.raw, self.kind, tuple(self.shape), self.dtype, self.order)


def holds_blocks(model: nn.Module) -> bool:
    """Returns whether some of a model's parameters lie in quantised blocks in a file."""
    return any(isinstance(weight, FileBlocks) and weight.kind not in TORCH_DTYPES for weight in model.parameters())


def check_kind(kind: str) -> None:
    """Raises ValueError if kernels do not read blocks of this kind."""
    if kind not in READABLE:
        raise ValueError(
            f"kernels read blocks of {', '.join(READABLE)}, not of {kind}: choose weights='int8' or 'int4', which "
            "quantise the model anew, or a file of another kind, such as Q4_K_M"
        )


def check_readable(weight: Tensor) -> None:
    """Raises ValueError if a parameter lies in blocks that kernels do not read."""
    if isinstance(weight, FileBlocks) and weight.kind not in TORCH_DTYPES:
        check_kind(weight.kind)


def blocks_of(weight: Tensor) -> tuple[Tensor, str, Tensor]:
    """Returns the rows of blocks of an ``[..., I]`` parameter, their kind, and the place of each row among them.

    A parameter that lies in a file has the file's blocks. Any other one has its own float32 or bfloat16 numbers. Blocks
    that kernels do not read are dequantised.
    """
    rows = torch.arange(weight.numel() // weight.shape[-1])
    if isinstance(weight, FileBlocks) and weight.kind in BLOCKS:
        return weight.blocks(), weight.kind, rows if weight.order is None else weight.order
    return *float_blocks(in_memory(weight).flatten(0, -2)), rows


def in_memory(weight: Tensor) -> Tensor:
    """Returns a parameter as a dense tensor, for code that reads memory by address."""
    return weight.dense() if isinstance(weight, FileBlocks) else weight.detach()


def _parameter(*args: Any) -> nn.Parameter:
    return nn.Parameter(FileBlocks(*args), requires_grad=False)


__all__ = [
    "READABLE",
    "TORCH_DTYPES",
    "FileBlocks",
    "blocks_of",
    "check_kind",
    "check_readable",
    "holds_blocks",
    "in_memory",
]
