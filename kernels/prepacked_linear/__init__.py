"""Linear layers whose weights are laid out once for the processor that reads them."""

import torch
from torch import Tensor

from arbordraft.kernels import native
from arbordraft.kernels.prepacked_linear.groups import LANES, Groups, concatenate, quantize_groups
from arbordraft.kernels.prepacked_linear.reference import (
    ACTIVATIONS,
    WEIGHTS,
    check_weights,
    interleave,
    pack,
    prepack,
    prepacked_linear_reference,
    quantize,
    restore,
)

ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}


def prepacked_linear(
    x: Tensor,
    prepacked: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    outputs: int,
    activation: str | None = None,
) -> Tensor:
    """``x W^T + bias`` with prepacked weights; natively a row's bits do not depend on the rows beside it.

    Args:
        x: ``[..., I]`` float32 or bfloat16.
        prepacked: what :func:`pack` made of ``W``: of x's dtype, int8, or uint8 in groups. Weights in groups multiply x
            in 8 bits, which are taken of every row by itself, group by group.
        scale: ``[O]`` float32 factors of int8 weights; what :func:`pack` made for groups.
        bias: ``[O]`` float32.
        outputs: ``O``.
        activation: name of the activation if the rows of ``W`` are gates and inputs, :func:`interleave`-d, whose
            product is wanted: ``activation(gate) * up``.

    Returns:
        ``[..., O]`` of x's dtype, or ``[..., O / 2]`` with an activation.
    """
    if not native.load():
        return prepacked_linear_reference(x, prepacked, scale, bias, outputs, activation)
    code = -1 if activation is None else ACTIVATION_CODES[activation]
    return torch.ops.arbordraft.prepacked_linear(x.contiguous(), prepacked, scale, bias, outputs, code)


__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_CODES",
    "LANES",
    "WEIGHTS",
    "Groups",
    "check_weights",
    "concatenate",
    "interleave",
    "pack",
    "prepack",
    "prepacked_linear",
    "prepacked_linear_reference",
    "quantize",
    "quantize_groups",
    "restore",
]
