"""The command line: chat, serve, trace, generate, tune, tree, plot, doctor, bench, train, export."""

import sys
import time
from copy import copy
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from arbordraft import tuning
from arbordraft.allocator import keep_freed_memory
from arbordraft.bench.plots import plot, read_rows
from arbordraft.cli.bench import app as bench
from arbordraft.cli.chat import chat
from arbordraft.cli.decoders import Law, Verifier, load_decoder
from arbordraft.cli.display import progress, stats_table, stream_panels, tree_text
from arbordraft.cli.doctor import doctor
from arbordraft.cli.export import app as export
from arbordraft.cli.failures import ending
from arbordraft.cli.measurement import texts
from arbordraft.cli.options import (
    SHAPES,
    AutoDtypeOption,
    DrafterOption,
    DtypeOption,
    KernelsOption,
    LimitOption,
    ModelOption,
    PromptsOption,
    TemperatureOption,
    TopPOption,
    finite,
    numbers,
    output_file,
    parse_topology,
)
from arbordraft.cli.serve import serve
from arbordraft.cli.trace import trace
from arbordraft.cli.train import app as train
from arbordraft.deciders import ConfidenceThreshold
from arbordraft.drawing import draw_png
from arbordraft.files import read_text
from arbordraft.loading import Dtype, Kernels, drafter_named, load_target
from arbordraft.prompts import chat_batch

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Multi-draft speculative decoding: several tokens per forward pass, the same output law.",
)
app.command()(chat)
app.command()(serve)
app.command()(trace)
app.command()(doctor)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.add_typer(export, name="export")
console = Console()


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="One or many prompts, decoded as one batch.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file with one prompt per line, added to the others."),
    ] = None,
    model: ModelOption = "smollm2",
    drafter: DrafterOption = "auto",
    tree: Annotated[
        str | None, typer.Option(help=f"Shape of the draft tree, by default what pays here: {SHAPES}.")
    ] = None,
    law: Annotated[Law | None, typer.Option(help="Draft law; by default what suits drafter and tree.")] = None,
    verifier: Annotated[
        Verifier | None, typer.Option(help="How recursive rejection is applied; all choices are exact.")
    ] = None,
    confidence: Annotated[
        float | None, typer.Option(min=0, max=1, callback=finite, help="Stop drafting below this draft probability.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens per prompt.")] = 128,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    seed: Annotated[int, typer.Option(help="Seed; prompt i uses seed + i, whatever shares its batch.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    dtype: AutoDtypeOption = None,
    kernels: KernelsOption = Kernels.auto,
) -> None:
    """Decode one or many prompts as a ragged batch, streaming, and report what speculation gained."""
    questions = [*(prompts or []), *_lines(file)]
    if not questions:
        raise typer.BadParameter("give at least one prompt, or --file")
    topology = None if tree is None else parse_topology(tree)
    decoder = load_decoder(
        model,
        drafter,
        law=law,
        verifier=verifier,
        topology=topology,
        decider=None if confidence is None else ConfidenceThreshold(confidence),
        dtype=dtype,
        kernels=kernels,
    )
    tokenizer: Any = copy(decoder.target.tokenizer)
    if raw:
        tokenizer.chat_template = None
    inputs = chat_batch(tokenizer, questions)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        settings |= {"temperature": temperature, "top_p": top_p, "seeds": [seed + i for i in range(len(questions))]}
    if max_new_tokens == 0:
        return
    with stream_panels(console, tokenizer, questions) as streamers:
        start = time.perf_counter()
        output: Any = decoder.generate(**inputs, **settings, streamer=streamers, return_dict_in_generate=True)
        seconds = time.perf_counter() - start
    console.print(stats_table(output.stats, seconds, decoder.target.chosen))


@app.command()
def tune(
    drafter: DrafterOption = "ngram",
    model: ModelOption = "smollm2",
    dtype: DtypeOption = Dtype.bfloat16,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    batches: Annotated[str, typer.Option(help="Batch sizes to choose for, as in 1,8.")] = "1,8",
    temperature: TemperatureOption = 0.0,
    new_tokens: Annotated[int, typer.Option(min=8, help="Longest answer.")] = 96,
    output: Annotated[Path, typer.Option(callback=output_file, help="File to write, for Tuned.load.")] = Path(
        "tuned.json"
    ),
    costs: Annotated[
        Path | None, typer.Option(callback=output_file, help="Write the step costs to this file, too.")
    ] = None,
) -> None:
    """Find the fastest way to speculate on this machine, for a drafter and your own prompts, by batch size."""
    sizes = numbers(batches, int)
    with progress(console) as tell:
        tell("loading the model")
        target, tokenizer = load_target(model, dtype, Kernels.auto)
        tuned = tuning.tune(
            target,
            tokenizer,
            drafter,
            drafter_named(drafter, target),
            texts(prompts, limit),
            batches=sizes,
            temperature=temperature,
            new_tokens=new_tokens,
            tell=tell,
        )
    tuned.save(output)
    if costs is not None:
        tuned.costs.save(costs)
    for choice in tuned.choices:
        gain = (
            f"{choice.tokens_per_second:.0f} tokens/s, {choice.tokens_per_second / choice.plain:.2f} x plain decoding"
        )
        verdict = f"{choice.setting}: {gain}" if choice.pays else "do not speculate: plain decoding is the fastest"
        console.print(f"batch {choice.batch}: {verdict}")
    console.print(f"wrote {output}")


@app.command("plot")
def redraw(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON file of 'arbordraft bench'.")],
    png: Annotated[Path, typer.Argument(callback=output_file, help="Picture to write (needs matplotlib).")],
) -> None:
    """Draw a picture of measurements that 'arbordraft bench --json' wrote."""
    plot(read_rows(results), png)
    console.print(f"wrote {png}")


@app.command("tree")
def draw_tree(
    shape: Annotated[str, typer.Argument(help=SHAPES)],
    png: Annotated[
        Path | None, typer.Option(callback=output_file, help="Also draw it to this PNG file (needs matplotlib).")
    ] = None,
) -> None:
    """Draw a draft tree and its causal mask."""
    topology = parse_topology(shape)
    console.print(tree_text(topology))
    console.print(f"{topology.num_nodes} nodes with the root, {topology.max_depth} levels of drafts")
    if png is not None:
        draw_png(topology, png)
        console.print(f"wrote {png}")


def main() -> None:
    """Entry point: runs the app; for how it ends see :func:`~arbordraft.cli.failures.ending`."""
    keep_freed_memory()
    with ending():
        command = typer.main.get_command(app)
        with command.make_context("arbordraft", sys.argv[1:]) as context:  # main() would print panels, not lines
            command.invoke(context)


def _lines(file: Path | None) -> list[str]:
    return [line for line in read_text(file).splitlines() if line.strip()] if file else []
