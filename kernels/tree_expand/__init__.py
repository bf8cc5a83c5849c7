"""Finds the most probable children of all nodes of a tree level in one call."""

import torch
from torch import Tensor

from arbordraft.kernels.dispatch import Operator
from arbordraft.kernels.tree_expand.reference import tree_expand_reference


def _fake(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], k)
    return scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape, dtype=torch.float32)


_expand = Operator(
    "tree_expand(Tensor scores, int k) -> (Tensor, Tensor)",
    tree_expand_reference,
    _fake,
    triton="arbordraft.kernels.tree_expand.triton:launch",
)


def tree_expand(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k most probable children of every node of a level.

    Args:
        scores: ``[R, V]`` draft scores of the nodes, processed.
        k: children per node, at most V.

    Returns:
        ``[R, k]`` int64 tokens, the most probable ones first, and ``[R, k]`` float32 log-probabilities. These are
        ``-inf`` for tokens that cannot be drafted, and NaN in the whole row if a score is NaN.

    Raises:
        ValueError: if k is not within 1 and V, or above 256 in the Triton kernel.
    """
    if not 1 <= k <= scores.shape[1]:
        raise ValueError(f"a node gets 1 to {scores.shape[1]} children, {k} were asked for")
    return _expand(scores, k)


__all__ = ["tree_expand", "tree_expand_reference"]
