"""All writers of files and folders by name, for the tests of disks and interrupts."""

from pathlib import Path

import torch

from arbordraft import CostTable, TreeTopology
from arbordraft.bench import measure
from arbordraft.bench.decoding import DecodeRow
from arbordraft.bench.tuned import Choice, Setting, Tuned
from arbordraft.deciders import LearnedDecider
from arbordraft.deciders.costs import StepCosts
from arbordraft.training.recording import AtomicCheckpoints
from arbordraft.training.shards import ANSWER, Conversation, ShardFolder, pack, write_shard
from arbordraft.trees.drawing import draw_png
from arbordraft.utils.files import new_folder, write_text
from arborlab.plots import plot

COSTS = CostTable((1,), (1e-3,))
TUNED = Tuned("ngram", 0.0, StepCosts(COSTS, COSTS), [Choice(1, Setting("plain"), 1.0, 1.0)])
ROW = DecodeRow("float32", 1, 0.0, "plain", "exact", 1.0, 1.0, acceptance=[0.5])
CHECKPOINT = {"state_dict": {"weight": torch.zeros(1000)}}


def shard(path: Path) -> None:
    write_shard(pack([Conversation([5, 6], [ANSWER, ANSWER], 0.0)] * 9, path))


def decider(folder: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LearnedDecider(0, 2, [4]).save_pretrained(folder)


def published(folder: Path) -> None:
    with new_folder(folder, force=True) as new:
        (new / "a").write_text("x" * 500)


def several(folder: Path) -> None:
    with new_folder(folder, force=True) as new:
        (new / "graphs").mkdir()
        (new / "graphs" / "model.onnx").write_bytes(bytes(500))
        (new / "README.md").write_text("how to use it")


FILES = {
    "cost table": lambda path: COSTS.save(path),
    "step costs": lambda path: TUNED.costs.save(path),
    "tuned": lambda path: TUNED.save(path),
    "benchmark": lambda path: measure.save(path, [ROW]),
    "plot": lambda path: plot([ROW], path),
    "tree": lambda path: draw_png(TreeTopology.chain(2), path),
    "shard": shard,
    "checkpoint": lambda path: AtomicCheckpoints().save_checkpoint(CHECKPOINT, path),
    "text": lambda path: write_text(path, "x" * 500),
}
FOLDERS = {
    "published": published,
    "exported": several,
    "decider": decider,
    "shards": lambda folder: ShardFolder(folder).claim({"recipe": {"seed": 1}, "target": "a name"}),
}
WRITERS = FILES | FOLDERS


def everything(root: Path) -> dict[str, bytes | None]:
    """Returns all paths below a folder, with the contents of files."""
    return {str(path.relative_to(root)): path.read_bytes() if path.is_file() else None for path in root.rglob("*")}


def place(root: Path, writer: str) -> Path:
    return root / ("out" if writer in FOLDERS else "out.png" if writer in ("plot", "tree") else "out.bin")
