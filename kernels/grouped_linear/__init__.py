"""Linears over weights of 4 bits in groups, on a GPU: fewer bytes to read than the weights themselves.

Shapes: T rows, I inputs, O outputs, P panels of 16 outputs.
"""

from torch import Tensor

from arbordraft.kernels.dispatch import SINGLE, Operator
from arbordraft.kernels.fused_layers import ACTIVATIONS
from arbordraft.kernels.grouped_linear.panels import KINDS, pack_panels, restore_panels, round_to_panels
from arbordraft.kernels.grouped_linear.reference import grouped_linear_reference
from arbordraft.kernels.prepacked_linear.blocks import LANES
from arbordraft.kernels.prepacked_linear.reference import interleave

_linear = Operator(
    "grouped_linear(Tensor x, Tensor panels, Tensor? bias, int outputs, str? activation, str kind) -> Tensor",
    grouped_linear_reference,
    lambda x, panels, bias, outputs, activation, kind: x.new_empty(
        *x.shape[:-1], outputs if activation is None else outputs // 2
    ),
    triton="arbordraft.kernels.grouped_linear.triton:launch",
    triton_takes=SINGLE,
)


def grouped_linear(
    x: Tensor,
    panels: Tensor,
    bias: Tensor | None = None,
    *,
    outputs: int,
    activation: str | None = None,
    kind: str = "INT4",
) -> Tensor:
    """Multiplies rows with weights of 4 bits; sums are taken in float32 and rounded once.

    On an NVIDIA GPU a row's bits depend on the number of rows, but not on the values in other rows.

    Args:
        x: ``[..., I]`` float32, bfloat16 or float16.
        panels: ``[P, bytes]`` weights from :func:`pack_panels` or :func:`round_to_panels`.
        bias: ``[O]`` of the type of x.
        outputs: O, at most 16 P.
        activation: a key of :data:`~arbordraft.kernels.fused_layers.ACTIVATIONS`. Panels of gates and of their inputs
            then alternate, see :func:`interleave`, and the result is that of
            :func:`~arbordraft.kernels.fused_layers.gated_activation`.
        kind: kind of the panels' blocks, ``"INT4"`` or ``"MXFP4"``.

    Returns:
        ``[..., O]``, or ``[..., O / 2]`` with an activation.

    Raises:
        ValueError: if there is no such activation or kind, or ``outputs`` does not fit the panels.
    """
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if kind not in KINDS:
        raise ValueError(f"panels hold blocks of {' or '.join(KINDS)}, not of {kind!r}")
    gated = activation is not None
    if not 0 <= LANES * len(panels) - outputs < LANES or (gated and outputs % (2 * LANES)):
        raise ValueError(
            f"{len(panels)} panels hold {LANES * len(panels)} outputs, or up to {LANES - 1} fewer"
            f"{', in pairs of a gate and its input' * gated}; got outputs={outputs}"
        )
    return _linear(x, panels, bias, outputs, activation, kind)


__all__ = [
    "KINDS",
    "grouped_linear",
    "grouped_linear_reference",
    "interleave",
    "pack_panels",
    "restore_panels",
    "round_to_panels",
]
