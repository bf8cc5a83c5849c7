"""Pictures of trees and of steps, and what all pictures have in common."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.trees.draft_tree import SampleTree, SampleVerdict
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.files import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by every kind of eye (Okabe and Ito), the first ones best.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8c8c8c"
_ACCEPTED, _REJECTED, _OWN = "#009E73", "#d9d9d9", "#0072B2"
_Spell = Callable[[int], str]


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of a size in inches, whose parts make room for each other.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError as error:
        raise ImportError("drawing a PNG needs matplotlib: pip install arbordraft[plot]") from error
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def save_png(figure: "Figure", path: Path) -> None:
    """Writes a PNG file, which appears when it is complete; raises WriteError if it cannot be written."""
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def draw_png(topology: TreeTopology, path: Path) -> None:
    """A topology and its causal mask as a PNG file; for errors see :func:`new_figure` and :func:`save_png`."""
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
    """A topology and its causal mask; for errors see :func:`new_figure`."""
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
        ImportError: if matplotlib is not installed.
        ValueError: if a probability is not in 0..1.
    """
    if wrong := [rate for rate in by_rank if not 0 <= rate <= 1]:
        raise ValueError(f"by_rank must hold probabilities, got {wrong[0]}")
    chance = [1.0] * topology.num_nodes
    for parent, children in enumerate(topology.child_list):
        for rank, child in enumerate(children):
            chance[child] = chance[parent] * (by_rank[rank] if rank < len(by_rank) else 0.0)
    place = columns(topology)
    figure = new_figure(max(5.0, 0.8 * (round(max(place)) + 1)), 1.2 + 1.0 * topology.max_depth)
    axes = figure.subplots()
    _edges(axes, topology, place, lambda node: {"lw": 0.5 + 5 * chance[node]})
    depths = [-depth for depth in topology.depth_list]
    sizes, shades = [60 + 1500 * each for each in chance], [each**0.5 for each in chance]  # small ones stay apart
    axes.scatter(place, depths, s=sizes, c=shades, cmap="YlGn", vmin=-0.2, vmax=1.1, edgecolors=_ACCEPTED, zorder=2)
    for each, x, y in zip(chance, place, depths, strict=True):
        where: dict[str, Any] = {"xytext": (0, 0), "ha": "center"} if each > 0.2 else {"xytext": (10, 0), "ha": "left"}
        colour = "white" if each > 0.5 else "black"
        where |= {"textcoords": "offset points", "va": "center", "color": colour, "fontsize": 9, "zorder": 3}
        axes.annotate(f"{each:.0%}", (x, y), **where)
    axes.set_axis_off()
    axes.margins(0.08, 0.14)
    axes.set_title(f"chance that a node is accepted: {sum(chance):.2f} tokens per forward are expected", fontsize=11)
    return figure


def step_picture(
    trees: Sequence[SampleTree], verdicts: Sequence[SampleVerdict], lengths: Sequence[int], spell: _Spell
) -> "Figure":
    """One step as data: ragged trees, the packed rows with their mask, and what was decided.

    Args:
        trees: of every sample.
        verdicts: of every sample.
        lengths: of every sample's committed tokens.
        spell: the text of a token; short texts fit.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the samples differ in number.
    """
    if not len(trees) == len(verdicts) == len(lengths):
        raise ValueError(f"got {len(trees)} trees, {len(verdicts)} verdicts and {len(lengths)} lengths")
    figure = new_figure(12.5, 1.5 * len(trees) + 0.6)
    grid = figure.add_gridspec(len(trees), 3, width_ratios=[4.2, 4.2, 3.6])
    drafts, outcomes = ([figure.add_subplot(grid[sample, column]) for sample in range(len(trees))] for column in (0, 2))
    for sample, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
        _drafts(drafts[sample], tree, verdict, spell)
        _outcome(outcomes[sample], tree, verdict, lengths[sample], spell)
    packed = figure.add_subplot(grid[:, 1])
    _packed_rows(packed, trees, lengths, spell)
    rows = sum(len(tree.tokens) for tree in trees)
    drafts[0].set_title("1  a draft tree per sample, each of its own size", fontsize=11, loc="left")
    packed.set_title(f"2  one forward over all {rows} rows, none is padding", fontsize=11, loc="left")
    outcomes[0].set_title("3  a verdict per sample", fontsize=11, loc="left")
    return figure


def _drafts(axes: "Axes", tree: SampleTree, verdict: SampleVerdict, spell: _Spell) -> None:
    place, accepted = columns(tree.topology), {0, *verdict.path}
    chosen, others = {"color": _ACCEPTED, "lw": 2.5}, {"color": GREY, "lw": 1}
    _edges(axes, tree.topology, place, lambda node: chosen if node in accepted else others, tree.tokens)
    for node, token in tree.tokens.items():
        colour = _OWN if node == 0 else _ACCEPTED if node in accepted else _REJECTED
        _word(axes, spell(token), place[node], -tree.topology.depth_list[node], colour)
    axes.set_axis_off()
    axes.set_xlim(min(place) - 0.7, max(place) + 0.7)
    axes.set_ylim(-max(tree.topology.depth_list[node] for node in tree.tokens) - 0.5, 0.5)


def _packed_rows(axes: "Axes", trees: Sequence[SampleTree], lengths: Sequence[int], spell: _Spell) -> None:
    from matplotlib.patches import Rectangle

    starts = [0, *accumulate(len(tree.tokens) for tree in trees)]
    for sample, (tree, (start, end)) in enumerate(zip(trees, pairwise(starts), strict=True)):
        nodes, colour = list(tree.tokens), COLOURS[(sample + 3) % len(COLOURS)]  # the first three mean something
        for row, sees in enumerate(tree.topology.visible[nodes][:, nodes].tolist(), start):
            node = nodes[row - start]
            position = lengths[sample] - 1 + tree.topology.depth_list[node]
            axes.text(-0.7, row, str(position), ha="right", va="center", fontsize=8)
            axes.text(-1.8, row, spell(tree.tokens[node]), ha="right", va="center", fontsize=8)
            for column, visible in enumerate(sees, start):
                face = colour if visible else "#f3f3f3"
                axes.add_patch(Rectangle((column - 0.45, row - 0.45), 0.9, 0.9, facecolor=face, edgecolor="none"))
        x, side = (end - 0.2, "left") if end + 3 < starts[-1] else (start - 0.8, "right")
        axes.text(x, (start + end - 1) / 2, f"sample {sample}", ha=side, va="center", fontsize=9, color=colour)
    axes.set_xlim(-4.2, starts[-1] - 0.4)
    axes.set_ylim(starts[-1] - 0.3, -1.4)
    axes.set_aspect("equal", anchor="N")
    axes.set_axis_off()
    axes.text(-0.55, -1, "token, position", ha="right", va="center", fontsize=8)


def _outcome(axes: "Axes", tree: SampleTree, verdict: SampleVerdict, length: int, spell: _Spell) -> None:
    for index, node in enumerate(verdict.path):
        _word(axes, spell(tree.tokens[node]), index, 0.25, _ACCEPTED)
    accepted, kind = len(verdict.path), "recovered" if verdict.recovered else "bonus"
    _word(axes, spell(verdict.token), accepted, 0.25, COLOURS[1] if verdict.recovered else COLOURS[0])
    told = f"{accepted} accepted + 1 {kind}: {length} → {length + accepted + 1} tokens"
    axes.text(-0.4, -0.35, told, fontsize=9, va="center")
    axes.set_xlim(-0.6, 4.0)
    axes.set_ylim(-1, 1)
    axes.set_axis_off()


def _word(axes: "Axes", word: str, x: float, y: float, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"}
    text = "black" if colour == _REJECTED else "white"
    axes.annotate(word, (x, y), ha="center", va="center", fontsize=10, color=text, bbox=box)


def _edges(
    axes: "Axes",
    topology: TreeTopology,
    place: Sequence[float],
    look: Callable[[int], dict[str, Any]] = lambda _: {},
    nodes: Iterable[int] | None = None,
) -> None:
    for node in range(topology.num_nodes) if nodes is None else nodes:
        parent, depth = topology.parent_list[node], topology.depth_list[node]
        if parent >= 0:
            line = {"color": "0.7", "lw": 1.5, "zorder": 1, **look(node)}
            axes.plot([place[node], place[parent]], [-depth, 1 - depth], **line)
