"""Growing draft trees by a level: the most probable children of all its nodes in one call."""

from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.tree_expand.operator import expand
from arbordraft.kernels.tree_expand.reference import tree_expand_reference


def tree_expand(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable children of every node of a level.

    Args:
        scores: ``[R, V]`` draft scores of the nodes, processed.
        k: children per node, at most V.

    Returns:
        ``[R, k]`` int64 tokens, the most probable ones first; ``[R, k]`` float32 log-probabilities, ``-inf`` for what
        cannot be drafted and NaN throughout a row whose scores are no numbers.

    Raises:
        ValueError: if k is not within 1 and V, or for the Triton kernel above 256.
    """
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"a node gets 1 to {scores.shape[1]} children, {k} were asked for")
    return (expand if choice.wants_triton("tree_expand", scores) else tree_expand_reference)(scores, k)


__all__ = ["tree_expand", "tree_expand_reference"]
