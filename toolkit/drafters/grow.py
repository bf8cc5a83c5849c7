"""Grows the trees of a step within their limits: asks the drafter for predictions, drops drafts that do not pay.

Shapes: B samples, S samples that draft, R nodes of a depth that get children, n nodes of a depth that may have some, K
children at most, V vocabulary.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Draw, Origin, StepView
from arbordraft.drafters.base import Drafter, Predictions
from arbordraft.drafters.children import Children, children_of
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.network import DraftNetwork
from arbordraft.drafters.planning import Group, plan
from arbordraft.kernels.draft_tree import Corrections, Draws, Limits, TreesToGrow, usable
from arbordraft.kernels.draft_tree import reference as rule
from arbordraft.kernels.draft_tree.rule import HostRule
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import draft_scores
from arbordraft.trees.draft_tree import DraftTree, Flags, Ints, Proposal, Reals, check_drawn
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import TreeLevel

_NO_ORIGIN = Origin()  # of children without a draft row
_CERTAIN = 1e9  # a calibration whose product with any probability counts as 1


DeviceDrafts = Callable[[Drafter, Any, DraftContext, DraftNetwork, TreesToGrow], int]
"""Grows the trees of a step on a device, all levels in one run; returns the number of rows of scores that are no
numbers. Called with a drafter, its state, the step, the drafter's network and the trees."""


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
    """The growth of the trees of a step, planned for the first of a drafter's stages.

    Args:
        context: the step.
        decider: decides how far trees go on.
        stages: drafters with their states, in order.
        device: see :func:`grow`.

    Attributes:
        forest: the trees so far.
        limits: how far they go on.
        groups: samples that are planned together, by their number in the limits.
    """

    def __init__(
        self,
        context: DraftContext,
        decider: Decider,
        stages: Sequence[tuple[Drafter, Any]],
        device: DeviceDrafts | None = None,
    ) -> None:
        (drafter, state), *self._later = stages
        self.context, self.decider, self.drafter, self.state, self.device = context, decider, drafter, state, device
        self.law = context.greedy_law if drafter.certain else context.law
        self.limits, self.groups = plan(context, decider, drafter, state)
        tokens: list[int | None] = [None] * len(context.max_depth)
        proposals: list[Proposal | None] = [None] * len(tokens)
        source = type(drafter).__name__
        for sample in context.alive:
            tokens[sample] = context.tokens(sample)[-1]
            law = self.law_of(sample)
            proposals[sample] = Proposal(law, source)
            if not law.deterministic:  # such a tree is ended, not pruned
                self.limits.whole[sample] = True
                self.limits.budget[self.limits.group[sample]] = -1
        self.forest = Forest.of_roots(context.topology, tokens, proposals)
        self.forest.reach[:, 0] = self.limits.weight
        self._ranked = None if drafter.informative else np.array(drafter.acceptance)
        self._random = not self.law.deterministic
        self._constrained = any(context[sample].path_state is not None for sample in context.alive)
        self._drafted: dict[str, int] = {}  # levels, by kind of drafter
        self._read = 0  # committed tokens that the drafter reads first
        self._forced: list[tuple[int, int, int]] = []  # sample, parent and node of the children that constraints force
        # For deciders that are asked: the draft row that the children of a node were drawn from.
        self._origins: dict[tuple[int, int], Origin] | None = {} if any(group.asked for group in self.groups) else None

    def law_of(self, sample: int) -> DraftLaw:
        """Returns the law of a sample's children."""
        return self.context.law_of(sample, self.drafter.certain)

    def gains(self) -> Reals:
        """Returns ``[B]`` expected tokens from every sample's drafts, less the price of their rows."""
        forest = self.forest
        worth = forest.reach - self.limits.row_cost * ~forest.trunk  # the target must read the trunk in any case
        gains: Reals = (worth * (forest.token >= 0))[:, 1:].sum(axis=1)
        return gains

    def grown(self) -> DraftTree:
        """Grows the trees of all stages to their end, and packs them."""
        context, forest = self.context, self.forest
        self._grow_stage()
        gains, drafted, read = self.gains() if self._later else None, dict(self._drafted), self._read
        for stage in self._later:
            assert gains is not None
            waiting = self._waiting(stage, gains)
            if not waiting:
                continue
            max_depth = [limit if sample in waiting else None for sample, limit in enumerate(context.max_depth)]
            drafts = forest.drafts
            rows = sum(int(drafts[sample]) + 1 for sample in context.alive if sample not in waiting)
            step = replace(context, max_depth=max_depth, extra_rows=context.extra_rows + rows)
            other = Growth(step, self.decider, [stage], self.device)
            other._grow_stage()
            for kind, levels in other._drafted.items():
                drafted[kind] = drafted.get(kind, 0) + levels
            read += other._read
            found, better = other.forest.drafts, other.gains()
            taken = [sample for sample in sorted(waiting) if found[sample]]
            forest.take(other.forest, taken)
            gains[taken] = better[taken]
        if forest.drafts.any():
            return replace(forest.rows(), drafted=drafted, read=read)
        living = set(context.alive)
        roots = [context.tokens(sample)[-1] if sample in living else None for sample in range(len(context.max_depth))]
        tree = DraftTree.roots(context.topology, roots, Proposal(context.greedy_law))
        return replace(tree, drafted=drafted, read=read)

    def _waiting(self, stage: tuple[Drafter, Any], gains: Reals) -> set[int]:
        """Returns the samples for which a later stage is expected to gain more tokens than the drafts so far."""
        context, drafts = self.context, self.forest.drafts
        waiting = {sample for sample in context.alive if not drafts[sample] and context.bounds.get(sample) != 0}
        if len(waiting) < len(context.alive):
            limits, _ = plan(context, self.decider, *stage)
            if limits.gains is not None:
                waiting |= {sample for sample in context.alive if gains[sample] < limits.gains[sample]}
        return waiting

    def _grow_stage(self) -> None:
        """Grows the trees of its own stage."""
        if self.limits.levels.any() and (lag := self.drafter.lag(self.state, self.context)):
            self._read = sum(lag[sample] for sample in self.limits.levels.nonzero()[0].tolist())
        self._add_candidates()
        self._add_forced_tokens()
        left = [group for group in self.groups if not self._grown_in_one_call(group)]
        if len(left) == len(self.groups):
            self._grow_level_by_level(self.limits)
        elif left:
            levels = np.zeros_like(self.limits.levels)
            for group in left:
                levels[group.samples] = self.limits.levels[group.samples]
            self._grow_level_by_level(replace(self.limits, levels=levels))
        self.drafter.proposed(self.state)
        if self.limits.levels.any():
            present = (self.forest.token >= 0).any(axis=0)
            deepest = int(self.context.topology.depth_array[present].max())
            self._drafted[type(self.drafter).__name__] = min(deepest, int(self.limits.levels.max()))
        for sample, bound in self.context.bounds.items():
            samples, nodes, _ = self._likeliest(np.array([sample]))
            self.forest.drop(samples[bound:], nodes[bound:])
        for number, group in enumerate(self.groups):
            # Trees drawn at random are not trimmed: verification would no longer be lossless.
            if not group.asked and self.law_of(group.samples[0]).deterministic:
                self._trim(number, np.array(group.samples))

    # Before the drafter proposes

    def _add_candidates(self) -> None:
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
                if self._origins is not None:
                    self._origins[sample, 0] = Origin(partial(_same, row))

    def _add_forced_tokens(self) -> None:
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
        if self._ranked is not None:
            chances = self._ranked[np.arange(len(tokens)).clip(max=len(self._ranked) - 1)].tolist()
        for child, token, chance in zip(topology.child_list[node], tokens, chances, strict=False):
            forest.token[sample, child], forest.chance[sample, child] = token, chance
            likely = 1.0 if forced else min(1.0, calibration * chance)
            forest.certain[sample, child], forced = forced, False
            forest.reach[sample, child] = forest.reach[sample, node] * likely
            forest.prefilled = True

    # In one call

    @property
    def whole(self) -> TreesToGrow | None:
        """The trees, if one call can grow all of them that grow at all; ``None`` if the host has to see some level."""
        if len(self.groups) != 1 or self._later or self._constrained:
            return None
        levels, topology = self.limits.levels, self.context.topology
        pruned = any(
            topology.levels[min(levels[sample], topology.max_depth)].stop - 1 > bound
            for sample, bound in self.context.bounds.items()
        )
        return None if pruned else self._whole(self.groups[0])

    def _whole(self, group: Group) -> TreesToGrow | None:
        """Returns the trees of a group, if one call can grow them."""
        context, limits, topology = self.context, self.limits, self.context.topology
        slots = [sample for sample in group.samples if limits.levels[sample] > 0]
        if group.asked or not group.pathwise or context.candidates is not None or not slots:
            return None
        if self._ranked is not None:  # so that all planned levels are drafted
            limits = replace(limits, calibration=np.full_like(limits.calibration, _CERTAIN))
        draws = draws_of(context, slots)
        return TreesToGrow(self.forest, slots, topology.child_offsets, topology.child_order, limits, draws)

    def _grown_in_one_call(self, group: Group) -> bool:
        """Lets a network grow a group's trees at once; returns whether the group is finished."""
        context, forest, topology = self.context, self.forest, self.context.topology
        if (trees := self._whole(group)) is None:
            return not group.asked and not self.limits.levels[group.samples].any()
        slots = trees.slots
        if self.device is not None and (network := self.drafter.network(context)) is not None:
            if self._constrained:  # a device knows no masks
                return False
            broken: int | None = self.device(self.drafter, self.state, context, network, trees)
        else:
            trees = trees._replace(corrections=corrections_of(context, slots, forest))
            broken = self.drafter.grow_natively(self.state, context, trees) if usable() else None
        if broken is None:
            return False
        if broken:
            warn_of_broken_rows()
        if self._ranked is not None:
            for level in topology.tree_levels:
                chance = self._ranked[level.rank.clip(max=len(self._ranked) - 1)]
                chance = np.where(forest.certain[slots, level.below], _CERTAIN, chance)
                forest.chance[slots, level.below] = np.where(forest.token[slots, level.below] >= 0, chance, 0)
            rule.reached(forest, self.limits, topology.tree_levels, slots)
            forest.chance[forest.certain] = 1
        for sample in slots if self._constrained else ():
            self._drop_forbidden(sample)
        return True

    def _drop_forbidden(self, sample: int) -> None:
        """Drops the drafts of a sample that constraints forbid, with all that follow them."""
        forest, topology = self.forest, self.context.topology
        state = self.context[sample].path_state
        if state is None:
            return
        for node in ((forest.token[sample, 1:] >= 0).nonzero()[0] + 1).tolist():
            parent, token = topology.parent_list[node], int(forest.token[sample, node])
            allowed = state.allowed(forest.path(sample, parent)) if forest.token[sample, parent] >= 0 else None
            if forest.token[sample, parent] < 0 or (allowed is not None and token not in allowed):
                forest.token[sample, node] = -1
            elif allowed is not None and allowed.only == token:
                forest.certain[sample, node], forest.reach[sample, node] = True, forest.reach[sample, parent]

    # Level by level

    def _grow_level_by_level(self, limits: Limits) -> None:
        context, forest, topology = self.context, self.forest, self.context.topology
        host = HostRule(forest, limits, topology.tree_levels, topology.offset_array, topology.child_array)
        went = np.zeros(forest.token.shape, dtype=np.bool_) if forest.prefilled or self._origins is not None else None
        for depth, level in enumerate(topology.tree_levels):
            going = host.going(depth)
            if went is not None:
                going = going[:, self._may_go(limits, depth, went)[going[0], going[1] - topology.levels[depth].start]]
                went[going[0], going[1]] = True
            samples, nodes, _ = going
            if not len(nodes):
                return
            frontier = Frontier(context, forest, depth, *going.tolist())
            children = self._children(frontier, level)
            if forest.prefilled:
                first = topology.child_array[topology.offset_array[nodes]]
                children.tokens[forest.token[samples, first] >= 0] = -1  # these nodes have their children
            elif children.tokens.max() < 0:
                return
            host.add(depth, samples, nodes, children.tokens, children.chances)
            for sample, node, child in self._forced:
                forest.certain[sample, child], forest.reach[sample, child] = True, forest.reach[sample, node]

    def _may_go(self, limits: Limits, depth: int, went: Flags) -> Flags:
        """Returns ``[B, m]``: which nodes of a depth may get children.

        Prefilled nodes may be there although their parents did not go on. A decider that is asked before every level
        may end a sample.
        """
        context, topology = self.context, self.context.topology
        nodes = topology.levels[depth]
        present: Flags = self.forest.token[:, nodes] >= 0
        if depth:
            present &= went[:, topology.parent_array[nodes]]
        drafts = self.forest.drafts
        for group in self.groups:
            living = [
                sample
                for sample in group.samples
                if group.asked and depth < limits.levels[sample] and present[sample].any()
            ]
            if not living:
                continue
            alike = 1 if group.pathwise else context.expected_batch
            view = StepView(
                depth,
                paths=[
                    [self._draws(sample, nodes[place]) for place in np.flatnonzero(present[sample])]
                    for sample in living
                ],
                memory=[context[sample].memory for sample in living],
                pathwise=group.pathwise,
                batch=len(group.samples) * alike,
                planned=(len(group.samples) + int(drafts[group.samples].sum())) * alike,
                alike=alike,
                source=type(self.drafter).__name__,
                acceptance=self.drafter.acceptance,
            )
            answers = self.decider(view)
            if len(answers) != len(living):
                raise ValueError(f"{self.decider} must answer for {len(living)} samples, answered for {len(answers)}")
            present[[sample for sample, goes_on in zip(living, answers, strict=True) if not goes_on]] = False
        return present

    def _draws(self, sample: int, node: int) -> tuple[Draw, ...]:
        """Returns the draws along the path to a node."""
        assert self._origins is not None
        path = self.context.topology.path(node)
        return tuple(
            Draw(float(self.forest.chance[sample, child]), self._origins.get((sample, parent), _NO_ORIGIN))
            for parent, child in pairwise(path)
        )

    def _children(self, frontier: Frontier, level: TreeLevel) -> Children:
        """Returns the children that the drafter proposes, those left out that constraints forbid."""
        proposed = self.drafter.scores(self.state, frontier)
        if isinstance(proposed, Tensor):
            proposed = Predictions(proposed)
        nodes, given = len(frontier), len(proposed.logits if isinstance(proposed, Predictions) else proposed)
        if given != nodes:
            raise ValueError(f"{self.drafter} must give predictions for each of {nodes} nodes, gave {given}")
        if isinstance(proposed, Predictions):
            children = self._drawn(frontier, level, proposed)
        else:
            children = Children.of(proposed, level.width)
        self._forced = []
        for row, (sample, node) in enumerate(frontier.places if self._constrained else ()):
            if self.context[sample].path_state is None or not self.law_of(sample).deterministic:
                continue
            if (allowed := frontier.allowed(row)) is not None:
                children.keep(row, [token >= 0 and token in allowed for token in children.tokens[row].tolist()])
                child = self.context.topology.child_list[node][0]
                if allowed.only is not None and children.tokens[row, 0] >= 0 and self.forest.token[sample, child] < 0:
                    self._forced.append((sample, node, child))
        if children.tokens.shape[1] > level.width:
            children = Children(children.tokens[:, : level.width], children.chances[:, : level.width])
        if self._ranked is not None:
            children.chances[:] = self._ranked[np.arange(level.width).clip(max=len(self._ranked) - 1)]
        return children

    def _drawn(self, frontier: Frontier, level: TreeLevel, predicted: Predictions) -> Children:
        """Returns the most probable children of nodes, or draws them."""
        context, samples = self.context, frontier.samples
        owners = [context[sample] for sample in samples]
        scores = draft_scores(predicted.logits, owners, frontier.path, untruncated=context.shared)
        if isinstance(context.noise, GumbelNoise):
            scores = context.noise.perturb(scores, [(sample, frontier.depth) for sample in samples])
        laws, uniforms = self._random_draws(frontier)
        children = children_of(scores, self.law.k, laws, level.width, uniforms)
        # Processors may allow no token after a draft. The target's own row decides whether that is an error.
        assert children.finite is not None
        if not children.finite.all() and not predicted.logits.amax(dim=1).isfinite().all():
            warn_of_broken_rows()
        forest = self.forest
        first = sum(map(len, forest.draft_rows))
        if children.draft_rows is not None:
            forest.draft_rows.append(children.draft_rows)
        for row, law in enumerate(laws if self._random else ()):
            sample, node = frontier.places[row]
            if law is not None and children.finite[row]:
                check_drawn(law, node, [token for token in children.tokens[row].tolist() if token >= 0])
                forest.draft_row[sample, node] = first + row
        if self._origins is not None:
            for row, place in enumerate(frontier.places):
                hidden = None if predicted.hidden is None else predicted.hidden[row]
                self._origins.setdefault(place, Origin(partial(_probabilities, scores, row), hidden))
        return children

    def _random_draws(self, frontier: Frontier) -> tuple[list[DraftLaw | None], list[Sequence[float]]]:
        """Returns, by node, the law that draws its children at random, if any, and the uniforms for it."""
        laws: list[DraftLaw | None] = [None] * len(frontier)
        uniforms: list[Sequence[float]] = [()] * len(frontier)
        if not self._random:
            return laws, uniforms
        made: dict[tuple[int, int], DraftLaw] = {}  # a law is a module, which is slow to build
        child_list = self.context.topology.child_list
        for row, (sample, node) in enumerate(frontier.places):
            law, children = self.law_of(sample), child_list[node]
            if law.deterministic or self.forest.token[sample, children[0]] >= 0:  # candidates are there
                continue
            assert isinstance(self.context.noise, Noise)
            kind = id(law), len(children)
            if kind not in made:
                made[kind] = law.narrow(len(children))
            laws[row] = made[kind]
            uniforms[row] = self.context.noise.draft[sample, list(children)].tolist()
        return laws, uniforms

    # At the end

    def _trim(self, number: int, samples: Ints) -> None:
        """Drops the drafts of a group that are too unlikely to be worth their rows."""
        forest, limits = self.forest, self.limits
        budget, verification = limits.price_of(number)
        if budget < 0 and verification is None:
            return
        samples, nodes, trunk = self._likeliest(samples)
        if len(nodes):
            kept = max(rule.number_kept(forest.reach[samples, nodes], budget, verification), trunk)
            forest.drop(samples[kept:], nodes[kept:])

    def _likeliest(self, samples: Ints) -> tuple[Ints, Ints, int]:
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


def draws_of(context: DraftContext, samples: Sequence[int]) -> Draws | None:
    """Returns how tokens of S samples are drawn with shared noise; ``None`` if the noise is not shared."""
    noise = context.noise
    if not isinstance(noise, GumbelNoise):
        return None
    seeds = [source.seed if (source := noise.sources[sample]) else 0 for sample in samples]
    keys = np.array([seeds, [noise.lengths[sample] for sample in samples]], dtype=np.int64)
    temperatures = [context.temperature(sample) for sample in samples]
    truncations = [context[sample].pipeline.truncation for sample in samples]
    return Draws(torch.from_numpy(keys[0]), torch.from_numpy(keys[1]), temperatures, truncations)


def corrections_of(context: DraftContext, samples: Sequence[int], forest: Forest) -> Corrections | None:
    """Returns the changes that the processors of S samples make, and the tokens allowed after their forced drafts."""
    changes = [context[sample].corrections() for sample in samples]
    masks = [_mask_after_forced(context, sample, forest) for sample in samples]
    if not any(map(len, changes)) and not any(masks):
        return None
    table, bounds = torch.from_numpy(np.concatenate(changes)), [0, *accumulate(map(len, changes))]
    if not any(masks):
        return Corrections(table, bounds)
    width = max(len(bits) for _, bits in filter(None, masks))
    allowed = np.zeros((len(samples), width), dtype=np.uint8)
    for row, mask in enumerate(masks):
        if mask:
            allowed[row, : len(mask[1])] = np.frombuffer(mask[1], np.uint8)
    return Corrections(table, bounds, torch.from_numpy(allowed), [mask[0] if mask else -1 for mask in masks])


def _mask_after_forced(context: DraftContext, sample: int, forest: Forest) -> tuple[int, bytes] | None:
    """Returns the depth of a sample's last forced draft, and a bit for each token allowed after it, unless all are."""
    if (state := context[sample].path_state) is None:
        return None
    depth, node, children = 0, 0, context.topology.child_list
    while children[node] and forest.token[sample, children[node][0]] >= 0:
        depth, node = depth + 1, children[node][0]
    allowed = state.allowed(forest.path(sample, node))
    return None if allowed is None else (depth, allowed.bits)


def _probabilities(scores: Tensor, row: int) -> Tensor:
    return scores[row].softmax(dim=-1)


def _same(row: Tensor) -> Tensor:
    return row


def warn_of_broken_rows() -> None:
    """Warns that some rows of draft scores are no numbers."""
    warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)


__all__ = ["DeviceDrafts", "Growth", "draws_of", "grow", "warn_of_broken_rows"]
