"""Pages of memory: large ones for tensors that are read again and again, and pages of files that are given back."""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 64  # bytes; any dtype may begin at a multiple of it
_LARGE_PAGE = 1 << 21  # bytes
_PRESENT, _SWAPPED, _OF_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))  # bits of the system's table of pages


class LargePages:
    """One stretch of memory for many tensors, on large pages if the system grants them.

    Repeated sequential reads are faster there: fewer addresses are translated, and processors do not prefetch beyond
    the end of a page. Tensors get memory of their own if the stretch would be smaller than such a page, or is full.
    They also do if Python knows no large pages on this system.

    Args:
        size: bytes of all tensors together, or an upper bound. Memory is taken as it is written.
    """

    def __init__(self, size: int) -> None:
        self._end, self._region = 0, torch.empty(0, dtype=torch.uint8)
        if not (hasattr(mmap, "MADV_HUGEPAGE") and size >= _LARGE_PAGE):
            return
        with contextlib.suppress(OSError):  # too large, or a system built without large pages
            pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._region = torch.frombuffer(pages, dtype=torch.uint8)
            pages.madvise(mmap.MADV_HUGEPAGE)

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Returns a contiguous tensor behind those before it; its numbers are arbitrary."""
        start = self._end + -self._end % _ALIGNED
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._region):
            return torch.empty(*shape, dtype=dtype)
        self._end = end
        return self._region[start:end].view(dtype).view(shape)

    @contextlib.contextmanager
    def given_back(self) -> Iterator[None]:
        """Gives the place of the tensors made within back if an error ends the block; nothing may use these then."""
        begun = self._end
        try:
            yield
        except BaseException:
            self._end = begun
            raise


def drop_pages(stretches: Iterable[tuple[int, int]]) -> None:
    """Takes pages of mapped files out of this process's memory; the system maps them again when they are used.

    A stretch of memory stays if any page of it was written to, or is no file's: nothing else holds its contents.

    Args:
        stretches: address and bytes of each.
    """
    for begin, size in stretches:
        if lie_in_file(begin, size):
            first, last = _whole(begin, size)
            length = ctypes.c_size_t((last - first) * mmap.PAGESIZE)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first * mmap.PAGESIZE), length, mmap.MADV_DONTNEED)


def lie_in_file(begin: int, size: int) -> bool:
    """Returns whether whole pages of this stretch of memory are those of a mapped file, unchanged.

    A page that was written to is a private copy; one that is not in memory is not. Where the system does not tell, the
    answer is ``False``.
    """
    first, last = _whole(begin, size)
    if last <= first or not hasattr(mmap, "MADV_DONTNEED"):
        return False
    entries = np.empty(0, np.uint64)
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as table:
        table.seek(8 * first)
        entries = np.frombuffer(table.read(8 * (last - first)), np.uint64)
    if len(entries) < last - first or (entries & _SWAPPED).any():
        return False
    present = entries[entries & _PRESENT != 0]
    return bool((present & _OF_FILE != 0).all())


def _whole(begin: int, size: int) -> tuple[int, int]:
    """Returns the first whole page of a stretch and the one after its last."""
    return -(-begin // mmap.PAGESIZE), (begin + size) // mmap.PAGESIZE


__all__ = ["LargePages", "drop_pages", "lie_in_file"]
