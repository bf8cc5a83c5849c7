"""``arbordraft bench``: measures whole decoders, prints tables and writes JSON."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbordraft.cli.options import (
    BOTH,
    AutoDtypeOption,
    BatchesOption,
    DeviceOption,
    DraftersOption,
    DtypesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PngOption,
    PromptsOption,
    RepeatsOption,
    RequestsOption,
    SeedOption,
    TemperaturesOption,
    TopPOption,
    finite,
    workloads,
)
from arbordraft.cli.policy import policy
from arbordraft.utils.checkout import NoCheckoutError, laboratory

if TYPE_CHECKING:
    from arbordraft.bench.decoding import Decode
    from arbordraft.bench.workload import Workload
    from arbordraft.deciders import Decider
    from arbordraft.decoding.decoder import SpeculativeDecoder
    from arbordraft.drafters import Drafter
    from arbordraft.target.model import RaggedModel

app = typer.Typer(
    no_args_is_help=True,
    help="Measure decoders. Compared ones take turns in one run. Scripts in examples/benchmarks measure their parts.",
)


Suite = Callable[
    ["RaggedModel", Mapping[str, "Drafter"], "Workload", "Decider | None"],
    Mapping[str, "SpeculativeDecoder | Decode"],
]


def _in_turns(
    suite: Callable[[Any], Suite],
    usual_batches: str,
    usual_temperatures: str,
    usual_repeats: int,
    usual_drafters: Any = ...,
) -> Callable[..., None]:
    """Builds the command that decodes workloads with the decoders of a suite, in turns.

    Args:
        suite: picks the suite from the module ``suites``, which is imported when the command runs.
        usual_batches: default of the option. The other ``usual_`` arguments are defaults, too; ``...`` means none.
    """

    def command(
        drafter: DraftersOption = usual_drafters,
        model: ModelOption = "smollm2",
        dtype: AutoDtypeOption = None,
        device: DeviceOption = None,
        prompts: PromptsOption = None,
        limit: LimitOption = None,
        categories: Annotated[
            bool, typer.Option("--categories", help="Measure each 'category' of the prompts by itself.")
        ] = False,
        new_tokens: NewTokensOption = 128,
        batches: BatchesOption = usual_batches,
        temperatures: TemperaturesOption = usual_temperatures,
        requests: RequestsOption = "",
        repeats: RepeatsOption = usual_repeats,
        decider: Annotated[
            Path | None,
            typer.Option(exists=True, file_okay=False, help="Folder of a trained decider, which ends chains early."),
        ] = None,
        seed: SeedOption = 0,
        json: JsonOption = None,
        png: PngOption = None,
    ) -> None:
        from arbordraft.bench import suites
        from arbordraft.bench.report import Report
        from arbordraft.deciders import LearnedDecider

        decoders = suite(suites)
        learned = None if decider is None else LearnedDecider.from_pretrained(decider)
        rounds: dict[str, Any] = {"new_tokens": new_tokens, "repeats": repeats, "seed": seed}
        sizes = workloads(prompts, limit, batches, temperatures, requests, categories=categories, **rounds)
        with Report(json, png, drafter=drafter) as report:
            target = report.load(model, dtype, device=device)
            drafters = suites.drafters_of(drafter, target)
            for workload in suites.filled(sizes):
                report.decode(target, decoders(target, drafters, workload, learned), workload)

    return command


app.command(
    "decode",
    help="Measure the gain of drafters over plain decoding. Compares lookups, chains, trees, and lookups with trees.",
)(_in_turns(lambda suites: suites.drafter_gain, "8", "0,1", 1))
app.command("policy")(policy)
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
    requests: RequestsOption = "",
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Compare speculative answers in batches with single plain ones. Exits with 1 if a promise is broken."""
    from arbordraft.bench.equality import equal_tokens
    from arbordraft.bench.report import Report
    from arbordraft.bench.suites import drafters_of
    from arbordraft.loading import load_target

    settings: dict[str, Any] = {"top_p": top_p, "repetition_penalty": repetition_penalty}
    rounds: dict[str, Any] = {"new_tokens": new_tokens, "repeats": 1, "seed": seed}
    sizes = workloads(prompts, limit, batches, temperatures, requests, **rounds, **settings)
    with Report(json, model=model, dtype=dtype, drafter=drafter, **settings) as report:
        for each in dtype:
            target, _ = load_target(model, each)
            drafters = drafters_of(drafter, target)
            for case in dict.fromkeys((workload.temperature, workload.kind) for workload in sizes):
                alike = [workload for workload in sizes if (workload.temperature, workload.kind) == case]
                report.take(equal_tokens(target, drafters, alike, report.on_progress), alike[0])
    if any(row.reached is False for row in report.rows):
        raise typer.Exit(1)


def add_program(to: typer.Typer, name: str) -> None:
    """Adds a command of the laboratory; outside of a checkout it only says where that is."""
    settings: dict[str, Any] = {}
    try:
        command = getattr(laboratory("commands", name), name)
    except NoCheckoutError:
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}

        def command(context: typer.Context) -> None:
            """Run a program of the source checkout, which this installation lacks."""
            laboratory("commands", shlex.join([*context.command_path.split(), *context.args]))

    to.command(name, context_settings=settings)(command)


add_program(app, "verifiers")
add_program(app, "gpu")

__all__ = ["add_program", "app"]
