"""Linears and the operations after them in plain PyTorch, with the operations of transformers' modules one by one.

Shapes: T rows, K inputs, N outputs, Hq/Hkv heads, D head size, P pool rows.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.fused_layers.reference import (
    gated_activation_reference,
    rms_norm_reference,
    rotate_append_reference,
)


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See :func:`arbordraft.kernels.fused_linear.linear`."""
    return F.linear(x, weight, bias)


def gated_linear_reference(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    """See :func:`arbordraft.kernels.fused_linear.gated_linear`."""
    gate, up = _products(x, weights, biases)
    return gated_activation_reference(gate, up, activation)


def project_rotate_append_reference(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    norms: list[Tensor],
    epsilon: float,
    offset: float,
    wide: bool,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """See :func:`arbordraft.kernels.fused_linear.project_rotate_append`."""
    query, key, value = (rows.unflatten(-1, (-1, keys.shape[2])) for rows in _products(x, weights, biases))
    if norms:
        query, key = (
            rms_norm_reference(heads, weight, epsilon, offset, wide)
            for heads, weight in zip((query, key), norms, strict=True)
        )
    return rotate_append_reference(query, key, value, cosine, sine, keys, values, slots)


def _products(x: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    given: Sequence[Tensor | None] = biases or [None] * len(weights)
    return [F.linear(x, weight, bias) for weight, bias in zip(weights, given, strict=True)]
