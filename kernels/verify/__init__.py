"""What verification reads off rows of logits."""

import torch
from torch import Tensor

from arbordraft.kernels import native
from arbordraft.kernels.verify.reference import row_max_reference


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every row and its first position.

    Args:
        logits: ``[R, V]``.

    Returns:
        ``[R]`` values, at least in float32, NaN where a row holds one; and ``[R]`` int64 positions, without meaning
        where the value is NaN.
    """
    if logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16) and native.load():
        return torch.ops.arbordraft.row_max(logits.contiguous())
    return row_max_reference(logits)


__all__ = ["row_max", "row_max_reference"]
