"""The setting that all phases of ``arbordraft bench gpu`` share, and the items that a phase consists of."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from arbordraft.bench.gpu.timing import Stopwatch


@dataclass
class Setting:
    """Where phases run, and until when.

    Args:
        device: a GPU; on a CPU all problems are tiny and kernels run in Triton's interpreter.
        seed: of random weights, problems and drafts.
        tell: is told one line at a time, for people.
        deadline: of the current phase, as ``time.monotonic`` counts.
    """

    device: torch.device
    seed: int = 0
    tell: Callable[[str], object] = print
    deadline: float = field(default=float("inf"))

    @property
    def on_gpu(self) -> bool:
        """Whether times mean something."""
        return self.device.type == "cuda"

    @cached_property
    def watch(self) -> Stopwatch | None:
        """Measures times on the GPU; ``None`` on a CPU."""
        return Stopwatch(8) if self.on_gpu else None

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, 0 behind it."""
        return max(0.0, self.deadline - time.monotonic())

    def free(self) -> None:
        """Returns unused memory of the GPU."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


class Item(NamedTuple):
    """A part of a phase that runs whole or is left out.

    Args:
        name: names it where it is left out or fails.
        run: returns its rows, which are dataclasses.
    """

    name: str
    run: Callable[[], Iterable[Any]]


Phase = Callable[[Setting], Sequence[Item]]

__all__ = ["Item", "Phase", "Setting"]
