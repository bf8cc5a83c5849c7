"""Counts the threads that this process can run at a time."""

import contextlib
import math
import os
from pathlib import Path

import torch

_GROUPS = Path("/sys/fs/cgroup")


class TooManyThreads(RuntimeWarning):
    """Torch has more threads than this process may use processors, so threads wait for each other."""


def usable_processors(groups: Path = _GROUPS) -> int:
    """Returns the processors that this process may use, by its affinity and by its container's share of time.

    Args:
        groups: folder of the control groups, version 2 or 1.
    """
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [float(own)]
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError):  # "max" is not a number: no limit
            quota, period = (int(word) for name in names for word in (groups / name).read_text().split())
            if quota > 0 and period > 0:  # -1: no limit
                shares.append(quota / period)
    return max(1, math.ceil(min(shares)))


def too_many_threads() -> TooManyThreads | None:
    """Returns a warning if torch, whose team the kernels use, has more threads than can run at a time."""
    threads, usable = torch.get_num_threads(), usable_processors()
    if threads <= usable:
        return None
    return TooManyThreads(
        f"torch has {threads} threads and this process may use {usable} processor{'s' if usable > 1 else ''}: threads "
        f"that meet at the end of every part would wait for threads that are not running; call "
        f"torch.set_num_threads({usable}) or set OMP_NUM_THREADS={usable}"
    )


__all__ = ["TooManyThreads", "too_many_threads", "usable_processors"]
