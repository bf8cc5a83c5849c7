"""Element-wise parts of a decoder layer, a launch each: RMS norms, gated activations, rotary embeddings.

Results are rounded where the modules of transformers round, so that a model computes the same function.

Shapes: T rows, H hidden size, N inner size of an MLP, Hq/Hkv heads, D head size, R rotated channels of
a head, P pool rows.
"""

from torch import Tensor

from arbordraft.kernels.dispatch import SINGLE, Operator
from arbordraft.kernels.fused_layers.reference import (
    ACTIVATIONS,
    add_rms_norm_reference,
    gated_activation_reference,
    rms_norm_reference,
    rotate_append_reference,
    rotate_reference,
)


def _fake_one(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _fake_pair(x: Tensor, y: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), y.new_empty(y.shape)


_rms_norm = Operator(
    "rms_norm(Tensor x, Tensor weight, float epsilon, float offset, bool wide) -> Tensor",
    rms_norm_reference,
    _fake_one,
    triton="arbordraft.kernels.fused_layers.triton:launch_norm",
    triton_takes=SINGLE,
)
_add_rms_norm = Operator(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float epsilon, float offset, bool wide) -> "
    "(Tensor, Tensor)",
    add_rms_norm_reference,
    _fake_pair,
    triton="arbordraft.kernels.fused_layers.triton:launch_add_norm",
    triton_takes=SINGLE,
)
_gated_activation = Operator(
    "gated_activation(Tensor gate, Tensor up, str activation) -> Tensor",
    gated_activation_reference,
    _fake_one,
    triton="arbordraft.kernels.fused_layers.triton:launch_gated",
    triton_takes=SINGLE,
)
_rotate_append = Operator(
    "rotate_append(Tensor query, Tensor key, Tensor value, Tensor cosine, Tensor sine, Tensor(a!) keys, "
    "Tensor(b!) values, Tensor slots) -> Tensor",
    rotate_append_reference,
    _fake_one,
    triton="arbordraft.kernels.fused_layers.triton:launch_rotate_append",
    triton_takes=SINGLE,
)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0, wide: bool = False) -> Tensor:
    """Divides rows by the root of their mean square, in float32, and multiplies them with weights.

    Only the order in which squares are added up may differ from the reference.

    Args:
        x: ``[..., H]`` float32, bfloat16 or float16.
        weight: ``[H]`` of the same type.
        epsilon: added to the mean square.
        offset: added to the weights in float32, if ``wide``.
        wide: multiply with the weights in float32 and round the product once, as Gemma does. Otherwise the divided
            rows are rounded to the type of ``x`` first and the product is rounded again, as Llama does.

    Returns:
        ``[..., H]``.
    """
    return _rms_norm(x, weight, epsilon, offset, wide)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0, wide: bool = False
) -> tuple[Tensor, Tensor]:
    """Adds two tensors, rounds the sum to their type, and takes :func:`rms_norm` of the sum.

    Args:
        x: ``[..., H]``.
        residual: ``[..., H]`` of the same type.
        weight: as for :func:`rms_norm`; so are the arguments after it.

    Returns:
        The sum and its norm, ``[..., H]`` each.
    """
    return _add_rms_norm(x, residual, weight, epsilon, offset, wide)


def gated_activation(gate: Tensor, up: Tensor, activation: str = "silu") -> Tensor:
    """Multiplies the activation of ``gate``, rounded to its type, with ``up``.

    Activations are computed in float32. Functions of libraries differ in their last places there. The difference shows
    in float32, but hardly ever in a type of 16 bits. It also shows where GELU is close to 0: every library has few
    digits there.

    Args:
        gate: ``[..., N]`` float32, bfloat16 or float16.
        up: ``[..., N]`` of the same type.
        activation: a key of :data:`ACTIVATIONS`.

    Returns:
        ``[..., N]``.

    Raises:
        ValueError: if there is no such activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    return _gated_activation(gate, up, activation)


def rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotates queries and keys, and writes keys and values to the pools of a layer, in place.

    The first R channels of each head are rotated, in pairs that lie R/2 apart, as in Llama. Both products and their sum
    are rounded to the type of the tensors: the bits are those of the reference.

    Args:
        query: ``[T, Hq, D]`` float32, bfloat16 or float16.
        key: ``[T, Hkv, D]``; it and the arguments up to ``values`` have the type of ``query``.
        value: ``[T, Hkv, Dv]``.
        cosine: ``[T, R]``, R even and at most D.
        sine: ``[T, R]``.
        keys: ``[P, Hkv, D]`` pool, contiguous.
        values: ``[P, Hkv, Dv]`` pool, contiguous.
        slots: ``[T]`` int64 pool rows to write to, all different.

    Returns:
        ``[T, Hq, D]`` rotated queries, contiguous.
    """
    return _rotate_append(query, key, value, cosine, sine, keys, values, slots)


__all__ = [
    "ACTIVATIONS",
    "add_rms_norm",
    "add_rms_norm_reference",
    "gated_activation",
    "gated_activation_reference",
    "rms_norm",
    "rms_norm_reference",
    "rotate_append",
    "rotate_append_reference",
    "rotate_reference",
]
