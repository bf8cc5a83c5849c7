"""Draws the pictures of the documentation and of the results from files of the repository.

python docs/pictures.py
"""

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arbordraft import Fixed, TreeTopology
from arbordraft.serving.deltas import step_of
from arbordraft.serving.page import page
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.drawing import ACCEPTED, COLOURS, GREY, OWN, columns, draw_edges, new_figure, save_png
from arbordraft.trees.verdict import SampleVerdict
from arbordraft.utils.checkout import laboratory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
PICTURES, RESULTS = ROOT / "docs" / "pictures", ROOT / "examples" / "results"
DRAFTER = ROOT / "examples" / "checkpoints" / "smollm2-135m-instruct-eagle"
REJECTED = "#d9d9d9"
plots = laboratory("plots", "docs/pictures.py")
Spell = Callable[[int], str]

# Three samples in the middle of their texts: their trees, the path that the target accepts, and its next token.
STEP = (
    (11, [-1, 0, 0, 1, 1, 3], ["sky", "is", "looks", "blue", "so", "because"], (1, 3, 5), ("light", False)),
    (5, [-1, 0, 1, 2], ["print", "(", "a", ","], (1,), ("x", True)),
    (8, [-1, 0, 0], ["of", "France", "Spain"], (1,), ("is", False)),
)


def step() -> None:
    """Draws one step as data."""
    trees, verdicts, words = drafted_and_judged()
    lengths = [length for length, *_ in STEP]
    save_png(step_picture(trees, verdicts, lengths, words.__getitem__), PICTURES / "step.png")


def drafted_and_judged() -> tuple[list[SampleTree], list[SampleVerdict], list[str]]:
    """Returns the trees and verdicts of ``STEP``, and the word of each token."""
    words = [word for _, _, drafted, _, (own, _) in STEP for word in (*drafted, own)]
    trees, verdicts = [], []
    for _, parents, drafted, path, (own, recovered) in STEP:
        tokens = {node: words.index(word) for node, word in enumerate(drafted)}
        trees.append(DraftTree.of(TreeTopology.from_parents(parents), Fixed(2), [tokens])[0])
        verdicts.append(SampleVerdict((0, *path), words.index(own), recovered))
    return trees, verdicts, words


def page_of_step() -> None:
    """Draws the first of these samples on the server's page, in an installed Chromium."""
    from playwright.sync_api import sync_playwright

    trees, verdicts, words = drafted_and_judged()
    shown = {**step_of(trees[0], verdicts[0], 1 + len(verdicts[0].path), words.__getitem__), "seconds": 0}
    answer = {"prompt": "Why is the sky blue?", "text": "The sky is blue because light", "steps": [shown]}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 340})
        tab.set_content(page({"model": "smollm2", "exactness": "pathwise", **answer}))
        tab.screenshot(path=PICTURES / "page.png")
        browser.close()


def tree() -> None:
    """Draws the best tree of 16 nodes for the measured acceptance of the drafter in ``examples/checkpoints``."""
    by_rank = json.loads((DRAFTER / "config.json").read_text())["acceptance"]
    save_png(acceptance_picture(TreeTopology.sequoia(by_rank, 16, 6), by_rank), PICTURES / "tree.png")


def speed() -> None:
    """Draws speed against batch."""
    save_png(plots.speed_picture(plots.read_rows(RESULTS / "batching.json")), PICTURES / "speed.png")


def verifiers() -> None:
    """Draws the gain of draft laws and rules over recursive rejection of independent drafts."""
    plots.plot(
        [row for drafter in ("eagle", "early-exit") for row in plots.read_rows(RESULTS / f"verifiers-{drafter}.json")],
        PICTURES / "verifiers.png",
    )


def results() -> None:
    """Draws the pictures that stand beside their measurements."""
    for name in ("product", "batching", "deciders"):
        plots.plot(plots.read_rows(RESULTS / f"{name}.json"), RESULTS / f"{name}.png")


def acceptance_picture(topology: TreeTopology, by_rank: Sequence[float]) -> "Figure":
    """Draws a tree whose nodes are larger and darker the likelier they are accepted.

    Args:
        topology: shape of the tree.
        by_rank: probability that the child of each rank is accepted, given that its parent was; children of higher
            ranks count as never accepted.

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
    draw_edges(axes, topology, place, lambda node: {"lw": 0.5 + 5 * chance[node]})
    depths = [-depth for depth in topology.depth_list]
    sizes, shades = (
        [60 + 1500 * each for each in chance],
        [each**0.5 for each in chance],
    )  # the square root keeps small ones apart
    axes.scatter(place, depths, s=sizes, c=shades, cmap="YlGn", vmin=-0.2, vmax=1.1, edgecolors=ACCEPTED, zorder=2)
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
    trees: Sequence[SampleTree], verdicts: Sequence[SampleVerdict], lengths: Sequence[int], spell: Spell
) -> "Figure":
    """Draws one step as data: ragged trees, the packed rows with their mask, and the verdicts.

    Args:
        trees: one tree per sample.
        verdicts: one verdict per sample.
        lengths: committed tokens per sample.
        spell: returns the text of a token; short texts fit.

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


def _drafts(axes: "Axes", tree: SampleTree, verdict: SampleVerdict, spell: Spell) -> None:
    topology = tree.batch.topology
    place, depths = columns(topology), topology.depth_list
    chosen, others = {"color": ACCEPTED, "lw": 2.5}, {"color": GREY, "lw": 1}
    draw_edges(axes, topology, place, lambda node: chosen if node in verdict.path else others, tree.rows)
    for node, token in enumerate(tree.tokens):
        colour = OWN if node == 0 else ACCEPTED if node in verdict.path else REJECTED
        _word(axes, spell(token), place[node], -depths[node], colour)
    axes.set_axis_off()
    axes.set_xlim(min(place) - 0.7, max(place) + 0.7)
    axes.set_ylim(-max(depths) - 0.5, 0.5)


def _packed_rows(axes: "Axes", trees: Sequence[SampleTree], lengths: Sequence[int], spell: Spell) -> None:
    from matplotlib.patches import Rectangle

    starts = [0, *accumulate(len(tree.tokens) for tree in trees)]
    for sample, (tree, (start, end)) in enumerate(zip(trees, pairwise(starts), strict=True)):
        topology, colour = tree.batch.topology, COLOURS[(sample + 3) % len(COLOURS)]  # the first three mean something
        for row, sees in enumerate(topology.visible.tolist(), start):
            position = lengths[sample] - 1 + topology.depth_list[row - start]
            axes.text(-0.7, row, str(position), ha="right", va="center", fontsize=8)
            axes.text(-1.8, row, spell(tree.tokens[row - start]), ha="right", va="center", fontsize=8)
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


def _outcome(axes: "Axes", tree: SampleTree, verdict: SampleVerdict, length: int, spell: Spell) -> None:
    for index, row in enumerate(verdict.path[1:]):
        _word(axes, spell(tree.token(row)), index, 0.25, ACCEPTED)
    accepted, kind = len(verdict.path) - 1, "recovered" if verdict.recovered else "bonus"
    _word(axes, spell(verdict.token), accepted, 0.25, COLOURS[1] if verdict.recovered else COLOURS[0])
    caption = f"{accepted} accepted + 1 {kind}: {length} → {length + accepted + 1} tokens"
    axes.text(-0.4, -0.35, caption, fontsize=9, va="center")
    axes.set_xlim(-0.6, 4.0)
    axes.set_ylim(-1, 1)
    axes.set_axis_off()


def _word(axes: "Axes", word: str, x: float, y: float, colour: str) -> None:
    box = {"boxstyle": "round,pad=0.3", "facecolor": colour, "edgecolor": "none"}
    text = "black" if colour == REJECTED else "white"
    axes.annotate(word, (x, y), ha="center", va="center", fontsize=10, color=text, bbox=box)


if __name__ == "__main__":
    for draw in (step, page_of_step, tree, speed, verifiers, results):
        draw()
