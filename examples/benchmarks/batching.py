"""Measures EMS-SD's comparison: the same chains in padded, half padded and unpadded batches."""

from typing import Annotated

import typer
from padded import PaddedDecoder

from arbordraft import builders
from arbordraft.bench.report import Report
from arbordraft.bench.suites import whole_batches
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
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers.coupling import Coupling


def padding(target: RaggedModel, drafter: Drafter, length: int = 7) -> dict[str, SpeculativeDecoder]:
    """Builds EMS-SD's comparison: the same greedy chains in padded, half padded and unpadded batches.

    In the paper's LLMA runs the drafter is a lookup.
    """
    parts = (target, drafter, TreeTopology.chain(length), Coupling.matching())
    return {
        "plain": builders.plain(target),
        "vanilla": PaddedDecoder(*parts),
        "unpadded cache only": PaddedDecoder(*parts, pad_cache=False),
        "unpadded input only": PaddedDecoder(*parts, pad_input=False),
        "ems_sd": SpeculativeDecoder(*parts),
    }


def main(
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    drafter: DrafterOption = "ngram",
    length: Annotated[int, typer.Option(min=1, help="Drafted tokens per step.")] = 7,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 128,
    batches: BatchesOption = "1,2,4,8,12,16,24",
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure the same greedy chains in padded, half padded and unpadded batches."""
    sizes = workloads(prompts, limit, batches, new_tokens=new_tokens, repeats=repeats, seed=seed)
    with Report(json, png, drafter=drafter, length=length) as report:
        target = report.load(model, dtype)
        decoders = padding(target, drafter_named(drafter, target), length)
        for workload in map(whole_batches, sizes):
            report.decode(target, decoders, workload)


if __name__ == "__main__":
    run_script(main)
