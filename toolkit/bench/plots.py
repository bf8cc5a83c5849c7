"""Pictures of measurements."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.bench.decoding import DecodeRow
from arbordraft.bench.verifiers import NodeRow, TreeRow
from arbordraft.files import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(rows: Sequence[Any], path: Path) -> None:
    """Draws what there is to draw of some measurements.

    Tokens per forward over nodes, acceptance by rank, tokens per second over batch and acceptance by depth.

    Args:
        rows: of any kind; kinds without a picture are left out.
        path: PNG file.

    Raises:
        RuntimeError: if matplotlib is not installed.
        ValueError: if there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("drawing a PNG needs matplotlib: pip install arbordraft[plot]") from error

    panels: list[tuple[str, Callable[[Axes, list[Any]], None], list[Any]]] = []
    trees = [row for row in rows if isinstance(row, TreeRow)]
    nodes = [row for row in rows if isinstance(row, NodeRow)]
    decodes = [row for row in rows if isinstance(row, DecodeRow)]
    for key, group in _by(trees, lambda row: (row.drafter, row.temperature, row.topology)):
        panels.append(("{}, T={:g}, {} trees".format(*key), _tau_over_nodes, group))
    for key, group in _by(nodes, lambda row: (row.drafter, row.temperature)):
        panels.append(("{}, T={:g}, one node".format(*key), _by_rank, group))
    for key, group in _by(decodes, lambda row: (row.dtype, row.temperature)):
        title = "{}, T={:g}".format(*key)
        if len({row.batch for row in group}) > 1:
            panels.append((title, _speed_over_batch, group))
        panels.append((title, _by_depth, group))
    if not panels:
        raise ValueError("these measurements have no picture")
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6 * columns, 4.5 * lines), layout="constrained")
    for axes, (title, draw, group) in zip(figure.subplots(lines, columns, squeeze=False).flat, panels, strict=False):
        axes.set_title(title)
        draw(axes, group)
        axes.legend(fontsize="x-small")
    with new_file(path) as partial:
        figure.savefig(partial, format="png")


def _by(rows: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    return [(value, list(group)) for value, group in groupby(sorted(rows, key=key), key)]


def _tau_over_nodes(axes: "Axes", rows: Sequence[TreeRow]) -> None:
    for (law, verifier), group in _by(rows, lambda row: (row.law, row.verifier)):
        line = sorted(group, key=lambda row: row.nodes)
        axes.errorbar(
            [row.nodes for row in line],
            [row.tau for row in line],
            [row.error for row in line],
            marker=".",
            label=f"{law}, {verifier}",
        )
    axes.set(xlabel="nodes, root included", ylabel="tokens per target forward", xscale="log")


def _by_rank(axes: "Axes", rows: Sequence[NodeRow]) -> None:
    for row in rows:
        ranks = range(1, len(row.by_rank) + 1)
        axes.plot(ranks, row.by_rank, marker=".", label=f"{row.law}, {row.rule}: {row.acceptance:.3f}")
    axes.set(xlabel="rank of the child", ylabel="chance that it is the accepted one")


def _speed_over_batch(axes: "Axes", rows: Sequence[DecodeRow]) -> None:
    for decoder, group in _by(rows, lambda row: row.decoder):
        line = sorted(group, key=lambda row: row.batch)
        axes.plot([row.batch for row in line], [row.tokens_per_second for row in line], marker=".", label=decoder)
    axes.set(xlabel="batch", ylabel="tokens per second")


def _by_depth(axes: "Axes", rows: Sequence[DecodeRow]) -> None:
    for row in rows:
        if row.acceptance:
            depths = range(1, len(row.acceptance) + 1)
            axes.plot(depths, row.acceptance, marker=".", label=f"{row.decoder}, batch {row.batch}")
    axes.set(xlabel="depth", ylabel="accepted when tried", ylim=(0, 1))
