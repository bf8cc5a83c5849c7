"""Linear layers whose weights are laid out once in the order in which the processor reads them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from arbordraft.kernels.dispatch import define
from arbordraft.kernels.native import load
from arbordraft.kernels.prepacked_linear.blocks import (
    BLOCKS,
    LANES,
    NUMBERED,
    check_finite_blocks,
    check_rows,
    dequantize_blocks_reference,
    outputs_of,
    pack_blocks_reference,
    places_of,
    restore_blocks,
    select_panels,
)
from arbordraft.kernels.prepacked_linear.groups import float_blocks, quantize_groups
from arbordraft.kernels.prepacked_linear.reference import (
    ACTIVATIONS,
    WEIGHTS,
    check_weights,
    interleave,
    prepack,
    prepacked_linear_reference,
    quantize,
    restore,
)

ACTIVATION_CODES = {name: code for code, name in enumerate(ACTIVATIONS)}
QUANTIZED = {4: "INT4", 8: "Q8_0"}  # kinds of blocks that quantize_groups makes, by bits
_ROWS = 256 * LANES  # rows that are quantised at a time: in float32 they take more memory
_NAMES: dict[int, str | None] = {-1: None} | dict(enumerate(ACTIVATIONS))

_linear = define(
    "prepacked_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int outputs, int activation) -> Tensor",
    lambda x, weight, scale, bias, outputs, code: x.new_empty(*x.shape[:-1], outputs if code < 0 else outputs // 2),
    lambda x, weight, scale, bias, outputs, code: prepacked_linear_reference(
        x, weight, scale, bias, outputs, _NAMES[code]
    ),
)
_pack = define(
    "pack_blocks(Tensor[] raws, int[] kinds, Tensor places) -> Tensor",
    run=lambda raws, kinds, places: pack_blocks_reference(raws, [NUMBERED[kind] for kind in kinds], places),
)
_dequantize = define(
    "dequantize_blocks(Tensor raw, int kind) -> Tensor",
    run=lambda raw, kind: dequantize_blocks_reference(raw, NUMBERED[kind]),
)


def pack_blocks(raws: Sequence[Tensor], kinds: Sequence[str], rows: Tensor | None = None) -> Tensor:
    """Lays rows of blocks out for the kernels, 16 rows of one kind at a time; no weight is changed.

    Args:
        raws: ``[O, bytes]`` uint8 matrices of blocks, as files have them, with the same number of inputs.
        kinds: kind of the blocks of each matrix, a key of :data:`BLOCKS`.
        rows: places of the packed rows in the concatenated matrices; by default all rows in their order.

    Returns:
        A flat uint8 tensor, which holds everything that the kernels need: see :mod:`.blocks`. It takes at most 3 %
        more memory than the blocks.

    Raises:
        ValueError: if 16 rows of a panel are not of one kind, or the numbers of inputs differ.
    """
    load()  # without the kernels the operator runs the reference
    places = places_of(raws, rows)
    for raw, kind in zip(raws, kinds, strict=True):
        check_rows(raw, kind)
    packed: Tensor = _pack(list(raws), [BLOCKS[kind].number for kind in kinds], places)
    return packed


def dequantize_blocks(raw: Tensor, kind: str) -> Tensor:
    """Returns the ``[n, I]`` float32 weights of ``[n, bytes]`` uint8 rows of blocks, exactly as a file means them."""
    load()  # see above
    check_rows(raw, kind)
    numbers: Tensor = _dequantize(raw.contiguous(), BLOCKS[kind].number)
    return numbers


def pack(weight: Tensor, weights: str | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns ``[O, I]`` in the layout of the kernels, and its scales.

    Args:
        weight: float32 or bfloat16.
        weights: ``"int4"`` or ``"int8"``, in groups; ``"int8-weight-only"``, with one scale per output; ``"file"``,
            not quantised, but in panels like the blocks of a file. By default weights are not quantised.
    """
    if weights is None:
        return prepack(weight), None
    if weights == "int8-weight-only":
        eight, scale = quantize(weight)
        return prepack(eight), scale
    if weights == "file":
        raw, kind = float_blocks(weight)
        return pack_blocks([raw], [kind]), None
    bits = 4 if weights == "int4" else 8
    return pack_blocks(
        [torch.cat([quantize_groups(some, bits) for some in weight.split(_ROWS)])], [QUANTIZED[bits]]
    ), None


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
        prepacked: ``W`` as :func:`pack` or :func:`pack_blocks` returns it, of x's dtype, int8, or uint8 in panels.
            Panels multiply x in 8 bits: every row is quantised by itself, in groups of 32 inputs.
        scale: ``[O]`` float32 factors of int8 weights.
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
    "BLOCKS",
    "LANES",
    "QUANTIZED",
    "WEIGHTS",
    "check_finite_blocks",
    "check_weights",
    "dequantize_blocks",
    "dequantize_blocks_reference",
    "float_blocks",
    "interleave",
    "outputs_of",
    "pack",
    "pack_blocks",
    "pack_blocks_reference",
    "prepack",
    "prepacked_linear",
    "prepacked_linear_reference",
    "quantize",
    "quantize_groups",
    "restore",
    "restore_blocks",
    "select_panels",
]
