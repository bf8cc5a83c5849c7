"""``arbordraft export``: what was trained, in the formats that others serve."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from arbordraft.exports.folder import Export
from arbordraft.exports.onnx.quantization import Quantization

app = typer.Typer(no_args_is_help=True, help="Export drafters, deciders and targets for deployment.")
console = Console()

OutArgument = Annotated[Path, typer.Argument(help="Folder to write.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the folder if it is there.")]
OpsetOption = Annotated[int, typer.Option(help="20, or 23 with attention as one operator.")]
QuantizeOption = Annotated[
    Quantization, typer.Option(help="Matrices in 8 bits, or in blocks of 4 bits with the head in 8.")
]
ToleranceOption = Annotated[
    float, typer.Option(help="Greatest difference of a float32 graph's logits; more layers round more.")
]
LeastOption = Annotated[
    float,
    typer.Option(min=0, max=1, help="Least acceptance of a quantised graph's tokens by the float32 one, on real rows."),
]


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Shows what is going on."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting")
        yield lambda what: shown.update(task, description=what)


@app.command("onnx")
def onnx_graphs(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER_OR_MODEL",
            help="Folder of a trained drafter or decider; folder or hub name of a causal LM ('smollm2' fetches "
            "SmolLM2-135M-Instruct); 'early-exit:LAYERS'; 'verification:TOPS,TAILS'.",
        ),
    ],
    out: OutArgument,
    target: Annotated[
        str | None, typer.Option(help="The model that it drafts for; by default the one that it was trained for.")
    ] = None,
    hidden: Annotated[
        str, typer.Option(help="Hidden states that a causal LM is to show, as in 2,15,27: what a drafter reads.")
    ] = "",
    quantize: QuantizeOption = Quantization.none,
    tolerance: ToleranceOption = 1e-4,
    least_acceptance: LeastOption = 0.8,
    opset: OpsetOption = 20,
    force: ForceOption = False,
) -> None:
    """Graphs for onnxruntime, of drafters, deciders, targets that verify trees, and verification."""
    from arbordraft.exports.onnx import export

    try:
        layers = [int(layer) for layer in hidden.split(",") if layer]
    except ValueError as error:
        raise typer.BadParameter(f"--hidden takes numbers as in 2,15,27, got {hidden!r}") from error
    with progress() as tell:
        found = export(
            source,
            out,
            target=target,
            hidden_layers=layers,
            opset=opset,
            quantization=quantize,
            tolerance=tolerance,
            least_acceptance=least_acceptance,
            force=force,
            tell=tell,
        )
    show(found)


@app.command("ort-genai")
def ort_genai(
    draft: Annotated[
        str,
        typer.Argument(help="Folder or hub name of a small causal LM, folder of an early exit, 'early-exit:LAYERS'."),
    ],
    out: OutArgument,
    target: Annotated[str, typer.Option(help="Folder or hub name of the target.")] = "smollm2",
    length: Annotated[int, typer.Option(help="Drafted tokens per step, 1 to 16.")] = 4,
    quantize: QuantizeOption = Quantization.none,
    tolerance: ToleranceOption = 1e-4,
    least_acceptance: LeastOption = 0.8,
    opset: OpsetOption = 20,
    force: ForceOption = False,
) -> None:
    """A folder for onnxruntime-genai, which decodes chains at batch 1: target, draft model and tokenizer."""
    from arbordraft.exports.onnx import export_ort_genai

    with progress() as tell:
        found = export_ort_genai(
            draft,
            out,
            target=target,
            length=length,
            opset=opset,
            quantization=quantize,
            tolerance=tolerance,
            least_acceptance=least_acceptance,
            force=force,
            tell=tell,
        )
    show(found)


def show(export: Export) -> None:
    """Prints what was written and how near it is to the original."""
    table = Table(title=str(export.folder))
    for column, justify in (("file", "left"), ("size", "right"), ("sha256", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for file in export.files:
        table.add_row(file.name, f"{file.size / 2**20:.2f} MiB", file.sha256[:16])
    console.print(table)
    for check, value in export.parity.items():
        console.print(f"{check}: {value if isinstance(value, bool) else f'{value:.3g}'}")
