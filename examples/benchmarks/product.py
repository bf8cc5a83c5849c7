"""Measures ragged batches of chains, static trees and trees of dynamic depth, and the lossy fork of improved MCSD."""

from typing import Annotated

import typer

from arbordraft import builders
from arbordraft.bench.report import Report
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
from arbordraft.deciders import ConfidenceThreshold
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology


def product(target: RaggedModel, drafter: Drafter, nodes: int = 16) -> dict[str, SpeculativeDecoder]:
    """Builds chains and trees, static or with depth by sample, lossless or not, of at most ``nodes``, root included."""
    binary = TreeTopology.sequoia(drafter.acceptance[:2], nodes, 6)
    decoders: dict[str, SpeculativeDecoder] = {
        "plain": builders.plain(target),
        "chain": builders.ems_sd(target, drafter, min(6, nodes - 1)),
        "static tree": SpeculativeDecoder(target, drafter, binary),
        "static tree, depth by sample": SpeculativeDecoder(target, drafter, binary, decider=ConfidenceThreshold(0.4)),
    }
    if drafter.takes_candidates:
        decoders["dynasd fork, lossy"] = builders.dynasd(target, drafter, max(2, (nodes - 1) // 5), 4)
    return decoders


def main(
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    nodes: Annotated[int, typer.Option(min=3, help="Most nodes of a tree, root included.")] = 16,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 64,
    batches: BatchesOption = "1,4,8,16",
    temperatures: TemperaturesOption = "0,1",
    repeats: RepeatsOption = 1,
    seed: SeedOption = 0,
    json: JsonOption = None,
    png: PngOption = None,
) -> None:
    """Measure ragged batches of chains, static trees and trees of dynamic depth; and the lossy fork."""
    sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=repeats, seed=seed)
    with Report(json, png, drafter=drafter, nodes=nodes) as report:
        target = report.load(model, dtype)
        decoders = product(target, drafter_named(drafter, target), nodes)
        for workload in sizes:
            report.decode(target, decoders, workload)


if __name__ == "__main__":
    run_script(main)
