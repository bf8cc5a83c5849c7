"""``arbordraft doctor``: what this machine has, what runs on it and why, and what is missing."""

import json as json_format
import os
import re
import timeit
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

import torch
import typer
from packaging.requirements import Requirement
from rich.table import Column, Table

from arbordraft.bench.measure import provenance
from arbordraft.cli.options import DRAFTERS, AutoDtypeOption, KernelsOption, WeightsOption
from arbordraft.deciders import CostAware
from arbordraft.kernels import native
from arbordraft.kernels.native.build import cache_folder
from arbordraft.loading import Kernels, load
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.memory import available_memory
from arbordraft.testing import tiny_model
from arbordraft.utils.terminal import terminal

_DEVELOPERS = {"dev", "docs"}  # extras that users of the package do not miss
_MOST_BYTES = 2**28  # read to measure the memory: several times the last cache of most machines


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Do not measure the memory.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--measure",
            help="Measure thoroughly what forwards and drafts of this model (hub name, folder or GGUF file) cost here, "
            "and keep it. Other commands measure for 10 s at most, once decoding is worth it, and estimate the rest.",
        ),
    ] = None,
    drafter: Annotated[str, typer.Option(help=f"With --measure: {DRAFTERS}")] = "auto",
    dtype: AutoDtypeOption = None,
    kernels: KernelsOption = Kernels.auto,
    weights: WeightsOption = None,
) -> None:
    """Show the machine, the kernels chosen and why, what is cached, and what to install; exits with 1 if broken."""
    options = {"dtype": dtype, "kernels": kernels, "weights": weights}
    costs = {} if model is None else {"costs": measured(model, drafter, **options)}
    report = examine(measure=not quick) | costs
    if json:
        typer.echo(json_format.dumps(report, indent=2))
    else:
        _show(report)
    if report["broken"]:
        raise typer.Exit(1)


def measured(model: str, drafter: str, **options: Any) -> dict[str, Any]:
    """Measures the parts of a step in milliseconds, without a limit of time; ValueError if nothing is drafted."""
    decoder = load(model, drafter, costs="renew", **options)
    if not isinstance(decoder.decider, CostAware):
        raise ValueError(f"drafter {drafter!r} drafts nothing whose costs could be weighed: name another one")
    costs = decoder.decider.costs
    return {
        "model": model,
        "drafter": type(decoder.drafter).__name__,
        "forward": {rows: 1e3 * seconds for rows, seconds in zip(costs.target.rows, costs.target.seconds, strict=True)},
        "level": {rows: 1e3 * seconds for rows, seconds in zip(costs.draft.rows, costs.draft.seconds, strict=True)},
        "besides": 1e3 * costs.rest,
    }


def examine(*, measure: bool = True) -> dict[str, Any]:
    """All findings by section, ready for JSON; ``broken`` lists what keeps the package from working."""
    here, requirements = provenance(), _requirements()
    missing = [
        f"{name} is {problem}: pip install '{name}'" for name, problem in requirements.pop("").items() if problem
    ]
    kernels, faults = _kernels()
    cache, obstacles = _cache()
    return {
        "versions": {"python": here["python"], **here["versions"]},
        "machine": {
            "cpu": here["cpu"] or here["machine"],
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": here["threads"],
            "vector extensions": torch.backends.cpu.get_cpu_capability(),
            "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        },
        "memory": _memory(measure),
        "kernels": kernels,
        "cache": cache,
        "extras": {
            extra: {
                "missing": [name if why == "missing" else f"{name} ({why})" for name, why in parts.items() if why],
                "install": f"pip install 'arbordraft[{extra}]'",
            }
            for extra, parts in requirements.items()
        },
        "broken": [*faults, *missing, *obstacles],
    }


def _memory(measure: bool) -> dict[str, float | None]:
    """GiB in all and available to this process, where the system tells, and GB/s of reading and of copying.

    Reading is the sum of a tensor; of copying, read and written bytes count. The best of a few rounds with torch's
    threads is the most that a forward, which reads all weights once, can reach.
    """
    total, available = None, available_memory()
    with suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    sizes = {"total": total, "available": available}
    memory: dict[str, float | None] = {name: None if size is None else size / 2**30 for name, size in sizes.items()}
    if not measure:
        return memory
    source = torch.ones(min(_MOST_BYTES, (available or _MOST_BYTES * 8) // 8) // 4)
    copy = torch.empty_like(source)
    read, copied = (min(timeit.repeat(run, number=1, repeat=6)) for run in (source.sum, lambda: copy.copy_(source)))
    return memory | {"read": source.nbytes / read / 1e9, "copy": 2 * source.nbytes / copied / 1e9}


def _kernels() -> tuple[dict[str, Any], list[str]]:
    """Wraps a small model in each precision: the kernels it gets and why, and the faults of its self-test."""
    try:
        found: dict[str, Any] = {"instruction set": native.isa(), "problem": native.problem(), "chosen": {}}
    except ValueError as error:  # a wrong environment variable
        return {"instruction set": None, "problem": str(error), "chosen": {}}, [str(error)]
    broken = []
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        model: Any = tiny_model()
        try:
            found["chosen"][name] = RaggedModel(model.to(dtype)).chosen
        except (ValueError, RuntimeError) as error:
            broken.append(f"the kernels fail in {name}: {error}")
    return found, broken


def _cache() -> tuple[dict[str, Any], list[str]]:
    """The cache folder and what lies in it, hidden files left out; and why it cannot be used, if so."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:
        return {"folder": None, "entries": []}, [f"no cache folder: {error}; set ARBORDRAFT_CACHE to one"]
    broken = [] if os.access(folder, os.W_OK) else [f"{folder} cannot be written; set ARBORDRAFT_CACHE to another"]
    entries = []
    for place in sorted(folder.glob("[!.]*")):
        sizes = [file.stat().st_size for file in (place, *place.rglob("*")) if file.is_file()]
        entries.append({"name": place.name, "files": len(sizes), "bytes": sum(sizes)})
    return {"folder": str(folder), "entries": entries}, broken


def _requirements() -> dict[str, dict[str, str | None]]:
    """By extra, "" for the package itself: required distributions, and what is wrong with each, if anything."""
    lines = [Requirement(line) for line in requires("arbordraft") or ()]
    extras = {extra for line in lines for extra in re.findall(r'extra == "([^"]+)"', str(line.marker))}

    def asked(line: Requirement, extra: str) -> bool:
        return line.marker is None or line.marker.evaluate({"extra": extra})

    def parts(extra: str) -> Iterator[tuple[str, str | None]]:
        for line in lines:
            if not asked(line, extra) or (extra and asked(line, "")):  # elsewhere, or the package's own
                continue
            if line.name == "arbordraft":
                for other in line.extras:
                    yield from parts(other)
            else:
                yield line.name, _problem(line)

    return {extra: dict(parts(extra)) for extra in ("", *sorted(extras - _DEVELOPERS))}


def _problem(line: Requirement) -> str | None:
    try:
        there = version(line.name)
    except PackageNotFoundError:
        return "missing"
    return None if line.specifier.contains(there, prereleases=True) else f"{there}, not {line.specifier}"


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
    """Findings as names and values."""
    yield "versions", ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    machine, memory, kernels = report["machine"], report["memory"], report["kernels"]
    yield "processor", f"{machine['cpu']}: {machine['cores']} cores, {machine['threads']} threads of torch"
    yield "GPUs", ", ".join(machine["gpus"]) or "none"
    yield "instruction set", kernels["instruction set"] or f"{machine['vector extensions']} (torch's own kernels)"
    sizes = [f"{memory[name]:.1f} GiB {name}" for name in ("total", "available") if memory[name] is not None]
    yield "memory", ", ".join(sizes) or "unknown"
    if "read" in memory:
        yield "bandwidth", f"{memory['read']:.1f} GB/s reading, {memory['copy']:.1f} GB/s copying (both ways)"
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
