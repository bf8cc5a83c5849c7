"""Checks Triton kernels and times them against the bandwidth of the memory.

On a GPU every kernel is compared with float64 and timed: in CUDA graphs, so that the host's time does not count, with
nothing in the L2 cache, by the median. Without one Triton's interpreter runs the same code on tiny problems: it tells
whether results are right, and nothing about time.
"""

import gc
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.choice import INTERPRETER, interpreted
from arbordraft.kernels.work import Work
from arbordraft.utils.errors import UserError

ATTENTION = "ragged_tree_attention"
COPIED = 1 << 30  # bytes of the copy that measures the bandwidth
MULTIPLIED = 8192  # rows of the matrices that measure the throughput


class Goal(NamedTuple):
    """The bound that a kernel should reach: a share ``of copy`` at least, or microseconds (``us``) at most."""

    figure: str
    bound: float

    def __str__(self) -> str:
        return f">= {self.bound:.0%} of copy" if self.figure == "of copy" else f"< {self.bound:.0f} us"

    def reached(self, us: float, of_copy: float) -> bool:
        """Whether a measurement does."""
        return of_copy >= self.bound if self.figure == "of copy" else us < self.bound


@dataclass
class Problem:
    """A call of a kernel that is checked and timed.

    ``error`` gives the largest error of such a call against float64, as a share of the largest value; rounding explains
    what is ``allowed``. ``peers`` could do the same: they are made when they are timed, as they need memory of their
    own. What has no ``work`` is too small to be timed.
    """

    kernel: str
    case: str
    run: Callable[[], object]
    error: Callable[[], float]
    allowed: float
    work: Work | None = None
    goal: Goal | None = None
    peers: Mapping[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelRow:
    """Error and times of a problem; without a GPU no times.

    Args:
        error: largest error against float64, as a share of the largest value; ``correct`` if rounding explains it.
        us: median microseconds, those of peers beside it.
        of_copy: bytes that have to be moved per second, as a share of a large copy's.
        of_roofline: least time by this device's own copy and matrix product, as a share of the time.
        sdpa_us: PyTorch's attention with a dense mask, padded.
        flash_us: flash-attention for packed samples, causal: it knows no trees.
        flex_us: FlexAttention with a mask of ancestors.
        torch_us: PyTorch's own operators, for kernels other than attention.
        reached: ``"reached"`` or ``"missed"``; a goal of bandwidth only where memory is what bounds the kernel.
    """

    kernel: str
    case: str
    error: float
    correct: bool
    us: float | None = None
    of_copy: float | None = None
    of_roofline: float | None = None
    sdpa_us: float | None = None
    flash_us: float | None = None
    flex_us: float | None = None
    torch_us: float | None = None
    goal: str = ""
    reached: str = ""

    @property
    def table(self) -> str:
        """Title of the table that it belongs to: attention has peers of its own."""
        return "attention" if self.kernel == ATTENTION else "other kernels"


def device() -> torch.device:
    """Where kernels run: on a GPU, or in the interpreter, which is switched on if need be.

    Raises:
        ImportError: if Triton is not installed.
        UserError: if there is no GPU and Triton was imported already without its interpreter.
    """
    if find_spec("triton") is None:
        raise ImportError("these are Triton kernels; run: pip install 'arbordraft[triton]'")
    if torch.cuda.is_available() and not interpreted():
        return torch.device("cuda")
    if not interpreted():
        if "triton" in sys.modules:
            raise UserError(f"there is no GPU: set {INTERPRETER}=1 before Python starts")
        os.environ[INTERPRETER] = "1"
    return torch.device("cpu")


class Stopwatch:
    """Times calls on a GPU, spending ``milliseconds`` on each, and measures its bandwidth and throughput."""

    def __init__(self, milliseconds: float = 50) -> None:
        self.milliseconds = milliseconds
        source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.bandwidth = 2 * COPIED / self.seconds(lambda: target.copy_(source))
        a, b, c = (torch.randn(MULTIPLIED, MULTIPLIED, device="cuda").bfloat16() for _ in range(3))
        self.throughput = 2 * MULTIPLIED**3 / self.seconds(lambda: torch.mm(a, b, out=c))
        number = torch.zeros(1, device="cuda")
        self.least = self.seconds(lambda: number.zero_())

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of a call that finds nothing in the L2 cache."""
        from triton.testing import do_bench

        return 1e-3 * do_bench(captured(run), warmup=self.milliseconds / 4, rep=self.milliseconds, return_mode="median")

    def settings(self) -> dict[str, Any]:
        """Bandwidth, throughput and shortest time, to stand beside the times."""
        return {
            "copy_gb_per_s": self.bandwidth / 1e9,
            "matmul_tflop_per_s": self.throughput / 1e12,
            "shortest_us": self.least * 1e6,  # measured time of a kernel that does nothing
        }


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, after it has compiled what it compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measured(
    problems: Iterable[Problem], watch: Stopwatch | None, tell: Callable[[str], object] = print
) -> Iterator[KernelRow]:
    """Checks every problem, made one by one as they may be large; with a stopwatch, times it and its peers."""
    for problem in problems:
        error = problem.error()
        times = _times(problem, problem.work, watch, tell) if watch and problem.work else {}
        yield KernelRow(problem.kernel, problem.case, error, error <= problem.allowed, **times)
        del problem
        if watch:
            gc.collect()
            torch.cuda.empty_cache()


def _times(problem: Problem, needed: Work, watch: Stopwatch, tell: Callable[[str], object]) -> dict[str, Any]:
    us = watch.seconds(problem.run) * 1e6
    throughput = watch.throughput if needed.matrix else math.inf  # of other operations nothing is known
    of_copy = needed.bytes / (us * 1e-6) / watch.bandwidth
    times: dict[str, Any] = {
        "us": us,
        "of_copy": of_copy,
        "of_roofline": needed.seconds(watch.bandwidth, throughput) / (us * 1e-6),
    }
    for name, make in problem.peers.items():
        try:
            times[f"{name}_us"] = watch.seconds(make()) * 1e6
        except (RuntimeError, ImportError) as failure:  # it may not know the case, or want too much memory
            tell(f"{name} has no time for {problem.case}: {str(failure).splitlines()[0]}")
            torch.cuda.empty_cache()
    goal = problem.goal
    computes = needed.flops / throughput > needed.bytes / watch.bandwidth
    if goal is not None and not (computes and goal.figure == "of copy"):
        times |= {"goal": str(goal), "reached": "reached" if goal.reached(us, of_copy) else "missed"}
    return times


def largest_error(result: Tensor, exact: Tensor) -> float:
    """The largest difference, as a share of the largest exact value."""
    return float((result.double() - exact).abs().max() / exact.abs().max())
