"""Draws the pictures of the documentation, and those of the results, from what is in the repository.

python docs/pictures.py
"""

import json
import shutil
from pathlib import Path

from arbordraft import Fixed, TreeTopology
from arbordraft.bench.plots import plot, read_rows, speed_picture
from arbordraft.serving.page import page
from arbordraft.serving.pieces import step_of
from arbordraft.trees.draft_tree import SampleTree, SampleVerdict
from arbordraft.trees.drawing import acceptance_picture, save_png, step_picture

ROOT = Path(__file__).resolve().parents[1]
PICTURES, RESULTS = ROOT / "docs" / "pictures", ROOT / "examples" / "results"
DRAFTER = ROOT / "examples" / "checkpoints" / "smollm2-135m-instruct-eagle"

# Three samples in the middle of their texts: their trees, what the target accepts, and its own token behind.
STEP = (
    (11, [-1, 0, 0, 1, 1, 3], ["sky", "is", "looks", "blue", "so", "because"], (1, 3, 5), ("light", False)),
    (5, [-1, 0, 1, 2], ["print", "(", "a", ","], (1,), ("x", True)),
    (8, [-1, 0, 0], ["of", "France", "Spain"], (1,), ("is", False)),
)


def step() -> None:
    """One step as data."""
    trees, verdicts, words = drafted_and_judged()
    lengths = [length for length, *_ in STEP]
    save_png(step_picture(trees, verdicts, lengths, words.__getitem__), PICTURES / "step.png")


def drafted_and_judged() -> tuple[list[SampleTree], list[SampleVerdict], list[str]]:
    """The samples of ``STEP``, and the words that their tokens stand for."""
    words = [word for _, _, drafted, _, (own, _) in STEP for word in (*drafted, own)]
    trees, verdicts = [], []
    for _, parents, drafted, path, (own, recovered) in STEP:
        tokens = {node: words.index(word) for node, word in enumerate(drafted)}
        trees.append(SampleTree(TreeTopology.from_parents(parents), Fixed(2), tokens))
        verdicts.append(SampleVerdict(path, words.index(own), recovered))
    return trees, verdicts, words


def page_of_step() -> None:
    """The first of these samples on the server's page, in the Chromium that is installed."""
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
    """The best tree of 16 nodes for the measured acceptance of the drafter in ``examples/checkpoints``."""
    by_rank = json.loads((DRAFTER / "config.json").read_text())["acceptance"]
    save_png(acceptance_picture(TreeTopology.sequoia(by_rank, 16, 6), by_rank), PICTURES / "tree.png")


def speed() -> None:
    """Speed against batch."""
    save_png(speed_picture(read_rows(RESULTS / "batching.json")), PICTURES / "speed.png")


def results() -> None:
    """The pictures beside the measurements that they show."""
    for name in ("product", "batching", "deciders"):
        plot(read_rows(RESULTS / f"{name}.json"), RESULTS / f"{name}.png")


if __name__ == "__main__":
    for draw in (step, page_of_step, tree, speed, results):
        draw()
