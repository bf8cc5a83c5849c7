"""A drafter's part in the trees of a step: the trees so far, their limits, and all that is known before it drafts.

Shapes: B samples.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Origin
from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.network import DraftNetwork
from arbordraft.drafters.planning import plan
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.kernels.draft_tree import reference as rule
from arbordraft.sampling.laws import DraftLaw
from arbordraft.trees.draft_tree import Ints, Proposal, Reals
from arbordraft.trees.forest import Forest

DeviceDrafts = Callable[[Drafter, Any, DraftContext, DraftNetwork, TreesToGrow], int]
"""Grows the trees of a step on a device, all levels in one run; returns the number of rows of scores that are no
numbers. Called with a drafter, its state, the step, the drafter's network and the trees."""


class Stage:
    """Trees that one drafter grows in a step, planned.

    Args:
        context: the step.
        decider: decides how far trees go on.
        drafter: proposes children.
        state: the drafter's state for this batch.
        device: grows whole trees on a device; ``None`` if the target's steps have no fixed shapes.

    Attributes:
        forest: the trees so far.
        limits: how far they go on.
        groups: samples that are planned together, by their number in the limits.
        law: law of the children of samples that draw.
        random: whether children are drawn at random.
        ranked: expected acceptance of a drafter's tokens by rank, if its draft probabilities do not tell it.
        constrained: whether some sample has stateful processors.
        origins: for deciders that are asked, the draft row that the children of a node were drawn from.
        drafted: levels that the drafter drafted, by its kind.
        read: committed tokens that the drafter reads first.
    """

    def __init__(
        self,
        context: DraftContext,
        decider: Decider,
        drafter: Drafter,
        state: Any,
        device: DeviceDrafts | None = None,
    ) -> None:
        self.context, self.decider, self.drafter, self.state, self.device = context, decider, drafter, state, device
        self.law = context.certain_law if drafter.certain else context.law
        self.limits, self.groups = plan(context, decider, drafter, state)
        proposals: list[Proposal | None] = [None] * len(context.max_depth)
        source = type(drafter).__name__
        for sample in context.alive:
            law = self.law_of(sample)
            proposals[sample] = Proposal(law, source)
            if not law.deterministic:  # such a tree is ended, not pruned
                self.limits.whole[sample] = True
                self.limits.budget[self.limits.group[sample]] = -1
        self.forest = Forest.of_roots(context.topology, context.roots, proposals)
        self.forest.reach[:, 0] = self.limits.weight
        self.ranked = None if drafter.informative else np.array(drafter.acceptance)
        self.random = not self.law.deterministic
        self.constrained = any(context[sample].path_state is not None for sample in context.alive)
        self.origins: dict[tuple[int, int], Origin] | None = {} if any(group.asked for group in self.groups) else None
        self.drafted: dict[str, int] = {}
        self.read = 0

    def law_of(self, sample: int) -> DraftLaw:
        """Returns the law of a sample's children."""
        return self.context.law_of(sample, self.drafter.certain)

    def gains(self) -> Reals:
        """Returns ``[B]`` expected tokens from every sample's drafts, less the price of their rows."""
        forest = self.forest
        worth = forest.reach - self.limits.row_cost * ~forest.trunk  # the target must read the trunk in any case
        gains: Reals = (worth * (forest.token >= 0))[:, 1:].sum(axis=1)
        return gains

    def add_candidates(self) -> None:
        """Adds the children of roots that the step brings along."""
        context = self.context
        for sample in context.alive if context.candidates is not None else ():
            assert context.candidates is not None
            if (given := context.candidates[sample]) is not None:
                tokens, row = given
                state, allowed = context[sample].path_state, None
                if state is not None and self.law_of(sample).deterministic:
                    allowed = state.allowed([])
                tokens = [token for token in tokens if allowed is None or token in allowed]
                self._prefill(sample, 0, tokens, row[tokens].tolist(), allowed is not None and allowed.only is not None)
                if self.origins is not None:
                    self.origins[sample, 0] = Origin(partial(_same, row))

    def add_forced_tokens(self) -> None:
        """Adds the forced tokens after every root, along the topology's first path.

        No plan delays or drops them, because the target must read them in any case.
        """
        child_list = self.context.topology.child_list
        for sample in self.context.alive:
            state = self.context[sample].path_state
            if state is None or not (self.drafter.certain or self.context.pathwise(sample)):
                continue  # further drafts would change the text of a seed
            node, path = 0, list[int]()
            most = self.context.max_depth[sample] or 0
            for _ in range(min(most, self.context.bounds.get(sample, most))):
                allowed = state.allowed(path)
                if allowed is None or allowed.only is None or not child_list[node]:
                    break
                self._prefill(sample, node, [allowed.only], [1.0], forced=True)
                node = child_list[node][0]
                path = [*path, allowed.only]

    def _prefill(self, sample: int, node: int, tokens: Sequence[int], chances: Sequence[float], forced: bool) -> None:
        """Adds children of a node before the drafter proposes any; ``forced`` if constraints allow only the first."""
        forest, topology = self.forest, self.context.topology
        calibration = float(self.limits.calibration_at(topology.depth_list[node])[sample, 0])
        if self.ranked is not None:
            chances = self.ranked[np.arange(len(tokens)).clip(max=len(self.ranked) - 1)].tolist()
        for child, token, chance in zip(topology.child_list[node], tokens, chances, strict=False):
            forest.token[sample, child], forest.chance[sample, child] = token, chance
            likely = 1.0 if forced else min(1.0, calibration * chance)
            forest.certain[sample, child], forced = forced, False
            forest.reach[sample, child] = forest.reach[sample, node] * likely
            forest.prefilled = True

    def trim(self, number: int, samples: Ints) -> None:
        """Drops the drafts of a group that are too unlikely to be worth their rows."""
        forest, limits = self.forest, self.limits
        budget, verification = limits.price_of(number)
        if budget < 0 and verification is None:
            return
        samples, nodes, trunk = self.likeliest(samples)
        if len(nodes):
            kept = max(rule.number_kept(forest.reach[samples, nodes], budget, verification), trunk)
            forest.drop(samples[kept:], nodes[kept:])

    def likeliest(self, samples: Ints) -> tuple[Ints, Ints, int]:
        """Returns samples and nodes of the drafts of some samples, the likeliest first, and the size of the trunk.

        The trunk comes first. Every parent comes before its children.
        """
        forest = self.forest
        places, nodes = (forest.token[samples, 1:] >= 0).nonzero()
        samples, nodes = samples[places], nodes + 1
        trunk = forest.trunk[samples, nodes]
        # The reach never rises along a path, and equal reaches sort by node.
        order = np.lexsort((samples, nodes, -forest.reach[samples, nodes], ~trunk))
        return samples[order], nodes[order], int(trunk.sum())


def _same(row: Tensor) -> Tensor:
    return row


__all__ = ["DeviceDrafts", "Stage"]
