"""How this process gets memory from the system."""

import ctypes
import math
import mmap
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGE = 1 << 30  # bytes; mallopt takes a C int
_ALWAYS_TAKEN = 1 << 25  # what older versions accept at most


def keep_freed_memory() -> bool:
    """Lets glibc keep freed blocks of up to 1 GiB for the next tensor, instead of giving each back at once.

    By default every block above 32 MB is mapped and unmapped alone, so that the system has to clear and map all its
    pages again whenever a row of tensors as large as a chunk of a vocabulary is computed. Memory that the process
    has had stays with it. It concerns the whole process: command lines call it, nothing below them does.

    Returns:
        Whether the system's C library knows such settings; without, nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return False
    mapped = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _ALWAYS_TAKEN)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, 2 * _LARGE - 1))


def untouched_zeros(*shape: int, dtype: "torch.dtype") -> "Tensor | None":
    """Zeros on the CPU that take memory only where they are written to.

    Returns:
        ``None`` where the system has no such memory, or not as much.
    """
    import torch  # not needed by command lines that only ask for help

    size = math.prod(shape) * dtype.itemsize
    if size == 0 or sys.platform == "win32":
        return None
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return None
    return torch.frombuffer(pages, dtype=dtype).view(shape)


__all__ = ["keep_freed_memory", "untouched_zeros"]
