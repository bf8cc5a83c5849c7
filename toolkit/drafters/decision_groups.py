"""The samples of a step that decide together how far their trees go on.

Shapes: S samples of a group.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Plan, RowPrices, Situation
from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.kernels.draft_tree import Draws, Growth
from arbordraft.sampling.noise import GumbelNoise


@dataclass
class DecisionGroup:
    """Some samples that decide together.

    Args:
        samples: S numbers.
        told: whether numbers say all that their processors do to draft scores.
        pathwise: whether their texts do not depend on what is drafted.
        beside: samples that decide in other groups, each of which has a row at least.
        depths: ``[S]`` greatest depth of each one's tree.
        plan: how far their trees go on; ``None`` if the decider wants to be asked before every level.
        rows: nodes, by their place in the grower's columns, that were added last.
    """

    samples: list[int]
    told: bool
    pathwise: bool
    beside: int
    depths: Sequence[int] = ()
    plan: Plan | None = None
    rows: Sequence[int] = ()

    @cached_property
    def limits(self) -> dict[int, tuple[int, Sequence[float]]]:
        """By sample, most levels and the plan's expectations."""
        assert self.plan is not None
        told = zip(self.samples, self.plan.levels, self.depths, self.plan.next, strict=True)
        return {sample: (min(levels, depth), following) for sample, levels, depth, following in told}

    def alike(self, context: DraftContext) -> int:
        """Samples that each of them stands for."""
        return 1 if self.pathwise else context.expected_batch

    def make_plan(self, context: DraftContext, decider: Decider, drafter: Drafter, lag: Sequence[int]) -> None:
        """Asks the decider, given the committed tokens that the drafter has not read, how far trees go on."""
        if drafter.max_levels == 0 or (context.resting and self.pathwise):
            self.plan = Plan.everything([0] * len(self.samples))
        elif decider.can_plan:
            most = context.topology.max_depth
            self.plan = decider.plan(
                Situation(
                    [min(depth, most) for depth in self.depths],
                    [context[sample].memory for sample in self.samples],
                    self.alike(context),
                    type(drafter).__name__,
                    drafter.acceptance,
                    drafter.free,
                    [lag[sample] for sample in self.samples] if lag else (),
                    [depth + 1 for depth in self.depths] if context.fixed_batch else (),
                    context.extra_rows + self.beside if self.pathwise else 0,
                    drafter.informative,
                )
            )


def decision_groups(context: DraftContext, decider: Decider, drafter: Drafter, state: Any) -> list[DecisionGroup]:
    """The samples that decide together, with their plans.

    What is drafted never changes a pathwise text: such samples decide together and spend their rows where they gain
    most, those that can be told in numbers and those whose processors have to be asked each for themselves. The text of
    any other depends on what is verified: it decides alone, for a batch of its like.
    """
    told: dict[bool, list[int]] = {True: [], False: []}
    groups = []
    for sample in context.alive:
        if context.pathwise(sample):
            told[context.temperature(sample) is not None].append(sample)
        else:
            groups.append(DecisionGroup([sample], told=False, pathwise=False, beside=0))
    number = len(context.alive)
    together = [(kind, own) for kind, own in told.items() if own]
    groups[:0] = [DecisionGroup(own, kind, pathwise=True, beside=number - len(own)) for kind, own in together]
    depths, lag = drafter.depths(state, context), drafter.lag(state, context)
    for group in groups:
        group.depths = [depths[sample] for sample in group.samples]
        group.make_plan(context, decider, drafter, lag)
    return groups


def growth_of(context: DraftContext, plan: Plan, depths: Sequence[int], going: Sequence[int]) -> Growth:
    """The plan for the samples that stand at ``going`` in it."""
    told = [(plan.trust[place], plan.next[place]) for place in going]
    known = range(max(len(factors) for row in told for factors in row))
    return Growth(
        context.topology.child_offsets,
        context.topology.child_order,
        [min(plan.levels[place], depths[place]) for place in going],
        [trust[min(depth, len(trust) - 1)] for trust, _ in told for depth in known],
        [following[min(depth, len(following) - 1)] for _, following in told for depth in known],
        [plan.weights[place] for place in going] if plan.weights else [1.0] * len(going),
        plan.level,
        plan.row,
        -1 if plan.budget is None else plan.budget,
        _prices(plan),
    )


def _prices(plan: Plan) -> Callable[[int], Sequence[float]] | None:
    if plan.keep is Plan.keep:
        return _keep_all
    return plan.keep.table if isinstance(plan.keep, RowPrices) else None


def _keep_all(drafts: int) -> Sequence[float]:
    return ()


def draws_of(context: DraftContext, samples: Sequence[int]) -> Draws | None:
    """How the tokens of S samples are drawn with shared noise; ``None`` where none is drawn."""
    noise = context.noise
    if not isinstance(noise, GumbelNoise):
        return None
    seeds = [source.seed if (source := noise.sources[sample]) else 0 for sample in samples]
    keys = np.array([seeds, [noise.lengths[sample] for sample in samples]], dtype=np.int64)
    temperatures = [context.temperature(sample) or 0.0 for sample in samples]
    return Draws(torch.from_numpy(keys[0]), torch.from_numpy(keys[1]), temperatures)


__all__ = ["DecisionGroup", "decision_groups", "draws_of", "growth_of"]
