"""Grows trees level by level: the drafter gives predictions for the nodes of a depth, and children are chosen of them.

Shapes: B samples, R nodes of a depth that get children, n nodes of a depth that may have some, K children at most, V
vocabulary.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from torch import Tensor

from arbordraft.deciders.decisions import Draw, Origin, StepView
from arbordraft.drafters.base import Predictions
from arbordraft.drafters.children import Children, children_of
from arbordraft.drafters.context import Frontier
from arbordraft.drafters.one_call import warn_of_broken_rows
from arbordraft.drafters.stage import Stage
from arbordraft.kernels.draft_tree import Limits
from arbordraft.kernels.draft_tree.rule import HostRule
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import draft_scores
from arbordraft.trees.draft_tree import Flags, check_drawn
from arbordraft.trees.topology import TreeLevel

_NO_ORIGIN = Origin()  # of children without a draft row


class LevelByLevel:
    """Grows the trees of a stage within limits."""

    def __init__(self, stage: Stage, limits: Limits) -> None:
        self.stage, self.limits = stage, limits
        self._forced: list[tuple[int, int, int]] = []  # sample, parent and node of the children that constraints force

    def grow(self) -> None:
        """Grows all levels, or as many as the drafter, the decider and the limits allow."""
        stage, limits = self.stage, self.limits
        context, forest, topology = stage.context, stage.forest, stage.context.topology
        host = HostRule(forest, limits, topology.tree_levels, topology.offset_array, topology.child_array)
        went = np.zeros(forest.token.shape, dtype=np.bool_) if forest.prefilled or stage.origins is not None else None
        for depth, level in enumerate(topology.tree_levels):
            going = host.going(depth)
            if went is not None:
                going = going[:, self._may_go(depth, went)[going[0], going[1] - topology.levels[depth].start]]
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

    def _may_go(self, depth: int, went: Flags) -> Flags:
        """Returns ``[B, m]``: which nodes of a depth may get children.

        Prefilled nodes may be there although their parents did not go on. A decider that is asked before every level
        may end a sample.
        """
        stage = self.stage
        context, topology = stage.context, stage.context.topology
        nodes = topology.levels[depth]
        present: Flags = stage.forest.token[:, nodes] >= 0
        if depth:
            present &= went[:, topology.parent_array[nodes]]
        drafts = stage.forest.drafts
        for group in stage.groups:
            living = [
                sample
                for sample in group.samples
                if group.asked and depth < self.limits.levels[sample] and present[sample].any()
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
                source=type(stage.drafter).__name__,
                acceptance=stage.drafter.acceptance,
            )
            answers = stage.decider(view)
            if len(answers) != len(living):
                raise ValueError(f"{stage.decider} must answer for {len(living)} samples, answered for {len(answers)}")
            present[[sample for sample, goes_on in zip(living, answers, strict=True) if not goes_on]] = False
        return present

    def _draws(self, sample: int, node: int) -> tuple[Draw, ...]:
        """Returns the draws along the path to a node."""
        stage = self.stage
        assert stage.origins is not None
        path = stage.context.topology.path(node)
        return tuple(
            Draw(float(stage.forest.chance[sample, child]), stage.origins.get((sample, parent), _NO_ORIGIN))
            for parent, child in pairwise(path)
        )

    def _children(self, frontier: Frontier, level: TreeLevel) -> Children:
        """Returns the children that the drafter proposes, those left out that constraints forbid."""
        stage = self.stage
        proposed = stage.drafter.scores(stage.state, frontier)
        if isinstance(proposed, Tensor):
            proposed = Predictions(proposed)
        nodes, given = len(frontier), len(proposed.logits if isinstance(proposed, Predictions) else proposed)
        if given != nodes:
            raise ValueError(f"{stage.drafter} must give predictions for each of {nodes} nodes, gave {given}")
        if isinstance(proposed, Predictions):
            children = self._drawn(frontier, level, proposed)
        else:
            children = Children.of(proposed, level.width)
        self._forced = []
        for row, (sample, node) in enumerate(frontier.places if stage.constrained else ()):
            if stage.context[sample].path_state is None or not stage.law_of(sample).deterministic:
                continue
            if (allowed := frontier.allowed(row)) is not None:
                children.keep(row, [token >= 0 and token in allowed for token in children.tokens[row].tolist()])
                child = stage.context.topology.child_list[node][0]
                if allowed.only is not None and children.tokens[row, 0] >= 0 and stage.forest.token[sample, child] < 0:
                    self._forced.append((sample, node, child))
        if children.tokens.shape[1] > level.width:
            children = Children(children.tokens[:, : level.width], children.chances[:, : level.width])
        if stage.ranked is not None:
            children.chances[:] = stage.ranked[np.arange(level.width).clip(max=len(stage.ranked) - 1)]
        return children

    def _drawn(self, frontier: Frontier, level: TreeLevel, predicted: Predictions) -> Children:
        """Returns the most probable children of nodes, or draws them."""
        stage = self.stage
        context, samples = stage.context, frontier.samples
        owners = [context[sample] for sample in samples]
        scores = draft_scores(predicted.logits, owners, frontier.path, untruncated=context.shared)
        if isinstance(context.noise, GumbelNoise):
            scores = context.noise.perturb(scores, [(sample, frontier.depth) for sample in samples])
        laws, uniforms = self._random_draws(frontier)
        children = children_of(scores, stage.law.k, laws, level.width, uniforms)
        # Processors may allow no token after a draft. The target's own row decides whether that is an error.
        assert children.finite is not None
        if not children.finite.all() and not predicted.logits.amax(dim=1).isfinite().all():
            warn_of_broken_rows()
        forest = stage.forest
        first = sum(map(len, forest.draft_rows))
        if children.draft_rows is not None:
            forest.draft_rows.append(children.draft_rows)
        for row, law in enumerate(laws if stage.random else ()):
            sample, node = frontier.places[row]
            if law is not None and children.finite[row]:
                check_drawn(law, node, [token for token in children.tokens[row].tolist() if token >= 0])
                forest.draft_row[sample, node] = first + row
        if stage.origins is not None:
            for row, place in enumerate(frontier.places):
                hidden = None if predicted.hidden is None else predicted.hidden[row]
                stage.origins.setdefault(place, Origin(partial(_probabilities, scores, row), hidden))
        return children

    def _random_draws(self, frontier: Frontier) -> tuple[list[DraftLaw | None], list[Sequence[float]]]:
        """Returns, by node, the law that draws its children at random, if any, and the uniforms for it."""
        stage = self.stage
        laws: list[DraftLaw | None] = [None] * len(frontier)
        uniforms: list[Sequence[float]] = [()] * len(frontier)
        if not stage.random:
            return laws, uniforms
        made: dict[tuple[int, int], DraftLaw] = {}  # a law is a module, which is slow to build
        child_list = stage.context.topology.child_list
        for row, (sample, node) in enumerate(frontier.places):
            law, children = stage.law_of(sample), child_list[node]
            if law.deterministic or stage.forest.token[sample, children[0]] >= 0:  # candidates are there
                continue
            assert isinstance(stage.context.noise, Noise)
            kind = id(law), len(children)
            if kind not in made:
                made[kind] = law.narrow(len(children))
            laws[row] = made[kind]
            uniforms[row] = stage.context.noise.draft[sample, list(children)].tolist()
        return laws, uniforms


def _probabilities(scores: Tensor, row: int) -> Tensor:
    return scores[row].softmax(dim=-1)


__all__ = ["LevelByLevel"]
