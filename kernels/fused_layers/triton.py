"""Element-wise parts of decoder layers in Triton: every tensor is read once and written once.

Numbers are widened to float32, and narrowed wherever transformers' modules round. Launches forbid the compiler to
contract a product and a sum, because contraction would omit a rounding.

Shapes: T rows, H hidden size, N inner size of an MLP, Hq/Hkv heads, D head size, R rotated channels of
a head, P pool rows.
"""

import triton
import triton.language as tl
from torch import Tensor

GATED_BLOCK = 1024
HEADS = 16  # heads that a program rotates
EXACT = {"enable_fp_fusion": False}
GATED_OPTIONS = {"num_warps": 2, **EXACT}  # warps of 32 or 64 threads, each of which reads 16 bytes at a time


@triton.jit
def norm_row(
    X, RESIDUAL, WEIGHT, SUM, OUT, epsilon, ADD: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Norms one row per program."""
    kind: tl.constexpr = OUT.dtype.element_ty
    e = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * SIZE + e
    x = tl.load(X + at, mask=e < SIZE, other=0.0).to(tl.float32)
    if ADD:
        total = (x + tl.load(RESIDUAL + at, mask=e < SIZE, other=0.0).to(tl.float32)).to(kind)
        tl.store(SUM + at, total, mask=e < SIZE)
        x = total.to(tl.float32)
    weight = tl.load(WEIGHT + e, mask=e < SIZE, other=0.0).to(tl.float32)
    x *= tl.rsqrt(tl.sum(x * x, 0) * (1.0 / SIZE) + epsilon)
    out = x * (OFFSET + weight) if WIDE else x.to(kind).to(tl.float32) * weight
    tl.store(OUT + at, out.to(kind), mask=e < SIZE)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        tanh = 1.0 - tl.div_rn(2.0, 1.0 + tl.exp(2.0 * 0.7978845608028654 * (x + 0.044715 * x * x * x)))
        y = 0.5 * x * (1.0 + tanh)
    return y


@triton.jit
def gated_block(GATE, UP, OUT, size, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Computes one block of numbers per program; a block may span rows."""
    kind: tl.constexpr = OUT.dtype.element_ty
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(GATE + e, mask=e < size, other=0.0).to(tl.float32)
    up = tl.load(UP + e, mask=e < size, other=0.0).to(tl.float32)
    gate = activated(gate, ACTIVATION).to(kind).to(tl.float32)
    tl.store(OUT + e, (gate * up).to(kind), mask=e < size)


@triton.jit
def _rotate_heads(
    HEADS, OUT, COSINE, SINE, first, count: tl.constexpr, D: tl.constexpr, R: tl.constexpr, REST: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates some heads of one row, all with the same cosines and sines."""
    kind: tl.constexpr = OUT.dtype.element_ty
    half: tl.constexpr = R // 2
    head = first + tl.arange(0, BLOCK_H)[:, None]
    e = tl.arange(0, BLOCK)[None, :]
    there = (head < count) & (e < half)
    x = tl.load(HEADS + head * D + e, mask=there, other=0.0).to(tl.float32)
    y = tl.load(HEADS + head * D + half + e, mask=there, other=0.0).to(tl.float32)
    table = tl.broadcast_to(e, (BLOCK_H, BLOCK))  # each thread loads its own values: no exchange between threads
    cos_x = tl.load(COSINE + table, mask=there, other=0.0).to(tl.float32)
    cos_y = tl.load(COSINE + half + table, mask=there, other=0.0).to(tl.float32)
    sin_x = tl.load(SINE + table, mask=there, other=0.0).to(tl.float32)
    sin_y = tl.load(SINE + half + table, mask=there, other=0.0).to(tl.float32)
    rotated_x = (x * cos_x).to(kind).to(tl.float32) - (y * sin_x).to(kind).to(tl.float32)
    rotated_y = (y * cos_y).to(kind).to(tl.float32) + (x * sin_y).to(kind).to(tl.float32)
    tl.store(OUT + head * D + e, rotated_x.to(kind), mask=there)
    tl.store(OUT + head * D + half + e, rotated_y.to(kind), mask=there)
    if R < D:
        e = tl.arange(0, REST)[None, :]
        there = (head < count) & (e < D - R)
        tl.store(OUT + head * D + R + e, tl.load(HEADS + head * D + R + e, mask=there, other=0.0), mask=there)


@triton.jit
def rotate_append_row(
    QUERY, KEY, VALUE, COSINE, SINE, NEW_QUERY, KEYS, VALUES, SLOTS, stride_q, stride_k, stride_v, HQ: tl.constexpr,
    HKV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, REST: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Handles one row and block of heads per program: first heads of queries, then of keys, then of values."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    queries: tl.constexpr = (HQ + BLOCK_H - 1) // BLOCK_H  # blocks
    keys: tl.constexpr = (HKV + BLOCK_H - 1) // BLOCK_H
    if block < queries:
        _rotate_heads(
            QUERY + row * stride_q, NEW_QUERY + row * HQ * D, COSINE + row * R, SINE + row * R, block * BLOCK_H, HQ, D,
            R, REST, BLOCK_H, BLOCK,
        )  # fmt: skip
    else:
        slot = tl.load(SLOTS + row)
        if block < queries + keys:
            _rotate_heads(
                KEY + row * stride_k, KEYS + slot * HKV * D, COSINE + row * R, SINE + row * R,
                (block - queries) * BLOCK_H, HKV, D, R, REST, BLOCK_H, BLOCK,
            )  # fmt: skip
        else:
            head = (block - queries - keys) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
            e = tl.arange(0, BLOCK_DV)[None, :]
            there = (head < HKV) & (e < DV)
            value = tl.load(VALUE + row * stride_v + head * DV + e, mask=there, other=0.0)
            tl.store(VALUES + slot * HKV * DV + head * DV + e, value, mask=there)


def launch_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float, wide: bool) -> Tensor:
    """See :func:`arbordraft.kernels.fused_layers.rms_norm`."""
    x = x.contiguous()
    out = x.new_empty(x.shape)
    _norm(x, x, weight, out, out, epsilon, False, offset, wide)
    return out


def launch_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, epsilon: float, offset: float, wide: bool
) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.fused_layers.add_rms_norm`."""
    x, residual = x.contiguous(), residual.contiguous()
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    _norm(x, residual, weight, total, out, epsilon, True, offset, wide)
    return total, out


def _norm(
    x: Tensor, residual: Tensor, weight: Tensor, total: Tensor, out: Tensor, epsilon: float, add: bool, offset: float,
    wide: bool,
) -> None:  # fmt: skip
    size = x.shape[-1]
    if rows := x.numel() // size:
        norm_row[(rows,)](
            x, residual, weight, total, out, epsilon, ADD=add, OFFSET=offset, WIDE=wide, SIZE=size,
            **norm_options(size), **EXACT,
        )  # fmt: skip


def norm_options(size: int) -> dict[str, int]:
    """Returns the block that holds a row, and the warps, of 32 threads that read 16 bytes each."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


def launch_gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """See :func:`arbordraft.kernels.fused_layers.gated_activation`."""
    gate, up = gate.contiguous(), up.contiguous()
    out = gate.new_empty(gate.shape)
    if size := gate.numel():
        gated_block[(triton.cdiv(size, GATED_BLOCK),)](
            gate, up, out, size, ACTIVATION=activation, BLOCK=GATED_BLOCK, **GATED_OPTIONS
        )
    return out


def launch_rotate_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cosine: Tensor,
    sine: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    """See :func:`arbordraft.kernels.fused_layers.rotate_append`."""
    rows, heads, size = query.shape
    new_query = query.new_empty(query.shape)
    if rows:
        kv_heads, value_size = value.shape[1:]
        # Rows may lie side by side in one product's output; heads are copied if they do not follow one another.
        parts = [part.flatten(1) for part in (query, key, value)]
        blocks = triton.cdiv(heads, HEADS) + 2 * triton.cdiv(kv_heads, HEADS)
        rotate_append_row[(rows, blocks)](
            *parts, cosine.contiguous(), sine.contiguous(), new_query, keys, values, slots.contiguous(),
            *(part.stride(0) for part in parts), HQ=heads, HKV=kv_heads,
            **rotation_options(size, value_size, cosine.shape[1]), **EXACT,
        )  # fmt: skip
    return new_query


def rotation_options(size: int, value_size: int, rotary_size: int) -> dict[str, int]:
    """Returns constants for heads of these sizes, of which the first ``rotary_size`` channels are rotated."""
    block = triton.next_power_of_2(rotary_size // 2)
    return {
        **{"D": size, "DV": value_size, "R": rotary_size, "BLOCK_H": HEADS, "BLOCK": block},
        "REST": triton.next_power_of_2(max(1, size - rotary_size)),
        "BLOCK_DV": triton.next_power_of_2(value_size),
        "num_warps": max(1, block // 32),
    }
