"""Plots of measurements: few lines, each named at its end, and the speed against plain decoding first."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.bench.decoding import DecodeRow, case_of
from arbordraft.trees.drawing import COLOURS, GREY, new_figure, save_png
from arbordraft.utils.files import read_text
from arborlab.verifiers import NodeRow, TreeRow
from arborlab.verifiers.positions import difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = 6  # of a panel; readers cannot tell more apart
_PLAIN = "plain"
_BEYOND = ", gain over recursive\nrejection of independent drafts"  # errors of gains are those of pairs
_WIDTH = 28  # characters in a line of a name
_KINDS: tuple[Any, ...] = (DecodeRow, NodeRow, TreeRow)


class Line(NamedTuple):
    """One line of a panel; its points, by x, are x, y and half the length of the error bar (0 for none)."""

    name: str
    points: list[tuple[float, float, float]]


Panel = Callable[["Axes", dict[str, str]], None]


def plot(rows: Sequence[Any], path: Path) -> None:
    """Draws measurements as a PNG file and leaves out kinds that have no plot.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there is nothing to draw.
    """
    save_png(picture(rows), path)


def read_rows(path: Path) -> list[Any]:
    """Reads the measurements that have a plot from a file of ``bench gpu`` or of a benchmark's ``--json``.

    Raises:
        ValueError: if the file is not one of these.
    """
    try:
        figures = json.loads(read_text(path))
        parts = (
            [phase["rows"] for phase in figures["phases"].values()]
            if "phases" in figures
            else [figures["measurements"]]
        )
        return [known for part in parts for row in part if (known := _row(dict(row))) is not None]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds no measurements: let a benchmark write some with its option --json") from error


def _row(written: dict[str, Any]) -> Any | None:
    """Builds a row of the kind that has these fields; fields that older files lack get defaults."""
    from arborlab.gpu.pictures import KINDS  # imports Triton, too

    for kind in (*_KINDS, *KINDS):
        with suppress(TypeError):
            return kind(**written)
    return None


def speed_picture(rows: Sequence[Any]) -> "Figure":
    """Draws only the first panels of :func:`plot`: speed against plain decoding, over batch.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the rows hold decoding at fewer than two batch sizes.
    """
    decodes = _of(rows, DecodeRow)
    if len({row.batch for row in decodes}) < 2:
        raise ValueError("speed against batch needs decoding at two batch sizes or more")
    return _figure([_speed(*group) for group in _by(decodes, _setting)], decodes)


def picture(rows: Sequence[Any]) -> "Figure":
    """Draws all panels of some measurements; for arguments and errors see :func:`plot`."""
    from arborlab.gpu import pictures

    decodes, trees, nodes = _of(rows, DecodeRow), _of(rows, TreeRow), _of(rows, NodeRow)
    panels = [_speed(*group) for group in _by(decodes, _setting)]
    panels += [panel for group in _by(decodes, _setting) if (panel := _cause(*group))]
    panels += [_tau(*group) for group in _by(trees, lambda row: (row.drafter, row.temperature, row.topology))]
    panels += _acceptance(nodes)
    panels += pictures.panels(rows)
    if not panels:
        raise ValueError("these measurements have no picture")
    return _figure(panels, decodes)


def _of(rows: Iterable[Any], kind: type) -> list[Any]:
    return [row for row in rows if isinstance(row, kind)]


def _setting(row: DecodeRow) -> tuple[str, str]:
    """Returns dtype and case: a panel compares decoders over batches, or over clients, of one case."""
    case = case_of(row) if row.request or row.context else _drawn(row.temperature)
    return row.dtype, f"{case}, clients of a server" if row.served else case


def _by(rows: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    return [(value, list(group)) for value, group in groupby(sorted(rows, key=key), key)]


def _figure(panels: Sequence[Panel], decodes: Sequence[DecodeRow]) -> "Figure":
    """Arranges panels in rows of two or three, none empty; a decoder has one colour in all of them."""
    wide = min(len(panels), 2 if len(panels) <= 4 else 3)
    high = math.ceil(len(panels) / wide)
    figure = new_figure(7.2 * wide, 4.6 * high)
    grid = figure.add_gridspec(high, wide)
    names = list(dict.fromkeys(row.decoder for row in decodes if row.decoder != _PLAIN))
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
    for index, draw in enumerate(panels):
        axes = figure.add_subplot(grid[divmod(index, wide)])
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, colours)
    return figure


def _speed(setting: tuple[str, str], rows: list[DecodeRow]) -> Panel:
    """Builds the panel of speeds: lines over batch, or a ranking if there are too many lines or one batch size."""
    batches = sorted({row.batch for row in rows})
    reference = next((row.decoder for row in rows if row.decoder == _PLAIN), rows[0].decoder)
    title = f"speed against {reference} ({', '.join(setting)})"
    others = [row for row in rows if row.decoder != reference] or rows
    lines = [
        Line(name, sorted((row.batch, row.speed_up, row.spread) for row in group))
        for name, group in _by(others, lambda row: row.decoder)
    ]

    def draw(axes: "Axes", colours: dict[str, str]) -> None:
        axes.set(ylabel=f"speed, × {reference}", title=title)
        axes.axhline(1, color=GREY, ls="--", lw=1.2)
        axes.set_ylim(0, 1.08 * max(1.1, max(row.speed_up + row.spread for row in others)))
        _over_batch(axes, batches, served=rows[0].served)
        _draw(axes, lines, colours, reference)

    if len(batches) < 2 or len(lines) > MOST_LINES:
        return lambda axes, _: _ranking(axes, others, batches, title, reference)
    return draw


def _drawn(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _over_batch(axes: "Axes", batches: Sequence[int], *, served: bool) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.set_xlabel("clients" if served else "batch")


def _ranking(axes: "Axes", rows: Sequence[DecodeRow], batches: Sequence[int], title: str, reference: str) -> None:
    """Draws decoders from the slowest at the bottom to the fastest on top, one colour per batch size."""
    mean = {name: math.prod(row.speed_up for row in group) for name, group in _by(rows, lambda row: row.decoder)}
    order = sorted(mean, key=mean.__getitem__)
    for index, batch in enumerate(batches):
        here = sorted((row for row in rows if row.batch == batch), key=lambda row: order.index(row.decoder))
        places, speeds = [order.index(row.decoder) for row in here], [row.speed_up for row in here]
        bars = [row.spread for row in here] if any(row.spread for row in here) else None
        colour = COLOURS[index % len(COLOURS)]
        axes.errorbar(speeds, places, xerr=bars, fmt="o", ms=6, color=colour, capsize=2)
        at: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "color": colour, "fontsize": 9}
        axes.annotate(f"batch {batch}", (speeds[-1], places[-1]), (0, 9), **at)
    axes.axvline(1, color=GREY, ls="--", lw=1.2)
    axes.set_yticks(range(len(order)), [fill(name, _WIDTH) for name in order])
    axes.set_ylim(-0.7, len(order) + 0.1)
    axes.grid(axis="y", color="0.92")
    axes.margins(x=0.08)
    axes.set(xlabel=f"speed, × {reference}", title=title)


def _cause(setting: tuple[str, str], rows: list[DecodeRow]) -> Panel | None:
    """Builds the panel that explains the speed; ``None`` for no lines or too many.

    Over several batch sizes it shows padding if there is any, else tokens per forward. For one size it shows acceptance
    by depth.
    """
    batches = sorted({row.batch for row in rows})
    drafting = [row for row in rows if row.tau > 1]
    padded = any(row.pad_rows for row in drafting)
    lines = []
    for name, group in _by(drafting, lambda row: row.decoder):
        if len(batches) > 1:
            lines.append(Line(name, sorted((row.batch, row.pad_rows if padded else row.tau, 0.0) for row in group)))
        elif len(group[0].acceptance) > 1:
            lines.append(Line(name, [(depth, rate, 0.0) for depth, rate in enumerate(group[0].acceptance, 1)]))
    if not lines or len(lines) > MOST_LINES:
        return None

    def draw(axes: "Axes", colours: dict[str, str]) -> None:
        if len(batches) > 1:
            _over_batch(axes, batches, served=rows[0].served)
            what = "share of rows that are padding" if padded else "tokens per target forward"
        else:
            deepest = max(len(line.points) for line in lines)
            axes.set(xlabel="depth", xticks=range(1, deepest + 1, 1 + deepest // 10))
            what = "share accepted when tried"
        axes.set(ylabel=what, title=f"{what} ({setting[1]})")
        shares = padded or len(batches) == 1
        axes.set_ylim(*(-0.02, 1) if shares else (1, 1.1 * max(y for line in lines for _, y, _ in line.points)))
        _draw(axes, lines, colours)

    return draw


def _tau(setting: tuple[str, float, str], rows: list[TreeRow]) -> Panel:
    point, beyond = _points(rows, "nodes", "tau", "verifier", "TopDown(RRS)")
    lines = [
        Line(f"{law}, {verifier}", sorted(map(point, group)))
        for (law, verifier), group in _by(rows, lambda row: (row.law, row.verifier))
    ]
    title = f"{setting[0]}, {_drawn(setting[1])}, {setting[2]} trees"
    return _measured(title, "nodes, root included", f"tokens per target forward{beyond}", lines)


def _acceptance(nodes: Sequence[NodeRow]) -> list[Panel]:
    """Builds panels of acceptance over children, by drafter and temperature; a law has one colour in all of them.

    ``TopTail``, with SpecHub, stands for its best split into tops and tails.
    """
    panels = []
    for (drafter, temperature), rows in _by(nodes, lambda row: (row.drafter, row.temperature)):
        point, beyond = _points(rows, "k", "acceptance", "rule", "RRS")
        lines = []
        for name, group in _by(rows, _name):
            best = [max(alike, key=lambda row: row.acceptance) for _, alike in _by(group, lambda row: row.k)]
            lines.append(Line(name, list(map(point, best))))
        panels.append((f"{drafter}, {_drawn(temperature)}", f"acceptance{beyond}", lines))
    shown = Counter(line.name for *_, lines in panels for line in _best(lines))
    ranked = [name for name, _ in shown.most_common()]
    colours = dict.fromkeys(ranked, GREY) | dict(zip(ranked, COLOURS, strict=False))
    return [_measured(title, "children of one node", y, lines, colours) for title, y, lines in panels]


def _name(row: NodeRow) -> str:
    law = row.law.partition("(")[0]
    return law if law.endswith("TopTail") else f"{law}, {row.rule}"


def _points(
    rows: Sequence[Any], x: str, y: str, judge: str, plain: str
) -> tuple[Callable[[Any], tuple[float, float, float]], str]:
    """Returns a function from a row to its point, and the end of the label of y.

    The points are gains over independent drafts with the judge ``plain``, if the rows allow it. The fewest children
    come first.
    """
    reference: dict[int, Any] = {}
    for row in rows:
        if row.law.startswith("IID(") and getattr(row, judge) == plain:
            reference.setdefault(getattr(row, x), row)
    if all(row.by_prompt and getattr(row, x) in reference for row in rows):
        return lambda row: (getattr(row, x), *difference(row.by_prompt, reference[getattr(row, x)].by_prompt)), _BEYOND
    return lambda row: (getattr(row, x), getattr(row, y), row.error), ""


def _best(lines: Sequence[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: line.points[-1][1], reverse=True)[:MOST_LINES]


def _measured(title: str, x: str, y: str, lines: list[Line], colours: dict[str, str] | None = None) -> Panel:
    """Builds a panel of the lines that end highest, with the number of lines left out."""
    best = _best(lines)

    def draw(axes: "Axes", _: dict[str, str]) -> None:
        axes.set(xlabel=x, ylabel=y, title=title, xticks=sorted({point[0] for line in lines for point in line.points}))
        if len(best) < len(lines):
            left = f"{len(lines) - len(best)} lower ones are not shown"
            axes.text(0.98, 0.02, left, transform=axes.transAxes, ha="right", fontsize=8, color=GREY)
        _draw(axes, best, colours or {})

    return draw


def _draw(axes: "Axes", lines: Sequence[Line], colours: dict[str, str], reference: str = "") -> None:
    """Draws at most ``MOST_LINES`` lines with error bars, each with its name at its end.

    The axes must have their final scales. Lines that ``colours`` lacks get colours in order; ``reference`` names the
    horizontal line at 1.
    """
    ends = []
    for index, line in enumerate(lines):
        colour = colours.get(line.name, COLOURS[index])
        x, y, error = zip(*line.points, strict=True)
        axes.errorbar(x, y, error if any(error) else None, color=colour, marker="o", ms=4, lw=1.8, capsize=2)
        ends.append((line.name, (x[-1], y[-1]), colour))
    if reference:
        ends.append((reference, (axes.get_xlim()[1], 1.0), GREY))
    low, high = axes.get_ylim()
    floor = -math.inf
    for name, end, colour in sorted(ends, key=lambda end: end[1][1]):
        text = fill(name, _WIDTH)
        room = 0.055 * (1 + text.count("\n")) * (high - low)
        floor = max(end[1], floor + room)  # names do not overlap
        axes.annotate(
            text,
            end,
            (1.04, floor),
            textcoords=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 1, "shrinkB": 3, "relpos": (0, 0.5)},
        )
