"""Asks the decider how far the trees of a step go on.

Shapes: B samples, S samples of a group.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Limits, Situation
from arbordraft.drafters.base import Drafter, Lookup
from arbordraft.drafters.context import DraftContext


class Group(NamedTuple):
    """Samples of a step that a decider plans together.

    Args:
        samples: numbers of the S samples.
        pathwise: whether drafts cannot change their texts.
        asked: whether the decider is asked before every level, instead of once.
    """

    samples: list[int]
    pathwise: bool
    asked: bool = False


def plan(context: DraftContext, decider: Decider, drafter: Drafter, state: Any) -> tuple[Limits, list[Group]]:
    """Asks the decider how far the trees of a step go on.

    Drafts never change a pathwise text. Pathwise samples are therefore planned together and spend rows where they gain
    most. The text of any other sample depends on its drafts. It is planned alone, for an assumed batch of equal
    samples.

    Returns:
        The limits of all B samples, and the groups, in the order of their numbers in the limits.

    Raises:
        ValueError: if the decider plans for another number of samples.
    """
    alive = context.alive
    together = [sample for sample in alive if context.pathwise(sample)]
    groups = [Group(together, True)] if together else []
    groups += [Group([sample], False) for sample in alive if not context.pathwise(sample)]
    depths, lag = drafter.depths(state, context), drafter.lag(state, context)
    bounded = _within_bounds(context, drafter, depths)
    idle = drafter.max_levels == 0
    found: list[Limits] = []
    for number, (samples, pathwise, _) in enumerate(groups):
        own = [bounded[sample] for sample in samples]
        if idle or (context.resting and pathwise):
            found.append(Limits.everything([0] * len(samples)))
        elif decider.can_plan:
            most = context.topology.max_depth
            limits = decider.plan(
                Situation(
                    max_depth=[min(depth, most) for depth in own],
                    memory=[context[sample].memory for sample in samples],
                    alike=1 if pathwise else context.expected_batch,
                    source=type(drafter).__name__,
                    acceptance=drafter.acceptance,
                    free=isinstance(drafter, Lookup),
                    lag=[lag[sample] for sample in samples] if lag else (),
                    left=[depths[sample] + 1 for sample in samples] if context.fixed_batch else (),
                    remaining=[(context.max_depth[sample] or 0) + 1 for sample in samples] if lag else (),
                    emitted=[len(context.tokens(sample)) - context[sample].prompt for sample in samples] if lag else (),
                    extra_rows=context.extra_rows + len(alive) - len(samples) if pathwise else 0,
                    informative=drafter.informative,
                    drafts=len(samples) * (context.topology.num_nodes - 1),
                    pathwise=pathwise and context.candidates is None,
                )
            )
            if len(limits.levels) != len(samples):
                raise ValueError(f"{decider} must plan for {len(samples)} samples, planned for {len(limits.levels)}")
            if (limits.levels > own).any():
                limits = replace(limits, levels=np.minimum(limits.levels, own))
            found.append(limits)
        else:
            found.append(Limits.everything(own))
            groups[number] = groups[number]._replace(asked=True)
    return _joined(context, groups, found), groups


def _within_bounds(context: DraftContext, drafter: Drafter, depths: Sequence[int]) -> Sequence[int]:
    """Returns the depths of B trees, lowered as far as the samples' own bounds on drafts require.

    Trees that are drawn at random are not pruned. So all nodes of their deepest level fit into the bound. Of other
    trees the likeliest drafts are kept.
    """
    if not context.bounds:
        return depths
    found = list(depths)
    for sample, bound in context.bounds.items():
        if not context.law_of(sample, drafter.certain).deterministic:
            bound = sum(level.stop - 1 <= bound for level in context.topology.levels[1:])
        found[sample] = min(found[sample], bound)
    return found


def _joined(context: DraftContext, groups: Sequence[Group], found: Sequence[Limits]) -> Limits:
    """Returns the limits of all B samples; those that take no part draft nothing."""
    count = len(context.max_depth)
    if len(groups) == 1 and groups[0].samples == list(range(count)) and groups[0].pathwise:  # nearly always
        (limits,) = found
        if limits.calibration.shape == limits.expected.shape:
            return limits
    known = max((max(part.calibration.shape[1], part.expected.shape[1]) for part in found), default=1)
    limits = Limits(
        levels=np.zeros(count, dtype=np.int64),
        calibration=np.ones((count, known)),
        expected=np.ones((count, known)),
        weight=np.full(count, -1.0),
        level_cost=np.zeros((count, 1)),
        row_cost=np.zeros((count, 1)),
        budget=[part.budget for part in found],
        verification=[part.verification for part in found],
        gains=np.full(count, -np.inf),
        group=np.zeros(count, dtype=np.int64),
        whole=np.zeros((count, 1), dtype=np.bool_),
    )
    for number, (group, part) in enumerate(zip(groups, found, strict=True)):
        samples = group.samples
        limits.levels[samples], limits.weight[samples], limits.group[samples] = part.levels, part.weight, number
        for name in ("calibration", "expected"):
            own = getattr(part, name)
            getattr(limits, name)[samples] = own[:, np.minimum(np.arange(known), own.shape[1] - 1)]
        limits.level_cost[samples] = part.level_cost / (1 if group.pathwise else context.expected_batch)
        limits.row_cost[samples] = part.row_cost
        if part.gains is not None:
            limits.gains[samples] = part.gains
    return limits


__all__ = ["Group", "plan"]
