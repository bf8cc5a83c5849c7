"""Frees the memory of weights whose packed copies are read: they move to a file, or lie in one."""

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.kernels.machine import cache_folder
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.prepacked.mlps import stacked
from arbordraft.target.prepacked.probing import is_linear, plain
from arbordraft.target.prepacked.room import BYTES_EACH
from arbordraft.utils.files import new_file
from arbordraft.utils.pages import drop_pages, lie_in_file

FEW_BITS = 6  # bits per weight below which a copy of 4 bits would be read hardly faster
_ALIGNED = 64  # bytes; any dtype may begin at a multiple of it


def copy_bytes(model: nn.Module, weights: str | None = None) -> int:
    """Returns the bytes of a prepacked copy of a model's linears and experts."""
    held = {getattr(module, "weight", None) for module in model.modules() if is_linear(module)}
    held.update(weight for module in model.modules() if stacked(module) for weight in module.parameters())
    originals = [weight for weight in held if plain(weight)]
    if weights == "file":  # blocks take up to 3 % more than there
        stored = [1.03 * prod(weight.raw.shape) for weight in originals if isinstance(weight, FileBlocks)]
        return int(sum(stored) + sum(weight.nbytes for weight in originals if not isinstance(weight, FileBlocks)))
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = getattr(find_head(), "weight", None)
    size = 0.0
    for tensor in originals:  # in 4 bits, heads alone have 8
        bits = "int8" if weights == "int4" and tensor is head else weights or ""
        size += tensor.numel() * BYTES_EACH.get(bits, tensor.element_size())
    return int(size)


def bits_per_weight(packed: int, model: nn.Module) -> float:
    """Returns the bits that every weight of a model takes if prepacked copies of all take ``packed`` bytes."""
    return 8 * packed / max(1, copy_bytes(model, "int8-weight-only"))


def check_movable(model: nn.Module) -> None:
    """Raises ValueError unless a model's weights are memory of this process alone, which :func:`move_to_file` frees."""
    for weight in model.parameters():
        if isinstance(weight, FileBlocks) or not plain(weight):  # these are not moved
            continue
        if weight.is_inference():
            raise ValueError(
                "keep_weights=False cannot move weights that were loaded in inference mode: load the model outside "
                "torch.inference_mode()"
            )
        if weight.is_shared() or not weight.is_cpu:
            raise ValueError(
                "keep_weights=False cannot free weights that lie in a file or on a device, or that other processes "
                "share: leave it out, or give this process a model of its own"
            )


def move_to_file(tensors: Sequence[Tensor]) -> None:
    """Moves tensors to a private memory-mapped file; they keep their values and are read when needed.

    The operating system caches pages in use and may drop others at any time. Writing to a tensor takes memory for the
    pages written and never changes the file. The file has no name any more and is freed with the last tensor.

    Args:
        tensors: tensors on the CPU without duplicates; see :func:`check_movable`.

    Raises:
        WriteError: if the cache folder has no room for them.
    """
    path = cache_folder() / f"weights-{os.getpid()}-{secrets.token_hex(4)}.bin"
    starts, end = [], 0
    with new_file(path) as partial, partial.open("wb") as stream:
        for tensor in tensors:
            stream.write(b"\0" * (-end % _ALIGNED))
            starts.append(end + -end % _ALIGNED)
            stream.write(memoryview(tensor.detach().contiguous().view(torch.uint8).numpy()))  # type: ignore[arg-type]
            end = starts[-1] + tensor.nbytes
    try:
        storage = torch.UntypedStorage.from_file(str(path), False, end)
    finally:
        path.unlink()
    for tensor, start in zip(tensors, starts, strict=True):
        mapped = torch.empty(0, dtype=tensor.dtype).set_(storage, start // tensor.element_size(), tensor.shape)  # type: ignore[call-overload]
        tensor.data = mapped


def drop_originals(tensors: Iterable[Tensor | None]) -> None:
    """Takes weights that lie unchanged in mapped files out of memory; they are read again when they are used."""
    drop_pages(stretch for tensor in tensors if tensor is not None for stretch in _stretches(tensor))


def in_file(tensor: Tensor) -> bool:
    """Returns whether a weight lies unchanged in a mapped file."""
    return isinstance(tensor, FileBlocks) or any(lie_in_file(*stretch) for stretch in _stretches(tensor))


def _stretches(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yields addresses and bytes of a tensor's memory, if it is large."""
    if isinstance(tensor, FileBlocks):
        for part in getattr(tensor.raw, "parts", [tensor.raw]):
            yield part.ctypes.data, part.nbytes
    elif tensor.ndim > 1 and plain(tensor) and tensor.is_cpu and tensor.is_contiguous():
        yield tensor.data_ptr(), tensor.nbytes


__all__ = ["FEW_BITS", "bits_per_weight", "check_movable", "copy_bytes", "drop_originals", "in_file", "move_to_file"]
