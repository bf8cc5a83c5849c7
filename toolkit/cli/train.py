"""``arbordraft train``: trains drafters and deciders with LightningCLI, and generates their data."""

import logging
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from arbordraft.cli.options import AutoDtypeOption, ModelOption, finite
from arbordraft.kernels.progress import phase
from arbordraft.utils.choices import SMALL
from arbordraft.utils.terminal import terminal

app = typer.Typer(no_args_is_help=True, help="Train drafters and deciders for a target.")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


ALL = "--help-all"
# Those that most trainings set, of several hundred options.
USUAL = {
    "--config NAME_OR_FILE": "configuration; its options may be given here, too",
    "--data.target.model NAME": "model to draft for: a folder or a name of the hub",
    "--data.prompts FILE.jsonl": "conversations whose answers the target writes; by default it writes all itself",
    "--data.recipe.conversations N": "number of conversations to generate",
    "--data.minutes M": "longest time for generating them",
    "--data.folder FOLDER": "their folder, which a later training may use again",
    "--data.validation N": "conversations that are held out",
    "--trainer.max_time DD:HH:MM:SS": "time for training",
    "--trainer.max_steps N": "or its number of steps",
    "--model.lr RATE": "learning rate",
    "--trainer.accumulate_grad_batches N": "batches for each step, if memory is short",
    "--data.batch_tokens N": "tokens in a batch",
    "--results.output FOLDER": "results: best/, curve.json, checkpoints/",
    "--ckpt_path FILE": "checkpoint with which a training goes on",
    "--trainer.logger false": "record nothing with MLflow",
}
OF_DRAFTERS = {
    "--model.student CLASS": "kind of drafter: EagleStudent, BlockStudent, MedusaStudent, ...",
    "--model.begin_with FOLDER": "trained drafter to train on",
}
OF_DECIDERS = {"--model.drafter FOLDER": "trained drafter whose drafts the decider ends"}


@app.command("drafter", context_settings=_PASS_ON)
def drafter(context: typer.Context) -> None:
    """Train a drafter. Arguments: fit | validate [--config NAME_OR_FILE] [--print_config] [--key.key VALUE ...]."""
    if asks_for_help(context, OF_DRAFTERS):
        return
    with phase("loading Lightning"):
        from arbordraft.training.drafter_module import DrafterModule
        from arbordraft.training.fit import run

        arguments = _silence_lightning(context.args)
    _show_best(run(DrafterModule, arguments), "arbordraft bench decode --model {model} --drafter {best}")


@app.command("decider", context_settings=_PASS_ON)
def decider(context: typer.Context) -> None:
    """Train a decider for a trained drafter. Arguments are those of 'drafter'."""
    if asks_for_help(context, OF_DECIDERS):
        return
    with phase("loading Lightning"):
        from arbordraft.training.decider_module import DeciderModule
        from arbordraft.training.fit import run

        arguments = _silence_lightning(context.args)
    _show_best(
        run(DeciderModule, arguments), "arbordraft bench decode --model {model} --drafter {drafter} --decider {best}"
    )


def asks_for_help(context: typer.Context, own: dict[str, str]) -> bool:
    """Prints the usual options if help is asked for; leaves a request for all options to Lightning.

    Args:
        context: the command with its arguments.
        own: options of this command alone.
    """
    if ALL in context.args:
        context.args[:] = ["--help" if argument == ALL else argument for argument in context.args]
    elif not context.args or {"--help", "-h"} & {*context.args}:
        command = context.command_path
        typer.echo(f"Usage: {command} fit|validate [--config NAME_OR_FILE] [--KEY VALUE ...]\n")
        width = max(map(len, {**USUAL, **own}))
        for option, text in {**USUAL, **own}.items():
            typer.echo(f"  {option:{width}}  {text}")
        typer.echo(f"\nAll options and their values: {command} fit --print_config; their help: fit {ALL}")
        typer.echo("Configurations of the package: arbordraft train configs")
        return True
    return False


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
