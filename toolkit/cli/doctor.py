"""``arbordraft doctor``: examines this machine and this installation."""

import json as json_format
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from arbordraft.cli.options import DRAFTERS, AutoDtypeOption, KernelsOption, WeightsOption
from arbordraft.utils.choices import Kernels
from arbordraft.utils.terminal import terminal


def doctor(
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help="GGUF file or folder to describe: its contents, and the memory that it needs."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Run no kernels and measure nothing.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--measure",
            help="Measure and store the costs of forwards and drafts of this model (hub name, folder or GGUF file), "
            "without a time limit. Other commands measure 10 s at most, after some decoding, and estimate the rest.",
        ),
    ] = None,
    drafter: Annotated[str, typer.Option(help=f"With --measure: {DRAFTERS}")] = "auto",
    dtype: AutoDtypeOption = None,
    kernels: KernelsOption = Kernels.auto,
    weights: WeightsOption = None,
) -> None:
    """Examine this machine, this installation and, if one is named, a model. Exits with 1 if something is broken.

    A model is only described from its header, not read: its types of weights, memory and longest text.
    """
    from arbordraft.cli.examination import described, examine, measured

    options = {"dtype": dtype, "kernels": kernels, "weights": weights}
    costs = {} if model is None else {"costs": measured(model, drafter, **options)}
    about = {} if source is None else {"model": described(source, dtype, weights)}
    report = about | examine(quick=quick or source is not None) | costs
    if json:
        typer.echo(json_format.dumps(report, indent=2))
    else:
        _show(report)
    if report["broken"]:
        raise typer.Exit(1)


def _show(report: dict[str, Any]) -> None:
    console = terminal(highlight=False, soft_wrap=True)
    table = Table(Column(style="bold"), Column(), show_header=False, box=None, padding=(0, 2, 0, 0))
    for finding in _lines(report):
        table.add_row(*finding)
    console.print(table)
    for problem in report["broken"]:
        console.print(f"broken: {problem}", style="red")
    if not report["broken"]:
        console.print("nothing is broken", style="green")


def _lines(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields findings as pairs of name and value."""
    if "model" in report:
        yield from _lines_of_model(report["model"])
    machine, memory, kernels = report["machine"], report["memory"], report.get("kernels")
    yield "versions", ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    threads = f", {machine['threads']} threads of torch" if "threads" in machine else ""
    yield "processor", f"{machine['cpu']}: {machine['cores']} cores{threads}"
    yield "instruction set", (kernels and kernels["instruction set"]) or machine["instruction set"]
    if "gpus" in machine:
        yield "GPUs", ", ".join(machine["gpus"]) or "none"
    sizes = [f"{memory[name]:.1f} GiB {name}" for name in ("total", "available") if name in memory]
    yield "memory", ", ".join(sizes) or "unknown"
    if "read" in memory:
        yield "bandwidth", f"{memory['read']:.1f} GB/s reading, {memory['copy']:.1f} GB/s copying (both ways)"
    if kernels is not None:
        for dtype, chosen in kernels["chosen"].items():
            yield f"kernels, {dtype}", chosen
        if kernels["problem"]:
            yield "native kernels", kernels["problem"]
    if "costs" in report:
        costs = report["costs"]
        for part, name in (("forward", costs["model"]), ("level", costs["drafter"])):
            table = ", ".join(f"{took:.2f} ms for {rows}" for rows, took in costs[part].items())
            yield f"costs of a {part}", f"{name}: {table} rows"
    yield "cache", str(report["cache"]["folder"])
    for entry in report["cache"]["entries"]:
        yield "", f"{entry['name']}: {entry['files']} files, {entry['bytes'] / 2**20:.1f} MiB"
    for extra, state in report["extras"].items():
        missing = state["missing"]
        yield f"extra {extra}", f"missing {', '.join(missing)}: {state['install']}" if missing else "installed"


def _lines_of_model(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields findings about a model as pairs of name and value."""
    yield "model", f"{model['name']}: {model['architecture']}, {model['weights'] / 1e9:.2f} billion weights"
    for kind, part in model["kinds"].items():
        yield "", f"{kind}: {part['tensors']} tensors, {part['bytes'] / 2**20:.1f} MiB"
    yield (
        "read per token",
        f"{model['needed']['packed weights'] / 2**20:.1f} MiB of packed weights in {model['packed in']}",
    )
    needed = {name: size for name, size in model["needed"].items() if size}
    parts = ", ".join(f"{size / 2**30:.2f} of {name}" for name, size in needed.items())
    yield "memory it needs", f"{sum(needed.values()) / 2**30:.2f} GiB ({parts})"
    yield (
        "longest text",
        f"{model['positions'] or 'unknown'} tokens, {model['cache per token'] / 2**10:.1f} KiB of cache each",
    )
    if "tokens" in model:
        template = "with" if model["chat template"] else "without"
        yield (
            "tokenizer",
            f"{model['tokens']} tokens, {template} a chat template, ends of texts: {', '.join(model['ends'])}",
        )
