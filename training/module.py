"""Base of the Lightning modules: their data, progress, pace of validations, and the check of a checkpoint."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from arbordraft import RaggedModel
from arbordraft.training.batches import Batch
from arbordraft.training.data import SelfDistillationDataModule
from arbordraft.training.resuming import check_fit
from arbordraft.training.schedule import progress
from arbordraft.training.students import Student


class DistillationModule(LightningModule):  # type: ignore[misc]  # Lightning is not type-checked here
    """Base of the drafter and decider modules, which learn along text of a target.

    Subclasses add ``save(folder)`` and ``card(metrics)``, by which
    :class:`~arbordraft.training.recording.Recorder` publishes them.

    A validation that is due waits until training has read as many batches as the validation reads. It therefore never
    takes most of the time. The final network is always validated.
    """

    student: Student

    def __init__(self) -> None:
        super().__init__()
        self._collected: list[dict[str, Tensor]] = []
        self._progress = 0.0
        self._validated_at = 0  # batches of training before the last validation
        self._limit: int | float = 1.0  # the trainer's own limit of validation batches

    @property
    def data(self) -> SelfDistillationDataModule:
        return self.trainer.datamodule

    def hidden_layers(self, target: RaggedModel) -> tuple[int, ...]:
        return self.student.hidden_layers(target)

    def tables(self) -> dict[str, dict[str, list[Any]]]:
        """Returns the tables to record at the end, by name; each holds columns of equal length."""
        return {}

    def figures(self, curve: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """Returns the figures of all validations to record at the end, by name."""
        return {}

    def collect(self, tensors: Mapping[str, Tensor]) -> None:
        """Keeps the tensors of one batch of held-out text; their last axis counts drafts."""
        self._collected.append({name: values.cpu() for name, values in tensors.items()})

    def collected(self) -> dict[str, Tensor]:
        """Joins the kept tensors of all batches of this validation."""
        return {name: torch.cat([part[name] for part in self._collected], dim=-1) for name in self._collected[0]}

    def on_train_start(self) -> None:
        self._limit = self.trainer.limit_val_batches
        self._validated_at = min(self._validated_at, self._trained)  # of this training, not of one before
        self.advance()
        needed = self._validation_batches
        if needed and (planned := self.trainer.val_check_batch) and planned < needed:
            logging.getLogger("arbordraft").warning(
                "a validation reads %d batches, so it waits for as many of training, not for trainer.val_check_interval"
                " (%d); a lower data.validation holds out less",
                needed,
                planned,
            )

    def on_train_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        """Stops at the end, so that Lightning validates the final network; lets early validations wait."""
        self.advance()
        if self._progress == 1:
            self.trainer.should_stop = True
        due = self.trainer.should_stop or self._trained - self._validated_at >= self._validation_batches
        self.trainer.limit_val_batches = self._limit if due else 0

    def on_train_end(self) -> None:
        self.trainer.limit_val_batches = self._limit

    def advance(self) -> None:
        """Updates the progress of the training, also when it is resumed."""
        self._progress = progress(self.trainer)

    def on_validation_epoch_start(self) -> None:
        self._collected = []
        if not self.trainer.sanity_checking:
            self._validated_at = self._trained

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["validated_at"] = self._validated_at

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError if the checkpoint belongs to another training."""
        check_fit(self, checkpoint)
        self._validated_at = checkpoint.get("validated_at", 0)

    @property
    def _trained(self) -> int:
        """Batches of training so far, in this process."""
        return int(self.trainer.fit_loop.total_batch_idx) + 1

    @property
    def _validation_batches(self) -> int:
        """Batches of one validation; 0 until Lightning knows."""
        return int(sum(self.trainer.num_val_batches))
