"""Grows the trees of one step: who drafts, how far, and what of it is kept.

Shapes: B samples, N nodes of the topology, R nodes of a level, V vocabulary.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Draw, Origin, Plan, Situation, StepView
from arbordraft.drafters.base import Drafter, Guesses, Predictions
from arbordraft.drafters.context import DraftContext, Level
from arbordraft.kernels.draft_tree import Draws, Growth, usable
from arbordraft.kernels.draft_tree.reference import going_on, reach_of
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import draft_scores
from arbordraft.trees.draft_tree import NO_ROWS, DraftTree, Proposal

Reals = npt.NDArray[np.float64]


def grow(context: DraftContext, decider: Decider, drafter: Drafter, state: Any) -> DraftTree:
    """The trees of a step.

    The stages of a drafter propose one after another: a later one for the samples for which the earlier ones proposed
    nothing, or less than it is expected to bring. Who drafts depends on committed tokens alone.

    Args:
        context: the step.
        decider: how far trees go on.
        drafter: proposes them.
        state: the drafter's, of this batch.
    """
    first, *others = drafter.stages(state)
    tree = TreeGrower(context, decider, *first).grow()
    for part, own in others:
        waiting = _waiting(context, decider, part, own, tree)
        if not waiting:
            continue
        taking = [limit if sample in waiting else None for sample, limit in enumerate(context.max_depth)]
        rows = sum(length for sample, length in enumerate(tree.lengths) if sample not in waiting)
        step = replace(context, max_depth=taking, extra_rows=context.extra_rows + rows)
        other = TreeGrower(step, decider, part, own).grow()
        better = [sample for sample in other.living if other.lengths[sample] > 1]
        if better:
            tree = DraftTree.joined([tree.without(better), other.take(better)])
    return tree


def _waiting(context: DraftContext, decider: Decider, drafter: Drafter, state: Any, tree: DraftTree) -> set[int]:
    """The samples for which another drafter is expected to bring more than what was proposed."""
    waiting = {sample for sample in tree.living if tree.lengths[sample] == 1}
    if len(waiting) < len(tree.living):
        for group in _groups(context, drafter, state):
            plan = group.plan(context, decider, drafter)
            for sample, gain in zip(group.samples, plan.gains if plan else (), strict=False):
                if tree[sample].proposal.gain < gain:
                    waiting.add(sample)
    return waiting


def _groups(context: DraftContext, drafter: Drafter, state: Any) -> list["_Group"]:
    """The samples that decide together.

    What is drafted never changes a pathwise text: such samples decide together and spend their rows where they gain
    most, those that can be told in numbers and those whose processors have to be asked each for themselves. The text of
    any other depends on what is verified: it decides alone, for a batch of its like.
    """
    told: dict[bool, list[int]] = {True: [], False: []}
    alone: list[int] = []
    for sample in context.alive:
        if context.pathwise(sample):
            told[context.temperature(sample) is not None].append(sample)
        else:
            alone.append(sample)
    depths, lag = drafter.depths(state, context), drafter.lag(state, context)
    number = len(context.alive)
    groups = [_Group(own, kind, True, number - len(own)) for kind, own in told.items() if own]
    groups += [_Group([sample], False, False, 0) for sample in alone]
    for group in groups:
        group.depths = [depths[sample] for sample in group.samples]
        group.lag = [lag[sample] for sample in group.samples] if lag else []
    return groups


@dataclass
class _Group:
    """Some samples that decide together.

    Args:
        samples: their numbers.
        told: whether numbers say all that their processors do to draft scores.
        pathwise: whether their texts do not depend on what is drafted.
        beside: samples that decide in other groups, each of which has a row at least.
        depths: greatest depth of each one's tree.
        lag: committed tokens that the drafter has not read; none if empty.
    """

    samples: list[int]
    told: bool
    pathwise: bool
    beside: int
    depths: Sequence[int] = ()
    lag: Sequence[int] = ()

    def alike(self, context: DraftContext) -> int:
        """Samples that each of them stands for."""
        return 1 if self.pathwise else context.expected_batch

    def plan(self, context: DraftContext, decider: Decider, drafter: Drafter) -> Plan | None:
        """How far their trees go on; ``None`` if the decider wants to be asked before every level."""
        if context.resting and self.pathwise:
            return Plan.everything([0] * len(self.samples))
        if not decider.can_plan:
            return None
        return decider.plan(
            Situation(
                [min(depth, context.topology.max_depth) for depth in self.depths],
                [context.samples[sample].memory for sample in self.samples],  # type: ignore[union-attr]
                self.alike(context),
                type(drafter).__name__,
                drafter.acceptance,
                drafter.free,
                self.lag,
                [depth + 1 for depth in self.depths] if context.fixed_batch else [],
                context.extra_rows + self.beside if self.pathwise else 0,
            )
        )


class TreeGrower:
    """The trees of one step while they grow: columns by sample and node of the topology.

    Args:
        context: the step.
        decider: how far they go on.
        drafter: proposes children.
        state: the drafter's.
    """

    def __init__(self, context: DraftContext, decider: Decider, drafter: Drafter, state: Any) -> None:
        self.context, self.decider, self.drafter, self.state = context, decider, drafter, state
        topology = context.topology
        shape = len(context.max_depth), topology.num_nodes
        self.law = drafter.law(context.law)
        self.groups = _groups(context, drafter, state)
        self.plans = [group.plan(context, decider, drafter) for group in self.groups]
        self.tokens = np.full(shape, -1, dtype=np.int64)
        self.chances, self.reach = np.zeros(shape), np.zeros(shape)
        self.certain = np.zeros(shape, dtype=np.bool_)
        self.trust = np.ones((shape[0], topology.max_depth or 1))
        self._draft_row = np.full(shape, -1, dtype=np.int64)
        self._draft_rows: list[Tensor] = []
        self._ended: set[int] = set()
        asked = [group for group, plan in zip(self.groups, self.plans, strict=True) if plan is None]
        # How every node's path came about, for deciders that are asked.
        self._paths: dict[tuple[int, int], tuple[Draw, ...]] = {
            (sample, 0): () for group in asked for sample in group.samples
        }
        alive = context.alive
        self.tokens[alive, 0] = [context.tokens(sample)[-1] for sample in alive]
        self.reach[alive, 0] = 1.0
        for group, plan in zip(self.groups, self.plans, strict=True):
            if plan is not None:
                self.trust[group.samples] = _by_depth(plan.trust, self.trust.shape[1])
                if plan.weights:
                    self.reach[group.samples, 0] = plan.weights

    def law_of(self, sample: int) -> Any:
        """How a sample's children are chosen."""
        greedy = self.context.samples[sample].greedy  # type: ignore[union-attr]
        return self.context.greedy_law if greedy and not self.drafter.certain else self.law

    def grow(self) -> DraftTree:
        """Grows them to their end."""
        self._add_candidates()
        if self.drafter.certain:
            self._add_forced_tokens()
        left = [
            index
            for index, (group, plan) in enumerate(zip(self.groups, self.plans, strict=True))
            if not (group.told and plan is not None and self._grown_in_one_call(group, plan))
        ]
        for depth in range(self.context.topology.max_depth if left else 0):
            level = self._level(left, depth)
            if not level.frontier:
                break
            proposed = self.drafter.propose(self.state, level)
            if isinstance(proposed, Tensor):
                proposed = Predictions(proposed)
            if isinstance(proposed, Predictions):
                self._take_predictions(level, proposed)
            else:
                self._take_guesses(level, proposed)
        self.drafter.proposed(self.state)
        return self._tree()

    # What stands before a model is asked

    def _add_candidates(self) -> None:
        for sample, given in enumerate(self.context.candidates or ()):
            if given is not None and self.tokens[sample, 0] >= 0:
                tokens, row = given
                origin = Origin(partial(_same, row))
                self._add_children(sample, 0, 0, tokens, row[tokens].tolist(), origin)

    def _add_forced_tokens(self) -> None:
        """Gives every root the tokens that have to follow it, as far as the topology's first path goes.

        They wait for no plan, and no plan gives them up: the target has to read them in any case.
        """
        child_list = self.context.topology.child_list
        for sample in self.context.alive:
            state = self.context.samples[sample].path_state  # type: ignore[union-attr]
            if state is None:
                continue
            node, path = 0, list[int]()
            for depth in range(self.context.max_depth[sample] or 0):
                allowed = state.allowed(path)
                if not child_list[node] or allowed is None or allowed.only is None:
                    break
                self._add_children(sample, node, depth, [allowed.only], [1.0], Origin())
                node, path = child_list[node][0], [*path, allowed.only]

    # In one call

    def _grown_in_one_call(self, group: _Group, plan: Plan) -> bool:
        """Has whole trees grown by kernels or in fixed shapes, if they can be."""
        context = self.context
        if context.candidates is not None or not (context.static or usable()):
            return False
        going = [place for place, most in enumerate(plan.levels) if most > 0 and group.depths[place]]
        if not going:
            return not any(plan.levels)
        samples = [group.samples[place] for place in going]
        growth = _growth(context, plan, group, going)
        drafted = self.drafter.propose_trees(self.state, context, samples, growth, _draws(context, samples))
        if drafted is None:
            return False
        if drafted.broken:
            _warn_of_broken_rows()
        if len(drafted.nodes):
            owner, node, token = drafted.nodes
            owner = np.asarray(samples)[owner]
            self.tokens[owner, node], self.chances[owner, node] = token, drafted.chances
            self._reach_below(samples)
        return True

    def _reach_below(self, samples: Sequence[int]) -> None:
        """The reach of all nodes of some samples, level by level."""
        topology = self.context.topology
        rows = np.asarray(samples)[:, None]
        for depth, level in enumerate(topology.levels[1:]):
            nodes = slice(level.start, level.stop)
            if not (self.tokens[samples, nodes] >= 0).any():
                break
            above = self.reach[rows, topology.parent_array[nodes]]
            self.reach[samples, nodes] = reach_of(above, self.trust[samples, depth, None], self.chances[samples, nodes])

    # Level by level

    def _level(self, groups: Sequence[int], depth: int) -> Level:
        """The nodes at ``depth`` that get children, of all samples that go on."""
        frontier: dict[int, list[int]] = {}
        for index in groups:
            group, plan = self.groups[index], self.plans[index]
            living = self._living(group, depth)
            chosen = self._asked(group, living, depth) if plan is None else self._planned(group, plan, living, depth)
            self._ended |= living.keys() - chosen.keys()
            frontier |= chosen
        return Level(self.context, depth, frontier, self.tokens)

    def _living(self, group: _Group, depth: int) -> dict[int, list[int]]:
        """The nodes at ``depth``, for every sample of a group that goes on and has some."""
        level = self.context.topology.levels[depth]
        living = {}
        for sample, most in zip(group.samples, group.depths, strict=True):
            if sample not in self._ended and depth < most:
                here = np.flatnonzero(self.tokens[sample, level.start : level.stop] >= 0)
                if len(here):
                    living[sample] = (here + level.start).tolist()
        return living

    def _fertile(self, nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if self.context.topology.child_list[node]]

    def _planned(
        self, group: _Group, plan: Plan, living: dict[int, list[int]], depth: int
    ) -> dict[int, list[int]]:
        """Those of the living nodes that gain more than they take, if together they are worth a level."""
        kept = [place for place, sample in enumerate(group.samples) if sample in living and depth < plan.levels[place]]
        if not kept:
            return {}
        samples = [group.samples[place] for place in kept]
        nodes = self.context.topology.inner[depth]
        reach = self.reach[np.ix_(samples, nodes)]
        alive = self.tokens[np.ix_(samples, nodes)] >= 0
        following = _by_depth([plan.next[place] for place in kept], depth + 1)[:, depth, None]
        prunes = self.law_of(samples[0]).deterministic
        drafts = self.reach[group.samples, 1:] if plan.budget and prunes else None
        going = going_on(
            reach,
            alive,
            following,
            row=plan.row,
            level=plan.level / group.alike(self.context),
            drafts=drafts,
            budget=plan.budget or 0,
            prunes=prunes,
        )
        chosen = {sample: nodes[own].tolist() for sample, own in zip(samples, going, strict=True)}
        return {sample: own for sample, own in chosen.items() if own}
