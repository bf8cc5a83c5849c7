"""Grows the trees of a step within their limits, stage by stage; drops drafts that do not pay."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from arbordraft.deciders.base import Decider
from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.level_by_level import LevelByLevel
from arbordraft.drafters.one_call import grow_in_one_call, trees_of
from arbordraft.drafters.planning import plan
from arbordraft.drafters.stage import DeviceDrafts, Stage
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.trees.draft_tree import DraftTree, Proposal, Reals


def grow(
    context: DraftContext, decider: Decider, drafter: Drafter, state: Any, device: DeviceDrafts | None = None
) -> DraftTree:
    """Grows the trees of a step.

    The stages of a drafter propose one after another. A later stage drafts for a sample if the earlier ones proposed
    nothing, or less than it is expected to bring. This choice depends only on committed tokens.

    Args:
        context: the step.
        decider: decides how far trees go on.
        drafter: proposes children.
        state: the drafter's state for this batch.
        device: grows whole trees on a device; ``None`` if the target's steps have no fixed shapes.
    """
    return Growth(context, decider, drafter.stages(state), device).grown()


class Growth:
    """The growth of the trees of a step.

    Args:
        context: the step.
        decider: decides how far trees go on.
        stages: drafters with their states, in order.
        device: see :func:`grow`.

    Attributes:
        first: the stage of the first drafter, planned; its forest takes the trees of later ones.
    """

    def __init__(
        self,
        context: DraftContext,
        decider: Decider,
        stages: Sequence[tuple[Drafter, Any]],
        device: DeviceDrafts | None = None,
    ) -> None:
        first, *self._later = stages
        self.first = Stage(context, decider, *first, device)

    @property
    def whole(self) -> TreesToGrow | None:
        """The trees, if one call can grow all of them that grow at all; ``None`` if the host has to see some level."""
        stage = self.first
        if len(stage.groups) != 1 or self._later or stage.constrained:
            return None
        levels, topology = stage.limits.levels, stage.context.topology
        pruned = any(
            topology.levels[min(levels[sample], topology.max_depth)].stop - 1 > bound
            for sample, bound in stage.context.bounds.items()
        )
        return None if pruned else trees_of(stage, stage.groups[0])

    def grown(self) -> DraftTree:
        """Grows the trees of all stages to their end, and packs them."""
        first = self.first
        context, forest = first.context, first.forest
        _grow_stage(first)
        gains, drafted, read = first.gains() if self._later else None, dict(first.drafted), first.read
        for drafter, state in self._later:
            assert gains is not None
            waiting = self._waiting(drafter, state, gains)
            if not waiting:
                continue
            max_depth = [limit if sample in waiting else None for sample, limit in enumerate(context.max_depth)]
            drafts = forest.drafts
            rows = sum(int(drafts[sample]) + 1 for sample in context.alive if sample not in waiting)
            step = replace(context, max_depth=max_depth, extra_rows=context.extra_rows + rows)
            stage = Stage(step, first.decider, drafter, state, first.device)
            _grow_stage(stage)
            for kind, levels in stage.drafted.items():
                drafted[kind] = drafted.get(kind, 0) + levels
            read += stage.read
            found, better = stage.forest.drafts, stage.gains()
            taken = [sample for sample in sorted(waiting) if found[sample]]
            forest.take(stage.forest, taken)
            gains[taken] = better[taken]
        if forest.drafts.any():
            return replace(forest.rows(), drafted=drafted, read=read)
        tree = DraftTree.roots(context.topology, context.roots, Proposal(context.certain_law))
        return replace(tree, drafted=drafted, read=read)

    def _waiting(self, drafter: Drafter, state: Any, gains: Reals) -> set[int]:
        """Returns the samples for which a later drafter is expected to gain more tokens than the drafts so far."""
        context, drafts = self.first.context, self.first.forest.drafts
        waiting = {sample for sample in context.alive if not drafts[sample] and context.bounds.get(sample) != 0}
        if len(waiting) < len(context.alive):
            limits, _ = plan(context, self.first.decider, drafter, state)
            if limits.gains is not None:
                waiting |= {sample for sample in context.alive if gains[sample] < limits.gains[sample]}
        return waiting


def _grow_stage(stage: Stage) -> None:
    """Grows the trees of a stage to their end."""
    context, forest, limits = stage.context, stage.forest, stage.limits
    if limits.levels.any() and (lag := stage.drafter.lag(stage.state, context)):
        stage.read = sum(lag[sample] for sample in limits.levels.nonzero()[0].tolist())
    stage.add_candidates()
    stage.add_forced_tokens()
    left = [group for group in stage.groups if not grow_in_one_call(stage, group)]
    if len(left) == len(stage.groups):
        LevelByLevel(stage, limits).grow()
    elif left:
        levels = np.zeros_like(limits.levels)
        for group in left:
            levels[group.samples] = limits.levels[group.samples]
        LevelByLevel(stage, replace(limits, levels=levels)).grow()
    stage.drafter.proposed(stage.state)
    if limits.levels.any():
        present = (forest.token >= 0).any(axis=0)
        deepest = int(context.topology.depth_array[present].max())
        stage.drafted[type(stage.drafter).__name__] = min(deepest, int(limits.levels.max()))
    for sample, bound in context.bounds.items():
        samples, nodes, _ = stage.likeliest(np.array([sample]))
        forest.drop(samples[bound:], nodes[bound:])
    for number, group in enumerate(stage.groups):
        # Trees drawn at random are not trimmed: verification would no longer be lossless.
        if not group.asked and stage.law_of(group.samples[0]).deterministic:
            stage.trim(number, np.array(group.samples))


__all__ = ["Growth", "grow"]
