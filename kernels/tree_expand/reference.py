"""Children of a level of draft trees in plain PyTorch: the truth for the Triton kernel."""

import torch
from torch import Tensor


def tree_expand_reference(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.tree_expand.tree_expand`."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    # argmax is much faster than topk.
    tokens = wide.argmax(dim=-1, keepdim=True) if k == 1 else wide.topk(k, dim=-1).indices
    # On a CPU softmax is much faster than logsumexp.
    return tokens, wide.softmax(dim=-1).gather(1, tokens).log().float()
