"""Problems for single kernels: results against float64 up to rounding, times against peers."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arborlab.gpu.timing import Stopwatch
from arborlab.work import Work

ATTENTION = "ragged_tree_attention"
GUARD = 64  # elements before and after a buffer
_POISON = -77  # fills integer buffers


class Goal(NamedTuple):
    """A bound that a kernel should reach: at least a share ``of copy``, or fewer than some microseconds (``us``)."""

    figure: str
    bound: float

    def __str__(self) -> str:
        return f">= {self.bound:.0%} of copy" if self.figure == "of copy" else f"< {self.bound:.0f} us"

    def reached(self, us: float, of_copy: float) -> bool:
        """Returns whether a measurement reaches the bound."""
        return of_copy >= self.bound if self.figure == "of copy" else us < self.bound


@dataclass
class Problem:
    """A call of a kernel that is checked and timed.

    Args:
        kernel: its operator.
        case: sizes and options.
        run: the call.
        error: makes the call and returns its error against float64; 0 or infinity for integers and copies.
        allowed: the largest error that rounding explains, in the same unit.
        dtype: type of the floating-point inputs.
        work: bytes and operations; ``None`` for a problem that is not timed.
        goal: bound for the time.
        peers: makers of calls of other libraries for the same result; each runs only when timed, as it needs memory.
    """

    kernel: str
    case: str
    run: Callable[[], object]
    error: Callable[[], float]
    allowed: float
    dtype: torch.dtype = torch.bfloat16
    work: Work | None = None
    goal: Goal | None = None
    peers: Mapping[str, Callable[[], Callable[[], object]]] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelRow:
    """Error or times of a problem.

    Args:
        error: against float64, in the unit of ``allowed``; ``None`` where only time is measured.
        allowed: largest error that rounding explains.
        correct: whether the error is at most ``allowed``; ``None`` where only time is measured.
        us: median microseconds, like the times of peers; ``None`` without a GPU.
        of_copy: necessary bytes per second, as a share of a large copy's.
        of_roofline: least time by this device's own copy and matrix product, as a share of the time.
        sdpa_us: time of PyTorch's attention, padded, with a dense mask.
        flash_us: time of flash-attention for packed samples; causal, as it supports no trees.
        torch_us: time of PyTorch's own operators, for kernels other than attention.
        reached: ``"reached"`` or ``"missed"``; a bandwidth goal counts only if memory bounds the kernel.
    """

    kernel: str
    case: str
    dtype: str
    error: float | None = None
    allowed: float | None = None
    correct: bool | None = None
    us: float | None = None
    of_copy: float | None = None
    of_roofline: float | None = None
    sdpa_us: float | None = None
    flash_us: float | None = None
    torch_us: float | None = None
    goal: str = ""
    reached: str = ""

    @property
    def table(self) -> str:
        """Title of the row's table: attention has peers of its own."""
        return "attention" if self.kernel == ATTENTION else "other kernels"


def check(problem: Problem) -> KernelRow:
    """Solves a problem with poisoned outputs and compares the result with float64."""
    with poisoned() as bands:
        error = problem.error()
    if bands.overwritten():
        error = math.inf
    correct = error <= problem.allowed
    return KernelRow(problem.kernel, problem.case, named(problem.dtype), error, problem.allowed, correct)


def timed(problem: Problem, watch: Stopwatch, log: Callable[[str], object] = print) -> KernelRow:
    """Times a problem and its peers."""
    needed = problem.work
    assert needed is not None
    us = watch.seconds(problem.run) * 1e6
    throughput = watch.throughput if needed.matrix else math.inf  # unknown for other operations
    of_copy = needed.bytes / (us * 1e-6) / watch.bandwidth
    times: dict[str, Any] = {
        "us": us,
        "of_copy": of_copy,
        "of_roofline": needed.seconds(watch.bandwidth, throughput) / (us * 1e-6),
    }
    for name, make in problem.peers.items():
        try:
            times[f"{name}_us"] = watch.seconds(make()) * 1e6
        except (RuntimeError, ImportError) as failure:  # it may lack the case or need too much memory
            log(f"{name} cannot be timed for {problem.case}: {str(failure).splitlines()[0]}")
            torch.cuda.empty_cache()
    goal = problem.goal
    computes = needed.flops / throughput > needed.bytes / watch.bandwidth
    if goal is not None and not (computes and goal.figure == "of copy"):
        times |= {"goal": str(goal), "reached": "reached" if goal.reached(us, of_copy) else "missed"}
    return KernelRow(problem.kernel, problem.case, named(problem.dtype), **times)


def named(dtype: torch.dtype) -> str:
    """Returns the short name of a type."""
    return str(dtype).removeprefix("torch.")


def largest_error(result: Tensor, exact: Tensor) -> float:
    """Returns the largest difference, as a share of the largest exact value."""
    return float((result.double() - exact).abs().max() / exact.abs().max())


def share_of(result: Tensor, exact: Tensor, bound: Tensor) -> float:
    """Returns the largest difference, as a share of each element's bound; NaN if the result holds one."""
    return float(((result.double() - exact).abs() / bound).max())


def unequal(result: Tensor, expected: Tensor) -> float:
    """Returns 0 if all bits are equal, else infinity."""
    return 0.0 if torch.equal(_bits(result), _bits(expected)) else math.inf


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def rounding(dtype: torch.dtype) -> float:
    """Returns the largest relative rounding error of a type, doubled where the interpreter truncates bfloat16."""
    cut = choice.interpreted() and dtype == torch.bfloat16
    return torch.finfo(dtype).eps * (1.0 if cut else 0.5)


class Bands:
    """Buffers filled with NaN or ``-77``, between guard bands that no kernel may write to."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, int]] = []

    def empty(self, like: Tensor, shape: torch.Size, **kind: Any) -> Tensor:
        """Returns a poisoned contiguous buffer."""
        numel = shape.numel()
        buffer = _NEW_EMPTY(like, numel + 2 * GUARD, **kind)
        buffer.fill_(float("nan") if buffer.is_floating_point() else _POISON)
        self._made.append((buffer, numel))
        return buffer[GUARD : GUARD + numel].view(shape)

    def overwritten(self) -> bool:
        """Returns whether a kernel has written to a guard band."""
        for buffer, numel in self._made:
            for band in (buffer[:GUARD], buffer[GUARD + numel :]):
                kept = band.isnan() if band.is_floating_point() else band == _POISON
                if not bool(kept.all()):
                    return True
        return False


_NEW_EMPTY = torch.Tensor.new_empty


@contextmanager
def poisoned() -> Iterator[Bands]:
    """Makes ``Tensor.new_empty``, which allocates all buffers of kernels, return poisoned ones with guard bands."""
    bands = Bands()

    def new_empty(self: Tensor, *size: Any, dtype: Any = None, device: Any = None) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        return bands.empty(self, torch.Size(shape), dtype=dtype or self.dtype, device=device)

    torch.Tensor.new_empty = new_empty  # type: ignore[method-assign, assignment]
    try:
        yield bands
    finally:
        torch.Tensor.new_empty = _NEW_EMPTY  # type: ignore[method-assign]
