"""Command line: chat, serve, trace, generate, tune, tree, plot, doctor, import, bench, train, export.

Modules of this package import torch, and modules that need it, only inside their commands: help and usage errors must
not wait for seconds.
"""

from pathlib import Path
from typing import Annotated

import typer

from arbordraft.cli.bench import app as bench
from arbordraft.cli.chat import chat
from arbordraft.cli.doctor import doctor
from arbordraft.cli.export import app as export
from arbordraft.cli.generate import generate
from arbordraft.cli.importing import import_drafter
from arbordraft.cli.options import (
    SHAPES,
    AutoDtypeOption,
    DeviceOption,
    DrafterOption,
    LimitOption,
    ModelOption,
    PromptsOption,
    TemperatureOption,
    numbers,
    output_file,
    parse_topology,
)
from arbordraft.cli.program import run
from arbordraft.cli.serve import serve
from arbordraft.cli.trace import trace
from arbordraft.cli.train import app as train
from arbordraft.utils.terminal import terminal

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its import takes longer than printing help
    help="Multi-draft speculative decoding: several tokens per forward pass, the same output law.",
)
app.command()(chat)
app.command()(serve)
app.command()(trace)
app.command()(generate)
app.command()(doctor)
app.command("import")(import_drafter)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.add_typer(export, name="export")
console = terminal()


@app.command()
def tune(
    drafter: DrafterOption = "ngram",
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    device: DeviceOption = None,
    batches: Annotated[str, typer.Option(help="Batch sizes to tune for, as in 1,8.")] = "1,8",
    temperature: TemperatureOption = 0.0,
    new_tokens: Annotated[int, typer.Option(min=8, help="Longest answer, in tokens.")] = 96,
    output: Annotated[Path, typer.Option(callback=output_file, help="File to write, for Tuned.load.")] = Path(
        "tuned.json"
    ),
    costs: Annotated[
        Path | None, typer.Option(callback=output_file, help="Write the step costs to this file, too.")
    ] = None,
) -> None:
    """Find the fastest draft settings on this machine. Measures a drafter on your own prompts, by batch size."""
    from arbordraft.bench.tuning import tune as find_fastest
    from arbordraft.bench.workload import read_texts
    from arbordraft.cli.display import progress
    from arbordraft.drafter_names import drafter_named
    from arbordraft.loading import load_target

    sizes = numbers(batches, int)
    with progress(console) as tell:
        tell("loading the model")
        target, tokenizer = load_target(model, dtype, device=device)
        tuned = find_fastest(
            target,
            tokenizer,
            drafter,
            drafter_named(drafter, target),
            read_texts(prompts, limit),
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
    console.print(f"wrote {output}", soft_wrap=True)


@app.command("plot")
def redraw(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON file of 'arbordraft bench'.")],
    png: Annotated[Path, typer.Argument(callback=output_file, help="Picture to write (needs matplotlib).")],
) -> None:
    """Draw a picture of measurements. 'arbordraft bench --json' and 'arbordraft bench gpu' write them."""
    from arbordraft.bench.plots import plot, read_rows

    plot(read_rows(results), png)
    console.print(f"wrote {png}", soft_wrap=True)


@app.command("tree")
def draw_tree(
    shape: Annotated[str, typer.Argument(help=SHAPES)],
    png: Annotated[
        Path | None, typer.Option(callback=output_file, help="Also draw it to this PNG file (needs matplotlib).")
    ] = None,
) -> None:
    """Draw a draft tree and its causal mask."""
    from arbordraft.cli.display import tree_text

    topology = parse_topology(shape)
    console.print(tree_text(topology))
    console.print(f"{topology.num_nodes} nodes with the root, {topology.max_depth} levels of drafts")
    if png is not None:
        from arbordraft.trees.drawing import draw_png

        draw_png(topology, png)
        console.print(f"wrote {png}", soft_wrap=True)


def main() -> None:
    """Runs the app: the entry point of ``arbordraft``."""
    run(app, "arbordraft")
