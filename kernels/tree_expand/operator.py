"""Growing draft trees by a level, as an operator of torch.

Shapes: R nodes, V vocabulary, k children, W ancestor words.
"""

import torch
from torch import Tensor

from arbordraft.kernels.choice import interpreted
from arbordraft.kernels.tree_expand.reference import tree_expand_reference


@torch.library.custom_op("arbordraft::tree_expand", mutates_args=())
def expand(
    scores: Tensor, k: int, words: Tensor | None, first_child: Tensor | None, seeds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.tree_expand.tree_expand`; without a GPU or the interpreter, by the reference."""
    if scores.is_cuda or interpreted():
        from arbordraft.kernels.tree_expand.triton import launch

        return launch(scores, k, words, first_child, seeds)
    return tree_expand_reference(scores, k, words, first_child, seeds)


@expand.register_fake
def _(
    scores: Tensor, k: int, words: Tensor | None, first_child: Tensor | None, seeds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = scores.shape[0]
    shape = (0, 0) if words is None or first_child is None else (rows * k, words.shape[1])
    return (
        scores.new_empty((rows, k), dtype=torch.int64),
        scores.new_empty((rows, k), dtype=torch.float32),
        scores.new_empty(shape, dtype=torch.int64),
    )


__all__ = ["expand"]
