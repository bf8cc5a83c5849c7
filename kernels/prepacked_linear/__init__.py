"""Linear layers whose weights are laid out once in the order in which the processor reads them."""

from torch import Tensor

from arbordraft.kernels.dispatch import define
from arbordraft.kernels.native import load
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
_NAMES: dict[int, str | None] = {-1: None} | dict(enumerate(ACTIVATIONS))

_linear = define(
    "prepacked_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int outputs, int activation) -> Tensor",
    lambda x, weight, scale, bias, outputs, code: x.new_empty(*x.shape[:-1], outputs if code < 0 else outputs // 2),
    lambda x, weight, scale, bias, outputs, code: prepacked_linear_reference(
        x, weight, scale, bias, outputs, _NAMES[code]
    ),
)


def prepacked_linear(
    x: Tensor,
    prepacked: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    outputs: int,
    activation: str | None = None,
) -> Tensor:
    """Computes ``x W^T + bias`` with prepacked weights; in C++ a row's bits do not depend on the other rows.

    Args:
        x: ``[..., I]`` float32 or bfloat16.
        prepacked: ``W`` as :func:`pack` returns it, of x's dtype, int8, or uint8 in groups. Weights in groups multiply
            x in 8 bits: every row is quantised by itself, group by group.
        scale: ``[O]`` float32 factors of int8 weights; for groups, the scales that :func:`pack` returns.
        bias: ``[O]`` float32.
        outputs: ``O``.
        activation: name of the gated activation, ``activation(gate) * up``. The rows of ``W`` are then gates and
            inputs, interleaved by :func:`interleave`.

    Returns:
        ``[..., O]`` of x's dtype, or ``[..., O / 2]`` with an activation.
    """
    load()  # without the kernels the operator runs the reference
    code = -1 if activation is None else ACTIVATION_CODES[activation]
    y: Tensor = _linear(x.contiguous(), prepacked, scale, bias, outputs, code)
    return y


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
