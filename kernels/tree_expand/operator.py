"""Growing draft trees by a level, as an operator of torch.

Shapes: R nodes, V vocabulary, k children.
"""

import torch
from torch import Tensor

from arbordraft.kernels.choice import interpreted
from arbordraft.kernels.tree_expand.reference import tree_expand_reference


@torch.library.custom_op("arbordraft::tree_expand", mutates_args=())
def expand(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.tree_expand.tree_expand`; without a GPU or the interpreter, by the reference."""
    if scores.is_cuda or interpreted():
        from arbordraft.kernels.tree_expand.triton import launch

        return launch(scores, k)
    return tree_expand_reference(scores, k)


@expand.register_fake
def _(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (scores.shape[0], k)
    return scores.new_empty(shape, dtype=torch.int64), scores.new_empty(shape, dtype=torch.float32)
