"""Plots of GPU measurements: kernels against the roofline, times of steps, and parts of a step."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from arbordraft.trees.drawing import COLOURS
from arborlab.gpu.problem import KernelRow
from arborlab.gpu.profiling import ProfileRow
from arborlab.gpu.steps import StepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (KernelRow, StepRow, ProfileRow)
_WIDTH = 52  # characters of a name
_SUMS = ("step", "launches of kernels and copies")  # totals of other figures


def panels(rows: Sequence[Any]) -> Iterator[Callable[["Axes", dict[str, str]], None]]:
    """Yields a drawing function for each plot of some measurements."""
    kernels = [row for row in rows if isinstance(row, KernelRow) and row.of_roofline is not None]
    if kernels:
        shares = [(f"{row.kernel}, {row.case}", row.of_roofline, f"{row.us:.0f} µs") for row in kernels]
        yield _bars("kernels: least time of their bytes and operations, as a share of theirs", "", shares)
    for model, steps in _by_model(row for row in rows if isinstance(row, StepRow)):
        taken = [(f"{row.steps}, {row.kernels}, drafts: {row.drafts}", row.ms, _note(row)) for row in steps]
        yield _bars(f"steps of {model}", "ms", taken)
    for model, figures in _by_model(row for row in rows if isinstance(row, ProfileRow)):
        parts = [row for row in figures if row.share is not None and row.figure not in _SUMS]
        if parts:
            shares = [(row.figure, row.share, f"{row.us:.0f} µs") for row in parts]
            yield _bars(f"parts of a recorded step of {model}", "share of the step", shares)


def _by_model(rows: Iterator[Any]) -> Iterator[tuple[str, list[Any]]]:
    for model, group in groupby(sorted(rows, key=lambda row: row.model), lambda row: row.model):
        yield model, list(group)


def _note(row: StepRow) -> str:
    speed = f", {row.tokens_per_second:.0f} tokens/s" if row.tokens_per_second else ""
    return f"{row.rows} rows, {row.ms:.2f} ms{speed}"


def _bars(title: str, label: str, bars: Sequence[tuple[str, Any, str]]) -> Callable[["Axes", dict[str, str]], None]:
    """Builds a panel of bars, names at their left and notes at their right, in the order of the rows."""

    def draw(axes: "Axes", _: dict[str, str]) -> None:
        places = range(len(bars))
        drawn = axes.barh(places, [value for _, value, _ in bars], color=COLOURS[0], height=0.7)
        axes.bar_label(drawn, [note for *_, note in bars], padding=3, fontsize=7)
        axes.set_yticks(places, [shorten(name, _WIDTH, placeholder="…") for name, *_ in bars], fontsize=7)
        axes.invert_yaxis()
        axes.margins(x=0.25, y=0.02)
        axes.set(title=title, xlabel=label)

    return draw
