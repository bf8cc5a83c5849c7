"""Products of rows with weights of 4 bits in Triton: codes become numbers in registers, on their way to a product.

A program computes two neighbouring panels for one tile of rows. Several pairs of groups are multiplied at a time, each
by products of its own, and their sums meet at the end. A group's scale multiplies the sum of its products, and its
minimum multiplies the sum of its inputs, which is a product with ones.

Shapes: T rows, I inputs, O outputs, G groups of 32 inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.fused_layers.triton import activated
from arbordraft.kernels.grouped_linear import panels as layout
from arbordraft.kernels.prepacked_linear.blocks import LANES
from arbordraft.kernels.ragged_tree_attention.softmax import numbers

_LANES = tl.constexpr(LANES)
_UNITS = tl.constexpr(layout.UNITS)
_PAIR_FIELDS = tl.constexpr(2 * layout.FIELDS)
_PAIR_CODES = tl.constexpr(2 * layout.CODES)


@triton.jit
def _levels(words, shift, LIKE: tl.constexpr, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Returns the levels of the codes at some bits of words as exact numbers, those of INT4 plus ``OFFSET``."""
    code = words >> shift & 15
    if KIND == "INT4":
        # The first four bits of the fraction of 16 count ones, so a code replaces them; to convert it takes longer.
        if tl.bfloat16 == LIKE:
            levels = (code << 3 | 0x4180).to(tl.bfloat16, bitcast=True)
        elif tl.float16 == LIKE:
            levels = (code << 6 | 0x4C00).to(tl.float16, bitcast=True)
        else:
            levels = code.to(LIKE) + OFFSET
    else:  # a sign, two bits of exponent and one of mantissa; in halves: 0, 1, 2, 3, 4, 6, 8, 12
        size = code & 7
        size = tl.where(size < 4, size, (2 | size & 1) << (size >> 1) - 1)
        levels = tl.where(code < 8, size, -size).to(LIKE)
    return levels


@triton.jit
def _scale(byte, unit, KIND: tl.constexpr):
    """Returns the float32 factors of groups, of codes or of minima."""
    if KIND == "INT4":
        scale = byte.to(tl.float32) * unit
    else:  # a power of two, half of it, as levels are in halves
        scale = tl.where(byte < 2, 0x200000 << (byte & 1), (byte - 1) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _add_pair(
    total, x0, x1, x2, x3, even, odd, CODES, there, fields, unit, lowest, KIND: tl.constexpr, OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the products with the two groups of every pair, whose scales and minima are bytes of ``fields``."""
    like: tl.constexpr = x0.dtype
    words = tl.load(CODES, mask=there, other=0)
    part = tl.dot(_levels(words, 0, like, KIND, OFFSET), x0, input_precision=PRECISION)
    part = tl.dot(_levels(words, 4, like, KIND, OFFSET), x1, part, input_precision=PRECISION)
    total = _add_group(total, part, even, fields, unit, lowest, KIND, OFFSET)
    part = tl.dot(_levels(words, 8, like, KIND, OFFSET), x2, input_precision=PRECISION)
    part = tl.dot(_levels(words, 12, like, KIND, OFFSET), x3, part, input_precision=PRECISION)
    return _add_group(total, part, odd, fields >> 16, unit, lowest, KIND, OFFSET)


@triton.jit
def _add_group(total, part, sums, fields, unit, lowest, KIND: tl.constexpr, OFFSET: tl.constexpr):
    """Scales products with codes, and adds the sums of inputs times the minimum; byte 0 is the scale, 1 the minimum."""
    scale = _scale(fields & 255, unit, KIND)
    total += part * scale[:, :, None]
    if KIND == "INT4":
        total += sums * (_scale(fields >> 8 & 255, lowest, KIND) - OFFSET * scale)[:, :, None]
    return total


@triton.jit
def _inputs(X, start, there, size, LIKE: tl.constexpr):
    return tl.load(X, mask=there & (start < size), other=0.0).to(LIKE)


@triton.jit
def grouped_tile(
    X, UNITS, FIELDS, CODES, OFFSETS, OUT, rows, size, outputs, stride, pairs, KIND: tl.constexpr,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows and two neighbouring panels per program; these are a gate and its input, if gated."""
    kind: tl.constexpr = OUT.dtype.element_ty
    like: tl.constexpr = tl.float32 if UPCAST else kind  # the interpreter cannot multiply bfloat16
    offset: tl.constexpr = 0.0 if like == tl.float32 else 16.0
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    panel = 2 * tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, _LANES)
    place = tl.arange(0, PAIRS)
    k = tl.arange(0, 16)
    second = (panel + 1) * _LANES + lane < outputs  # the last program may have one panel
    units = UNITS + panel * (stride // 4) + lane
    a_unit = tl.load(units)
    a_lowest = tl.load(units + _LANES)
    b_unit = tl.load(units + stride // 4, mask=second, other=0.0)
    b_lowest = tl.load(units + stride // 4 + _LANES, mask=second, other=0.0)
    fields = FIELDS + panel * (stride // 4) + _UNITS // 4 + place[:, None] * _LANES + lane[None, :]
    codes = CODES + (panel * stride + _UNITS + pairs * _PAIR_FIELDS) // 2
    codes += place[:, None, None] * (_PAIR_CODES // 2) + lane[None, :, None] * 16 + k[None, None, :]
    x_at = X + row.to(tl.int64)[None, None, :] * size + place[:, None, None] * 64 + k[None, :, None]
    x_there = (row < rows)[None, None, :]
    ones = tl.full([PAIRS, _LANES, 16], 1.0, like)
    a = tl.zeros([PAIRS, _LANES, BLOCK_M], tl.float32)
    b = tl.zeros([PAIRS, _LANES, BLOCK_M], tl.float32)
    for start in tl.range(0, pairs, PAIRS, num_stages=STAGES):
        there = start + place < pairs
        here = there[:, None, None]
        a_fields = tl.load(fields + start * _LANES, mask=there[:, None], other=0)
        b_fields = tl.load(fields + start * _LANES + stride // 4, mask=there[:, None] & second[None, :], other=0)
        at = (start + place)[:, None, None] * 64 + k[None, :, None]
        x0 = _inputs(x_at + start * 64, at, x_there, size, like)
        x1 = _inputs(x_at + start * 64 + 16, at + 16, x_there, size, like)
        x2 = _inputs(x_at + start * 64 + 32, at + 32, x_there, size, like)
        x3 = _inputs(x_at + start * 64 + 48, at + 48, x_there, size, like)
        even = tl.dot(ones, x1, tl.dot(ones, x0, input_precision=PRECISION), input_precision=PRECISION)
        odd = tl.dot(ones, x3, tl.dot(ones, x2, input_precision=PRECISION), input_precision=PRECISION)
        code = codes + start * (_PAIR_CODES // 2)
        a = _add_pair(a, x0, x1, x2, x3, even, odd, code, here, a_fields, a_unit, a_lowest, KIND, offset, PRECISION)
        b = _add_pair(
            b, x0, x1, x2, x3, even, odd, code + stride // 2, here & second[None, :, None], b_fields, b_unit, b_lowest,
            KIND, offset, PRECISION,
        )  # fmt: skip
    x = tl.sum(a, 0)
    y = tl.sum(b, 0)
    n = panel * _LANES + lane
    if BIAS:
        x += tl.load(OFFSETS + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        y += tl.load(OFFSETS + n + _LANES, mask=n + _LANES < outputs, other=0.0).to(tl.float32)[:, None]
    real = (row < rows)[None, :]
    if ACTIVATION is None:
        at = OUT + row.to(tl.int64)[None, :] * outputs + n[:, None]
        tl.store(at, x.to(kind), mask=real & (n < outputs)[:, None])
        tl.store(at + _LANES, y.to(kind), mask=real & (n + _LANES < outputs)[:, None])
    else:
        gate = activated(x.to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
        n = tl.program_id(1) * _LANES + lane
        at = OUT + row.to(tl.int64)[None, :] * (outputs // 2) + n[:, None]
        tl.store(at, (gate * y.to(kind).to(tl.float32)).to(kind), mask=real & (2 * n < outputs)[:, None])


def launch(x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int, activation: str | None, kind: str) -> Tensor:
    """See :func:`arbordraft.kernels.grouped_linear.grouped_linear`."""
    x, size = x.contiguous(), x.shape[-1]
    rows = x.numel() // size
    out = x.new_empty(*x.shape[:-1], outputs if activation is None else outputs // 2)
    if rows:
        how = tile(rows, x.dtype, torch.version.hip is not None)
        grid = triton.cdiv(rows, how["BLOCK_M"]), triton.cdiv(outputs, 2 * LANES)
        grouped_tile[grid](
            x, panels.view(torch.float32), panels.view(torch.int32), panels.view(torch.int16),
            panels if bias is None else bias, out, rows, size, outputs, panels.shape[1],
            layout.groups_of(panels) // 2, KIND=kind, ACTIVATION=activation, BIAS=bias is not None, **how,
            **numbers(x),
        )  # fmt: skip
    return out


def tile(rows: int, dtype: torch.dtype, hip: bool) -> dict[str, int]:
    """Returns constants of products with this many rows; a matrix instruction takes 8 rows, on AMD's GPUs 16."""
    return {
        "BLOCK_M": 8 if rows <= 8 and not hip else 16 if rows <= 16 else 32,
        "PAIRS": 4 if dtype == torch.float32 or rows > 16 else 8,
        "STAGES": 2 if hip else 4,  # AMD's GPUs have less shared memory
        "num_warps": 4,
    }


__all__ = ["launch", "tile"]
