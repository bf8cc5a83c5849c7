"""Measures the n-gram tree on the model's own modules against ``generate``, on prompts where it pays or not."""

from dataclasses import replace
from functools import partial
from typing import Any

from arbordraft.bench.decoding import answers
from arbordraft.bench.measure import Measurement, precision
from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet, read_texts
from arbordraft.cli.options import (
    BOTH,
    DtypesOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
)
from arbordraft.cli.program import run_script
from arbordraft.deciders import CostAware
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.measuring import known_costs
from arbordraft.decoding.prompts import REPEATING, VARIED
from arbordraft.drafters import NGramDrafter
from arbordraft.loading import load_target
from arbordraft.target.model import RaggedModel
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.choices import Kernels
from arbordraft.verifiers.coupling import Coupling
from arborlab.pairs import paired

# Prompts whose answers repeat them and prompts whose answers do not, each with the speed-up to reach.
KINDS = {"repeating": (REPEATING, ">= 1.5"), "varied": (VARIED, ">= 0.9")}


def lookup_speed(
    target: RaggedModel, workload: Workload, kind: str = "given", reach: str = "", on_progress: ProgressCallback = quiet
) -> Measurement:
    """Measures greedy decoding with the n-gram tree against ``generate``, with all prompts of a ``kind`` in a batch."""
    tree, count = TreeTopology.from_k_config((2, 1, 1, 1)), len(workload.prompts)
    drafter = NGramDrafter(longest=5, shortest=3)
    pays = CostAware(known_costs(target, drafter))
    decoder = SpeculativeDecoder(target, drafter, tree, Coupling.matching(2), pays)
    (inputs,) = replace(workload, batch=count).batches(target)
    request: dict[str, Any] = {**inputs, **workload.request()}
    model: Any = target.model
    generate = partial(model.generate, **request)
    case = f"{precision(model)}, batch {count}, {kind} prompts, {workload.new_tokens} new tokens"
    speculate = partial(decoder.generate, **request)
    row = paired("decode", case, speculate, generate, workload, on_progress, reach=reach, speed_up=True)
    output: Any = decoder.generate(**request, return_dict_in_generate=True)
    wanted = generate()[:, inputs["input_ids"].shape[1] :].tolist()
    found = answers(output, inputs)
    same = sum(answer == whole[: len(answer)] for answer, whole in zip(found, wanted, strict=True))
    tokens = sum(map(len, found))
    speeds = f"{tokens / row.ours * 1e3:.0f} against {tokens / row.reference * 1e3:.0f} tokens/s"
    return replace(row, detail=f"tau {output.stats.tau:.2f}, {speeds}, {same} of {count} answers equal")


def main(
    model: ModelOption = "smollm2",
    dtype: DtypesOption = BOTH,
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 128,
    repeats: RepeatsOption = 3,
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure the n-gram tree on the model's own modules against ``generate``, and count equal answers."""
    kinds = {"given": (tuple(read_texts(prompts)), "")} if prompts else KINDS
    with Report(json, model=model, dtype=dtype) as report:
        for each in dtype:
            target, _ = load_target(model, each, Kernels.torch)
            for kind, (texts, reach) in kinds.items():
                workload = Workload(texts[:limit], len(texts[:limit]), new_tokens, repeats=repeats, seed=seed)
                report.take([lookup_speed(target, workload, kind, reach, report.on_progress)], workload)


if __name__ == "__main__":
    run_script(main)
