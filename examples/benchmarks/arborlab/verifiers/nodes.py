"""Acceptance among the children of one node, by every draft law and rule.

Shapes: V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbordraft.bench.tables import HIDDEN
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.drafters import Drafter
from arbordraft.kernels.gumbel import gumbel
from arbordraft.sampling.laws import IID, AdaptiveTopTail, DraftLaw, WithoutReplacement
from arbordraft.sampling.rows import Rows
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import GlobalResolution, Rule, TopTailRule, optimal_acceptance
from arbordraft.verifiers.resolution import Race
from arbordraft.verifiers.transport import Array
from arborlab.verifiers.laws import laws_of
from arborlab.verifiers.positions import by_cluster, clustered, watch

DRAWS = 8  # of children at every position
TRIES = 4  # of them for every threshold
SHARED_DRAWS = 16  # of noise that target and drafter share, at every position
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6)


@dataclass(frozen=True)
class NodeRow:
    """Acceptance at one node with k children, on average over positions.

    Args:
        by_rank: probability that the child drawn first, second, ... is accepted.
        acceptance: probability that one of them is accepted.
        error: standard error of ``acceptance``; prompts are independent.
        optimum: greatest acceptance of any lossless rule for these draws.
        changed: with lists of shared noise, share of draws in which they change the target's token; else 0.
        by_prompt: acceptance of each prompt, from which the error of a difference between two rows follows.
    """

    drafter: str
    temperature: float
    k: int
    law: str
    rule: str
    positions: int
    by_rank: list[float]
    acceptance: float
    error: float
    optimum: float
    changed: float = 0.0
    by_prompt: list[float] = field(default_factory=list, metadata=HIDDEN)


def node_acceptance(
    target: RaggedModel,
    drafters: Mapping[str, Drafter],
    workload: Workload,
    *,
    children: Sequence[int] = (2, 3, 4),
    optima: int = 100,
    on_progress: ProgressCallback = quiet,
) -> Iterator[NodeRow]:
    """Yields the acceptance of the children of one node by every law and rule, on the same rows.

    Every second prompt chooses the threshold of the adaptive law. All figures are those of the other prompts.

    Args:
        workload: two prompts or more, at a temperature above 0; ``new_tokens`` is the number of positions per prompt.
        optima: positions at which the optimum of three or more draws without replacement is solved, which is slow. All
            other optima are solved at every position.

    Raises:
        ValueError: if there is only one prompt.
    """
    if len(workload.prompts) < 2:
        raise ValueError("thresholds are chosen on every second prompt and judged on the others: give 2 or more")
    for name, drafter in drafters.items():
        rows: list[tuple[int, Tensor, Tensor]] = []

        def keep(prompt: int, tree: SampleTree, target: Rows[Tensor], _: int, rows: list[Any] = rows) -> None:
            if (draft := tree.drawn_from(tree.root)) is not None:
                rows.append((prompt, target[tree.root].clone(), draft.clone()))

        watch(target, drafter, TreeTopology.chain(1), IID(1), workload, keep, on_progress)
        for done, k in enumerate(children):
            on_progress(f"laws and rules of {k} children, temperature {workload.temperature:g}", done, len(children))
            for row in _node_rows(rows, k, optima):
                yield NodeRow(drafter=name, temperature=workload.temperature, **row)


def _node_rows(rows: Sequence[tuple[int, Tensor, Tensor]], k: int, optima: int) -> Iterator[dict[str, Any]]:
    uniforms = spread_uniforms(len(rows), DRAWS, k).tolist()
    judged = [index for index, (prompt, _, _) in enumerate(rows) if prompt % 2]
    chosen = [index for index, (prompt, _, _) in enumerate(rows) if not prompt % 2]

    changes: dict[int, float] = {}  # by position, for the current law and rule

    def ranks(law: DraftLaw, rule: Rule | None, index: int, draws: int = DRAWS) -> list[float]:
        """Returns acceptance by rank, as the mean of some draws."""
        _, p, q = rows[index]
        if rule is None:
            found, changes[index] = shared_acceptance(p, q, k, index, lists=not law.shared)
            return found
        total = [0.0] * k
        for noise in uniforms[index][:draws]:
            for rank, accept in enumerate(rule(p, 1.0, q, law.draw(q, noise), law).accept):
                total[rank] += accept / draws
        return total

    def tried(threshold: float) -> float:
        law, rule = AdaptiveTopTail(k, threshold), TopTailRule()
        return sum(sum(ranks(law, rule, index, TRIES)) for index in chosen)

    laws: dict[str, tuple[DraftLaw, Mapping[str, Rule | None]]] = {**laws_of(k, resolution=RememberedRace())}
    laws[f"GumbelLists({k})"] = IID(k), {"list matching": None}
    best = max(THRESHOLDS, key=tried)
    laws[f"AdaptiveTopTail({k}, {best:g})"] = AdaptiveTopTail(k, best), {"TopTail": TopTailRule()}
    optimum: dict[str, list[float]] = {}
    for law_name, (law, rules) in laws.items():
        drawn = WithoutReplacement(k) if law.shared else law  # the law of the highest perturbed tokens
        every = 1 if drawn.replacement or drawn.tails < 3 else max(1, len(judged) // optima)
        if str(drawn) not in optimum:
            optimum[str(drawn)] = [optimal_acceptance(drawn, rows[i][1], rows[i][2]) for i in judged[::every]]
        solved = optimum[str(drawn)]
        for rule_name, rule in ({"SharedMatching": None} if law.shared else rules).items():
            changes.clear()
            accepts = [ranks(law, rule, index) for index in judged]
            # The optimum is the rule's mean over all positions plus its mean gap to the optimum at solved positions.
            reached = sum(map(sum, accepts[::every])) / max(1, len(solved))
            values = [(rows[i][0], sum(accept)) for i, accept in zip(judged, accepts, strict=True)]
            mean, error = clustered(values)
            yield {
                "k": k,
                "law": law_name,
                "rule": rule_name,
                "positions": len(judged),
                "by_rank": [sum(column) / len(judged) for column in zip(*accepts, strict=True)],
                "acceptance": mean,
                "error": error,
                "optimum": sum(solved) / max(1, len(solved)) + mean - reached,
                "changed": sum(changes.values()) / len(judged),
                "by_prompt": by_cluster(values),
            }


def spread_uniforms(positions: int, draws: int, k: int) -> Tensor:
    """Returns ``[positions, draws, k]`` uniforms: independent within a draw, spread over the draws of a position.

    This is a Latin hypercube: in every column, each of ``draws`` equal intervals holds one number.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (positions, draws, k)
    cells = torch.rand(shape, generator=generator, dtype=torch.float64).argsort(dim=1)
    return (cells + torch.rand(shape, generator=generator, dtype=torch.float64)) / draws


class RememberedRace(GlobalResolution):
    """Global resolution that solves a pair of rows once for all draws of a position."""

    def __init__(self) -> None:
        super().__init__()
        self._last: tuple[Array, Array, int, Race] | None = None

    def race(self, p: Array, q: Array, draws: int) -> Race:
        last = self._last
        if last is None or last[2] != draws or not (np.array_equal(last[0], p) and np.array_equal(last[1], q)):
            self._last = last = p, q, draws, super().race(p, q, draws)
        return last[3]


def shared_acceptance(p: Tensor, q: Tensor, k: int, seed: int, *, lists: bool) -> tuple[list[float], float]:
    """Returns how often the target's token is the drafter's first, second, ... under noise that both share.

    Args:
        p: ``[V]`` target row.
        q: ``[V]`` draft row.
        k: number of children.
        seed: seed of the noise.
        lists: whether each child has its own list of noise, of which the target takes the highest for every token.
            This is Gumbel list sampling (Rowan et al., NeurIPS 2025, arXiv 2506.05632). Otherwise the children are the
            k highest tokens under one list.

    Returns:
        ``[k]`` by rank, and how often the target's token differs from its token under the first list alone.
    """
    seeds = torch.full((SHARED_DRAWS,), seed)
    target, draft = p.double().log(), q.double().log()
    first = noise = gumbel(seeds, torch.arange(SHARED_DRAWS), len(p))
    if not lists:
        children = (draft + noise).topk(k, dim=1).indices
    else:
        columns = []
        for number in range(k):
            own = gumbel(seeds, torch.arange(SHARED_DRAWS) + number * SHARED_DRAWS, len(p))
            columns.append((draft + own).argmax(dim=1))
            noise = torch.maximum(noise, own)
        children = torch.stack(columns, dim=1)
    token = (target + noise).argmax(dim=1, keepdim=True)
    hit = children == token
    hit &= hit.cumsum(dim=1) == 1  # equal tokens of several lists are one child
    changed = (token[:, 0] != (target + first).argmax(dim=1)).double().mean().item()
    return hit.double().mean(dim=0).tolist(), changed
