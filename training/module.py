"""Base of the Lightning modules: their data, the tensors that validation collects, and the check of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from arbordraft import RaggedModel
from arbordraft.training.data import SelfDistillationDataModule
from arbordraft.training.resuming import check_fit
from arbordraft.training.students import Student


class DistillationModule(LightningModule):  # type: ignore[misc]  # Lightning is not type-checked here
    """Base of the drafter and decider modules, which learn along text of a target.

    Subclasses add ``save(folder)`` and ``card(metrics)``, by which
    :class:`~arbordraft.training.recording.Recorder` publishes them.
    """

    student: Student

    def __init__(self) -> None:
        super().__init__()
        self._collected: list[dict[str, Tensor]] = []

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

    def on_validation_epoch_start(self) -> None:
        self._collected = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError if the checkpoint belongs to another training."""
        check_fit(self, checkpoint)
