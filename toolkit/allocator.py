"""How this process gets memory from the system."""

import ctypes
import sys

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


__all__ = ["keep_freed_memory"]
