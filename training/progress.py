"""Progress of a training on the terminal: bars for steps and validations, and the size of the network in training."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.callbacks.progress.rich_progress import ProcessingSpeedColumn
from rich.text import Text


class _Pace(ProcessingSpeedColumn):  # type: ignore[misc]  # Lightning is not type-checked here
    """Steps per second, or seconds per step if they are slow."""

    def render(self, task: Any) -> Text:
        speed = task.finished_speed or task.speed
        if not speed:
            return Text("", style=self.style)
        return Text(f"{speed:.1f} steps/s" if speed >= 1 else f"{1 / speed:.1f} s per step", style=self.style)


class TrainingProgress(RichProgressBar):  # type: ignore[misc]  # Lightning is not type-checked here
    """Lightning's bars with validations shown, epochs counted from 1, and the pace of slow steps."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.progress is not None:
            trained = sum(parameter.numel() for parameter in pl_module.parameters() if parameter.requires_grad)
            self.progress.console.print(f"training {trained:,} parameters")

    def configure_columns(self, trainer: Trainer) -> list[Any]:
        *columns, pace = super().configure_columns(trainer)
        return [*columns, _Pace(style=pace.style)]

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {name: value for name, value in super().get_metrics(trainer, pl_module).items() if name != "v_num"}

    def _get_train_description(self, current_epoch: int) -> str:
        epochs = self.trainer.max_epochs
        of = f" of {epochs}" if epochs is not None and epochs > 0 else ""
        return f"Epoch {current_epoch + 1}{of}".ljust(len(self.validation_description))

    def _add_task(self, total_batches: int | float, description: str, visible: bool = True) -> Any:
        return super()._add_task(total_batches, description, visible=True)


__all__ = ["TrainingProgress"]
