"""Norms of rows, in plain PyTorch."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """An RMS norm, or with an offset a LayerNorm, which subtracts the mean of a row first.

    Args:
        weight: ``[H]`` float32 factors.
        offset: ``[H]`` float32, added at the end; zeros for a LayerNorm without a bias.
    """

    weight: Tensor
    offset: Tensor | None = None


def apply_norm_reference(x: Tensor, norm: Norm | None, epsilon: float) -> Tensor:
    """Norms ``[..., H]`` in float32; without a norm, returns it unchanged."""
    if norm is None:
        return x
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide if norm.offset is None else wide - wide.mean(dim=-1, keepdim=True)
    unit = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + epsilon)
    return (unit * norm.weight + (0 if norm.offset is None else norm.offset)).to(x.dtype)


__all__ = ["Norm", "apply_norm_reference"]
