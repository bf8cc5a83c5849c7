"""Trains a drafter and a decider for any target, from generating the data to measuring the gain."""

from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from arbordraft.bench.decoding import DecodeRow, in_turns
from arbordraft.bench.suites import drafter_gain
from arbordraft.bench.tables import print_rows
from arbordraft.bench.workload import Workload
from arbordraft.drafter_names import load_drafter
from arbordraft.loading import load_model
from arbordraft.training.decider_module import DeciderModule
from arbordraft.training.drafter_module import DrafterModule
from arbordraft.training.fit import run
from arbordraft.training.recording import RESULT
from arbordraft.training.shards import MANIFEST, ShardFolder
from arbordraft.training.sizing import Sizes, free_disk, free_memory, peak_memory
from arbordraft.training.targets import Target

_MANY = 10**6  # conversations: more than the minutes allow


STUDENTS = {"eagle": "EagleStudent", "block": "BlockStudent", "medusa": "MedusaStudent"}


def train_demo(
    console: Console,
    target: Target,
    folder: Path,
    kind: str = "eagle",
    *,
    generation: float = 75,
    training: float = 60,
    conversations: int | None = None,
) -> Path:
    """Generates data and trains; an interrupted run goes on after the last shard or checkpoint.

    Args:
        console: prints each stage, the chosen settings and, at the end, the peak of memory.
        target: any causal LM with a chat template.
        folder: for data, results and checkpoints.
        kind: ``eagle``, ``block`` or ``medusa``; an EAGLE head gets a decider, too.
        generation: minutes for writing text.
        training: minutes for training the drafter.
        conversations: number of conversations to generate, without a time limit.

    Returns:
        The folder of the trained drafter; the decider is beside its parent.

    Raises:
        ValueError: if the target cannot be loaded or trained for, or there is too little memory.
        ShardError: if the folder was begun for another target.
    """
    if kind not in STUDENTS:
        raise ValueError(f"a drafter is trained from nothing as {', '.join(STUDENTS)}, got {kind!r}")
    data, output = folder / "data", folder / "drafter"
    sizes = _sizes(console, target, data)
    shared = [
        f"--data.folder={data}",
        f"--data.target.model={target.model}",
        *([f"--data.target.dtype={target.dtype}"] if target.dtype else []),
        f"--data.generation_batch={sizes.generation_batch}",
        f"--data.recipe.per_shard={sizes.per_shard}",
        f"--data.recipe.conversations={conversations or _MANY}",
        f"--data.cache={str(sizes.cache).lower()}",
        *([] if conversations else [f"--data.minutes={generation}"]),
    ]
    _train(
        console,
        DrafterModule,
        output,
        [
            "--config=drafter/eagle",
            f"--model.student=arbordraft.training.students.{STUDENTS[kind]}",
            f"--model.student.init_args.vocabulary={sizes.vocabulary}",
            f"--model.lr={sizes.lr:.2e}",
            f"--data.batch_tokens={sizes.batch_tokens}",
            "--trainer.max_epochs=-1",
            f"--trainer.max_time={_clock(training)}",
            f"--trainer.val_check_interval={_clock(training / 5)}",
            *shared,
        ],
    )
    if kind == "eagle":
        own = ["--config=decider/learned", f"--model.drafter={output / RESULT}"]
        _train(console, DeciderModule, folder / "decider", [*own, *shared])
    console.print(f"At most {peak_memory() / 1e9:.1f} GB of memory were in use.")
    return output / RESULT


def gain(console: Console, target: Target, drafter: Path) -> None:
    """Decodes the built-in prompts with the trained drafter and prints its gain over plain decoding."""
    model = target.load(_device())
    drafters = {"trained": load_drafter(drafter, model)}
    rows: list[DecodeRow] = []
    for temperature in (0.0, 1.0):
        workload = Workload(new_tokens=128, temperature=temperature, repeats=1)
        rows += in_turns(model, drafter_gain(model, drafters, workload), workload)
    print_rows(console, rows)


def _train(console: Console, module: type, output: Path, arguments: list[str]) -> None:
    console.rule(output.name)
    arguments = ["fit", *arguments, f"--results.output={output}"]
    if (last := output / "checkpoints" / "last.ckpt").exists():
        arguments.append(f"--ckpt_path={last}")
    run(module, arguments)


def _sizes(console: Console, target: Target, data: Path) -> Sizes:
    """Chooses sizes for this target and machine; a folder that was begun keeps the size of its shards."""
    model, _ = load_model(target.model, target.weight_type(_device()), target.revision)
    memory, disk = free_memory(model), free_disk(data)
    sizes = Sizes.of(model, memory, disk)
    if (data / MANIFEST).exists():
        sizes = replace(sizes, per_shard=ShardFolder(data).manifest()["recipe"]["per_shard"])
    words, size = model.get_output_embeddings().weight.shape
    console.print(
        f"{target.model}: {model.num_parameters():,} weights, {words:,} tokens, hidden size {size}; beside it "
        f"{memory / 1e9:.1f} GB of memory are free, and {disk / 1e9:.0f} GB of disk\n"
        f"{', '.join(f'{name} {value}' for name, value in asdict(sizes).items())}"
    )
    return sizes


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _clock(minutes: float) -> str:
    """Writes minutes as Lightning reads them, ``DD:HH:MM:SS``."""
    seconds = max(1, round(minutes * 60))
    days, hours, minutes = seconds // 86400, seconds // 3600 % 24, seconds // 60 % 60
    return f"{days:02}:{hours:02}:{minutes:02}:{seconds % 60:02}"
