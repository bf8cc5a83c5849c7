"""``arbordraft bench policy``: the default policy beside plain decoding, up to a whole matrix of cases."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbordraft.cli.options import (
    NONE,
    AutoDtypeOption,
    ClientsOption,
    ContextsOption,
    DeviceOption,
    DraftersOption,
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
    axis,
    numbers,
    output_file,
    workloads,
)
from arbordraft.cli.serve import check_libraries

if TYPE_CHECKING:
    from arbordraft.bench.decoding import Decode
    from arbordraft.bench.workload import Workload
    from arbordraft.decoding.decoder import SpeculativeDecoder

# Values of options that the command line leaves out. Long prompts take minutes: few requests and batches get them.
MATRIX: Mapping[str, Any] = {
    "drafter": ["auto", "self", "head", "ngram"],
    "requests": "all",
    "batches": "1,2,4,8,16",
    "clients": "1,8,32,64",
    "contexts": "256,1024,4096,16384",
    "new_tokens": 48,
    "repeats": 2,
}
LENGTHENED: Mapping[str, Any] = {"requests": "greedy,chat", "batches": "1,4"}
FEW = 4  # prompts of a case of the matrix, or one batch if that holds more
ROUNDS = 3  # requests of each client: a server seldom has all clients begin, or a last one end, together


def policy(
    context: typer.Context,
    drafter: DraftersOption = [],  # noqa: B006
    matrix: Annotated[
        bool,
        typer.Option(
            "--matrix",
            help="Measure ten kinds of requests at batches 1 to 16 and with 1 to 64 clients, and two of them with long "
            "prompts, with the drafters auto, self, ngram and 'head', the one trained for the model. Other options "
            "narrow it. SmolLM2 takes about 30 minutes on two quiet cores, with one drafter ten.",
        ),
    ] = False,
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    device: DeviceOption = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 128,
    batches: Annotated[
        str,
        typer.Option("--batches", "--batch", callback=axis, help="Batch sizes, as in 1,4,8; 'none' for clients alone."),
    ] = "1,2,4,8,16",
    clients: ClientsOption = NONE,
    contexts: ContextsOption = NONE,
    temperatures: TemperaturesOption = "0,1",
    requests: RequestsOption = "",
    repeats: RepeatsOption = 5,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
    page: Annotated[
        Path | None,
        typer.Option(callback=output_file, help="Write a dated page of Markdown with the speed-ups.", dir_okay=False),
    ] = None,
) -> None:
    """Measure the default policy: draft as far as it pays. It should never be slower than plain decoding."""
    from arbordraft.bench import suites
    from arbordraft.bench.clients import Clients
    from arbordraft.bench.matrix import loaded, measurable
    from arbordraft.bench.report import Report

    given = {name: value for name, value in context.params.items() if _is_given(context, name)}
    if "temperatures" in given:
        given = {"requests": "", **given}
    chosen = {**context.params, **(MATRIX if matrix else {}), **given}
    lengthened = {**chosen, **(LENGTHENED if matrix else {}), **given}
    if chosen["clients"] != NONE:
        check_libraries()
    few = matrix and limit is None
    cases = [
        *_cases(chosen, chosen["batches"]),
        *_cases(lengthened, lengthened["batches"], chosen["contexts"]),
        *(replace(case, served=True) for case in _cases(chosen, chosen["clients"])),
    ]
    with Report(json, png, page, drafter=chosen["drafter"]) as report:
        target = report.load(model, dtype, device=device)
        cases = [suites.whole_batches(case, _prompts_of(case) if few else None) for case in cases]
        cases = measurable(cases, target, report)
        if matrix:
            known = loaded(target, chosen["drafter"], report)
        else:
            drafters = suites.drafters_of(drafter, target)

        def decoders(case: "Workload") -> "Mapping[str, SpeculativeDecoder]":
            return known if matrix else suites.policy(target, drafters, case)

        for case in cases:
            if not case.served:
                report.decode(target, decoders(case), case)
        served = [case for case in cases if case.served]
        if served:
            with Clients() as closed_loops, servers(decoders(served[0])) as urls:
                asked: dict[str, Decode] = {name: closed_loops.decode(url) for name, url in urls.items()}
                for case in served:
                    report.decode(target, asked, case)


@contextmanager
def servers(decoders: "Mapping[str, SpeculativeDecoder]") -> Iterator[dict[str, str]]:
    """Serves decoders as ``arbordraft serve`` does, all in this process; gives their URLs by name."""
    from arbordraft.decoding.engine import Engine
    from arbordraft.decoding.measuring import rows_within
    from arbordraft.serving.app import build_app
    from arbordraft.serving.server import running
    from arbordraft.serving.service import Service

    with ExitStack() as stack:
        urls = {}
        for name, decoder in decoders.items():
            engine = Engine(decoder, max_rows=rows_within(decoder.target))
            _, urls[name] = stack.enter_context(running(build_app(Service(engine, name))))
        yield urls


def _prompts_of(case: "Workload") -> int:
    """Returns how many prompts a case of the matrix takes, where there are as many."""
    if case.context:
        return case.batch
    return max(FEW, ROUNDS * case.batch) if case.served else FEW


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _cases(options: Mapping[str, Any], batches: str, contexts: str = "") -> "list[Workload]":
    """Builds the workloads of options, with batches of these sizes and with prompts of these lengths, if given."""
    names = ("prompts", "limit", "temperatures", "requests", "new_tokens", "repeats", "seed")
    found = workloads(batches=batches, **{name: options[name] for name in names})
    if contexts == NONE:
        return []
    return [replace(case, context=length) for length in numbers(contexts, int) for case in found] if contexts else found
