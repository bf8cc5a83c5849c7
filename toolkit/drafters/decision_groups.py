"""Groups the samples of a step that a decider plans together.

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
    """Samples of a step that a decider plans together.

    Args:
        samples: numbers of the S samples.
        told: whether a temperature is all that their processors apply to draft scores.
        pathwise: whether drafts cannot change their texts.
        beside: number of samples in other groups, each of which has at least one row.
        depths: ``[S]`` greatest depth of each sample's tree.
        plan: how far their trees go on; ``None`` if the decider is asked before every level.
        rows: nodes that were added last, by their place in the grower's columns.
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
        """Most levels and the plan's ``next`` by sample."""
        assert self.plan is not None
        told = zip(self.samples, self.plan.levels, self.depths, self.plan.next, strict=True)
        return {sample: (min(levels, depth), following) for sample, levels, depth, following in told}

    def alike(self, context: DraftContext) -> int:
        """Returns how many samples of a batch each sample of the group stands for."""
        return 1 if self.pathwise else context.expected_batch

    def make_plan(self, context: DraftContext, decider: Decider, drafter: Drafter, lag: Sequence[int]) -> None:
        """Asks the decider for a plan; ``lag`` counts the committed tokens that the drafter has not read."""
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
    """Groups samples that are planned together, and plans each group.

    Drafts never change a pathwise text. Pathwise samples are therefore planned together and spend rows where they gain
    most. Those whose processors apply only a temperature form one group, the others form a second one. The text of any
    other sample depends on its drafts. It is planned alone, for an assumed batch of equal samples.
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
    """Converts a plan to plain numbers, for the samples at its places ``going``."""
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
    """Returns how tokens of S samples are drawn with shared noise; ``None`` if the noise is not shared."""
    noise = context.noise
    if not isinstance(noise, GumbelNoise):
        return None
    seeds = [source.seed if (source := noise.sources[sample]) else 0 for sample in samples]
    keys = np.array([seeds, [noise.lengths[sample] for sample in samples]], dtype=np.int64)
    temperatures = [context.temperature(sample) or 0.0 for sample in samples]
    return Draws(torch.from_numpy(keys[0]), torch.from_numpy(keys[1]), temperatures)


__all__ = ["DecisionGroup", "decision_groups", "draws_of", "growth_of"]
