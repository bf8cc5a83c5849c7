"""Pictures of trees."""

from pathlib import Path
from typing import TYPE_CHECKING

from arbordraft.files import new_file
from arbordraft.topology import TreeTopology

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_png(topology: TreeTopology, path: Path) -> None:
    """A topology and its causal mask as a PNG file; for errors see :func:`tree_picture`."""
    figure = tree_picture(topology)
    with new_file(path) as partial:
        figure.savefig(partial, format="png")


def tree_picture(topology: TreeTopology) -> "Figure":
    """A topology and its causal mask.

    Raises:
        RuntimeError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("drawing a PNG needs matplotlib: pip install arbordraft[plot]") from error

    # Leaves side by side, every parent above the middle of its children.
    column: dict[int, float] = {}
    leaves = 0

    def place(node: int) -> float:
        nonlocal leaves
        children = topology.child_list[node]
        if children:
            places = [place(child) for child in children]
            column[node] = sum(places) / len(places)
        else:
            column[node] = leaves
            leaves += 1
        return column[node]

    place(0)
    figure = Figure(figsize=(4 + 0.5 * leaves, 1 + 0.9 * (topology.max_depth + 1)), layout="constrained")
    shape, mask = figure.subplots(1, 2, width_ratios=[max(2, leaves), max(2, topology.max_depth + 1)])
    for node, parent in enumerate(topology.parent_list):
        depth = topology.depth_list[node]
        if parent >= 0:
            shape.plot([column[node], column[parent]], [-depth, 1 - depth], color="0.6", zorder=1)
        shape.scatter(column[node], -depth, s=260, color="tab:green" if node else "tab:brown", zorder=2)
        shape.annotate(str(node), (column[node], -depth), ha="center", va="center", color="white", fontsize=8)
    shape.set_axis_off()
    shape.set_title("draft tree")
    mask.imshow(topology.visible.cpu().numpy(), cmap="Greens", vmin=0, vmax=1.4)
    mask.set(title="causal mask", xlabel="key", ylabel="query")
    return figure
