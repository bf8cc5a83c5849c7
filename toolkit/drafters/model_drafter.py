"""Growth level by level, which drafters with a model share.

Shapes: R frontier nodes of all samples, T packed rows, V vocabulary.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.grower import TreeGrower
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import stack_words


def grow(
    context: DraftContext, drafter: Drafter, run: Callable[[TreeGrower, dict[int, list[int]]], Tensor]
) -> DraftTree:
    """Grows trees level by level with a model.

    Args:
        context: the step.
        drafter: whose model it is.
        run: given the trees so far and the frontier nodes of every sample that goes on, the ``[R, V]`` draft logits
            of these nodes, sample by sample.
    """
    grower = TreeGrower(context, context.law, drafter)
    certain = context.law.deterministic
    for depth in range(context.topology.max_depth):
        frontier = grower.frontier(depth)
        if not frontier:
            break
        places = [(sample, node) for sample, nodes in frontier.items() for node in nodes]

        def place_of(row: int, places: list[tuple[int, int]] = places) -> tuple[int, list[int]]:
            sample, node = places[row]
            return sample, grower.path(sample, node)

        logits = run(grower, frontier)
        scores = context.process_logits(logits, place_of)
        if isinstance(context.noise, GumbelNoise):
            scores = context.noise.perturb(scores, [(sample, depth) for sample, _ in places])
        rows = SoftmaxRows(scores)
        likeliest, chances = tree_expand(scores, min(grower.law.k if certain else 1, scores.shape[1]))
        tops, odds = likeliest.tolist(), chances.exp().tolist()
        sound = [math.isfinite(values[0]) for values in odds]
        # Processors may leave no token behind a draft; whether that is an error, the target's own row says.
        if not all(sound) and not logits.amax(dim=1).isfinite().all():
            warnings.warn("the drafter produced NaN or infinite logits; nothing is drafted there", stacklevel=2)
        for row, (sample, node) in enumerate(places):
            if not sound[row] or (node == 0 and context.candidates is not None):
                continue
            children = context.topology.child_list[node]
            if certain:
                possible = sum(chance > 0 for chance in odds[row])
                tokens, confidence = tops[row][:possible][: len(children)], odds[row]
            else:
                draft = rows[row]
                uniforms = context.noise.draft[sample, list(children)].tolist()  # type: ignore[union-attr]
                tokens = grower.law.narrow(len(children)).draw(draft, uniforms)
                confidence = draft[tokens].tolist()
                grower.rows[sample][node] = draft
            grower.add_children(sample, node, tokens, confidence, partial(rows.__getitem__, row))
    return grower.tree()


def lay_out_level(
    grower: TreeGrower,
    frontier: dict[int, list[int]],
    cache: RaggedKVCache,
    handles: Mapping[int, int],
    fed: dict[int, list[int]],
) -> tuple[Tensor, RaggedBatch]:
    """Plans the packed forward of the frontier nodes, behind the nodes that were fed before.

    Args:
        grower: the trees.
        frontier: nodes to feed for every sample that goes on; added to ``fed``.
        cache: the drafter's cache.
        handles: the samples' handles in it.
        fed: nodes whose keys already lie behind the committed ones; without node 0 if the root is committed.

    Returns:
        ``[T]`` tokens and the batch.
    """
    topology = grower.context.topology
    tokens, depths, words = [], [], []
    for sample, nodes in frontier.items():
        columns = fed[sample] = fed[sample] + nodes
        root = topology.depth_list[columns[0]]
        tokens += [grower.tokens[sample][node] for node in nodes]
        depths.append([topology.depth_list[node] - root for node in nodes])
        words.append(grower.context.mask.select(nodes, columns))
    batch = cache.lay_out([handles[sample] for sample in frontier], depths, stack_words(words))
    return torch.tensor(tokens), batch
