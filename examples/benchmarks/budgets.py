"""Measures how many tokens a batch-wide budget of rows accepts, by the information that may choose the rows.

A scheduler that drops drafts by their own tokens changes the output law, unless target and drafter share their noise. A
causal barrier avoids that: a row is kept or dropped before its token is drawn (DSpark, arXiv 2607.05147, appendix A).
This program measures the accepted tokens that the barrier costs.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Annotated, ClassVar

import typer
from torch import Tensor

from arbordraft.bench.report import Report
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.cli.options import (
    AutoDtypeOption,
    BatchesOption,
    DrafterOption,
    JsonOption,
    LimitOption,
    ModelOption,
    NewTokensOption,
    PromptsOption,
    SeedOption,
    TemperaturesOption,
    numbers,
    whole_numbers,
    workloads,
)
from arbordraft.cli.program import run_script
from arbordraft.drafter_names import drafter_named
from arbordraft.drafters import Drafter
from arbordraft.sampling.laws import IID, SharedNoise
from arbordraft.sampling.rows import Rows
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.topology import TreeTopology
from arborlab.verifiers.positions import clustered, watch

STALE = 2  # steps between a confidence and its use, as in DSpark


@dataclass(frozen=True)
class BudgetRow:
    """Accepted tokens per sample and step, on average over positions.

    Args:
        noise: of the drafts, ``shared`` with the target or ``independent`` of it.
        looks_at: information that chooses the rows.
        lossless: whether the output law is the target's.
        rows: verified rows per sample, roots excluded, on average over a batch.
        accepted: expected accepted tokens per sample.
        error: standard error of that, batches being independent.
    """

    table: ClassVar[str] = "accepted tokens per sample, by the information that may choose the rows"

    temperature: float
    noise: str
    looks_at: str
    lossless: bool
    rows: int
    accepted: float
    error: float


@dataclass(frozen=True)
class Position:
    """One chain of drafts.

    Args:
        confidence: by depth, the draft probability of the path down to that token.
        before: by depth, the expectation of that before the last token was drawn.
        survival: by depth, the probability that the path is accepted down to that token.
    """

    confidence: list[float]
    before: list[float]
    survival: list[float]


def budgets(
    target: RaggedModel,
    drafter: Drafter,
    workload: Workload,
    depth: int,
    rows: Sequence[int],
    on_progress: ProgressCallback = quiet,
) -> Iterator[BudgetRow]:
    """Spends budgets of rows on chains that were drafted at the same positions of the same texts."""
    for law in (IID(1), SharedNoise(1)):
        found: dict[int, list[Position]] = defaultdict(list)

        watch(target, drafter, TreeTopology.chain(depth), law, workload, partial(_look, found), on_progress)
        noise = "shared" if law.shared else "independent"
        for looks_at, scores in _scores(found, depth).items():
            if law.shared and looks_at == "rows before the draw":  # the drafted tokens themselves may be looked at
                continue
            lossless = law.shared or looks_at != "drafted tokens"
            for budget in rows:
                mean, error = clustered(_spent(found, scores, workload.batch, budget))
                yield BudgetRow(workload.temperature, noise, looks_at, lossless, budget, mean, error)


def _look(found: dict[int, list[Position]], prompt: int, tree: SampleTree, target: Rows[Tensor], accepted: int) -> None:
    found[prompt].append(_position(tree, target, accepted))


def _position(tree: SampleTree, target: Rows[Tensor], accepted: int) -> Position:
    drafted, rows = tree.batch.chance[tree.root + 1 : tree.rows.stop].tolist(), list(tree.rows)
    confidence = list(accumulate(drafted, mul))
    if tree.proposal.law.shared:
        return Position(confidence, [], [float(depth <= accepted) for depth in range(1, len(rows))])
    before, ratios, above = [], [], 1.0
    for row, child, path in zip(rows, rows[1:], confidence, strict=False):
        q, token = tree.drawn_from(row), tree.token(child)
        assert q is not None
        before.append(above * float((q * q).sum()))
        ratios.append(min(1.0, float(target[row][token] / q[token])))
        above = path
    return Position(confidence, before, list(accumulate(ratios, mul)))


def _scores(found: dict[int, list[Position]], depth: int) -> dict[str, dict[int, list[list[float]]]]:
    """Returns predicted survival by information, prompt, step and depth; it never rises with depth."""
    every = [position for own in found.values() for position in own]
    means = [sum(p.survival[level] for p in every if level < len(p.survival)) / len(every) for level in range(depth)]
    scores = {
        "drafted tokens": {prompt: [p.confidence for p in own] for prompt, own in found.items()},
        "rows before the draw": {prompt: [p.before for p in own] for prompt, own in found.items()},
        f"drafted tokens {STALE} steps before": {
            prompt: [own[step - STALE].confidence if step >= STALE else means for step in range(len(own))]
            for prompt, own in found.items()
        },
        "depth alone": {prompt: [means] * len(own) for prompt, own in found.items()},
        "the verdict (bound)": {prompt: [p.survival for p in own] for prompt, own in found.items()},
    }
    return {
        name: {prompt: [list(accumulate(one, min)) for one in own] for prompt, own in by_prompt.items()}
        for name, by_prompt in scores.items()
    }


def _spent(
    found: dict[int, list[Position]], scores: dict[int, list[list[float]]], batch: int, rows: int
) -> list[tuple[int, float]]:
    """Returns, by number of the batch, the accepted tokens per sample of every step."""
    spent = []
    for first in range(0, max(found) + 1, batch):
        prompts = [prompt for prompt in range(first, first + batch) if prompt in found]
        for step in range(max((len(found[prompt]) for prompt in prompts), default=0)):
            here = [prompt for prompt in prompts if step < len(found[prompt])]
            offers = [
                (score, -level, found[prompt][step].survival[level])
                for prompt in here
                for level, score in enumerate(scores[prompt][step][: len(found[prompt][step].survival)])
            ]
            kept = sorted(offers, reverse=True)[: rows * len(here)]
            spent.append((first, sum(survival for _, _, survival in kept) / len(here)))
    return spent


def main(
    drafter: DrafterOption,
    model: ModelOption = "smollm2",
    dtype: AutoDtypeOption = None,
    depth: Annotated[int, typer.Option(min=1, help="Longest chain of drafts.")] = 8,
    rows: Annotated[str, typer.Option(callback=whole_numbers, help="Rows per sample to spend.")] = "1,2,4",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    new_tokens: NewTokensOption = 24,
    batches: BatchesOption = "8",
    temperatures: TemperaturesOption = "0.3,0.6,1",
    seed: SeedOption = 0,
    json: JsonOption = None,
) -> None:
    """Measure how many tokens a batch-wide budget of rows accepts, by the information that may choose the rows."""
    sizes = workloads(prompts, limit, batches, temperatures, new_tokens=new_tokens, repeats=1, seed=seed)
    with Report(json, drafter=drafter, depth=depth, rows=rows) as report:
        target = report.load(model, dtype)
        proposer = drafter_named(drafter, target)
        for workload in sizes:
            report.take(budgets(target, proposer, workload, depth, numbers(rows, int), report.on_progress), workload)


if __name__ == "__main__":
    run_script(main)
