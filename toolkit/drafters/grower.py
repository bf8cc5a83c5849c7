"""Grows the trees of one step: chooses drafters, follows the decider's plan and drops drafts not worth a row.

Shapes: B samples, S samples of a group, N nodes of the topology, R nodes of a level, V vocabulary.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Draw, Origin, Plan, StepView
from arbordraft.drafters.base import Drafter, Guesses, Predictions
from arbordraft.drafters.children import children_of
from arbordraft.drafters.context import DraftContext, Level
from arbordraft.drafters.decision_groups import DecisionGroup, decision_groups, draws_of, growth_of
from arbordraft.kernels.draft_tree import Drafted, usable
from arbordraft.kernels.draft_tree.reference import chosen
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import draft_scores
from arbordraft.trees.draft_tree import NO_ROWS, DraftTree, Proposal, check_drawn

_NO_ORIGIN = Origin()  # of children without a draft row
_FULL_TRUST = (1.0,)
_SURE = 1e9  # a trust whose product with any probability counts as 1


def grow(context: DraftContext, decider: Decider, drafter: Drafter, state: Any) -> DraftTree:
    """Grows the trees of a step.

    The stages of a drafter propose one after another. A later stage drafts for a sample if the earlier ones proposed
    nothing, or less than it is expected to bring. This choice depends only on committed tokens.

    Args:
        context: the step.
        decider: decides how far trees go on.
        drafter: proposes children.
        state: the drafter's state for this batch.
    """
    (stage, stage_state), *later = drafter.stages(state)
    first = TreeGrower(context, decider, stage, stage_state)
    first.grow()
    growers = dict.fromkeys(context.alive, first)
    for stage, stage_state in later:
        waiting = _waiting(context, decider, stage, stage_state, growers)
        if not waiting:
            continue
        max_depth = [limit if sample in waiting else None for sample, limit in enumerate(context.max_depth)]
        rows = sum(growers[sample].drafts(sample) + 1 for sample in context.alive if sample not in waiting)
        step = replace(context, max_depth=max_depth, extra_rows=context.extra_rows + rows)
        grower = TreeGrower(step, decider, stage, stage_state)
        grower.grow()
        growers |= {sample: grower for sample in waiting if grower.drafts(sample)}
    return _packed(context, growers)


def _waiting(
    context: DraftContext, decider: Decider, drafter: Drafter, state: Any, growers: Mapping[int, "TreeGrower"]
) -> set[int]:
    """Returns the samples for which this drafter is expected to gain more tokens than the drafts so far."""
    waiting = {sample for sample, grower in growers.items() if not grower.drafts(sample)}
    if len(waiting) < len(growers):
        for group in decision_groups(context, decider, drafter, state):
            for sample, gain in zip(group.samples, group.plan.gains if group.plan else (), strict=False):
                if growers[sample].gains[sample] < gain:
                    waiting.add(sample)
    return waiting


class TreeGrower:
    """The trees of one step while they grow: columns by node, in the order in which nodes were added.

    Args:
        context: the step.
        decider: decides how far trees go on.
        drafter: proposes children.
        state: the drafter's state.
    """

    def __init__(self, context: DraftContext, decider: Decider, drafter: Drafter, state: Any) -> None:
        self.context, self.decider, self.drafter, self.state = context, decider, drafter, state
        self.law = context.greedy_law if drafter.certain else context.law
        self.groups = decision_groups(context, decider, drafter, state)
        self.sample = [sample for group in self.groups for sample in group.samples]
        roots = len(self.sample)
        self.node = [0] * roots  # of the topology
        self.token = [context.tokens(sample)[-1] for sample in self.sample]
        self.parent = [-1] * roots  # place in these columns
        self.chance = [0.0] * roots
        self.reach: list[float] = []
        # For some nodes, by their places in these columns:
        self.children: dict[int, list[int]] = {}  # in the order in which they were drawn
        self.certain: set[int] = set()
        self.draft_row: dict[int, int] = {}
        self.draft_rows: list[Tensor] = []
        # By sample, the places of its nodes in these columns, without dropped drafts.
        self.rows = {sample: [row] for row, sample in enumerate(self.sample)}
        self._trust: dict[int, Sequence[float]] = {}
        # The draws along every node's path, for deciders that decide level by level.
        self._paths: dict[int, tuple[Draw, ...]] = {}
        for group in self.groups:
            plan, first = group.plan, len(self.reach)
            group.rows = range(first, first + len(group.samples))
            self.reach += (plan and plan.weights) or [1.0] * len(group.samples)
            if plan is None:
                self._trust |= dict.fromkeys(group.samples, _FULL_TRUST)
                self._paths |= dict.fromkeys(group.rows, ())
            else:
                self._trust |= zip(group.samples, plan.trust, strict=True)

    def drafts(self, sample: int) -> int:
        """Returns the number of drafts of a sample."""
        return len(self.rows[sample]) - 1

    @cached_property
    def gains(self) -> dict[int, float]:
        """Expected tokens from every sample's drafts, less the price of their rows."""
        trunk = self._trunk()  # the target must read these nodes in any case
        return {
            sample: sum(self.reach[row] - price * (row not in trunk) for row in self.rows[sample][1:])
            for group in self.groups
            for price in (0.0 if group.plan is None else group.plan.row,)
            for sample in group.samples
        }

    def law_of(self, sample: int) -> DraftLaw:
        """Returns the law of a sample's children."""
        return self.context.greedy_law if self.context[sample].greedy else self.law

    def grow(self) -> None:
        """Grows the trees to their end."""
        self._add_candidates()
        if self.drafter.certain:
            self._add_forced_tokens()
        groups = [group for group in self.groups if not self._grown_in_one_call(group)]
        level: Level | None = None
        numbers: dict[int, int] = {}
        for depth in range(self.context.topology.max_depth if groups else 0):
            rows = [row for group in groups for row in self._going(group, depth)]
            if not rows:
                break
            rows.sort(key=self._place)
            level = Level(
                self.context,
                depth,
                [self._place(row) for row in rows],
                [self.token[row] for row in rows],
                [numbers[self.parent[row]] for row in rows] if depth else (),
                level,
            )
            proposed = self._proposed(level)
            if isinstance(proposed, Predictions):
                self._take_predictions(level, rows, proposed)
            else:
                for row, (tokens, chances) in zip(rows, proposed, strict=True):
                    self._add_children(row, tokens, chances)
            numbers = {row: number for number, row in enumerate(rows)}
            for group in groups:
                group.rows = [child for row in group.rows if row in numbers for child in self.children.get(row, ())]
        self.drafter.proposed(self.state)
        for group in self.groups:
            # Trees drawn at random are not trimmed: verification would no longer be lossless.
            if group.plan is not None and self.law_of(group.samples[0]).deterministic:
                self._trim(group, group.plan)

    # Before the drafter proposes

    def _add_candidates(self) -> None:
        for sample, given in enumerate(self.context.candidates or ()):
            if given is not None and sample in self.rows:
                tokens, row = given
                self._add_children(self.rows[sample][0], tokens, row[tokens].tolist(), Origin(partial(_same, row)))

    def _add_forced_tokens(self) -> None:
        """Adds the forced tokens after every root, along the topology's first path.

        No plan delays or drops them, because the target must read them in any case.
        """
        for sample, (row, *_) in self.rows.items():
            state = self.context[sample].path_state
            if state is None:
                continue
            path: list[int] = []
            for _ in range(self.context.max_depth[sample] or 0):
                allowed = state.allowed(path)
                if allowed is None or allowed.only is None:
                    break
                self._add_children(row, [allowed.only], [1.0])
                if row not in self.children:
                    break
                row, path = self.children[row][0], [*path, allowed.only]

    # In one call

    def _grown_in_one_call(self, group: DecisionGroup) -> bool:
        """Grows a group's whole trees by kernels or in fixed shapes; returns whether the group is finished."""
        context, plan = self.context, group.plan
        if plan is None:
            return False
        going = [place for place, most in enumerate(plan.levels) if most > 0 and group.depths[place] > 0]
        if not going:
            return True
        # Lookups do not grow whole trees: converting the limits to numbers takes longer than a lookup.
        able = group.told and context.candidates is None and (context.static is not None or usable())
        if not able or type(self.drafter).propose_trees is Drafter.propose_trees:
            return False
        samples = [group.samples[place] for place in going]
        growth = growth_of(context, plan, group.depths, going)
        if not self.drafter.informative:
            growth = growth._replace(trust=[_SURE] * len(growth.trust))  # so that all planned levels are drafted
        drafted = self.drafter.propose_trees(self.state, context, samples, growth, draws_of(context, samples))
        if drafted is None:
            return False
        if drafted.broken:
            _warn_of_broken_rows()
        self._take_drafted(samples, drafted)
        if drafted.trimmed:
            group.plan = replace(plan, keep=Plan.keep)
        return True

    def _take_drafted(self, samples: Sequence[int], drafted: Drafted) -> None:
        parents, first = self.context.topology.parent_list, len(self.token)
        sample_rows = [self.rows[sample] for sample in samples]
        row_of = [{0: rows[0]} for rows in sample_rows]  # by node
        self.sample += [samples[place] for place in drafted.samples]
        self.node += drafted.nodes
        self.token += drafted.tokens
        chances = drafted.chances
        if not self.drafter.informative:
            chances = [self._by_rank(node) for node in drafted.nodes]
        self.chance += chances
        drafts = zip(drafted.samples, drafted.nodes, chances, strict=True)
        for row, (place, node, chance) in enumerate(drafts, first):
            rows = row_of[place]
            parent = rows[parents[node]]
            rows[node] = row
            sample_rows[place].append(row)
            self.parent.append(parent)
            self.reach.append(self._below(parent, chance))

    # Level by level

    def _proposed(self, level: Level) -> Predictions | Guesses:
        """Returns the drafter's predictions for a level, one per node."""
        proposed = self.drafter.propose(self.state, level)
        if isinstance(proposed, Tensor):
            proposed = Predictions(proposed)
        nodes, given = len(level.places), len(proposed.logits if isinstance(proposed, Predictions) else proposed)
        if given != nodes:
            raise ValueError(f"{self.drafter} must give predictions for each of {nodes} nodes, gave {given}")
        return proposed

    def _going(self, group: DecisionGroup, depth: int) -> list[int]:
        """Returns the nodes of a group at ``depth`` that get children."""
        if not group.rows:
            return []
        return self._asked(group, depth) if group.plan is None else self._planned(group, group.plan, depth)

    def _planned(self, group: DecisionGroup, plan: Plan, depth: int) -> list[int]:
        """Returns the nodes that are worth their rows, if together they are worth a level."""
        child_list, rows, following = self.context.topology.child_list, [], []
        for row in group.rows:
            most, factors = group.limits[self.sample[row]]
            if depth < most and child_list[self.node[row]]:
                rows.append(row)
                following.append(factors[depth if depth < len(factors) else -1])
        if not rows:
            return []
        pruned = self.law_of(group.samples[0]).deterministic
        going = chosen(
            [self.reach[row] for row in rows],
            following,
            plan.row,
            plan.level / group.alike(self.context),
            [self.reach[row] for row in self._drafts_of(group)] if pruned and plan.budget else (),
            plan.budget or 0,
            whole=not pruned,
        )
        return [row for row, goes_on in zip(rows, going, strict=True) if goes_on]

    def _asked(self, group: DecisionGroup, depth: int) -> list[int]:
        """Returns the nodes of the samples that the decider lets draft another level."""
        living: dict[int, list[int]] = {}
        for row in sorted(group.rows, key=self._place):
            living.setdefault(self.sample[row], []).append(row)
        for sample, most in zip(group.samples, group.depths, strict=True):
            if depth >= most:
                living.pop(sample, None)
        if not living:
            return []
        alike = group.alike(self.context)
        view = StepView(
            depth,
            paths=[[self._paths[row] for row in rows] for rows in living.values()],
            memory=[self.context[sample].memory for sample in living],
            pathwise=group.pathwise,
            batch=len(group.samples) * alike,
            planned=(len(group.samples) + len(self._drafts_of(group))) * alike,
            alike=alike,
            source=type(self.drafter).__name__,
            acceptance=self.drafter.acceptance,
        )
        answers = self.decider(view)
        if len(answers) != len(living):
            raise ValueError(f"{self.decider} must answer for {len(living)} samples, answered for {len(answers)}")
        child_list = self.context.topology.child_list
        going = [row for rows, goes_on in zip(living.values(), answers, strict=True) if goes_on for row in rows]
        return [row for row in going if child_list[self.node[row]]]

    def _take_predictions(self, level: Level, rows: Sequence[int], predicted: Predictions) -> None:
        """Adds the most probable children of nodes, or draws them."""
        context, places = self.context, level.places
        owners = [context[sample] for sample, _ in places]
        scores = draft_scores(predicted.logits, owners, level.path, untruncated=context.shared)
        if isinstance(context.noise, GumbelNoise):
            scores = context.noise.perturb(scores, [(sample, level.depth) for sample, _ in places])
        plans = [context.topology.child_list[node] for _, node in places]
        laws, uniforms = self._random_draws(rows, plans)
        children = children_of(scores, self.law.k, laws, [len(plan) for plan in plans], uniforms)
        # Processors may allow no token after a draft. The target's own row decides whether that is an error.
        if None in children.tokens and not predicted.logits.amax(dim=1).isfinite().all():
            _warn_of_broken_rows()
        first = sum(map(len, self.draft_rows))
        if children.draft_rows is not None:
            self.draft_rows.append(children.draft_rows)
        for number, (row, law, tokens) in enumerate(zip(rows, laws, children.tokens, strict=True)):
            if tokens is None or row in self.children:
                continue
            if law is not None:
                check_drawn(law, self.node[row], tokens)
                self.draft_row[row] = first + number
            origin = _NO_ORIGIN
            if self._paths:
                hidden = None if predicted.hidden is None else predicted.hidden[number]
                origin = Origin(partial(_probabilities, scores, number), hidden)
            self._add_children(row, tokens, children.chances[number], origin)

    def _random_draws(
        self, rows: Sequence[int], plans: Sequence[Sequence[int]]
    ) -> tuple[list[DraftLaw | None], list[Sequence[float]]]:
        """Returns, by node, the law that draws its children at random, if any, and the uniforms for it."""
        made: dict[tuple[int, int], DraftLaw] = {}  # a law is a module, which is slow to build
        laws: list[DraftLaw | None] = []
        uniforms: list[Sequence[float]] = []
        for row, plan in zip(rows, plans, strict=True):
            sample = self.sample[row]
            law = self.law_of(sample)
            if law.deterministic or row in self.children:  # its children are candidates or forced tokens
                laws.append(None)
                uniforms.append(())
                continue
            assert isinstance(self.context.noise, Noise)
            kind = id(law), len(plan)
            if kind not in made:
                made[kind] = law.narrow(len(plan))
            laws.append(made[kind])
            uniforms.append(self.context.noise.draft[sample, list(plan)].tolist())
        return laws, uniforms

    # Nodes

    def _add_children(
        self, row: int, tokens: Sequence[int], confidence: Sequence[float], origin: Origin = _NO_ORIGIN
    ) -> None:
        """Adds the children of a node unless it has some; fewer tokens than planned give fewer children.

        Tokens that constraints forbid are left out, unless they were drawn at random.
        """
        if row in self.children:
            return
        sample = self.sample[row]
        children = self.context.topology.child_list[self.node[row]]
        state = self.context[sample].path_state
        forced = False
        if state is not None and self.law_of(sample).deterministic:
            allowed = state.allowed(self._path(row))
            if allowed is not None:
                kept = [pair for pair in zip(tokens, confidence, strict=False) if pair[0] in allowed]
                tokens, confidence = [token for token, _ in kept], [chance for _, chance in kept]
                forced = allowed.only is not None
        first = len(self.token)
        if not self.drafter.informative:
            confidence = [self._by_rank(child) for child in children]
        for child, token, chance in zip(children, tokens, confidence, strict=False):
            self.sample.append(sample)
            self.node.append(child)
            self.token.append(token)
            self.parent.append(row)
            self.chance.append(chance)
            self.reach.append(self._below(row, chance))
        added = range(first, len(self.token))
        if not added:
            return
        self.children[row] = list(added)
        self.rows[sample] += added
        if forced:
            self.certain.add(first)
            self.reach[first] = self.reach[row]
        if (path := self._paths.get(row)) is not None:
            self._paths |= {child: (*path, Draw(self.chance[child], origin)) for child in added}

    def _by_rank(self, node: int) -> float:
        """Returns the chance of a draft by its rank among its siblings."""
        topology, acceptance = self.context.topology, self.drafter.acceptance
        rank = topology.child_list[topology.parent_list[node]].index(node)
        return acceptance[min(rank, len(acceptance) - 1)]

    def _below(self, row: int, chance: float) -> float:
        """Returns the reach of a child, whose chance is corrected by the plan's trust."""
        trust, depth = self._trust[self.sample[row]], self.context.topology.depth_list[self.node[row]]
        likely = trust[depth if depth < len(trust) else -1] * chance
        return self.reach[row] * likely if likely < 1 else self.reach[row]

    def _path(self, row: int) -> list[int]:
        """Returns the drafted tokens from below the root down to a node."""
        path: list[int] = []
        while self.parent[row] >= 0:
            path.append(self.token[row])
            row = self.parent[row]
        return path[::-1]

    def _place(self, row: int) -> tuple[int, int]:
        """Returns the sample and the topology node of a row."""
        return self.sample[row], self.node[row]

    def _drafts_of(self, group: DecisionGroup) -> list[int]:
        """Returns the drafts of a group."""
        return [row for sample in group.samples for row in self.rows[sample][1:]]

    def _trunk(self) -> set[int]:
        """Returns the nodes that are certain to be accepted."""
        trunk: set[int] = set()
        for row in sorted(self.certain):  # parents stand before their children
            if self.parent[row] in trunk or self.node[self.parent[row]] == 0:
                trunk.add(row)
        return trunk

    def _trim(self, group: DecisionGroup, plan: Plan) -> None:
        """Drops the drafts that are too unlikely to be worth their rows."""
        if plan.keep is Plan.keep or not (rows := self._drafts_of(group)):
            return
        trunk = self._trunk()
        # Parents sort before their children: the reach never rises along a path, and equal reaches sort by node.
        ranked = sorted(rows, key=lambda row: (row not in trunk, -self.reach[row], self.node[row], self.sample[row]))
        kept = max(plan.keep([self.reach[row] for row in ranked]), len(trunk.intersection(rows)))
        for row in ranked[kept:]:
            self.rows[self.sample[row]].remove(row)


def _packed(context: DraftContext, growers: Mapping[int, TreeGrower]) -> DraftTree:
    """Packs the trees of all growers into rows; each grower has the trees of some samples."""
    topology, count = context.topology, len(context.max_depth)
    if not any(grower.drafts(sample) for sample, grower in growers.items()):
        roots = [context.tokens(sample)[-1] if sample in growers else None for sample in range(count)]
        return DraftTree.roots(topology, roots, Proposal(context.greedy_law))
    draft_rows: list[Tensor] = []
    first_drawn: dict[TreeGrower, int] = {}
    for grower in dict.fromkeys(growers.values()):
        first_drawn[grower] = sum(map(len, draft_rows))
        draft_rows += grower.draft_rows
    proposals: list[Proposal | None] = [None] * count
    offsets, chances, certain = [0], list[float](), list[bool]()
    tokens, nodes, parents, depths, drawn = list[int](), list[int](), list[int](), list[int](), list[int]()
    for sample in range(count):
        if (one := growers.get(sample)) is not None:
            proposals[sample] = Proposal(one.law_of(sample), type(one.drafter).__name__)
            rows = sorted(one.rows[sample], key=one.node.__getitem__)
            place = {row: number for number, row in enumerate(rows, len(tokens))}
            tokens += [one.token[row] for row in rows]
            nodes += [one.node[row] for row in rows]
            parents += [place.get(one.parent[row], -1) for row in rows]
            chances += [one.chance[row] for row in rows]
            depths += [topology.depth_list[one.node[row]] for row in rows]
            certain += [row in one.certain for row in rows] if one.certain else [False] * len(rows)
            found, shift = one.draft_row, first_drawn[one]
            drawn += [found[row] + shift if row in found else -1 for row in rows] if found else [-1] * len(rows)
        offsets.append(len(tokens))
    columns = np.array([tokens, nodes, parents, depths, drawn])
    return DraftTree(
        topology,
        proposals,
        offsets,
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        np.array(chances),
        np.array(certain),
        columns[4],
        torch.cat(draft_rows) if draft_rows else NO_ROWS,
    )


def _probabilities(scores: Tensor, row: int) -> Tensor:
    return scores[row].softmax(dim=-1)


def _same(row: Tensor) -> Tensor:
    return row


def _warn_of_broken_rows() -> None:
    warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)


__all__ = ["TreeGrower", "grow"]
