"""Products of rows with the weights of linears in Triton, fused with the operations before the next product.

A program computes one tile of rows and two blocks of outputs that belong together. These are the two halves of a
rotated head, a gate and its input, or neighbouring blocks. An output is the sum over one row's inputs, in their order,
by ``mma`` instructions of sixteen inputs each. Every tile adds in this order, so a row's bits do not depend on the
other rows.

Shapes: T rows, K inputs, N outputs, Hq/Hkv heads, D head size, P pool rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.fused_layers.triton import EXACT, activated
from arbordraft.kernels.ragged_tree_attention.softmax import numbers

FEW = 16  # rows of the smallest tile that a matrix instruction takes
MOST = 32  # rows of a tile: from 64 on, Hopper's wgmma would add up in another order
WARPS = 4


@triton.jit
def _products(
    X, FIRST, SECOND, row, rows, a_at, b_at, a_there, b_there, size, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns ``[BLOCK_M, BLOCK_N]`` products with rows ``a_at`` of one matrix and ``b_at`` of another, in float32."""
    k = tl.arange(0, BLOCK_K)
    x_row = X + row.to(tl.int64)[:, None] * size
    a_row = FIRST + a_at.to(tl.int64)[None, :] * size
    b_row = SECOND + b_at.to(tl.int64)[None, :] * size
    a = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    b = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, size, BLOCK_K):
        inside = start + k < size
        x = tl.load(x_row + (start + k)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0)
        v = tl.load(a_row + (start + k)[:, None], mask=a_there[None, :] & inside[:, None], other=0.0)
        w = tl.load(b_row + (start + k)[:, None], mask=b_there[None, :] & inside[:, None], other=0.0)
        if UPCAST:  # the interpreter cannot multiply bfloat16
            x = x.to(tl.float32)
            v = v.to(tl.float32)
            w = w.to(tl.float32)
        a = tl.dot(x, v, a, input_precision=PRECISION)
        b = tl.dot(x, w, b, input_precision=PRECISION)
    return a, b


@triton.jit
def linear_tile(
    X, MATRIX, OFFSETS, OUT, rows, size, outputs, BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows and two neighbouring blocks of outputs per program."""
    kind: tl.constexpr = OUT.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * 2 * BLOCK_N + tl.arange(0, BLOCK_N)
    second = first + BLOCK_N
    a, b = _products(
        X, MATRIX, MATRIX, row, rows, first, second, first < outputs, second < outputs, size, BLOCK_M, BLOCK_N,
        BLOCK_K, UPCAST, PRECISION,
    )  # fmt: skip
    if BIAS:
        a += tl.load(OFFSETS + first, mask=first < outputs, other=0.0).to(tl.float32)[None, :]
        b += tl.load(OFFSETS + second, mask=second < outputs, other=0.0).to(tl.float32)[None, :]
    at = OUT + row.to(tl.int64)[:, None] * outputs
    real = (row < rows)[:, None]
    tl.store(at + first[None, :], a.to(kind), mask=real & (first < outputs)[None, :])
    tl.store(at + second[None, :], b.to(kind), mask=real & (second < outputs)[None, :])


@triton.jit
def gated_tile(
    X, GATE, UP, GATE_OFFSETS, UP_OFFSETS, OUT, rows, size, outputs, ACTIVATION: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows and block of outputs per program."""
    kind: tl.constexpr = OUT.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = n < outputs
    gate, up = _products(X, GATE, UP, row, rows, n, n, there, there, size, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, PRECISION)
    if BIAS:
        gate += tl.load(GATE_OFFSETS + n, mask=there, other=0.0).to(tl.float32)[None, :]
        up += tl.load(UP_OFFSETS + n, mask=there, other=0.0).to(tl.float32)[None, :]
    gate = activated(gate.to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
    out = (gate * up.to(kind).to(tl.float32)).to(kind)
    at = OUT + row.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(at, out, mask=(row < rows)[:, None] & there[None, :])


@triton.jit
def rotated_tile(
    X, QUERY_WEIGHT, KEY_WEIGHT, VALUE_WEIGHT, QUERY_OFFSETS, KEY_OFFSETS, VALUE_OFFSETS, QUERY_NORM, KEY_NORM, COSINE,
    SINE, NEW_QUERY, KEYS, VALUES, SLOTS, epsilon, rows, size, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes one tile of rows and head per program: first heads of queries, then of keys, then of values."""
    kind: tl.constexpr = NEW_QUERY.dtype.element_ty
    half: tl.constexpr = D // 2
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.program_id(1)
    n = tl.arange(0, BLOCK_N)
    there = n < half
    if place < HQ:
        head = place
        weight = QUERY_WEIGHT
        offsets = QUERY_OFFSETS
        norm = QUERY_NORM
    elif place < HQ + HKV:
        head = place - HQ
        weight = KEY_WEIGHT
        offsets = KEY_OFFSETS
        norm = KEY_NORM
    else:
        head = place - HQ - HKV
        weight = VALUE_WEIGHT
        offsets = VALUE_OFFSETS
        norm = KEY_NORM
    first = head * D + n
    second = first + half
    a, b = _products(
        X, weight, weight, row, rows, first, second, there, there, size, BLOCK_M, BLOCK_N, BLOCK_K, UPCAST, PRECISION
    )
    if BIAS:
        a += tl.load(offsets + first, mask=there, other=0.0).to(tl.float32)[None, :]
        b += tl.load(offsets + second, mask=there, other=0.0).to(tl.float32)[None, :]
    real = row < rows
    mask = real[:, None] & there[None, :]
    x = a.to(kind)
    y = b.to(kind)
    if place < HQ + HKV:
        if NORM:
            wide_x = x.to(tl.float32)
            wide_y = y.to(tl.float32)
            square = tl.sum(wide_x * wide_x, 1) + tl.sum(wide_y * wide_y, 1)
            share = tl.rsqrt(square * (1.0 / D) + epsilon)[:, None]
            by_x = tl.load(norm + n, mask=there, other=0.0).to(tl.float32)[None, :]
            by_y = tl.load(norm + half + n, mask=there, other=0.0).to(tl.float32)[None, :]
            wide_x *= share
            wide_y *= share
            if WIDE:
                x = (wide_x * (OFFSET + by_x)).to(kind)
                y = (wide_y * (OFFSET + by_y)).to(kind)
            else:
                x = (wide_x.to(kind).to(tl.float32) * by_x).to(kind)
                y = (wide_y.to(kind).to(tl.float32) * by_y).to(kind)
        table = row.to(tl.int64)[:, None] * D + n[None, :]
        cos_x = tl.load(COSINE + table, mask=mask, other=0.0).to(tl.float32)
        cos_y = tl.load(COSINE + half + table, mask=mask, other=0.0).to(tl.float32)
        sin_x = tl.load(SINE + table, mask=mask, other=0.0).to(tl.float32)
        sin_y = tl.load(SINE + half + table, mask=mask, other=0.0).to(tl.float32)
        wide_x = x.to(tl.float32)
        wide_y = y.to(tl.float32)
        rotated = (wide_x * cos_x).to(kind).to(tl.float32) - (wide_y * sin_x).to(kind).to(tl.float32)
        y = ((wide_y * cos_y).to(kind).to(tl.float32) + (wide_x * sin_y).to(kind).to(tl.float32)).to(kind)
        x = rotated.to(kind)
    if place < HQ:
        at = NEW_QUERY + row.to(tl.int64)[:, None] * HQ * D + first[None, :]
    else:
        slot = tl.load(SLOTS + row, mask=real, other=0)
        at = tl.where(place < HQ + HKV, KEYS, VALUES) + slot[:, None] * HKV * D + first[None, :]
    tl.store(at, x, mask=mask)
    tl.store(at + half, y, mask=mask)


def launch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See :func:`arbordraft.kernels.fused_linear.linear`."""
    x, rows, size = _rows(x)
    outputs = len(weight)
    out = x.new_empty(*x.shape[:-1], outputs)
    if rows:
        how = tile(rows, x.dtype)
        grid = triton.cdiv(rows, how["BLOCK_M"]), triton.cdiv(outputs, 2 * how["BLOCK_N"])
        offsets = weight if bias is None else bias
        linear_tile[grid](
            x, weight, offsets, out, rows, size, outputs, BIAS=bias is not None, **how, **numbers(x), **EXACT
        )
    return out


def launch_gated(x: Tensor, weights: list[Tensor], biases: list[Tensor], activation: str) -> Tensor:
    """See :func:`arbordraft.kernels.fused_linear.gated_linear`."""
    x, rows, size = _rows(x)
    outputs = len(weights[0])
    out = x.new_empty(*x.shape[:-1], outputs)
    if rows:
        how = tile(rows, x.dtype)
        grid = triton.cdiv(rows, how["BLOCK_M"]), triton.cdiv(outputs, how["BLOCK_N"])
        gated_tile[grid](
            x, *weights, *(biases or weights), out, rows, size, outputs, ACTIVATION=activation, BIAS=bool(biases),
            **how, **numbers(x), **EXACT,
        )  # fmt: skip
    return out


def launch_rotated(
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
    x, rows, size = _rows(x)
    kv_heads, dim = keys.shape[1:]
    heads = len(weights[0]) // dim
    query = x.new_empty(rows, heads, dim)
    if rows:
        how = head_tile(rows, dim, x.dtype, bool(norms))
        rotated_tile[triton.cdiv(rows, how["BLOCK_M"]), heads + 2 * kv_heads](
            x, *weights, *(biases or weights), *(norms or weights[:2]), cosine.contiguous(), sine.contiguous(), query,
            keys, values, slots.contiguous(), epsilon, rows, size, HQ=heads, HKV=kv_heads, D=dim, BIAS=bool(biases),
            NORM=bool(norms), OFFSET=offset, WIDE=wide, **how, **numbers(x), **EXACT,
        )  # fmt: skip
    return query


def tile(rows: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns constants of products with this many rows."""
    return {
        "BLOCK_M": FEW if rows <= FEW else MOST,
        "BLOCK_N": 16 if rows <= MOST else 64,  # many programs while weights are read once, then larger blocks
        "BLOCK_K": 32 if dtype == torch.float32 else 128,
        "num_warps": WARPS,
        "num_stages": 4 if rows <= MOST else 3,
    }


def head_tile(rows: int, dim: int, dtype: torch.dtype, norm: bool) -> dict[str, int]:
    """Returns constants of products whose outputs are heads, of all channels at once.

    A norm adds up squares in an order that depends on the tile, so products with norms have one size of tile.
    """
    half = max(16, triton.next_power_of_2(dim // 2))
    block_k = 32 if dtype == torch.float32 else 128 // max(1, half // 64)
    stages = 3 if half <= 64 else 2
    return tile(rows, dtype) | {
        "BLOCK_M": FEW if norm or rows <= FEW else MOST,
        "BLOCK_N": half,
        "BLOCK_K": block_k,
        "num_stages": stages,
    }


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """Returns the contiguous tensor, the number of its rows and their length."""
    x, size = x.contiguous(), x.shape[-1]
    return x, x.numel() // size, size


__all__ = ["head_tile", "launch_gated", "launch_linear", "launch_rotated", "tile"]
