"""Commands that ``arbordraft`` takes from its checkout: ``bench verifiers``, ``bench gpu``, ``tune`` and ``plot``.

Like modules of ``arbordraft.cli``, this one imports torch only inside its commands.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from arbordraft.cli.options import (
    AutoDtypeOption,
    BatchesOption,
    DeviceOption,
    DrafterOption,
    DraftersOption,
    DtypeOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PngOption,
    PromptsOption,
    SeedOption,
    TemperatureOption,
    TemperaturesOption,
    finite,
    numbers,
    output_file,
    whole_numbers,
    workloads,
)
from arbordraft.utils.choices import Dtype
from arbordraft.utils.files import check_writable
from arbordraft.utils.terminal import terminal

console = terminal()


def verifiers(
    drafter: DraftersOption,
    model: ModelOption = "smollm2",
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = None,
    children: Annotated[str, typer.Option(callback=whole_numbers, help="Numbers of children of one node.")] = "2,3,4",
    nodes: Annotated[
        str, typer.Option(callback=whole_numbers, help="Nodes per tree, root included; the same for all shapes.")
    ] = "8,16,32",
    trees: Annotated[bool, typer.Option(help="Measure whole trees, too, not only single nodes.")] = True,
    resolution: Annotated[
        bool, typer.Option(help="Verify trees by global resolution, too; takes seconds per position.")
    ] = False,
    optima: Annotated[
        int,
        typer.Option(min=1, help="Positions at which the optima of 3 or more draws without replacement are solved."),
    ] = 100,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 24,
    batches: BatchesOption = "8",
    temperatures: TemperaturesOption = "0.3,0.6,1",
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure acceptance of draft laws and verifiers. Prints expectations on the model's rows, with standard errors."""
    from arbordraft.bench.report import Report
    from arbordraft.bench.suites import drafters_of
    from arborlab.verifiers import node_acceptance, tree_tau

    sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=1, seed=seed)
    counts, most = numbers(children, int), numbers(nodes, int)
    options: dict[str, Any] = {
        "children": children,
        "nodes": nodes,
        "trees": trees,
        "resolution": resolution,
        "optima": optima,
    }
    with Report(json, png, drafter=drafter, **options) as report:
        target = report.load(model, dtype, device=device)
        drafters = drafters_of(drafter, target)
        for workload in sizes:
            single = node_acceptance(
                target, drafters, workload, children=counts, optima=optima, on_progress=report.on_progress
            )
            ranks = {(row.drafter, row.law): row.by_rank for row in report.take(single, workload)}
            widths = [count for count in counts if count > 1]
            if trees and widths:
                whole = tree_tau(
                    target,
                    drafters,
                    workload,
                    nodes=most,
                    children=widths,
                    ranks=ranks,
                    resolution=resolution,
                    on_progress=report.on_progress,
                )
                report.take(whole, workload)


def gpu(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for gpu.json, written as results come.")],
    minutes: Annotated[float, typer.Option(min=0.05, callback=finite, help="Minutes for all phases together.")] = 9,
    phases: Annotated[
        str | None, typer.Option(help="Phases to run, as in kernels,steps; by default all. A wrong name lists them.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu; cpu runs tiny problems in Triton's interpreter.")
    ] = None,
    only: Annotated[str, typer.Option(help="Run only parts whose names contain this text.")] = "",
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a model for phase smollm2; by default SmolLM2."),
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Check and time kernels and decoders on a GPU. Takes about --minutes; exits with 1 if a result is wrong."""
    from arborlab.gpu.run import FILE, PHASES, GpuBench, print_phase
    from arborlab.gpu.setting import Setting
    from arborlab.gpu.timing import device as find_device

    names = list(PHASES) if phases is None else [name.strip() for name in phases.split(",")]
    if unknown := [name for name in names if name not in PHASES]:
        raise typer.BadParameter(f"phase {unknown[0]!r} is none of {', '.join(PHASES)}")
    check_writable(out / FILE)
    here = find_device(device)  # before anything imports Triton
    if here.type == "cpu":
        console.print("On a CPU, problems are tiny and kernels run in Triton's interpreter: times mean nothing.")
    folder = None if model is None else str(model)
    setting = Setting(here, seed, folder, log=lambda line: console.print(line, soft_wrap=True))
    chosen = {name: phase for name, phase in PHASES.items() if name in names}
    bench = GpuBench(out, chosen, setting, minutes, only=only)
    bench.shown = lambda name, result: print_phase(console, name, result, bench.command)
    right = bench.run()
    if only and not any(vars(result)[kind] for result in bench.results.values() for kind in ("rows", "errors")):
        raise typer.BadParameter(f"no part of these phases ran whose name contains {only!r}")
    console.print(f"wrote {out / FILE}", soft_wrap=True)
    if not right:
        raise typer.Exit(1)


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
    from arbordraft.bench.workload import read_texts
    from arbordraft.cli.display import progress
    from arbordraft.drafter_names import drafter_named
    from arbordraft.loading import load_target
    from arborlab.tuning import tune as find_fastest

    sizes = numbers(batches, int)
    with progress(console) as on_progress:
        on_progress("loading the model")
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
            on_progress=on_progress,
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


def plot(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSON file of 'arbordraft bench'.")],
    png: Annotated[Path, typer.Argument(callback=output_file, help="Picture to write (needs matplotlib).")],
) -> None:
    """Draw a picture of a file that 'arbordraft bench gpu' or a benchmark's option --json wrote."""
    from arborlab import plots

    plots.plot(plots.read_rows(results), png)
    console.print(f"wrote {png}", soft_wrap=True)
