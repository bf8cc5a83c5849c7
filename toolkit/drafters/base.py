"""What every drafter is, and the level-by-level growth that model-based ones share.

Shapes: R frontier nodes of all samples, V vocabulary.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.cache import RaggedKVCache
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.laws import DraftLaw, Fixed
from arbordraft.masks import stack_words
from arbordraft.target import RaggedModel
from arbordraft.types import Costs, DraftContext, DraftTree, SampleTree, StepView, Verdict


class Drafter(nn.Module):
    """Proposes a draft tree per sample.

    Everything a drafter remembers about a batch (its caches, its indices) is in the state that :meth:`start` returns
    and that travels with the decoder's own, so one drafter serves many batches at once.
    """

    max_positions: int | None = None  # length of the longest text it can draft for, if there is a limit

    def laws(self, law: DraftLaw) -> tuple[DraftLaw, ...]:
        """The laws of the trees that it proposes when the coupling's is ``law``."""
        return (law,)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        """Raises ValueError if the drafter cannot propose to this target, or cannot draw by this law."""

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> Any:
        """State for a batch of prompts.

        Args:
            tokens: the prompts.
            target_cache: the target's cache, in which all but the last token of each prompt are committed.
            handles: the samples' handles in that cache.
        """

    def propose(self, state: Any, context: DraftContext) -> DraftTree:
        """Grows one tree per sample that is not finished."""
        raise NotImplementedError

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        """Learns what became of a tree; a sample without a verdict is finished."""


def grow(context: DraftContext, run: "Callable[[Garden, dict[int, list[int]]], Tensor]") -> DraftTree:
    """Grows trees level by level with a model.

    Args:
        context: the step.
        run: given the trees so far and the frontier nodes of every sample that goes on, the ``[R, V]`` draft logits
            of these nodes, sample by sample.
    """
    garden = Garden(context, Fixed(context.law.k) if context.greedy else context.law)
    for depth in range(context.topology.max_depth):
        frontier = garden.frontier(depth)
        if not frontier:
            break
        places = [(sample, node) for sample, nodes in frontier.items() for node in nodes]

        def place_of(row: int, places: list[tuple[int, int]] = places) -> tuple[int, list[int]]:
            sample, node = places[row]
            return sample, garden.trees[sample].path(node)

        probs = context.warp(run(garden, frontier), place_of).softmax(dim=-1)
        sound = probs.sum(dim=-1).isfinite().tolist()
        if not all(sound):
            warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)
        certain = probs.topk(min(garden.law.k, probs.shape[-1])).indices.tolist() if context.greedy else None
        for row, (sample, node) in enumerate(places):
            if not sound[row]:
                continue
            children = context.topology.child_list[node]
            if certain is not None:
                tokens = certain[row][: len(children)]
            else:
                uniforms = context.noise.draft[sample, list(children)].tolist()  # type: ignore[union-attr]
                tokens = garden.law.narrow(len(children)).draw(probs[row], uniforms)
                garden.rows[sample][node] = probs[row]
            garden.plant(sample, node, tokens, probs[row, tokens].tolist(), probs[row])
    return garden.tree()


def plan_level(
    garden: "Garden",
    frontier: dict[int, list[int]],
    cache: RaggedKVCache,
    handles: Sequence[int],
    fed: dict[int, list[int]],
) -> tuple[Tensor, RaggedBatch]:
    """Plans the packed forward of the frontier nodes, behind the nodes that were fed before.

    Args:
        garden: the trees.
        frontier: nodes to feed for every sample that goes on; added to ``fed``.
        cache: the drafter's cache.
        handles: the samples' handles in it.
        fed: nodes whose keys already lie behind the committed ones; without node 0 if the root is committed.

    Returns:
        ``[T]`` tokens and the batch.
    """
    topology = garden.context.topology
    tokens, depths, words = [], [], []
    for sample, nodes in frontier.items():
        columns = fed[sample] = fed[sample] + nodes
        root = topology.depth_list[columns[0]]
        tokens += [garden.tokens[sample][node] for node in nodes]
        depths.append([topology.depth_list[node] - root for node in nodes])
        words.append(garden.context.mask.select(nodes, columns))
    batch = cache.plan([handles[sample] for sample in frontier], depths, stack_words(words))
    return torch.tensor(tokens), batch


class Garden:
    """The trees of one step while they grow.

    Args:
        context: the step.
        law: how children are drawn.
    """

    def __init__(self, context: DraftContext, law: DraftLaw) -> None:
        self.context = context
        self.law = law
        alive = [sample for sample, room in enumerate(context.room) if room is not None]
        self.tokens: dict[int, dict[int, int]] = {sample: {0: context.tokens[sample][-1]} for sample in alive}
        self.rows: dict[int, dict[int, Tensor]] = {sample: {} for sample in alive}
        # These trees look at the two dicts above and grow with them.
        self.trees = {s: SampleTree(context.topology, law, self.tokens[s], self.rows[s]) for s in alive}
        self._going = list(self.trees)
        # What a decider may see of every node: the draft probability of its token and the row it came from.
        self._seen: dict[int, dict[int, tuple[float, Tensor | None]]] = {s: {0: (1.0, None)} for s in self.trees}
        # Nodes may be given up for their token only if no token was drawn at random.
        self._costs = context.costs if law.deterministic and alive else None
        self._floor = self._costs.floor(len(alive)) if self._costs else 0.0
        self._reach = {sample: {0: 1.0} for sample in alive}  # probability that a node's path is accepted

    def frontier(self, depth: int) -> dict[int, list[int]]:
        """The living nodes at ``depth`` that get children, for every sample that still goes on."""
        level = self.context.topology.levels[depth]
        living = {
            sample: [node for node in level if self._reach[sample].get(node, -1) >= self._floor]
            for sample in self._going
            if depth < (self.context.room[sample] or 0)
        }
        living = {sample: nodes for sample, nodes in living.items() if nodes}
        if not living:
            return {}
        seen = [[self._seen[sample][node] for node in nodes] for sample, nodes in living.items()]
        view = StepView(
            depth,
            confidence=[[confidence for confidence, _ in nodes] for nodes in seen],
            rows=[[row for _, row in nodes] for nodes in seen],
            history=[self.context.history[sample] for sample in living],
        )
        keep = self.context.decide(view)
        self._going = [sample for sample, goes_on in zip(living, keep, strict=True) if goes_on]
        fertile = {
            sample: [node for node in living[sample] if self.context.topology.child_list[node]]
            for sample in self._going
        }
        return {sample: nodes for sample, nodes in fertile.items() if nodes}

    def plant(
        self, sample: int, node: int, tokens: Sequence[int], confidence: Sequence[float], row: Tensor | None
    ) -> None:
        """Gives a node its children, fewer than planned if there are fewer tokens."""
        for child, token, probability in zip(self.context.topology.child_list[node], tokens, confidence, strict=False):
            self.tokens[sample][child] = token
            self._seen[sample][child] = (probability, row)
            self._reach[sample][child] = self._reach[sample][node] * probability

    def _trim(self, costs: Costs) -> None:
        """Gives up the drafts that are too unlikely to be worth their rows."""
        # Parents stand before their children: both the chance, which cannot rise, and the node agree on that.
        ranked = sorted(
            (-chance, node, sample) for sample, nodes in self._reach.items() for node, chance in nodes.items() if node
        )
        kept = costs.worthwhile(len(self.trees), [-chance for chance, _, _ in ranked])
        for _, node, sample in ranked[kept:]:
            del self.tokens[sample][node]

    def tree(self) -> DraftTree:
        """The result; every sample that is not finished has at least its root."""
        if self._costs:
            self._trim(self._costs)
        # Children were planted parent by parent, which need not be the order of their numbers.
        grown = {
            sample: SampleTree(tree.topology, tree.law, dict(sorted(tree.tokens.items())), tree.draft_probs)
            for sample, tree in self.trees.items()
        }
        return DraftTree(tuple(grown.get(sample) for sample in range(len(self.context.room))))
