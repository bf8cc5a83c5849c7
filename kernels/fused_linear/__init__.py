"""Linears fused with the operations after them, a launch each; a row's bits do not depend on the other rows.

Results are rounded where the modules of transformers round, so that a model computes the same function.

Shapes: T rows, K inputs, N outputs, Hq/Hkv heads, D head size, P pool rows.
"""

from collections.abc import Sequence

from torch import Tensor

from arbordraft.kernels.dispatch import SINGLE, Operator
from arbordraft.kernels.fused_layers import ACTIVATIONS
from arbordraft.kernels.fused_linear.reference import (
    gated_linear_reference,
    linear_reference,
    project_rotate_append_reference,
)

_linear = Operator(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    linear_reference,
    lambda x, weight, _: x.new_empty(*x.shape[:-1], weight.shape[0]),
    triton="arbordraft.kernels.fused_linear.triton:launch_linear",
    triton_takes=SINGLE,
)
_gated_linear = Operator(
    "gated_linear(Tensor x, Tensor[] weights, Tensor[] biases, str activation) -> Tensor",
    gated_linear_reference,
    lambda x, weights, *_: x.new_empty(*x.shape[:-1], weights[0].shape[0]),
    triton="arbordraft.kernels.fused_linear.triton:launch_gated",
    triton_takes=SINGLE,
)
_project_rotate_append = Operator(
    "project_rotate_append(Tensor x, Tensor[] weights, Tensor[] biases, Tensor[] norms, float epsilon, float offset, "
    "bool wide, Tensor cosine, Tensor sine, Tensor(a!) keys, Tensor(b!) values, Tensor slots) -> Tensor",
    project_rotate_append_reference,
    lambda x, weights, *others: x.new_empty(
        x.shape[0], weights[0].shape[0] // others[-3].shape[2], others[-3].shape[2]
    ),
    triton="arbordraft.kernels.fused_linear.triton:launch_rotated",
    triton_takes=SINGLE,
)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies rows with the weights of a linear; sums are taken in float32 and rounded once.

    On an NVIDIA GPU a row's bits do not depend on the other rows. On a CPU, and in the reference, the bits are torch's.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        weight: ``[N, K]`` of the same type, contiguous.
        bias: ``[N]`` of the same type.

    Returns:
        ``[..., N]``.
    """
    return _linear(x, weight, bias)


def gated_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor] = (), activation: str = "silu"
) -> Tensor:
    """Multiplies rows with two matrices and takes :func:`~arbordraft.kernels.fused_layers.gated_activation` of both.

    Args:
        x: ``[..., K]`` float32, bfloat16 or float16.
        weights: ``[N, K]`` of the gate and ``[N, K]`` of the gated input, of the same type, contiguous.
        biases: ``[N]`` for each of the two matrices, or empty.
        activation: a key of :data:`~arbordraft.kernels.fused_layers.ACTIVATIONS`.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: if there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return _gated_linear(x, list(weights), list(biases), activation)


def project_rotate_append(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    norms: Sequence[Tensor],
    epsilon: float,
    offset: float,
    wide: bool,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Projects rows to queries, keys and values, rotates queries and keys, and writes keys and values to the pools.

    Args:
        x: ``[T, K]`` float32, bfloat16 or float16.
        weights: ``[Hq D, K]`` of queries, ``[Hkv D, K]`` of keys and of values, of the same type, contiguous.
        biases: biases of all three, or empty.
        norms: ``[D]`` weights of the RMS norm of each query head and of that of each key head, or empty.
        epsilon: constant of these norms, as in :func:`~arbordraft.kernels.fused_layers.rms_norm`; so are ``offset``
            and ``wide``.
        cosine: ``[T, D]``, D even.
        sine: ``[T, D]``.
        keys: ``[P, Hkv, D]`` pool, contiguous.
        values: ``[P, Hkv, D]`` pool, contiguous.
        slots: ``[T]`` int64 pool rows to write to, all different.

    Returns:
        ``[T, Hq, D]`` rotated queries, contiguous.
    """
    return _project_rotate_append(
        x, list(weights), list(biases), list(norms), epsilon, offset, wide, cosine, sine, keys, values, slots
    )


__all__ = [
    "gated_linear",
    "gated_linear_reference",
    "linear",
    "linear_reference",
    "project_rotate_append",
    "project_rotate_append_reference",
]
