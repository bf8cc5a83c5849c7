"""Command line: chat, serve, trace, generate, tune, tree, plot, doctor, import, bench, train, export.

Modules of this package import torch, and modules that need it, only inside their commands: help and usage errors must
not wait for seconds.
"""

from pathlib import Path
from typing import Annotated

import typer

from arbordraft.cli.bench import add_program
from arbordraft.cli.bench import app as bench
from arbordraft.cli.chat import chat
from arbordraft.cli.doctor import doctor
from arbordraft.cli.export import app as export
from arbordraft.cli.generate import generate
from arbordraft.cli.importing import import_drafter
from arbordraft.cli.options import (
    SHAPES,
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
add_program(app, "tune")
add_program(app, "plot")
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.add_typer(export, name="export")
console = terminal()


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
