"""Measures every decider on the same chains, by tokens per second."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from arbordraft import builders
from arbordraft.bench.report import Report
from arbordraft.bench.workload import Workload
from arbordraft.cli.options import (
    AutoDtypeOption,
    BatchesOption,
    DrafterOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PngOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    TemperaturesOption,
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Bandit,
    ConfidenceThreshold,
    CostAware,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    LearnedDecider,
    PathSurvival,
)
from arbordraft.deciders.costs import StepCosts
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter
from arbordraft.target.model import RaggedModel


def deciders(depth: int, costs: StepCosts | None = None, learned: LearnedDecider | None = None) -> dict[str, Decider]:
    """Builds every kind of decider with the settings of its source, for chains of ``depth``.

    Step costs add cost-aware deciders. A learned decider is added unchanged.
    """
    known: dict[str, Decider] = {f"fixed {levels}": FixedDepth(levels) for levels in range(1, depth + 1)}
    known |= {
        "heuristic": Heuristic(min(5, depth), depth),
        "accepted average": AcceptedAverage(),
        "confidence 0.4": ConfidenceThreshold(0.4),
        "SVIP": EntropyBound(0.7, 0.15),
        "AdaEDL": AdaEDL(),
        "path survival 0.3": PathSurvival(0.3),
        "bandit of 1, 2 and 4 levels": Bandit([FixedDepth(levels) for levels in (1, 2, 4)], longest=depth),
    }
    if learned is not None:
        known["learned"] = learned
    if costs is not None:
        known["cost-aware"] = CostAware(costs)
        if learned is not None:
            known["cost-aware, learned"] = CostAware(costs, survival=learned)
    return known


def stops(
    target: RaggedModel, drafter: Drafter, deciders: Mapping[str, Decider], workload: Workload, depth: int = 6
) -> dict[str, SpeculativeDecoder]:
    """Builds plain decoding, and chains of up to ``depth`` drafts that deciders shorten.

    The score of a decider is tokens per second, because any early stop can raise acceptance.
    """
    chain = builders.ems_sd(target, drafter, depth)
    return {"plain": builders.plain(target)} | {
        name: SpeculativeDecoder(
            target, drafter, chain.topology, chain.coupling, decider, expected_batch=workload.batch
        )
        for name, decider in deciders.items()
    }


def main(
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    depth: Annotated[int, typer.Option(min=1, help="Longest chain.")] = 6,
    costs: Annotated[Path | None, typer.Option(help="Step costs that 'arbordraft tune --costs' has written.")] = None,
    learned: Annotated[Path | None, typer.Option(help="Folder of a trained decider for the drafter.")] = None,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 128,
    batches: BatchesOption = "1,8",
    temperatures: TemperaturesOption = "0",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure every decider on the same chains, by tokens per second."""
    sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=repeats, seed=seed)
    table = StepCosts.load(costs) if costs else None
    trained = LearnedDecider.from_pretrained(learned) if learned else None
    settings = {"drafter": drafter, "depth": depth, "costs": costs, "learned": learned}
    with Report(json, png, **settings) as report:
        target = report.load(model, dtype)
        proposer = drafter_named(drafter, target)
        for workload in sizes:
            stopping = deciders(depth, table, trained)
            report.decode(target, stops(target, proposer, stopping, workload, depth), workload)


if __name__ == "__main__":
    run_script(main)
