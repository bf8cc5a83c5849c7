"""Pictures of trees and of steps, and what all pictures have in common."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from arbordraft.files import new_file
from arbordraft.topology import TreeTopology
from arbordraft.types import SampleTree, SampleVerdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

# Told apart by every kind of eye (Okabe and Ito), the first ones best.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8c8c8c"
_ACCEPTED, _REJECTED, _OWN = "#009E73", "#d9d9d9", "#0072B2"


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches, whose parts make room for each other.

    Raises:
        RuntimeError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise RuntimeError("drawing a PNG needs matplotlib: pip install arbordraft[plot]") from error
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def save_png(figure: "Figure", path: Path) -> None:
    """Writes a PNG file, which appears when it is complete.

    Raises:
        WriteError: if it cannot be written.
    """
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def draw_png(topology: TreeTopology, path: Path) -> None:
    """A topology and its causal mask as a PNG file; for errors see :func:`tree_picture`."""
    save_png(tree_picture(topology), path)


def columns(topology: TreeTopology) -> list[float]:
    """Where nodes stand from left to right: leaves side by side, every parent above the middle of its children.

    Examples:
        >>> columns(TreeTopology.k_ary(2, 1))
        [0.5, 0, 1]
    """
    place = [0.0] * topology.num_nodes
    leaves = 0

    def visit(node: int) -> float:
        nonlocal leaves
        if children := topology.child_list[node]:
            place[node] = sum(visit(child) for child in children) / len(children)
        else:
            place[node] = leaves
            leaves += 1
        return place[node]

    visit(0)
    return place


def tree_picture(topology: TreeTopology) -> "Figure":
    """A topology and its causal mask.

    Raises:
        RuntimeError: if matplotlib is not installed.
    """
    place = columns(topology)
    leaves = round(max(place)) + 1
    figure = new_figure(4 + 0.5 * leaves, 1 + 0.9 * (topology.max_depth + 1))
    shape, mask = figure.subplots(1, 2, width_ratios=[max(2, leaves), max(2, topology.max_depth + 1)])
    _edges(shape, topology, place)
    for node, depth in enumerate(topology.depth_list):
        shape.scatter(place[node], -depth, s=260, color=_ACCEPTED if node else _OWN, zorder=2)
        shape.annotate(str(node), (place[node], -depth), ha="center", va="center", color="white", fontsize=8)
    shape.set_axis_off()
    shape.set_title("draft tree")
    mask.imshow(topology.visible.cpu().numpy(), cmap="Greens", vmin=0, vmax=1.4)
    mask.set(title="causal mask", xlabel="key", ylabel="query")
    return figure


def acceptance_picture(topology: TreeTopology, by_rank: Sequence[float]) -> "Figure":
    """A tree whose nodes are as large and as dark as it is likely that they are accepted.

    Args:
        topology: its shape.
        by_rank: probability that the child of each rank is the accepted one, given that its parent was; children of
            higher ranks count as never accepted.

    Raises:
        RuntimeError: if matplotlib is not installed.
        ValueError: if a probability is not in 0..1.
    """
    if wrong := [rate for rate in by_rank if not 0 <= rate <= 1]:
        raise ValueError(f"by_rank must hold probabilities, got {wrong[0]}")
    chance = [1.0] * topology.num_nodes
    for parent, children in enumerate(topology.child_list):
        for rank, child in enumerate(children):
            chance[child] = chance[parent] * (by_rank[rank] if rank < len(by_rank) else 0.0)
    place = columns(topology)
    leaves = round(max(place)) + 1
    figure = new_figure(max(5.0, 0.8 * leaves), 1.2 + 1.0 * topology.max_depth)
    axes = figure.subplots()
    _edges(axes, topology, place, width=lambda node: 0.5 + 5 * chance[node])
    depths = [-depth for depth in topology.depth_list]
    axes.scatter(
        place,
        depths,
        s=[60 + 1500 * each for each in chance],
        c=[each**0.5 for each in chance],  # the eye tells small ones apart
        cmap="YlGn",
        vmin=-0.2,
        vmax=1.1,
        edgecolors=_ACCEPTED,
        zorder=2,
    )
    for node, (x, y) in enumerate(zip(place, depths, strict=True)):
        inside = chance[node] > 0.2
        axes.annotate(
            f"{chance[node]:.0%}",
            (x, y),
            (0 if inside else 10, 0),
            textcoords="offset points",
            ha="center" if inside else "left",
            va="center",
            color="white" if chance[node] > 0.5 else "black",
            fontsize=9,
            zorder=3,
        )
    axes.set_axis_off()
    axes.margins(0.08, 0.14)
    axes.set_title(f"chance that a node is accepted: {sum(chance):.2f} tokens per forward are expected", fontsize=11)
    return figure


def step_picture(
    trees: Sequence[SampleTree],
    verdicts: Sequence[SampleVerdict],
    lengths: Sequence[int],
    spell: Callable[[int], str],
) -> "Figure":
    """One step as data: ragged trees, the packed rows with their mask, and what was decided.

    Args:
        trees: of every sample.
        verdicts: of every sample.
        lengths: of every sample's committed tokens.
        spell: the text of a token; short texts fit.

    Raises:
        RuntimeError: if matplotlib is not installed.
        ValueError: if the samples differ in number.
    """
    if not len(trees) == len(verdicts) == len(lengths):
        raise ValueError(f"got {len(trees)} trees, {len(verdicts)} verdicts and {len(lengths)} lengths")
    figure = new_figure(12.5, 1.5 * len(trees) + 0.6)
    grid = figure.add_gridspec(len(trees), 3, width_ratios=[4.2, 4.2, 3.6])
    for sample, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
        _drafts(figure.add_subplot(grid[sample, 0]), sample, tree, verdict, spell)
        _outcome(figure.add_subplot(grid[sample, 2]), sample, tree, verdict, lengths[sample], spell)
    _packed_rows(figure.add_subplot(grid[:, 1]), trees, lengths, spell)
    return figure


def _drafts(axes: "Axes", sample: int, tree: SampleTree, verdict: SampleVerdict, spell: Callable[[int], str]) -> None:
    place, accepted = columns(tree.topology), {0, *verdict.path}
    for node, token in tree.tokens.items():
        x, y, parent = place[node], -tree.topology.depth_list[node], tree.topology.parent_list[node]
        if parent >= 0:
            colour, width = (_ACCEPTED, 2.5) if node in accepted else (GREY, 1)
            axes.plot([x, place[parent]], [y, y + 1], color=colour, lw=width, zorder=1)
        colour = _OWN if node == 0 else _ACCEPTED if node in accepted else _REJECTED
        axes.annotate(
            spell(token),
            (x, y),
            ha="center",
            va="center",
            fontsize=10,
            color="black" if colour == _REJECTED else "white",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"},
        )
    axes.set_axis_off()
    axes.set_xlim(min(place) - 0.7, max(place) + 0.7)
    axes.set_ylim(-max(tree.topology.depth_list[node] for node in tree.tokens) - 0.5, 0.5)
    if sample == 0:
        axes.set_title("1  a draft tree per sample, each of its own size", fontsize=11, loc="left")


def _packed_rows(
    axes: "Axes", trees: Sequence[SampleTree], lengths: Sequence[int], spell: Callable[[int], str]
) -> None:
    sizes = [len(tree.tokens) for tree in trees]
    starts = [0, *accumulate(sizes)]
    for sample, (tree, start) in enumerate(zip(trees, starts, strict=False)):
        nodes, colour = list(tree.tokens), COLOURS[(sample + 3) % len(COLOURS)]  # the first three mean something
        seen = tree.topology.visible[nodes][:, nodes].tolist()
        for row, sees in enumerate(seen):
            depth = tree.topology.depth_list[nodes[row]]
            axes.text(-0.7, start + row, f"{lengths[sample] - 1 + depth}", ha="right", va="center", fontsize=8)
            axes.text(-1.8, start + row, spell(tree.tokens[nodes[row]]), ha="right", va="center", fontsize=8)
            for column, visible in enumerate(sees):
                face = colour if visible else "#f3f3f3"
                axes.add_patch(_cell(start + column, start + row, face))
        right = start + sizes[sample] + 3 < starts[-1]
        axes.text(
            start + sizes[sample] - 0.2 if right else start - 0.8,
            start + (sizes[sample] - 1) / 2,
            f"sample {sample}",
            ha="left" if right else "right",
            va="center",
            fontsize=9,
            color=colour,
        )
    axes.set_xlim(-4.2, starts[-1] - 0.4)
    axes.set_ylim(starts[-1] - 0.3, -1.4)
    axes.set_aspect("equal", anchor="N")
    axes.set_axis_off()
    axes.text(-0.55, -1, "token, position", ha="right", va="center", fontsize=8)
    axes.set_title(f"2  one forward over all {starts[-1]} rows, none is padding", fontsize=11, loc="left")


def _cell(x: float, y: float, colour: str) -> "Rectangle":
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.45, y - 0.45), 0.9, 0.9, facecolor=colour, edgecolor="none")


def _outcome(
    axes: "Axes", sample: int, tree: SampleTree, verdict: SampleVerdict, length: int, spell: Callable[[int], str]
) -> None:
    words = [(spell(tree.tokens[node]), _ACCEPTED) for node in verdict.path]
    words.append((spell(verdict.token), COLOURS[1] if verdict.recovered else COLOURS[0]))
    for index, (word, colour) in enumerate(words):
        axes.annotate(
            word,
            (index, 0.25),
            ha="center",
            va="center",
            fontsize=10,
            color="white",
            bbox={"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"},
        )
    kind = "recovered" if verdict.recovered else "bonus"
    told = f"{len(verdict.path)} accepted + 1 {kind}: {length} → {length + len(words)} tokens"
    axes.text(-0.4, -0.35, told, fontsize=9, va="center")
    axes.set_xlim(-0.6, 4.0)
    axes.set_ylim(-1, 1)
    axes.set_axis_off()
    if sample == 0:
        axes.set_title("3  a verdict per sample", fontsize=11, loc="left")


def _edges(
    axes: "Axes", topology: TreeTopology, place: Sequence[float], width: Callable[[int], float] = lambda _: 1.5
) -> None:
    for node, parent in enumerate(topology.parent_list):
        depth = topology.depth_list[node]
        if parent >= 0:
            axes.plot([place[node], place[parent]], [-depth, 1 - depth], color="0.7", lw=width(node), zorder=1)
