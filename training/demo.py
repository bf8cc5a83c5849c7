"""From nothing but a target to a trained drafter and decider, with the data, the records and a taste of the gain."""

from pathlib import Path

from rich.console import Console

from arbordraft.bench.contests import drafter_gain
from arbordraft.bench.decoding import DecodeRow, in_turns
from arbordraft.bench.tables import rows_table
from arbordraft.bench.workload import Workload
from arbordraft.loading import load_drafter
from arbordraft.training.decider_module import DeciderModule
from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.fit import run
from arbordraft.training.recording import RESULT
from arbordraft.training.targets import Target


def train_demo(console: Console, folder: Path, conversations: int | None = None) -> Path:
    """Generates and trains; an interrupted run goes on at the last shard, or at the last checkpoint.

    Args:
        console: is told what begins.
        folder: for data, results and checkpoints.
        conversations: how many to generate; by default what the configurations say.

    Returns:
        The folder of the trained drafter; the decider is beside its parent.
    """
    drafter = folder / "drafter" / RESULT
    for kind, module, own in (
        ("drafter", DrafterModule, []),
        ("decider", DeciderModule, [f"--model.drafter={drafter}"]),
    ):
        console.rule(kind)
        output = folder / kind
        arguments = [f"--config={kind}/smollm2", f"--data.folder={folder / 'data'}", f"--results.output={output}", *own]
        if conversations is not None:
            arguments.append(f"--data.recipe.conversations={conversations}")
        if (last := output / "checkpoints" / "last.ckpt").exists():
            arguments.append(f"--ckpt_path={last}")
        run(module, ["fit", *arguments])
    return drafter


def gain(console: Console, drafter: Path) -> None:
    """Decodes the built-in prompts with the trained drafter and shows what it gains over plain decoding."""
    target = Target(dtype="bfloat16").load()
    drafters = {"trained": load_drafter(drafter, target)}
    rows: list[DecodeRow] = []
    for temperature in (0.0, 1.0):
        workload = Workload(new_tokens=128, temperature=temperature, repeats=1)
        rows += in_turns(target, drafter_gain(target, drafters, workload), workload)
    console.print(rows_table(rows))
