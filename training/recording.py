"""What a training leaves behind: the best network as a folder, its card, and a record for the tracker."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

RESULT = "best"


class Publishable(Protocol):
    """What a module in training offers to be recorded."""

    def save(self, folder: Path) -> None:
        """Writes what was trained as transformers does."""

    def card(self, metrics: Mapping[str, float]) -> str:
        """The model card."""


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder aside and puts it in place at once; an older one goes only when the new one is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        fresh, old = Path(scratch, "new"), Path(scratch, "old")
        fresh.mkdir()
        write(fresh)
        if folder.exists():
            folder.rename(old)
        os.replace(fresh, folder)
        shutil.rmtree(old, ignore_errors=True)


class Recorder(Callback):  # type: ignore[misc]  # Lightning is not type-checked here
    """Publishes the best network after every validation and tells the trackers what they should know.

    Args:
        output: folder for results: ``best/`` with the network, ``metrics.json``.
        monitor: the metric that decides what is best; higher is better.
        alias: of the registered version; ``None`` registers nothing.
    """

    def __init__(self, output: str, monitor: str = "val/tau", alias: str | None = "candidate") -> None:
        self.output, self.monitor, self.alias = Path(output), monitor, alias
        self.best = float("-inf")
        self.config = ""
        self.curve: list[dict[str, float]] = []

    @property
    def result(self) -> Path:
        """The published network."""
        return self.output / RESULT

    def state_dict(self) -> dict[str, Any]:
        """What a resumed training goes on with."""
        return {"best": self.best, "curve": self.curve}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back."""
        self.best, self.curve = state_dict["best"], state_dict["curve"]

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records what the training depends on."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        profile = data.profile()
        for tracker in _trackers(trainer):
            tracker.log_config(self.config)
            tracker.log_provenance(int(os.environ.get("PL_GLOBAL_SEED", data.seed)), data.description())
            tracker.log_dataset(
                data.folder.folder.name, profile["digest"], profile["conversations"], str(data.folder.folder), profile
            )

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publishes the network if it is the best so far."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if trainer.sanity_checking or self.monitor not in metrics:
            return
        self.curve.append({"step": trainer.global_step, **metrics})
        if metrics[self.monitor] <= self.best:
            return
        self.best = metrics[self.monitor]

        def write(folder: Path) -> None:
            pl_module.save(folder)
            (folder / "README.md").write_text(pl_module.card(metrics))
            (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")

        publish(self.result, write)
        for tracker in _trackers(trainer):
            tracker.log_checkpoint(self.result, trainer.global_step, metrics)

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leaves pictures and samples, and registers the best network."""
        for tracker in _trackers(trainer):
            for name, columns in pl_module.tables().items():
                tracker.log_table(columns, name)
            for name, figure in pl_module.figures(self.curve).items():
                tracker.log_figure(figure, name)
            if self.result.exists():
                tracker.log_text((self.result / "README.md").read_text(), "model-card.md")
                if self.alias is not None and tracker.registers:
                    tracker.register(self.result, self.alias)


def _trackers(trainer: Trainer) -> list[Any]:
    from arbordraft.training.tracking import MLflowTracker

    return [logger for logger in trainer.loggers if isinstance(logger, MLflowTracker)]


__all__ = ["RESULT", "Publishable", "Recorder", "publish"]
