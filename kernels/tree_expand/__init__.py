"""Growing draft trees by a level: the children of all its nodes in one call."""

from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.tree_expand.operator import expand
from arbordraft.kernels.tree_expand.reference import tree_expand_reference


def tree_expand(
    scores: Tensor,
    k: int,
    *,
    words: Tensor | None = None,
    first_child: Tensor | None = None,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k children of every node of a level.

    Args:
        scores: ``[R, V]`` draft scores of the nodes, processed.
        k: children per node, at most V.
        words: ``[R, W]`` int64 ancestor words of the nodes, if those of the children are wanted.
        first_child: ``[R]`` int64, with ``words``: the number of every node's first child within its own tree.
        seeds: ``[R]`` int64, all different: draw k different children without replacement, in the order of their
            drawing, by the Gumbel-top-k trick (Kool et al., 2019), instead of taking the k most probable ones. The
            noise follows from the seed and the token alone.

    Returns:
        ``[R, k]`` int64 tokens, the first drawn or most probable ones first; ``[R, k]`` float32 log-probabilities, ``-inf``
        for what cannot be drafted and NaN throughout a row whose scores are no numbers; ``[R * k, W]`` ancestor words,
        empty if not asked for.

    Raises:
        ValueError: if k is not within 1 and V, or for the Triton kernel above 256.
    """
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"a node gets 1 to {scores.shape[1]} children, {k} were asked for")
    if choice.wants_triton("tree_expand", scores):
        return expand(scores, k, words, first_child, seeds)
    return tree_expand_reference(scores, k, words, first_child, seeds)


__all__ = ["tree_expand", "tree_expand_reference"]
