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
    """Examine this machine and this installation. Shows the kernels and missing packages; exits with 1 if broken."""
    from arbordraft.cli.examination import examine, measured

    options = {"dtype": dtype, "kernels": kernels, "weights": weights}
    costs = {} if model is None else {"costs": measured(model, drafter, **options)}
    report = examine(quick=quick) | costs
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
