"""The trees of one step while they grow: who drafts, how far, and what of it is kept.

Shapes: V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from arbordraft.deciders.decisions import Draw, Origin, Plan, Situation, StepView
from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.stateful import Allowed
from arbordraft.trees.draft_tree import DraftTree, SampleTree


def groups_of(context: DraftContext) -> list[list[int]]:
    """The samples that decide together.

    What is drafted never changes a pathwise text: a batch decides together and spends its rows where it gains most. Any
    other depends on what is verified: there every sample decides alone, for a batch of its like.
    """
    alive = [sample for sample, max_depth in enumerate(context.max_depth) if max_depth is not None]
    if context.pathwise:
        return [alive] if alive else []
    return [[sample] for sample in alive]


def situation_of(context: DraftContext, drafter: Drafter, group: Sequence[int]) -> Situation:
    """What is known of a group before a drafter drafts for it."""
    max_depth = [min(context.max_depth[sample] or 0, context.topology.max_depth) for sample in group]
    memory = [context.memory[sample] for sample in group]
    alike = 1 if context.pathwise else context.expected_batch
    lag = [context.lag[sample] for sample in group] if context.lag else []
    left = [(context.max_depth[sample] or 0) + 1 for sample in group] if context.fixed_batch else []
    source, extra_rows = type(drafter).__name__, context.extra_rows if context.pathwise else 0
    return Situation(max_depth, memory, alike, source, drafter.acceptance, drafter.free, lag, left, extra_rows)


class TreeGrower:
    """The trees of one step while they grow.

    Args:
        context: the step.
        law: how children are drawn.
        drafter: who grows them; says what is known of its drafts beforehand.
    """

    def __init__(self, context: DraftContext, law: DraftLaw, drafter: Drafter) -> None:
        self.context = context
        self.law = law
        self.source = type(drafter).__name__
        self.alive = [sample for sample, max_depth in enumerate(context.max_depth) if max_depth is not None]
        self.tokens: dict[int, dict[int, int]] = {sample: {0: context.tokens[sample][-1]} for sample in self.alive}
        self.rows: dict[int, dict[int, Tensor]] = {sample: {} for sample in self.alive}
        self.chances: dict[int, dict[int, float]] = {sample: {} for sample in self.alive}
        self.certain: dict[int, set[int]] = {sample: set() for sample in self.alive}
        # What deciders may see: how every node's path came about, and what drafters that have it put into `hidden`.
        self.hidden: dict[tuple[int, int], Tensor] = {}
        self._paths: dict[int, dict[int, tuple[Draw, ...]]] = {sample: {0: ()} for sample in self.alive}
        self._acceptance = drafter.acceptance
        self.groups = groups_of(context)
        self._alike = 1 if context.pathwise else context.expected_batch
        self.plans = [context.plan(situation_of(context, drafter, group)) for group in self.groups]
        self._going = {
            sample
            for group, plan in zip(self.groups, self.plans, strict=True)
            for sample, levels in zip(group, plan.levels if plan else [1] * len(group), strict=True)
            if levels > 0
        }
        self._trust = {
            sample: trust
            for group, plan in zip(self.groups, self.plans, strict=True)
            for sample, trust in zip(group, plan.trust if plan else [(1.0,)] * len(group), strict=True)
        }
        # Chance that a node's path is accepted, times what the sample's tokens are worth.
        self._reach = {sample: {0: 1.0} for sample in self.alive}
        for group, plan in zip(self.groups, self.plans, strict=True):
            for sample, weight in zip(group, plan.weights if plan else (), strict=False):
                self._reach[sample][0] = weight
        for sample, given in enumerate(context.candidates or ()):
            if given is not None and sample in self.tokens:
                tokens, row = given
                self.add_children(sample, 0, tokens, row[tokens].tolist(), partial(_same, row))

    def path(self, sample: int, node: int) -> list[int]:
        """Drafted tokens from below the root down to a node."""
        return [self.tokens[sample][passed] for passed in self.context.topology.path(node)[1:]]

    def allowed(self, sample: int, node: int) -> Allowed | None:
        """What may stand behind a node; ``None`` for everything, or where that is not known."""
        path_state = self.context.path_states[sample] if self.context.path_states else None
        return None if path_state is None else path_state.allowed(self.path(sample, node))

    def add_forced_tokens(self) -> None:
        """Gives every root the tokens that have to follow it, as far as the topology's first path goes.

        They wait for no plan, and no plan gives them up: the target has to read them in any case.
        """
        for sample in self.alive:
            node, children = 0, self.context.topology.child_list[0]
            for _ in range(self.context.max_depth[sample] or 0):
                allowed = self.allowed(sample, node)
                if not children or allowed is None or allowed.only is None:
                    break
                self.add_children(sample, node, [allowed.only], [1.0])
                node, children = children[0], self.context.topology.child_list[children[0]]

    def frontier(self, depth: int) -> dict[int, list[int]]:
        """The nodes at ``depth`` that get children, for every sample that still goes on."""
        parents: dict[int, list[int]] = {}
        for group, plan in zip(self.groups, self.plans, strict=True):
            living = self._living(group, depth)
            chosen = self._planned(group, plan, living, depth) if plan else self._asked(group, living, depth)
            self._going -= living.keys() - chosen.keys()
            parents |= chosen
        return parents

    def _living(self, group: Sequence[int], depth: int) -> dict[int, list[int]]:
        """The nodes at ``depth``, for every sample of a group that goes on and has some."""
        level = self.context.topology.levels[depth]
        living = {
            sample: [node for node in level if node in self.tokens[sample]]
            for sample in group
            if sample in self._going and depth < (self.context.max_depth[sample] or 0)
        }
        return {sample: nodes for sample, nodes in living.items() if nodes}

    def _fertile(self, nodes: Sequence[int]) -> list[int]:
        return [node for node in nodes if self.context.topology.child_list[node]]

    def _planned(
        self, group: Sequence[int], plan: Plan, living: Mapping[int, list[int]], depth: int
    ) -> dict[int, list[int]]:
        """Those of the living nodes that gain more than they take, if together they are worth a level."""
        prunes, floor = self.law.deterministic, 0.0
        if plan.budget is not None and prunes:
            # What is less likely than the last draft that fits so far has no descendants that fit either.
            reaches = sorted(self._chances(group), reverse=True)
            floor = reaches[plan.budget - 1] if 0 < plan.budget <= len(reaches) else 0.0
        chosen, worth = {}, 0.0
        for sample, levels, following in zip(group, plan.levels, plan.next, strict=True):
            if sample not in living or depth >= levels:
                continue
            following_here = following[min(depth, len(following) - 1)]
            reach = self._reach[sample]
            gains = {node: reach[node] * following_here - plan.row for node in self._fertile(living[sample])}
            if prunes:
                gains = {node: gain for node, gain in gains.items() if gain >= 0 and reach[node] >= floor}
            if gains and (gain := sum(gains.values())) >= 0:
                worth += gain
                chosen[sample] = list(gains)
        return chosen if worth * self._alike >= plan.level else {}

    def _asked(self, group: Sequence[int], living: Mapping[int, list[int]], depth: int) -> dict[int, list[int]]:
        """Those of the living nodes for whose samples the decider says so."""
        if not living:
            return {}
        view = StepView(
            depth,
            paths=[[self._paths[sample][node] for node in nodes] for sample, nodes in living.items()],
            memory=[self.context.memory[sample] for sample in living],
            pathwise=self.context.pathwise,
            batch=len(group) * self._alike,
            planned=sum(len(self.tokens[sample]) for sample in group) * self._alike,
            alike=self._alike,
            source=self.source,
            acceptance=self._acceptance,
        )
        answers = self.context.decide(view)
        if len(answers) != len(living):
            raise ValueError(f"{self.context.decide} must say of each of {len(living)} samples, said {len(answers)}")
        going = {sample: nodes for (sample, nodes), goes_on in zip(living.items(), answers, strict=True) if goes_on}
        return {sample: fertile for sample, nodes in going.items() if (fertile := self._fertile(nodes))}

    def add_children(
        self,
        sample: int,
        node: int,
        tokens: Sequence[int],
        confidence: Sequence[float],
        read: Callable[[], Tensor] | None = None,
    ) -> None:
        """Gives a node its children, fewer than planned if there are fewer tokens; ``read`` gives its draft row.

        Of tokens that were not drawn at random those that constraints forbid are left out.
        """
        origin = Origin(read, self.hidden.get((sample, node)))
        if (allowed := self.allowed(sample, node)) is not None and self.law.deterministic:
            kept = [pair for pair in zip(tokens, confidence, strict=False) if pair[0] in allowed]
            tokens, confidence = [token for token, _ in kept], [chance for _, chance in kept]
            if allowed.only is not None and kept:
                self.certain[sample].add(self.context.topology.child_list[node][0])
        for child, token, probability in zip(self.context.topology.child_list[node], tokens, confidence, strict=False):
            self._paths[sample][child] = (*self._paths[sample][node], Draw(probability, origin))
            self.add(sample, node, child, token, probability)

    def add(self, sample: int, parent: int, node: int, token: int, chance: float) -> None:
        """Adds a node below one that is there; ``chance`` is its draft probability, given its parent."""
        trust = self._trust[sample]
        self.tokens[sample][node], self.chances[sample][node] = token, chance
        depth = min(self.context.topology.depth_list[parent], len(trust) - 1)
        likely = 1.0 if node in self.certain[sample] else min(1.0, trust[depth] * chance)
        self._reach[sample][node] = self._reach[sample][parent] * likely

    def _chances(self, group: Sequence[int]) -> list[float]:
        return [chance for sample in group for node, chance in self._reach[sample].items() if node]

    def _trim(self, group: Sequence[int], plan: Plan) -> None:
        """Gives up the drafts that are too unlikely to be worth their rows."""
        # Parents stand before their children: both the chance, which cannot rise, and the node agree on that.
        trunks = {sample: self._trunk(sample) for sample in group}
        ranked = sorted(
            (node not in trunks[sample], -reach, node, sample)
            for sample in group
            for node, reach in self._reach[sample].items()
            if node
        )
        kept = max(plan.keep([-reach for _, reach, _, _ in ranked]), sum(map(len, trunks.values())))
        for _, _, node, sample in ranked[kept:]:
            del self.tokens[sample][node], self.chances[sample][node]
            self.certain[sample].discard(node)

    def _trunk(self, sample: int) -> set[int]:
        """The nodes that are certain to be accepted."""
        trunk: set[int] = set()
        for node in sorted(self.certain[sample]):
            parent = self.context.topology.parent_list[node]
            if parent == 0 or parent in trunk:
                trunk.add(node)
        return trunk

    def tree(self) -> DraftTree:
        """The result; every sample that takes part has at least its root."""
        gains: dict[int, float] = {}
        for group, plan in zip(self.groups, self.plans, strict=True):
            if plan is not None and self.law.deterministic:  # of what was drawn at random nothing is given up
                self._trim(group, plan)
            price = plan.row if plan else 0.0
            for sample in group:
                reach = self._reach[sample]
                trunk = self._trunk(sample)  # its rows have to be computed sooner or later
                gains[sample] = sum(reach[node] - price * (node not in trunk) for node in self.tokens[sample] if node)
        # Children were planted parent by parent, which need not be the order of their numbers.
        grown = {
            sample: SampleTree(
                self.context.topology,
                self.law,
                dict(sorted(tokens.items())),
                self.rows[sample],
                self.chances[sample],
                self.source,
                gains[sample],
                frozenset(self.certain[sample]),
            )
            for sample, tokens in self.tokens.items()
        }
        return DraftTree(tuple(grown.get(sample) for sample in range(len(self.context.max_depth))))


def _same(row: Tensor) -> Tensor:
    return row
