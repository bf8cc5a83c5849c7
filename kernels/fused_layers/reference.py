"""Element-wise parts of decoder layers in plain PyTorch, with the operations of transformers' modules one by one.

Shapes: T rows, H hidden size, N inner size of an MLP, Hq/Hkv heads, D head size, R rotated channels of
a head, P pool rows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.kv_cache.reference import append_reference

ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
}


def rms_norm_reference(x: Tensor, weight: Tensor, epsilon: float, offset: float, wide: bool) -> Tensor:
    """See :func:`arbordraft.kernels.fused_layers.rms_norm`."""
    rows = x.float()
    rows = rows * torch.rsqrt(rows.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    return (rows * (offset + weight.float())).to(x.dtype) if wide else weight * rows.to(x.dtype)


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.fused_layers.add_rms_norm`."""
    total = x + residual
    return total, rms_norm_reference(total, weight, epsilon, offset, wide)


def gated_activation_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See :func:`arbordraft.kernels.fused_layers.gated_activation`."""
    return ACTIVATIONS[activation](gate) * up


def rotate_reference(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates queries and keys as :func:`arbordraft.kernels.fused_layers.rotate_append` does."""
    return _rotated(query, cosine[:, None], sine[:, None]), _rotated(key, cosine[:, None], sine[:, None])


def rotate_append_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """See :func:`arbordraft.kernels.fused_layers.rotate_append`."""
    query, key = rotate_reference(query, key, cosine, sine)
    append_reference(keys, values, key, value, slots)
    return query


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    rotary, rest = heads[..., : cosine.shape[-1]], heads[..., cosine.shape[-1] :]
    first, second = rotary.chunk(2, dim=-1)
    rotated = rotary * cosine + torch.cat([-second, first], dim=-1) * sine
    return torch.cat([rotated, rest], dim=-1)
