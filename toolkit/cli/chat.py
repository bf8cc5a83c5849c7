"""``arbordraft chat``: a conversation in the terminal, or line by line from a pipe."""

import sys
from typing import Annotated

import typer

from arbordraft.cli.options import (
    AutoDtypeOption,
    CorpusOption,
    DeviceOption,
    DrafterOption,
    KernelsOption,
    ModelOption,
    SettingsOption,
    TemperatureOption,
    TopPOption,
    WeightsOption,
)
from arbordraft.kernels.progress import phase
from arbordraft.utils.choices import Kernels, Settings
from arbordraft.utils.terminal import terminal


def chat(
    source: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Hub name, folder or GGUF file; the same as --model.")
    ] = None,
    model: ModelOption = "smollm2",
    drafter: DrafterOption = "auto",
    corpus: CorpusOption = None,
    system: Annotated[str | None, typer.Option(help="System prompt that stands before the conversation.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of every answer; by default random ones.")] = None,
    dtype: AutoDtypeOption = None,
    device: DeviceOption = None,
    kernels: KernelsOption = Kernels.auto,
    weights: WeightsOption = None,
    generation_config: SettingsOption = Settings.model,
) -> None:
    """Talk to a model. Answers stream, /tree draws the last draft tree, /help lists the other commands.

    Without a terminal, every line of the input is a message; exits with 1 if one could not be answered.
    """
    with phase("importing torch and transformers"):
        from arbordraft.cli.decoders import load_decoder
        from arbordraft.cli.session import Session, converse, typed_lines

    console = terminal(highlight=False, soft_wrap=True)
    decoder = load_decoder(
        source or model,
        drafter,
        corpus=corpus,
        dtype=dtype,
        device=device,
        kernels=kernels,
        weights=weights,
        generation_config=generation_config,
    )
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    session = Session(decoder, settings, console, system)
    if sys.stdin.isatty():
        console.print(f"{decoder.target.chosen}\nType a message, or /help.", style="dim")
        converse(session, typed_lines(session))
    else:
        converse(session, (line.rstrip("\n") for line in sys.stdin))
        if session.failed:
            raise typer.Exit(1)
