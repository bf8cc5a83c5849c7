"""Linear layers whose weights are laid out once in the order in which the processor reads them."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.dispatch import define
from arbordraft.kernels.native import load
from arbordraft.kernels.prepacked_linear.blocks import (
    BLOCKS,
    LANES,
    NUMBERED,
    check_finite_blocks,
    dequantize_blocks_reference,
    inputs_of,
    kinds_of_panels,
    outputs_of,
    pack_blocks_reference,
    packed_bytes,
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
_ROUNDED = {"int4": "INT4", "int8": "Q8_0"}  # kinds to which weights are rounded
_NAMES: dict[int, str | None] = {-1: None} | dict(enumerate(ACTIVATIONS))

_linear = define(
    "prepacked_linear(Tensor x, Tensor weight, Tensor? scale, Tensor? bias, int outputs, int activation) -> Tensor",
    lambda x, weight, scale, bias, outputs, code: x.new_empty(*x.shape[:-1], outputs if code < 0 else outputs // 2),
    lambda x, weight, scale, bias, outputs, code: prepacked_linear_reference(
        x, weight, scale, bias, outputs, _NAMES[code]
    ),
)
_pack = define(
    "pack_blocks(Tensor[] raws, int[] kinds, Tensor places, int kind, Tensor(a!) packed) -> ()",
    run=lambda raws, kinds, places, kind, packed: _pack_by_reference(raws, kinds, places, kind, packed),
)
_pack_numbers = define(
    "pack_numbers(Tensor[] raws, int[] kinds, Tensor places, Tensor(a!) packed, Tensor(b!)? scale) -> ()",
    run=lambda raws, kinds, places, packed, scale: _pack_numbers_by_reference(raws, kinds, places, packed, scale),
)
_dequantize = define(
    "dequantize_blocks(Tensor raw, int kind, Tensor(a!) numbers) -> ()",
    run=lambda raw, kind, numbers: _dequantize_by_reference(raw, kind, numbers),
)


class Allocate(Protocol):
    """Returns an empty contiguous tensor on the CPU, such as ``torch.empty``."""

    def __call__(self, *shape: int, dtype: torch.dtype) -> Tensor: ...


def pack_blocks(
    raws: Sequence[Tensor],
    kinds: Sequence[str],
    rows: Tensor | None = None,
    *,
    to: str | None = None,
    empty: Allocate = torch.empty,
) -> Tensor:
    """Lays rows of blocks out for the kernels, 16 rows of one kind at a time.

    Args:
        raws: ``[O, bytes]`` uint8 matrices of blocks, as files have them, with the same number of inputs.
        kinds: kind of the blocks of each matrix, a key of :data:`BLOCKS`.
        rows: places of the packed rows in the concatenated matrices; by default all rows in their order.
        to: kind to which weights are rounded, ``"Q8_0"`` or ``"INT4"``. Rows of a panel may then be of different kinds.
            By default no weight is changed.
        empty: allocates the result.

    Returns:
        A flat uint8 tensor, which holds everything that the kernels need: see :mod:`.blocks`. It takes at most 3 %
        more memory than the blocks.

    Raises:
        ValueError: if 16 rows of a panel are not of one kind, or the numbers of inputs differ. Also if weights to be
            rounded are infinite, NaN or too large.
    """
    load()  # without the kernels the operator runs the reference
    inputs, places = inputs_of(raws, kinds), places_of(raws, rows)
    if to is None:
        panels = kinds_of_panels(raws, kinds, places)
        raws = [_whole_blocks(raw, kind) for raw, kind in zip(raws, kinds, strict=True)]
    else:
        panels = torch.full((len(places) // LANES,), BLOCKS[to].number)
    packed = empty(packed_bytes(panels, inputs), dtype=torch.uint8)
    _pack(list(raws), [BLOCKS[kind].number for kind in kinds], places, -1 if to is None else BLOCKS[to].number, packed)
    return packed


def pack_numbers(
    raws: Sequence[Tensor],
    kinds: Sequence[str],
    dtype: torch.dtype,
    rows: Tensor | None = None,
    *,
    empty: Allocate = torch.empty,
) -> tuple[Tensor, Tensor | None]:
    """Lays rows of blocks out as numbers of a type, see :func:`prepack`.

    Args:
        raws: see :func:`pack_blocks`.
        kinds: see :func:`pack_blocks`.
        dtype: float32, bfloat16, or int8 with one scale per output.
        rows: see :func:`pack_blocks`.
        empty: allocates the numbers.

    Returns:
        The numbers, and ``[O]`` float32 scales of int8.
    """
    load()  # see above
    inputs, places = inputs_of(raws, kinds), places_of(raws, rows)
    outputs = sum(map(len, raws)) if rows is None else len(rows)
    blocks, pairs = len(places) // LANES, -(-inputs // 2)
    shape = (blocks, inputs, LANES) if dtype == torch.float32 else (blocks, pairs, LANES, 2)
    packed = empty(*shape, dtype=dtype)
    scale = torch.ones(len(places)) if dtype == torch.int8 else None
    _pack_numbers(list(raws), [BLOCKS[kind].number for kind in kinds], places, packed, scale)
    return packed, None if scale is None else scale[:outputs]


def dequantize_blocks(raw: Tensor, kind: str, numbers: Tensor | None = None) -> Tensor:
    """Returns the ``[n, I]`` weights of ``[n, bytes]`` uint8 rows of blocks, exactly as a file means them.

    Args:
        raw: the rows.
        kind: kind of their blocks, a key of :data:`BLOCKS`.
        numbers: ``[n, I]`` contiguous float32 or bfloat16 tensor to write to; by default a new one in float32.
    """
    load()  # see above
    inputs = inputs_of([raw], [kind])
    numbers = torch.empty(len(raw), inputs) if numbers is None else numbers
    _dequantize(raw.contiguous(), BLOCKS[kind].number, numbers)
    return numbers


def pack_rows(
    raws: Sequence[Tensor],
    kinds: Sequence[str],
    weights: str | None,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    *,
    empty: Allocate = torch.empty,
) -> tuple[Tensor, Tensor | None]:
    """Returns rows of blocks in the layout of the kernels, and the scales of ``"int8-weight-only"``.

    Args:
        raws: see :func:`pack_blocks`.
        kinds: see :func:`pack_blocks`.
        weights: ``"int4"`` or ``"int8"``, in groups; ``"int8-weight-only"``, with one scale per output; ``"file"``,
            unchanged in panels. By default as numbers of ``dtype``.
        dtype: float32 or bfloat16.
        rows: see :func:`pack_blocks`.
        empty: allocates the result.
    """
    if weights in (None, "int8-weight-only"):
        return pack_numbers(raws, kinds, torch.int8 if weights else dtype, rows, empty=empty)
    return pack_blocks(raws, kinds, rows, to=_ROUNDED.get(weights), empty=empty), None


def pack(weight: Tensor, weights: str | None = None, *, empty: Allocate = torch.empty) -> tuple[Tensor, Tensor | None]:
    """Returns an ``[O, I]`` float32 or bfloat16 matrix in the layout of the kernels, as :func:`pack_rows` does."""
    raw, kind = float_blocks(weight)
    return pack_rows([raw], [kind], weights, weight.dtype, empty=empty)


def _whole_blocks(raw: Tensor, kind: str) -> Tensor:
    """Pads rows of floats to whole groups with zeros; rows of other kinds have them already."""
    return F.pad(raw, (0, -raw.shape[1] % BLOCKS[kind].nbytes)) if BLOCKS[kind].dtype is not None else raw


def _dequantize_by_reference(raw: Tensor, kind: int, numbers: Tensor) -> None:
    numbers.copy_(dequantize_blocks_reference(raw, NUMBERED[kind]))


def _pack_by_reference(raws: Sequence[Tensor], kinds: Sequence[int], places: Tensor, kind: int, packed: Tensor) -> None:
    names, rows = [NUMBERED[number] for number in kinds], places[places >= 0]
    if kind >= 0:
        bits = next(bits for bits, name in QUANTIZED.items() if name == NUMBERED[kind])
        dense = torch.cat([dequantize_blocks_reference(raw, name) for raw, name in zip(raws, names, strict=True)])
        raws, names, rows = [quantize_groups(dense[rows], bits)], [NUMBERED[kind]], torch.arange(len(rows))
    packed.copy_(pack_blocks_reference(raws, names, rows))


def _pack_numbers_by_reference(
    raws: Sequence[Tensor], kinds: Sequence[int], places: Tensor, packed: Tensor, scale: Tensor | None
) -> None:
    pairs = zip(raws, kinds, strict=True)
    dense = torch.cat([dequantize_blocks_reference(raw, NUMBERED[kind]) for raw, kind in pairs])[places[places >= 0]]
    if scale is not None:
        dense, scale[: len(dense)] = quantize(dense)
    packed.copy_(prepack(dense.to(packed.dtype)))


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
            Panels of codes multiply x in 8 bits: every row is quantised by itself, in groups of 32 inputs.
        scale: ``[O]`` float32 factors of the sums, such as the scales of int8 weights.
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
    "Allocate",
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
    "pack_numbers",
    "pack_rows",
    "prepack",
    "prepacked_linear",
    "prepacked_linear_reference",
    "quantize",
    "quantize_groups",
    "restore",
    "restore_blocks",
    "select_panels",
]
