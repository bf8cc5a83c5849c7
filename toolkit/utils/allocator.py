"""Settings of the C library's allocator and of Python's garbage collector, and memory that is mapped on demand."""

import contextlib
import ctypes
import gc
import math
import mmap
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGE = 1 << 30  # bytes; mallopt takes a C int
_ALWAYS_TAKEN = 1 << 25  # the largest value that older versions accept


def keep_freed_memory() -> bool:
    """Lets glibc keep freed blocks of up to 1 GiB for the next tensor, instead of giving each back at once.

    By default, every block above 32 MB is mapped and unmapped alone. The system then clears and maps all pages again
    for each tensor as large as a chunk of a vocabulary. With this setting the process keeps freed memory. It concerns
    the whole process, so only command lines call it.

    Returns:
        Whether the system's C library has such settings; otherwise nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # not glibc
        return False
    mapped = mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _ALWAYS_TAKEN)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, 2 * _LARGE - 1))


def return_freed_memory() -> None:
    """Gives memory that was freed inside glibc's heap back to the system, after work with many large temporaries."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def heap_left_alone() -> Iterator[None]:
    """Excludes the objects that exist now from garbage collection until the block ends.

    With the classes of torch and transformers, a full collection takes a quarter of a second, for which all answers
    of a server wait. If the process excludes objects already, nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def untouched_zeros(*shape: int, dtype: "torch.dtype") -> "Tensor | None":
    """Returns zeros on the CPU that take memory only where they are written to.

    Returns:
        The tensor; ``None`` if the system has no such memory or too little.
    """
    import torch  # `--help` does not need it

    size = math.prod(shape) * dtype.itemsize
    if size == 0 or sys.platform == "win32":
        return None
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):
        return None
    return torch.frombuffer(pages, dtype=dtype).view(shape)


__all__ = ["heap_left_alone", "keep_freed_memory", "return_freed_memory", "untouched_zeros"]
