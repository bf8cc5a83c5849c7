"""``arbordraft train``: trains drafters and deciders with LightningCLI, and generates their data."""

import logging
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from arbordraft.cli.options import AutoDtypeOption, ModelOption, finite
from arbordraft.utils.choices import SMALL
from arbordraft.utils.terminal import terminal

app = typer.Typer(no_args_is_help=True, help="Train drafters and deciders for a target.")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command("drafter", context_settings=_PASS_ON)
def drafter(context: typer.Context) -> None:
    """Train a drafter. Arguments: fit | validate [--config NAME_OR_FILE] [--print_config] [--key.key VALUE ...]."""
    from arbordraft.training.drafter_module import DrafterModule
    from arbordraft.training.fit import run

    trained = run(DrafterModule, _silence_lightning(context.args))
    _show_best(trained, "arbordraft bench decode --model {model} --drafter {best}")


@app.command("decider", context_settings=_PASS_ON)
def decider(context: typer.Context) -> None:
    """Train a decider for a trained drafter. Arguments are those of 'drafter'."""
    from arbordraft.training.decider_module import DeciderModule
    from arbordraft.training.fit import run

    trained = run(DeciderModule, _silence_lightning(context.args))
    _show_best(trained, "arbordraft bench decode --model {model} --drafter {drafter} --decider {best}")


@app.command("generate", context_settings=_PASS_ON)
def generate(
    context: typer.Context,
    part: Annotated[int, typer.Option(min=0, help="Share of the shards that this process writes, from 0.")] = 0,
    of: Annotated[int, typer.Option(min=1, help="Number of shares; start one process for each.")] = 1,
) -> None:
    """Generate the data of a training, and train nothing. Options are those of 'drafter fit'."""
    from arbordraft.training.fit import data_of

    data_of(context.args).generate(part, of)


@app.command("configs")
def configs() -> None:
    """List the configurations that come with the package."""
    from arbordraft.training.fit import known_configs

    for name in known_configs():
        typer.echo(name)


@app.command("demo")
def demo(
    target: ModelOption = SMALL,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for data, results and checkpoints; by default arbordraft-NAME.")
    ] = None,
    drafter: Annotated[
        Literal["eagle", "block", "medusa"], typer.Option(help="Drafter to train; an EAGLE head gets a decider, too.")
    ] = "eagle",
    generation_minutes: Annotated[
        float, typer.Option(min=0.01, callback=finite, help="Minutes for generating text, interrupted runs included.")
    ] = 75,
    training_minutes: Annotated[
        float,
        typer.Option(min=0.01, callback=finite, help="Minutes for training the drafter, interrupted runs included."),
    ] = 60,
    conversations: Annotated[
        int | None, typer.Option(min=1, help="Number of conversations to generate, without a time limit.")
    ] = None,
    dtype: AutoDtypeOption = None,
) -> None:
    """Train a drafter and a decider from scratch. Takes any causal LM that chats, within available time and memory."""
    from arbordraft.training.demo import gain, train_demo
    from arbordraft.training.targets import Target

    console, spec = terminal(), Target(target, dtype=dtype)
    folder = folder or Path(f"arbordraft-{Path(target).name.lower()}")
    trained = train_demo(
        console,
        spec,
        folder,
        drafter,
        generation=generation_minutes,
        training=training_minutes,
        conversations=conversations,
    )
    gain(console, spec, trained)


def _silence_lightning(arguments: list[str]) -> list[str]:
    """Silences Lightning's adverts and its notes on absent hardware; returns the arguments."""
    import lightning.pytorch  # noqa: F401  # its import sets the levels

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return arguments


def _show_best(trained: Any, measure: str) -> None:
    """Prints the best result of a training, its folder and the command that measures it.

    Args:
        trained: LightningCLI that ran.
        measure: the command that measures the result; its fields are filled in.
    """
    from arbordraft.training.recording import Recorder

    recorder = next(each for each in trained.trainer.callbacks if isinstance(each, Recorder))
    if trained.subcommand != "fit":
        return
    if not recorder.curve:
        typer.echo("nothing was published: there was no validation with a result")
        return
    monitor, best = recorder.monitor, str(recorder.result)
    point = max(recorder.curve, key=lambda point: point[monitor])
    typer.echo(f"best of {len(recorder.curve)} validations: {monitor} {point[monitor]:.4g} at step {point['step']}")
    typer.echo(f"wrote {best}")
    fit = trained.config.fit
    named = {"best": best, "drafter": str(fit.model.get("drafter")), "model": trained.datamodule.spec.model}
    typer.echo(f"measure it: {measure.format(**{name: shlex.quote(value) for name, value in named.items()})}")
