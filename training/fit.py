"""Runs trainings through LightningCLI, with our defaults and the configurations that come with the package."""

from contextlib import ExitStack
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.kernels.precision import fast_dtype, warn_if_slow
from arbordraft.kernels.progress import phase

if TYPE_CHECKING:
    from arbordraft.training.data import SelfDistillationDataModule

CONFIGS = resources.files("arbordraft.training") / "configs"


def known_configs() -> list[str]:
    """Returns the names of the configurations that come with the package."""
    root = Path(str(CONFIGS))
    return sorted(str(path.relative_to(root).with_suffix("")) for path in root.rglob("*.yaml"))


def resolve_configs(arguments: list[str]) -> list[str]:
    """Replaces names of the package's own configurations after ``--config`` by their paths.

    Raises:
        ValueError: if a configuration is neither a file nor one of the package's.
    """
    resolved: list[str] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        flag = "--config=" if argument.startswith("--config=") else ""
        if flag or before in ("--config", "-c"):
            name = argument.removeprefix(flag)
            if name in known_configs() and not Path(name).exists():
                argument = f"{flag}{CONFIGS / name}.yaml"
            elif not Path(name).exists():
                raise ValueError(
                    f"there is no configuration {name!r}: name a YAML file, or one of {', '.join(known_configs())}"
                )
        resolved.append(argument)
    return resolved


def data_of(arguments: list[str]) -> "SelfDistillationDataModule":
    """Returns the data module that arguments of 'drafter fit' describe, ready to generate its data."""
    from arbordraft.training.drafter_module import DrafterModule

    cli = run(DrafterModule, ["fit", *arguments, "--trainer.logger", "false"], go=False)
    cli.trainer.strategy.connect(cli.model)  # the data module asks the model which hidden states it reads
    cli.datamodule.trainer = cli.trainer
    return cli.datamodule


def run(module: Any, arguments: list[str], *, go: bool = True) -> Any:
    """Runs LightningCLI with our defaults and returns it.

    Args:
        module: the LightningModule.
        arguments: arguments of the command line.
        go: whether to run the subcommand, after building everything.

    Raises:
        ValueError: if a configuration or the checkpoint to go on with is missing or damaged.

    Without ``trainer.precision``, training runs in ``bf16-mixed`` on devices that are fast at bfloat16, else in
    ``32-true``.
    """
    from jsonargparse import ArgumentError
    from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
    from lightning.pytorch.cli import LightningCLI

    from arbordraft.training.data import SelfDistillationDataModule
    from arbordraft.training.drafter_module import DrafterModule
    from arbordraft.training.progress import TrainingProgress
    from arbordraft.training.recording import Recorder
    from arbordraft.training.resuming import check_resumable
    from arbordraft.utils.allocator import keep_freed_memory

    class CLI(LightningCLI):  # type: ignore[misc]  # Lightning is not type-checked here
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(Recorder, "results")
            parser.add_lightning_class_args(ModelCheckpoint, "checkpoints")
            parser.set_defaults({"results.output": "arbordraft-results"})
            parser.set_defaults({"checkpoints.save_last": True, "checkpoints.every_n_train_steps": 100})
            parser.link_arguments("results.output", "checkpoints.dirpath", lambda output: f"{output}/checkpoints")

        def parse_arguments(self, parser: Any, args: Any) -> None:
            for each in (parser, *self._subcommand_parsers.values()):
                each.exit_on_error = False  # on exit it would print a hundred lines of usage
            try:
                self.config = parser.parse_args(args)  # the base class would warn of the process's own arguments
            except ArgumentError as error:
                parser.exit(2, f"error: {' '.join(str(error).split())}; usage: {command} fit --help\n")
            subcommand = self.config["subcommand"]
            _choose_types(self.config[subcommand])
            if (path := self.config[subcommand].get("ckpt_path")) is not None:  # Lightning opens it right after this
                check_resumable(path, fit=subcommand == "fit")

        def instantiate_classes(self) -> None:
            super().instantiate_classes()
            resolved = self._parser(self.subcommand).dump(self.config[self.subcommand], skip_none=False)
            for callback in self.trainer.callbacks:
                if isinstance(callback, Recorder):
                    callback.config = resolved  # in the form that fit --config reads
            self.trainer.callbacks[:] = [
                TrainingProgress() if type(each) is RichProgressBar else each for each in self.trainer.callbacks
            ]

        def _run_subcommand(self, subcommand: str) -> None:
            starting.close()
            if go:
                if subcommand == "fit" and isinstance(self.model, DrafterModule):
                    self.model.check_beginning()
                super()._run_subcommand(subcommand)

    keep_freed_memory()
    starting = ExitStack()
    command = f"arbordraft train {'decider' if module.__name__.startswith('Decider') else 'drafter'}"
    with starting:
        starting.enter_context(phase("preparing the training"))
        return CLI(
            module,
            SelfDistillationDataModule,
            args=resolve_configs(arguments),
            # Lightning's callback writes the configuration into a log folder, which a tracker with a database lacks.
            save_config_callback=None,
            auto_configure_optimizers=False,  # the modules bring their own
            parser_kwargs={"allow_abbrev": False, "prog": command},
            seed_everything_default=0,
            trainer_defaults={"logger": False, "enable_checkpointing": True, "enable_model_summary": False},
        )


def _choose_types(settings: Any) -> None:
    """Fills in the fastest types where none are given, so that they are recorded; says so if a given one is slow."""
    trainer, target = settings.trainer, settings.data.target
    device = "cpu" if trainer.accelerator == "cpu" or not torch.cuda.is_available() else "cuda"
    if trainer.precision is None:
        trainer.precision = "bf16-mixed" if fast_dtype(device) == torch.bfloat16 else "32-true"
    elif str(trainer.precision).startswith("bf16"):
        warn_if_slow(torch.bfloat16, device, "trainer.precision")
    if target.dtype is None:
        target.dtype = str(fast_dtype(device if target.device == "auto" else target.device)).removeprefix("torch.")
