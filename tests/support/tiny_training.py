"""A training that takes a second: a tiny chat target, prompts for it, and settings of the students."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors import safe_open

from arbordraft.training.data import SelfDistillationDataModule
from arbordraft.training.distillation import Recipe
from arbordraft.training.drafter_module import DrafterModule, Phase
from arbordraft.training.recording import Recorder
from arbordraft.training.students import EagleStudent
from arbordraft.training.targets import Target
from support.chats import BRACKETS, chat_tokenizer
from support.models import tiny

RECIPE = Recipe(conversations=12, per_shard=4, max_new_tokens=16, max_tokens=64)
TRAINER = {
    "accelerator": "cpu",
    "devices": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "precision": "32-true",
    "log_every_n_steps": 1,
    "logger": False,
    "enable_checkpointing": False,
}


def save_target(folder: Path, seed: int = 0, **overrides: object) -> Path:
    """Saves a model with sharp predictions, and a tokenizer with a chat template."""
    model = tiny(seed=seed, sharpness=4.0, **overrides)
    model.model.norm.weight.data += 0.1 * seed  # models are recognised by their norms
    model.save_pretrained(folder)
    chat_tokenizer(BRACKETS).save_pretrained(folder)
    return folder


def save_prompts(path: Path, count: int = 12) -> Path:
    """Saves prompts of random words with different lengths."""
    source = random.Random(0)
    words = ["".join(source.choices(ascii_lowercase, k=6 + 7 * number % 20)) for number in range(count)]
    path.write_text("".join(json.dumps({"messages": [{"role": "user", "content": word}]}) + "\n" for word in words))
    return path


def save_world(folder: Path, **overrides: object) -> Path:
    """Saves a target and prompts; ``data(folder)`` generates the rest there at its first use."""
    save_target(folder / "target", **overrides)
    save_prompts(folder / "prompts.jsonl")
    return folder


def data(world: Path, **changes: Any) -> SelfDistillationDataModule:
    """Returns a data module of the target's answers to the prompts."""
    settings = {
        "folder": str(world / "data"),
        "target": Target(str(world / "target"), dtype="float32", kernels="torch"),
        "recipe": RECIPE,
        "prompts": str(world / "prompts.jsonl"),
        "batch_tokens": 128,
        "validation": 4,
    }
    return SelfDistillationDataModule(**{**settings, **changes})


def module(noise: float = 0.0, vocabulary: int = 40, **changes: Any) -> DrafterModule:
    """Returns a module whose drafter learns in two phases."""
    settings = {
        "phases": (Phase(0.5, 1, "kl"), Phase(1.0, 2, "lk_hybrid")),
        "warmup": 2,
        "draft_steps": 2,
        "tree": (2, 1),
        "decoded": 2,
        "decoded_tokens": 8,
    }
    return DrafterModule(EagleStudent(vocabulary=vocabulary, layers=[0, 1, 2], noise=noise), **{**settings, **changes})


def save_config(path: Path, world: Path, **sections: Mapping[str, Any]) -> Path:
    """Saves this training as a configuration for the command line, with ``sections`` merged into it."""
    config: dict[str, Any] = {
        "seed_everything": 0,
        "trainer": {**TRAINER, "max_epochs": 2, "enable_checkpointing": True},
        "model": {
            "student": {
                "class_path": "arbordraft.training.students.EagleStudent",
                "init_args": {"vocabulary": 40, "layers": [0, 1, 2]},
            },
            "phases": [{"until": 0.5, "steps": 1, "loss": "kl"}, {"until": 1.0, "steps": 2, "loss": "lk_hybrid"}],
            "warmup": 2,
            "draft_steps": 2,
            "tree": [2, 1],
            "decoded": 2,
            "decoded_tokens": 8,
        },
        "data": {
            "folder": str(world / "data"),
            "target": {"model": str(world / "target"), "dtype": "float32", "kernels": "torch"},
            "recipe": {"conversations": 12, "per_shard": 4, "max_new_tokens": 16, "max_tokens": 64},
            "prompts": str(world / "prompts.jsonl"),
            "batch_tokens": 128,
            "validation": 4,
        },
        "results": {"output": str(path.parent / "results")},
    }
    for name, changes in sections.items():
        config[name] = {**config.get(name, {}), **changes}
    path.write_text(yaml.safe_dump(config))
    return path


class Killed(Exception):
    """Stands for any event that ends a process."""


class Kill(Callback):
    """Ends a training before its step number ``at``."""

    def __init__(self, at):
        self.at = at

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.at:
            raise Killed


class FailOnce(Callback):
    """Raises in the second epoch, unless it did so before."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == 1 and not self.mark.exists():
            trainer.strategy.barrier()
            self.mark.touch()
            raise RuntimeError("a lost machine")


class Losses(Callback):
    """Keeps the loss and the text of every batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((float(outputs["loss"]), batch.tokens.tolist()))


def fit(world, folder, every=2, kill=None, noise=0.1, **settings):
    """Trains, from the last checkpoint if there is one; returns the last checkpoint, and all batches with their losses.

    Writes checkpoints after every ``every`` steps, or with 0 at the end of every epoch.
    """
    seed_everything(0, verbose=False)
    when = {"every_n_train_steps": every} if every else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    keep = ModelCheckpoint(folder / "checkpoints", save_last=True, save_top_k=1, **when)
    losses = Losses()
    callbacks = [Recorder(str(folder / "results")), keep, losses, *([] if kill is None else [Kill(kill)])]
    settings = {**TRAINER, "enable_checkpointing": True, "max_epochs": 2, "val_check_interval": 4, **settings}
    last = folder / "checkpoints" / "last.ckpt"
    trainer = Trainer(**settings, callbacks=callbacks)
    try:
        trainer.fit(module(noise), data(world), ckpt_path=last if last.exists() else None)
    except Killed:
        assert kill is not None
    else:
        trainer.save_checkpoint(last)
    return (torch.load(last, weights_only=True) if last.exists() else None), losses.seen


def same(one: Any, other: Any) -> bool:
    """Returns whether two states are equal to the last bit, except for measured times."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(one[key], other[key]) for key in one if not str(key).endswith("_ms")
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def stored(folder: Path) -> dict[str, Any]:
    """Returns the contents of all files in a folder of shards."""
    found: dict[str, Any] = {"manifest": json.loads((folder / "manifest.json").read_text())}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found[path.name] = [file.metadata(), {name: file.get_tensor(name) for name in sorted(file.keys())}]
    return found
