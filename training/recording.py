"""Publishes the best network of a training as a folder with its card, and records the training with the trackers."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only

from arbordraft.training.signals import DeferredSignals
from arbordraft.training.tracking import MLflowTracker
from arbordraft.utils.files import check_writable, new_file, new_folder, write_text
from arbordraft.utils.mlflow_server import CANDIDATE, check_names

INTERRUPTED = "interrupted.ckpt"
RESULT = "best"
RECIPE = "training.yaml"
_KEPT = "what was saved before is kept, and --ckpt_path goes on from the last checkpoint"


class AtomicCheckpoints(TorchCheckpointIO):  # type: ignore[misc]  # Lightning is not type-checked here
    """Writes Lightning's checkpoints so that a file appears only when it is complete, staged on the same disk."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a local file; leaves other file systems and storage options to Lightning.

        Raises:
            WriteError: if the disk is full, or the path cannot be written.
        """
        if storage_options is not None or not isinstance(get_filesystem(path), LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        with new_file(path, _KEPT) as partial, partial.open("wb") as file:
            torch.save(checkpoint, file)


class Recorder(Callback):  # type: ignore[misc]  # Lightning is not type-checked here
    """Publishes the best network after every validation, and records the training with the trackers.

    The module in training is a :class:`~arbordraft.training.module.DistillationModule`.

    Args:
        output: folder for results: ``best/`` with the network and how it was trained, ``curve.json`` with the metrics
            of every validation.
        monitor: the metric by which networks are compared; higher is better.
        alias: alias of the registered version; ``None`` registers nothing.

    Raises:
        ValueError: if MLflow does not allow the alias.
        WriteError: if ``output`` cannot be written.
    """

    def __init__(self, output: str, monitor: str = "val/tau", alias: str | None = CANDIDATE) -> None:
        check_names(None, alias or CANDIDATE)
        self.output, self.monitor, self.alias = Path(output), monitor, alias
        self.result, self._curve_path = self.output / RESULT, self.output / "curve.json"
        self.config = ""
        self.curve: list[dict[str, float]] = []
        self._runs: dict[str, str] = {}  # ids of the trackers' runs
        self._resumed = False
        self._signals = DeferredSignals()
        self._saved: Path | None = None  # where an interrupt left the training
        check_writable(self.output, folder=True)

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "runs": self._runs, "output": str(self.output)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve, self._resumed = state_dict["curve"], True
        if state_dict.get("output") == str(self.output):  # results in another folder belong to another run
            self._runs = state_dict["runs"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes checkpoints as :class:`AtomicCheckpoints`, unless the user chose another plugin for them."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpoints()

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins or resumes the record; drops validations after the checkpoint, which are done again."""
        if trainer.world_size == 1:  # several processes would save at different steps
            self._signals.defer()
        if self._resumed and self._curve_path.exists():
            known = json.loads(self._curve_path.read_text())
            self.curve = [point for point in known if point["step"] <= trainer.global_step]
        data = trainer.datamodule
        profile, folder = data.profile(), data.folder.folder
        for tracker in _trackers(trainer):
            tracker.resume(self._runs)
            tracker.log_config(self.config)
            tracker.log_provenance(int(os.environ.get("PL_GLOBAL_SEED", data.seed)), data.description())
            tracker.log_dataset(folder.name, profile["digest"], profile["conversations"], str(folder), profile)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._end_if_interrupted(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.restore()

    def _end_if_interrupted(self, trainer: Trainer) -> None:
        """Saves the training after a step or a validation in which a signal came, then lets the signal end it."""
        if self._signals.pending:
            path = self.output / "checkpoints" / INTERRUPTED
            trainer.save_checkpoint(path)
            self._saved = path
            self._signals.restore()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._record(trainer, pl_module)
        self._end_if_interrupted(trainer)

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def _record(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Publishes the network if it is the best so far."""
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        reached = metrics.get(self.monitor, math.nan)
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING or not math.isfinite(reached):
            return
        self.curve = [point for point in self.curve if point["step"] < trainer.global_step]
        if all(reached > point[self.monitor] for point in self.curve):
            self._publish(trainer, pl_module, metrics)
        self.curve.append({"step": trainer.global_step, **metrics})
        write_text(self._curve_path, json.dumps(self.curve, indent=2) + "\n", _KEPT)

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs tables, figures and the model card, and registers the best network."""
        for tracker in _trackers(trainer):
            for name, columns in pl_module.tables().items():
                tracker.log_table(columns, name)
            for name, figure in pl_module.figures(self.curve).items():
                tracker.log_figure(figure, name)
            if self.result.exists():
                tracker.log_text((self.result / "README.md").read_text(), "model-card.md")
                if self.alias is not None and tracker.registers:
                    tracker.register(self.result, self.alias)

    @rank_zero_only  # type: ignore[untyped-decorator, unused-ignore]
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Logs how to resume an interrupted training."""
        self._signals.restore()
        if isinstance(exception, KeyboardInterrupt) and trainer.state.fn == TrainerFn.FITTING:
            checkpoint = self._saved or getattr(trainer.checkpoint_callback, "last_model_path", None)
            how = f" and --ckpt_path {checkpoint}" if checkpoint else ": text that was written is kept"
            logging.getLogger("arbordraft").warning("the training goes on with the same command%s", how)

    def _publish(self, trainer: Trainer, pl_module: LightningModule, metrics: Mapping[str, float]) -> None:
        with new_folder(self.result, force=True, kept=_KEPT) as folder:
            pl_module.save(folder)
            (folder / "README.md").write_text(pl_module.card(metrics))
            (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
            if self.config:
                (folder / RECIPE).write_text(self.config)
        for tracker in _trackers(trainer):
            tracker.log_checkpoint(self.result, trainer.global_step, metrics)


def _trackers(trainer: Trainer) -> list[MLflowTracker]:
    return [logger for logger in trainer.loggers if isinstance(logger, MLflowTracker)]
