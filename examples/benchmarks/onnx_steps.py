"""Measures a draft step in torch and in onnxruntime, and the acceptance of quantised graphs."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from arbordraft.bench.decoding import take_turns, warm_up
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.cli.options import (
    BatchesOption,
    DrafterOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter
from arbordraft.loading import load_target
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.choices import Dtype, Kernels
from arbordraft.verifiers.coupling import Coupling


@dataclass(frozen=True)
class DraftStepRow:
    """Time and acceptance of one drafter for chains of ``depth`` levels.

    Args:
        milliseconds: time of a step, all levels and samples; median of the batches and rounds.
        per_level: milliseconds of one level.
        ratio: time over that of the first drafter's step; median of the batches' and rounds' ratios.
        tau: emitted tokens per target forward of a sample in greedy decoding.
        acceptance: acceptance rate by depth: how often a draft was accepted when one was tried.
    """

    drafter: str
    batch: int
    depth: int
    milliseconds: float
    per_level: float
    ratio: float
    tau: float
    acceptance: list[float]


def draft_steps(
    drafters: Mapping[str, tuple[RaggedModel, Drafter]],
    workload: Workload,
    depth: int = 4,
    on_progress: ProgressCallback = quiet,
) -> Iterator[DraftStepRow]:
    """Decodes all prompts greedily with every drafter in turns, and measures the drafting alone.

    ``drafters`` holds each drafter by name, with the target that it was built for. The first is the reference.
    """
    coupling, chain = Coupling.matching(), TreeTopology.chain(depth)
    decoders = {
        name: SpeculativeDecoder(target, drafter, chain, coupling) for name, (target, drafter) in drafters.items()
    }
    times: dict[str, list[float]] = {name: [] for name in decoders}
    totals: dict[str, DecodeStats] = {}
    first, _ = next(iter(drafters.values()))
    batches = workload.batches(first)
    warm_up(decoders, batches[0], workload)
    for name, _, stats in take_turns(decoders, batches, workload, on_progress):
        totals[name] = totals[name] + stats if name in totals else stats
        times[name].append(1e3 * stats.seconds["draft"] / max(stats.forwards))
    reference = next(iter(times.values()))
    for name, own in times.items():
        total, step = totals[name], statistics.median(own)
        yield DraftStepRow(
            drafter=name,
            batch=workload.batch,
            depth=depth,
            milliseconds=step,
            per_level=step / depth,
            ratio=statistics.median(mine / base for mine, base in zip(own, reference, strict=True)),
            tau=total.tau,
            acceptance=total.acceptance_by_depth,
        )


def main(
    graphs: Annotated[list[Path], typer.Argument(help="Folders that 'arbordraft export onnx' has written.")],
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    depth: Annotated[int, typer.Option(min=1, help="Levels of the drafted chains.")] = 4,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 64,
    batches: BatchesOption = "1,8",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure milliseconds per draft step in float32: torch's modules, the native kernels, and exported graphs."""
    sizes = workloads(prompts, limit, batches, new_tokens=new_tokens, repeats=repeats, seed=seed)
    with Report(json, model=model, drafter=drafter, graphs=graphs, depth=depth) as report:
        own, _ = load_target(model, Dtype.float32, Kernels.torch)
        native = RaggedModel(own.model, own.tokenizer, kernels="auto", self_test=False)
        drafters = {
            "torch, own modules": (own, drafter_named(drafter, own)),
            "torch, native kernels": (native, drafter_named(drafter, native)),
        } | {folder.name: (native, drafter_named(str(folder), native)) for folder in graphs}
        for workload in sizes:
            report.take(draft_steps(drafters, workload, depth, report.on_progress), workload)


if __name__ == "__main__":
    run_script(main)
