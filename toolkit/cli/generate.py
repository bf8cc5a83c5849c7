"""``arbordraft generate``: answers prompts as one batch and prints the figures of speculation."""

import json as json_format
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbordraft.cli.options import (
    SHAPES,
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
    finite,
    parse_topology,
)
from arbordraft.kernels.progress import phase
from arbordraft.utils.choices import Kernels, Law, Settings, Verifier
from arbordraft.utils.files import read_text
from arbordraft.utils.terminal import terminal

if TYPE_CHECKING:
    from arbordraft.decoding.metrics import DecodeStats
    from arbordraft.grammars import Grammar


def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="One or many prompts, decoded as one batch.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file with one prompt per line, added to the others."),
    ] = None,
    model: ModelOption = "smollm2",
    drafter: DrafterOption = "auto",
    corpus: CorpusOption = None,
    tree: Annotated[
        str | None, typer.Option(help=f"Shape of the draft tree: {SHAPES}. By default one that pays on this machine.")
    ] = None,
    law: Annotated[Law | None, typer.Option(help="Draft law; by default one that suits drafter and tree.")] = None,
    verifier: Annotated[
        Verifier | None, typer.Option(help="How recursive rejection is applied; all choices are exact.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(min=0, max=1, callback=finite, help="Stop drafting below this draft probability.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System prompt that stands before every prompt.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Longest answer, in tokens.")] = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0, help="Sample from this many top tokens, 0 for all; by default the model's setting, or all."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed; prompt i uses seed + i in any batch.")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="Text before which an answer ends. May be repeated.")] = None,
    json_schema: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File of a JSON Schema that answers follow."),
    ] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression that answers match as a whole.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print answers and figures as JSON at the end.")] = False,
    dtype: AutoDtypeOption = None,
    device: DeviceOption = None,
    kernels: KernelsOption = Kernels.auto,
    weights: WeightsOption = None,
    generation_config: SettingsOption = Settings.model,
) -> None:
    """Answer one or many prompts as a ragged batch. Answers stream; figures of speculation follow."""
    questions = [*(prompts or []), *_lines(file)]
    if not questions:
        raise typer.BadParameter("give at least one prompt, or --file")
    if raw and system is not None:
        raise typer.BadParameter("--system is for the chat template, which --raw leaves out: write it into the prompt")
    with phase("importing torch and transformers"):
        from arbordraft.cli.decoders import load_decoder
        from arbordraft.cli.display import AnswerStreamer, show_answers, show_stats
        from arbordraft.deciders import ConfidenceThreshold
        from arbordraft.decoding.detokenizing import IncrementalDetokenizer
        from arbordraft.decoding.prompts import left_padded
        from arbordraft.decoding.text import encode, ending, settings_of, stops, user_turn

    topology, ends, grammar = None if tree is None else parse_topology(tree), stops(stop), _grammar(json_schema, regex)
    decoder = load_decoder(
        model,
        drafter,
        corpus=corpus,
        law=law,
        verifier=verifier,
        topology=topology,
        decider=None if confidence is None else ConfidenceThreshold(confidence),
        dtype=dtype,
        device=device,
        kernels=kernels,
        weights=weights,
        generation_config=generation_config,
    )
    tokenizer: Any = decoder.target.tokenizer
    settings = settings_of(max_new_tokens, temperature, top_p, top_k, seed, len(questions), decoder.own_settings)
    settings["grammar"] = grammar
    encoded = [
        encode(tokenizer, user_turn(prompt, system), raw=raw, name=f"prompt {number}")
        for number, prompt in enumerate(questions, 1)
    ]
    settings |= ending(tokenizer, ends or None)
    inputs = {name: tensor.to(decoder.target.device) for name, tensor in left_padded(encoded).items()}
    reading = ExitStack()  # until the first tokens come
    streamers: list[Any] = [
        AnswerStreamer(IncrementalDetokenizer(tokenizer, ends), begun=reading.close) for _ in questions
    ]
    console = terminal()
    with reading, show_answers(console, questions, streamers, quiet=json or max_new_tokens == 0):
        reading.enter_context(phase("reading the prompts"))
        start = time.perf_counter()
        output: Any = decoder.generate(**inputs, **settings, streamer=streamers, return_dict_in_generate=True)
        seconds = time.perf_counter() - start
    if json:
        texts = [streamer.text for streamer in streamers]
        figures = _figures(questions, texts, output.stats, seconds, decoder.target.chosen)
        typer.echo(json_format.dumps(figures, indent=2, ensure_ascii=False))
    elif max_new_tokens:
        show_stats(console, output.stats, seconds, decoder.target.chosen)


def _figures(
    prompts: list[str], texts: list[str], stats: "DecodeStats", seconds: float, kernels: str
) -> dict[str, Any]:
    """Collects the answers and figures that ``--json`` prints."""
    from arbordraft.cli.display import verdict

    answers = [
        {"prompt": prompt, "text": text, "tokens": tokens, "tau": tokens / max(1, forwards)}
        for prompt, text, tokens, forwards in zip(prompts, texts, stats.emitted, stats.forwards, strict=True)
    ]
    return {
        "answers": answers,
        "exactness": stats.exactness,
        "tau": stats.tau,
        "tokens_per_second": sum(stats.emitted) / seconds,
        "acceptance_by_depth": stats.acceptance_by_depth,
        "drafted": stats.drafted,
        "seconds": stats.seconds,
        "kernels": kernels,
        "verdict": verdict(stats),
    }


def _grammar(json_schema: Path | None, regex: str | None) -> "Grammar | None":
    """Builds the grammar of --json-schema or --regex."""
    if json_schema is not None and regex is not None:
        raise typer.BadParameter("an answer has one form: give --json-schema or --regex")
    from arbordraft.grammars import Grammar

    if json_schema is not None:
        return Grammar.json_schema(read_text(json_schema))
    return None if regex is None else Grammar.regex(regex)


def _lines(file: Path | None) -> list[str]:
    return [line for line in read_text(file).splitlines() if line.strip()] if file else []
