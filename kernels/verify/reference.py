"""The largest logits in plain PyTorch: the truth for every other implementation."""

import torch
from torch import Tensor


def row_max_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.row_max`."""
    values, tokens = logits.max(dim=-1)
    return values.to(torch.promote_types(values.dtype, torch.float32)), tokens
