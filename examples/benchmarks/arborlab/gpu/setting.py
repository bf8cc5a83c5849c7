"""The setting that all phases of ``arbordraft bench gpu`` share, and the items that a phase consists of."""

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from arborlab.gpu.timing import Stopwatch


@dataclass
class Setting:
    """Device, seed and deadline of the phases.

    Args:
        device: a GPU; on a CPU all problems are tiny and kernels run in Triton's interpreter.
        seed: seed of random weights, problems and drafts.
        model: folder of a model for phase ``smollm2``; by default SmolLM2, if its weights are found.
        log: receives one line at a time, for people.
        deadline: end of the current phase, as ``time.monotonic`` counts.
    """

    device: torch.device
    seed: int = 0
    model: str | None = None
    log: Callable[[str], object] = print
    deadline: float = field(default=float("inf"))

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU, so that times are meaningful."""
        return self.device.type == "cuda"

    @cached_property
    def watch(self) -> Stopwatch | None:
        """Stopwatch for the GPU; ``None`` on a CPU."""
        return Stopwatch(8) if self.on_gpu else None

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def free(self) -> None:
        """Frees unused memory of the GPU."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()


class Item(NamedTuple):
    """A part of a phase that runs whole or is left out.

    Args:
        name: shown if the item is left out or fails.
        run: returns its rows, which are dataclasses.
    """

    name: str
    run: Callable[[], Iterable[Any]]


Phase = Callable[[Setting], Sequence[Item]]
