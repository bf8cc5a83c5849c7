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
from arbordraft.kernels.draft_tree.reference import fits, gains, growing, growing_whole, reach_below
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.sampling.owned_rows import draft_scores
from arbordraft.trees.draft_tree import NO_ROWS, DraftTree, Proposal

Reals = npt.NDArray[np.float64]

_NOTHING = Origin()  # children that were drawn from no row


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
        levels = [
            index
            for index, (group, plan) in enumerate(zip(self.groups, self.plans, strict=True))
            if not (group.told and plan is not None and self._grown_in_one_call(group, plan))
        ]
        for depth in range(self.context.topology.max_depth if levels else 0):
            level = self._level(levels, depth)
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
                self._add_children(sample, 0, tokens, row[tokens].tolist(), origin)
                self._find_reach([sample], 1)

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
                self._add_children(sample, node, [allowed.only], [1.0])
                self._find_reach([sample], depth + 1)
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
            for depth in range(1, int(context.topology.depth_array[node].max()) + 1):
                self._find_reach(samples, depth)
        return True

    def _find_reach(self, samples: Sequence[int], depth: int) -> None:
        """The reach of the nodes of a depth, given that of those above."""
        level = self.context.topology.levels[depth]
        here = np.ix_(samples, level)
        above = self.reach[np.ix_(samples, self.context.topology.parent_array[level.start : level.stop])]
        below = reach_below(above, self.trust[samples, depth - 1, None], self.chances[here])
        self.reach[here] = np.where(self.certain[here], above, below)

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

    def _planned(self, group: _Group, plan: Plan, living: dict[int, list[int]], depth: int) -> dict[int, list[int]]:
        """Those of the living nodes that gain more than they take, if together they are worth a level."""
        kept = [place for place, sample in enumerate(group.samples) if sample in living and depth < plan.levels[place]]
        if not kept:
            return {}
        samples = [group.samples[place] for place in kept]
        nodes = self.context.topology.inner[depth]
        places = np.ix_(samples, nodes)
        reach, able = self.reach[places], self.tokens[places] >= 0
        following = _by_depth([plan.next[place] for place in kept], depth + 1)[:, depth, None]
        gain, level = gains(reach, following, plan.row), plan.level / group.alike(self.context)
        if not self.law_of(samples[0]).deterministic:
            going = growing_whole(gain, able, level)
        else:
            if plan.budget:
                able &= fits(reach, self._drafts(group), plan.budget)
            going = growing(gain, able, level)
        chosen = {sample: nodes[own].tolist() for sample, own in zip(samples, going, strict=True)}
        return {sample: own for sample, own in chosen.items() if own}

    def _drafts(self, group: _Group) -> Reals:
        """The reach of all drafts of a group."""
        rows = self.tokens[group.samples, 1:] >= 0
        drafts: Reals = self.reach[group.samples, 1:][rows]
        return drafts

    def _asked(self, group: _Group, living: dict[int, list[int]], depth: int) -> dict[int, list[int]]:
        """Those of the living nodes for whose samples the decider says so."""
        if not living:
            return {}
        alike = group.alike(self.context)
        view = StepView(
            depth,
            paths=[[self._paths[sample, node] for node in nodes] for sample, nodes in living.items()],
            memory=[self.context.samples[sample].memory for sample in living],  # type: ignore[union-attr]
            pathwise=group.pathwise,
            batch=len(group.samples) * alike,
            planned=int((self.tokens[group.samples] >= 0).sum()) * alike,
            alike=alike,
            source=type(self.drafter).__name__,
            acceptance=self.drafter.acceptance,
        )
        answers = self.decider(view)
        if len(answers) != len(living):
            raise ValueError(f"{self.decider} must say of each of {len(living)} samples, said {len(answers)}")
        going = {sample: nodes for (sample, nodes), goes_on in zip(living.items(), answers, strict=True) if goes_on}
        return {sample: fertile for sample, nodes in going.items() if (fertile := self._fertile(nodes))}

    def _take_guesses(self, level: Level, guesses: Guesses) -> None:
        """Gives nodes children that the drafter chose itself."""
        for (sample, node), (tokens, chances) in zip(level.places, guesses, strict=True):
            self._add_children(sample, node, tokens, chances)
        self._find_reach(list(level.frontier), level.depth + 1)

    def _take_predictions(self, level: Level, predicted: Predictions) -> None:
        """Gives nodes the most probable children, or draws them."""
        context, places = self.context, level.places
        owners: Any = [context.samples[sample] for sample, _ in places]
        scores = draft_scores(predicted.logits, owners, level.path, untruncated=context.shared)
        if isinstance(context.noise, GumbelNoise):
            scores = context.noise.perturb(scores, [(sample, level.depth) for sample, _ in places])
        laws = [self.law_of(sample) for sample, _ in places]
        drawn = [row for row, law in enumerate(laws) if not law.deterministic]
        most = 1 if len(drawn) == len(places) else self.law.k
        likeliest, chances = tree_expand(scores, min(most, scores.shape[1]))
        tops, odds = likeliest.tolist(), chances.exp().tolist()
        sound = [math.isfinite(values[0]) for values in odds]
        # Processors may leave no token behind a draft; whether that is an error, the target's own row says.
        if not all(sound) and not predicted.logits.amax(dim=1).isfinite().all():
            _warn_of_broken_rows()
        rows = dict(zip(drawn, scores[drawn].softmax(dim=-1), strict=True)) if drawn else {}
        hidden = predicted.hidden
        for row, (sample, node) in enumerate(places):
            if not sound[row] or (node == 0 and context.candidates is not None):
                continue
            children = context.topology.child_list[node]
            if row in rows:
                draft = rows[row]
                uniforms = context.noise.draft[sample, list(children)].tolist()  # type: ignore[union-attr]
                tokens = laws[row].narrow(len(children)).draw(draft, uniforms)
                confidence = draft[tokens].tolist()
                self._draft_row[sample, node] = len(self._draft_rows)
                self._draft_rows.append(draft)
            else:
                possible = sum(chance > 0 for chance in odds[row])
                tokens, confidence = tops[row][:possible][: len(children)], odds[row]
            origin = (
                Origin(partial(_probabilities, scores, row), None if hidden is None else hidden[row])
                if self._paths
                else _NOTHING
            )
            self._add_children(sample, node, tokens, confidence, origin)
        self._find_reach(list(level.frontier), level.depth + 1)

    def _add_children(
        self,
        sample: int,
        node: int,
        tokens: Sequence[int],
        confidence: Sequence[float],
        origin: Origin = _NOTHING,
    ) -> None:
        """Gives a node its children, fewer than planned if there are fewer tokens.

        Of tokens that were not drawn at random those that constraints forbid are left out.
        """
        children = self.context.topology.child_list[node]
        state = self.context.samples[sample].path_state  # type: ignore[union-attr]
        if state is not None and self.law_of(sample).deterministic:
            allowed = state.allowed(self.tokens[sample, self.context.topology.path(node)[1:]].tolist())
            if allowed is not None:
                kept = [pair for pair in zip(tokens, confidence, strict=False) if pair[0] in allowed]
                tokens, confidence = [token for token, _ in kept], [chance for _, chance in kept]
                if allowed.only is not None and kept:
                    self.certain[sample, children[0]] = True
        path = self._paths.get((sample, node))
        for child, token, chance in zip(children, tokens, confidence, strict=False):
            self.tokens[sample, child], self.chances[sample, child] = token, chance
            if path is not None:
                self._paths[sample, child] = (*path, Draw(chance, origin))

    # The result

    def _tree(self) -> DraftTree:
        """The result; every sample that takes part has at least its root."""
        for group, plan in zip(self.groups, self.plans, strict=True):
            # Of what was drawn at random nothing is given up.
            if plan is not None and self.law_of(group.samples[0]).deterministic:
                self._trim(group, plan)
        topology = self.context.topology
        owner, node = np.nonzero(self.tokens >= 0)
        place = np.full(self.tokens.shape, -1, dtype=np.int64)
        place[owner, node] = np.arange(len(node))
        source, gains_of = type(self.drafter).__name__, self._gains()
        alive = set(self.context.alive)
        return DraftTree(
            topology,
            [
                Proposal(self.law_of(sample), source, gains_of[sample]) if sample in alive else None
                for sample in range(len(self.tokens))
            ],
            np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(self.tokens)))]).tolist(),
            self.tokens[owner, node],
            node,
            np.where(node > 0, place[owner, topology.parent_array[node]], -1),
            topology.depth_array[node],
            self.chances[owner, node],
            self.certain[owner, node],
            self._draft_row[owner, node],
            torch.stack(self._draft_rows) if self._draft_rows else NO_ROWS,
        )

    def _gains(self) -> list[float]:
        """What every sample's drafts are expected to bring, less what their rows could bring elsewhere."""
        drafts = self.tokens[:, 1:] >= 0
        worth = np.where(drafts, self.reach[:, 1:], 0.0)
        for group, plan in zip(self.groups, self.plans, strict=True):
            if plan is not None and plan.row:
                # The rows of a trunk have to be computed sooner or later.
                worth[group.samples] -= plan.row * (drafts & ~self._trunk)[group.samples]
        return worth.sum(axis=1).tolist()  # type: ignore[no-any-return]

    @property
    def _trunk(self) -> "npt.NDArray[np.bool_]":
        """``[B, N - 1]`` the nodes that are certain to be accepted."""
        trunk = self.certain.copy()
        if trunk.any():
            parents = self.context.topology.parent_list
            for node in range(1, trunk.shape[1]):
                if parents[node]:
                    trunk[:, node] &= trunk[:, parents[node]]
        return trunk[:, 1:]

    def _trim(self, group: _Group, plan: Plan) -> None:
        """Gives up the drafts that are too unlikely to be worth their rows."""
        # Parents stand before their children: both the chance, which cannot rise, and the node agree on that.
        place, node = np.nonzero(self.tokens[group.samples, 1:] >= 0)
        samples = np.asarray(group.samples)[place]
        trunk, reach = self._trunk[samples, node], self.reach[samples, node + 1]
        order = np.lexsort((samples, node, -reach, ~trunk))
        kept = max(plan.keep(reach[order].tolist()), int(trunk.sum()))
        lost = samples[order[kept:]], node[order[kept:]] + 1
        self.tokens[lost], self.chances[lost], self.certain[lost] = -1, 0.0, False


def _growth(context: DraftContext, plan: Plan, group: _Group, going: Sequence[int]) -> Growth:
    """The plan for the samples that stand at ``going`` in it."""
    told = [(plan.trust[place], plan.next[place]) for place in going]
    depths = range(max(len(factors) for row in told for factors in row))
    return Growth(
        context.topology.child_offsets,
        context.topology.child_order,
        [min(plan.levels[place], group.depths[place]) for place in going],
        [trust[min(depth, len(trust) - 1)] for trust, _ in told for depth in depths],
        [following[min(depth, len(following) - 1)] for _, following in told for depth in depths],
        [plan.weights[place] for place in going] if plan.weights else [1.0] * len(going),
        plan.level,
        plan.row,
        -1 if plan.budget is None else plan.budget,
    )


def _draws(context: DraftContext, samples: Sequence[int]) -> Draws | None:
    noise = context.noise
    if not isinstance(noise, GumbelNoise):
        return None
    seeds = torch.tensor([source.seed if (source := noise.sources[sample]) else 0 for sample in samples])
    positions = torch.tensor([noise.lengths[sample] for sample in samples])
    return Draws(seeds, positions, [context.temperature(sample) or 0.0 for sample in samples])


def _by_depth(factors: Sequence[Sequence[float]], depths: int) -> Reals:
    """``[S, depths]`` factors by depth, of which the last ones stand for all that are deeper."""
    known = min(depths, max(map(len, factors)))
    table = np.array([[row[min(depth, len(row) - 1)] for depth in range(known)] for row in factors])
    return table if known == depths else np.pad(table, ((0, 0), (0, depths - known)), mode="edge")


def _probabilities(scores: Tensor, row: int) -> Tensor:
    return scores[row].softmax(dim=-1)


def _same(row: Tensor) -> Tensor:
    return row


def _warn_of_broken_rows() -> None:
    warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)


__all__ = ["TreeGrower", "grow"]
