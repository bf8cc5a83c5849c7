"""Moves weights to large pages, or to a memory-mapped file."""

import contextlib
import math
import mmap
import os
import secrets
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from arbordraft.kernels.machine import cache_folder
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.prepacked.mlps import stacked
from arbordraft.target.prepacked.probing import is_linear, plain
from arbordraft.utils.files import new_file

_ALIGNED = 64  # bytes; any dtype may begin at a multiple of it
_LARGE_PAGE = 1 << 21  # bytes


def copy_bytes(model: nn.Module, weights: str | None = None) -> int:
    """Returns the bytes of a prepacked copy of a model's linears and experts."""
    held = {getattr(module, "weight", None) for module in model.modules() if is_linear(module)}
    held.update(weight for module in model.modules() if stacked(module) for weight in module.parameters())
    originals = [weight for weight in held if plain(weight)]
    # Bytes per weight, with scales and minima of groups; blocks of a file take up to 3 % more than there.
    bytes_each = {"int4": 0.5625, "int8": 1.0625, "int8-weight-only": 1.0}
    if weights == "file":
        stored = [1.03 * math.prod(weight.raw.shape) for weight in originals if isinstance(weight, FileBlocks)]
        return int(sum(stored) + sum(weight.nbytes for weight in originals if not isinstance(weight, FileBlocks)))
    return int(sum(tensor.numel() * bytes_each.get(weights or "", tensor.element_size()) for tensor in originals))


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


def move_together(tensors: Sequence[Tensor]) -> None:
    """Moves tensors into one stretch of memory in this order, on large pages if the system grants them.

    Repeated sequential reads are faster there: fewer addresses are translated, and processors do not prefetch beyond
    the end of a page. Tensors move one by one, so at most one exists twice at a time. They stay where they are if they
    are smaller than a large page, or if Python knows no large pages on this system.

    Args:
        tensors: contiguous tensors on the CPU without duplicates.
    """
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + tensor.nbytes + -tensor.nbytes % _ALIGNED)
    if not (hasattr(mmap, "MADV_HUGEPAGE") and starts[-1] >= _LARGE_PAGE):
        return
    pages = mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # takes memory as it is written
    with contextlib.suppress(OSError):  # a system built without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    region = torch.frombuffer(pages, dtype=torch.uint8)
    for tensor, start in zip(tensors, starts, strict=False):
        place = region[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.data = place.copy_(tensor.detach())


__all__ = ["check_movable", "copy_bytes", "move_to_file", "move_together"]
