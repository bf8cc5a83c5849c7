"""``arbordraft bench``: measures whole decoders, prints tables and writes JSON."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbordraft.cli.options import (
    BOTH,
    AutoDtypeOption,
    BatchesOption,
    DeviceOption,
    DraftersOption,
    DtypeOption,
    DtypesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PngOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    TemperaturesOption,
    TopPOption,
    finite,
    numbers,
    whole_numbers,
    workloads,
)
from arbordraft.utils.choices import Dtype
from arbordraft.utils.files import check_writable
from arbordraft.utils.terminal import terminal

if TYPE_CHECKING:
    from arbordraft.bench.decoding import Decode
    from arbordraft.bench.workload import Workload
    from arbordraft.decoding.decoder import SpeculativeDecoder
    from arbordraft.drafters import Drafter
    from arbordraft.target.model import RaggedModel

app = typer.Typer(
    no_args_is_help=True,
    help="Measure decoders. Compared ones take turns in one run. Scripts in examples/benchmarks measure their parts.",
)


Suite = Callable[["RaggedModel", Mapping[str, "Drafter"], "Workload"], Mapping[str, "SpeculativeDecoder | Decode"]]


def drafters_of(names: Sequence[str], target: "RaggedModel") -> "dict[str, Drafter]":
    """Builds drafters; the keys are their names in tables."""
    from arbordraft.drafter_names import drafter_named

    return {Path(name).name if Path(name).is_dir() else name: drafter_named(name, target) for name in names}


def _in_turns(
    suite: Callable[[Any], Suite],
    usual_batches: str,
    usual_temperatures: str,
    usual_repeats: int,
    usual_drafters: Any = ...,
    *,
    whole: bool = False,
) -> Callable[..., None]:
    """Builds the command that decodes workloads with the decoders of a suite, in turns.

    Args:
        suite: picks the suite from the module ``suites``, which is imported when the command runs.
        usual_batches: default of the option. The other ``usual_`` arguments are defaults, too; ``...`` means none.
        whole: whether all batches are full: drops the last prompts, or repeats prompts to fill one batch.
    """

    def command(
        drafter: DraftersOption = usual_drafters,
        model: ModelOption = "smollm2",
        dtype: AutoDtypeOption = None,
        device: DeviceOption = None,
        prompts: PromptsOption = None,
        limit: LimitOption = None,
        new_tokens: NewTokensOption = 128,
        batches: BatchesOption = usual_batches,
        temperatures: TemperaturesOption = usual_temperatures,
        repeats: RepeatsOption = usual_repeats,
        seed: SeedOption = 0,
        json: JsonOption = None,
        png: PngOption = None,
    ) -> None:
        from arbordraft.bench import suites
        from arbordraft.bench.report import Report

        decoders = suite(suites)
        sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=repeats, seed=seed)
        with Report(json, png, drafter=drafter) as report:
            target = report.load(model, dtype, device=device)
            drafters = drafters_of(drafter, target)
            for workload in map(suites.whole_batches, sizes) if whole else sizes:
                report.decode(target, decoders(target, drafters, workload), workload)

    return command


app.command(
    "decode",
    help="Measure the gain of drafters over plain decoding. Compares lookups, chains, trees, and lookups with trees.",
)(_in_turns(lambda suites: suites.drafter_gain, "8", "0,1", 1))
app.command(
    "policy",
    help="Measure the default policy: draft as far as it pays. It should never be slower than plain decoding.",
)(_in_turns(lambda suites: suites.policy, "1,2,4,8,16", "0,1", 5, whole=True))
app.command(
    "compare",
    help="Measure arbordraft against transformers. Runs generate, prompt lookup and, with a draft model, assistance.",
)(_in_turns(lambda suites: suites.against_transformers, "1", "0", 3, []))


@app.command()
def equality(
    drafter: DraftersOption = [],  # noqa: B006
    model: ModelOption = "smollm2",
    dtype: DtypesOption = BOTH,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 128,
    batches: BatchesOption = "1,4,8",
    temperatures: TemperaturesOption = "0",
    top_p: TopPOption = 1.0,
    repetition_penalty: Annotated[
        float, typer.Option(min=0, max=10, callback=finite, help="Divides scores of tokens that occurred; 1 is off.")
    ] = 1.0,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Compare speculative answers in batches with single plain ones. Exits with 1 if a promise is broken."""
    from arbordraft.bench.equality import equal_tokens
    from arbordraft.bench.report import Report
    from arbordraft.loading import load_target

    settings: dict[str, Any] = {"top_p": top_p, "repetition_penalty": repetition_penalty}
    sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=1, seed=seed, **settings)
    with Report(json, model=model, dtype=dtype, drafter=drafter, **settings) as report:
        for each in dtype:
            target, _ = load_target(model, each)
            drafters = drafters_of(drafter, target)
            for temperature in dict.fromkeys(workload.temperature for workload in sizes):
                alike = [workload for workload in sizes if workload.temperature == temperature]
                report.take(equal_tokens(target, drafters, alike, report.tell), alike[0])
    if any(row.reached is False for row in report.rows):
        raise typer.Exit(1)


@app.command()
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
    from arbordraft.bench.verifiers import node_acceptance, tree_tau

    sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=1, seed=seed)
    counts, most = numbers(children, int), numbers(nodes, int)
    options = {"children": children, "nodes": nodes, "trees": trees, "resolution": resolution, "optima": optima}
    with Report(json, png, drafter=drafter, **options) as report:
        target = report.load(model, dtype, device=device)
        drafters = drafters_of(drafter, target)
        for workload in sizes:
            single = node_acceptance(target, drafters, workload, children=counts, optima=optima, tell=report.tell)
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
                    tell=report.tell,
                )
                report.take(whole, workload)


@app.command()
def gpu(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for gpu.json, written as results come.")],
    minutes: Annotated[float, typer.Option(min=0.05, callback=finite, help="Minutes for all phases together.")] = 9,
    phases: Annotated[
        str | None, typer.Option(help="Phases to run, as in kernels,steps; by default all. A wrong name lists them.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1 or cpu; cpu runs tiny problems in Triton's interpreter.")
    ] = None,
    seed: SeedOption = 0,
) -> None:
    """Check and time kernels and decoders on a GPU. Takes about --minutes; exits with 1 if a result is wrong."""
    from arbordraft.bench.gpu.phases import PHASES
    from arbordraft.bench.gpu.run import FILE, GpuBench, print_phase
    from arbordraft.bench.gpu.setting import Setting
    from arbordraft.bench.gpu.timing import device as find_device

    names = list(PHASES) if phases is None else [name.strip() for name in phases.split(",")]
    if unknown := [name for name in names if name not in PHASES]:
        raise typer.BadParameter(f"phase {unknown[0]!r} is none of {', '.join(PHASES)}")
    check_writable(out / FILE)
    here = find_device(device)  # before anything imports Triton
    console = terminal()
    if here.type == "cpu":
        console.print("On a CPU, problems are tiny and kernels run in Triton's interpreter: times mean nothing.")
    setting = Setting(here, seed, tell=lambda line: console.print(line, soft_wrap=True))
    chosen = {name: phase for name, phase in PHASES.items() if name in names}
    right = GpuBench(out, chosen, setting, minutes, lambda name, result: print_phase(console, name, result)).run()
    console.print(f"wrote {out / FILE}", soft_wrap=True)
    if not right:
        raise typer.Exit(1)


__all__ = ["app"]
