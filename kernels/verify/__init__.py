"""What verification reads off rows of logits."""

import torch
from torch import Tensor

from arbordraft.kernels import native


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every row and its first position.

    Args:
        logits: ``[R, V]``.

    Returns:
        ``[R]`` values, NaN where a row holds one, and ``[R]`` int64 positions.
    """
    if logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16) and native.load():
        return torch.ops.arbordraft.row_max(logits.contiguous())
    values, tokens = logits.max(dim=-1)
    return values, tokens
