"""Packed forward of the target over the trees of a step.

Shapes: n_b nodes of sample b, T = sum of n_b packed rows, V vocabulary, F hidden states side by side.
"""

from typing import Protocol

from torch import Tensor

from arbordraft.decoding.assemble import AssembledParts
from arbordraft.decoding.state import DecodeState
from arbordraft.drafters.base import Drafter
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask, stack_words


class TargetRunner(Protocol):
    """Runs the target over the trees of a step, on caches that it opens itself."""

    def open(self, max_tokens: int | None) -> RaggedKVCache:
        """Opens a cache of at most ``max_tokens`` rows; ``None`` for no limit."""

    def __call__(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Returns ``[T, V]`` logits and ``[T, F]`` hidden states; counts the forward in ``state.stats``."""


class PackedRunner:
    """Runs one forward over the T nodes of all trees, without padding."""

    def __init__(self, parts: AssembledParts, mask: SlicedCausalMask) -> None:
        self.target, self.drafter, self.mask = parts.target, parts.drafter, mask

    def open(self, max_tokens: int | None) -> RaggedKVCache:
        return RaggedKVCache(max_tokens, state_tokens(self.target, self.drafter))

    def __call__(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor]:
        batch = lay_out(state, tree, self.mask)
        count(state, tree, batch)
        return self.target.run(tree.tokens(), batch, state.cache, hidden=self.drafter.hidden_layers)


def state_tokens(target: RaggedModel, drafter: Drafter) -> int:
    """Returns the tokens as which a sample's states count in the caches of a target and its drafter, the greater one.

    Caches of both count the same, so a sample that fits into the target's also fits into the drafter's.
    """
    models = (module for part in (target, drafter) for module in part.modules() if isinstance(module, RaggedModel))
    return max(model.state_tokens for model in models)


def lay_out(state: DecodeState, tree: DraftTree, mask: SlicedCausalMask, *, causal: bool = True) -> RaggedBatch:
    """Lays out the rows of trees in the cache.

    Args:
        state: the batch.
        tree: the drafts.
        mask: mask of the trees' topology.
        causal: omit ancestor words if all trees are chains, for which causal order suffices.
    """
    samples, offsets = [state[number] for number in tree.living], tree.offsets
    spans = [(offsets[number], offsets[number + 1]) for number in tree.living]
    words = None
    if not (causal and tree.are_chains):
        nodes = tree.node.tolist()
        words = stack_words([mask.select(nodes[begin:end], nodes[begin:end]) for begin, end in spans])
    depth = tree.depth.tolist()
    return state.cache.lay_out([sample.handle for sample in samples], [depth[b:e] for b, e in spans], words)


def count(state: DecodeState, tree: DraftTree, batch: RaggedBatch) -> None:
    """Counts the forward of a batch that was laid out for these trees, or for larger ones."""
    committed = sum(len(state[number].tokens) - 1 for number in tree.living)
    state.stats.count_forward(batch, rows=tree.rows, keys=committed + tree.rows)


__all__ = ["PackedRunner", "TargetRunner", "count", "lay_out", "state_tokens"]
