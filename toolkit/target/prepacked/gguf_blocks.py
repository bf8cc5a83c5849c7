"""Matrices that stay in the quantised blocks of a GGUF file; kernels read them without rounding a weight twice.

Shapes: O outputs, I inputs, G = I / 32 groups.
"""

from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from arbordraft.kernels.prepacked_linear import Groups

# Layouts of 32 weights that kernels read. A byte holds two codes of 4 bits, whose weights are 16 apart.
BLOCKS = {
    "Q4_0": np.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
    "Q4_1": np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("codes", "u1", 16)]),
    "Q8_0": np.dtype([("scale", "<f2"), ("codes", "u1", 32)]),  # signed codes
}
# Bytes of a block, and the places of its scales in float16; all other parts are integers.
_SCALES = {
    "Q4_0": (18, (0,)),
    "Q4_1": (20, (0, 2)),
    "Q5_0": (22, (0,)),
    "Q5_1": (24, (0, 2)),
    "Q8_0": (34, (0,)),
    "Q2_K": (84, (80, 82)),
    "Q3_K": (110, (108,)),
    "Q4_K": (144, (0, 2)),
    "Q5_K": (176, (0, 2)),
    "Q6_K": (210, (208,)),
    "IQ4_NL": (18, (0,)),
    "IQ4_XS": (136, (0,)),
}
# Kinds without blocks.
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CENTRE = np.float32(128)  # offset that makes signed codes unsigned
_Array = np.ndarray[Any, Any]
_DENSE = 1 << 20  # weights that are dequantised at a time
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
                raise RuntimeError("blocks of a GGUF file cannot be written to: load the model without weights='file'")
        return function(*tree_map_only(cls, cls.dense, args), **tree_map_only(cls, cls.dense, kwargs or {}))

    def untyped_storage(self) -> NoReturn:
        """Raises RuntimeError: there is no storage, and savers of models ask for one."""
        raise RuntimeError("blocks of a file are not saved again: copy the file, or load it without weights='file'")

    storage = untyped_storage

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return nn.Parameter(self._again(), requires_grad=False)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _parameter, (np.asarray(self.raw), self.kind, tuple(self.shape), self.dtype, self.order)

    def rows(self, index: Tensor) -> Tensor:
        """Returns the ``[n, I]`` numbers of ``[n]`` rows."""
        raw = self._raw(index)
        if (stored := TORCH_DTYPES.get(self.kind)) is not None:
            return torch.from_numpy(raw).view(stored).to(self.dtype)
        if self.kind not in BLOCKS:
            from gguf import GGMLQuantizationType, dequantize

            return torch.from_numpy(dequantize(raw, GGMLQuantizationType[self.kind])).to(self.dtype)
        codes, scale, minimum = _parts(raw, self.kind)
        wide = scale.astype(np.float32)[..., None]
        numbers = (codes - _CENTRE) * wide if minimum is None else codes * wide + minimum.astype(np.float32)[..., None]
        return torch.from_numpy(numbers.reshape(len(raw), -1)).to(self.dtype)

    def dense(self) -> Tensor:
        """Returns all numbers."""
        found = torch.empty(len(self.raw), self.shape[-1], dtype=self.dtype)
        for index in torch.arange(len(found)).split(max(1, _DENSE // found.shape[1])):
            found[index[0] : index[-1] + 1] = self.rows(index)
        return found.view(self.shape)

    def finite(self) -> bool:
        """Returns whether all numbers are finite, which the scales of blocks tell; unknown kinds are dequantised."""
        if self.kind not in _SCALES:
            return all(
                bool(self.rows(index).isfinite().all())
                for index in torch.arange(len(self.raw)).split(max(1, _DENSE // self.shape[-1]))
            )
        size, places = _SCALES[self.kind]
        blocks = np.asarray(self.raw).reshape(-1, size)
        return all(bool(np.isfinite(blocks[:, at : at + 2].copy().view("<f2")).all()) for at in places)

    def groups(self) -> Groups | None:
        """Returns the blocks in the kernels' layout; ``None`` for kinds that kernels do not read."""
        if self.kind not in BLOCKS:
            return None
        raw = self._raw(torch.arange(len(self.raw)))
        codes, scale, minimum = _parts(raw, self.kind)
        least = None if minimum is None else torch.from_numpy(minimum.copy())
        return Groups(torch.from_numpy(codes).flatten(1), torch.from_numpy(scale.copy()), least)

    def _raw(self, index: Tensor) -> _Array:
        places = (index if self.order is None else self.order[index]).numpy()
        return np.asarray(self.raw[places])

    def _again(self) -> "FileBlocks":
        return FileBlocks(self.raw, self.kind, tuple(self.shape), self.dtype, self.order)


def holds_blocks(model: nn.Module) -> bool:
    """Returns whether some of a model's parameters lie in quantised blocks in a file."""
    return any(isinstance(weight, FileBlocks) and weight.kind not in TORCH_DTYPES for weight in model.parameters())


def groups_of(weight: Tensor) -> Groups | None:
    """Returns the quantised groups of a parameter that lies in a file; ``None`` for any other."""
    return weight.groups() if isinstance(weight, FileBlocks) else None


def in_memory(weight: Tensor) -> Tensor:
    """Returns a parameter as a dense tensor, for code that reads memory by address."""
    return weight.dense() if isinstance(weight, FileBlocks) else weight.detach()


def _parameter(*args: Any) -> nn.Parameter:
    return nn.Parameter(FileBlocks(*args), requires_grad=False)


def _parts(raw: _Array, kind: str) -> tuple[_Array, _Array, _Array | None]:
    """Returns unsigned ``[n, G, 32]`` codes, ``[n, G]`` scales and, for codes of 4 bits, ``[n, G]`` minima."""
    blocks = raw.view(BLOCKS[kind])
    codes, scale = blocks["codes"], blocks["scale"]
    if kind == "Q8_0":
        return codes + _CENTRE.astype(np.uint8), scale, None
    codes = np.concatenate([codes & 15, codes >> 4], axis=-1)
    return codes, scale, blocks["minimum"] if kind == "Q4_1" else scale * np.float16(-8)


__all__ = ["BLOCKS", "TORCH_DTYPES", "FileBlocks", "groups_of", "holds_blocks", "in_memory"]
