"""Pictures of trees, and helpers that all pictures share."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.files import new_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinct for colour-blind readers, too (Okabe and Ito); the first ones are the easiest to tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
GREY = "#8c8c8c"
ACCEPTED, OWN = "#009E73", "#0072B2"


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure of a size in inches, whose layout keeps its parts from overlapping.

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
    """Writes a PNG file, which appears only when complete; raises WriteError if it cannot be written."""
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=110)


def draw_png(topology: TreeTopology, path: Path) -> None:
    """Draws a topology and its causal mask to a PNG file; for errors see :func:`new_figure` and :func:`save_png`."""
    save_png(tree_picture(topology), path)


def columns(topology: TreeTopology) -> list[float]:
    """Returns the horizontal place of every node: leaves side by side, every parent at the mean of its children.

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
    """Returns a figure of a topology and its causal mask; for errors see :func:`new_figure`."""
    place = columns(topology)
    leaves = round(max(place)) + 1
    figure = new_figure(4 + 0.5 * leaves, 1 + 0.9 * (topology.max_depth + 1))
    shape, mask = figure.subplots(1, 2, width_ratios=[max(2, leaves), max(2, topology.max_depth + 1)])
    draw_edges(shape, topology, place)
    for node, depth in enumerate(topology.depth_list):
        shape.scatter(place[node], -depth, s=260, color=ACCEPTED if node else OWN, zorder=2)
        shape.annotate(str(node), (place[node], -depth), ha="center", va="center", color="white", fontsize=8)
    shape.set_axis_off()
    shape.set_title("draft tree")
    mask.imshow(topology.visible.cpu().numpy(), cmap="Greens", vmin=0, vmax=1.4)
    mask.set(title="causal mask", xlabel="key", ylabel="query")
    return figure


def draw_edges(
    axes: "Axes",
    topology: TreeTopology,
    place: Sequence[float],
    look: Callable[[int], dict[str, Any]] = lambda _: {},
    nodes: Iterable[int] | None = None,
) -> None:
    """Draws lines from nodes to their parents.

    Args:
        axes: the axes to draw on.
        topology: the tree.
        place: horizontal place of every node, see :func:`columns`.
        look: returns the style of the line above a node.
        nodes: nodes whose lines are drawn; all by default.
    """
    for node in range(topology.num_nodes) if nodes is None else nodes:
        parent, depth = topology.parent_list[node], topology.depth_list[node]
        if parent >= 0:
            line = {"color": "0.7", "lw": 1.5, "zorder": 1, **look(node)}
            axes.plot([place[node], place[parent]], [-depth, 1 - depth], **line)
