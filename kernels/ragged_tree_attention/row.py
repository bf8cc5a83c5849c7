"""Ragged tree attention whose rows have the bits that plain decoding gives them.

One program attends one row, with all query heads of one key head, to that row's keys in the order of their positions.
Tiles of keys begin at multiples of their size, so committed and drafted keys give equal bits. No product is contracted
with a sum, because two loops might contract differently. Keys are read anew for every row, from the second row on
mostly from the cache of the GPU.

Segments of 256 positions have a softmax each, whose results are merged in the order of segments. One program does all
this for its row, or, if there are few rows, one program per segment, of which the last to finish merges. Both do equal
operations in equal order. So the number of programs changes no bit, and the number of rows may decide it. Wide heads
leave no registers for a second softmax: they have one segment.

Shapes: T packed rows, B samples, P pool rows, Hq/Hkv query/key heads, G = Hq / Hkv, D/Dv head sizes, W ancestor words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.ragged_tree_attention.batch import ARRIVALS
from arbordraft.kernels.ragged_tree_attention.softmax import accumulate, arrived, numbers, scores
from arbordraft.kernels.ragged_tree_attention.tiling import WHOLE, processors, row_tile

ALL: tl.constexpr = tl.constexpr(WHOLE)


@triton.jit
def merge(m, total, acc, m_new, total_new, acc_new):
    """Merges the softmax of a segment into that of the segments before it; the first one is taken as it is."""
    highest = tl.maximum(m, m_new)
    safe = tl.where(highest == -float("inf"), 0.0, highest)
    before = tl.exp2(m - safe)
    here = tl.exp2(m_new - safe)
    return highest, total * before + total_new * here, acc * before[:, None] + acc_new * here[:, None]


@triton.jit
def attend_row(
    Q, K, V, OUT, PART, STATS, ARRIVALS, SINKS, LAYOUT, REGION, POSITIONS, WORDS, scale, softcap, window, samples,
    stride_qt, stride_qh, stride_kp, stride_kh, stride_vp, stride_vh, stride_ot, stride_oh, G: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, W: tl.constexpr, SEARCH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SINK: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr, SPAN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Attends one row for one key head, per program or, if ``SPLIT``, per group of programs; see ``attend``."""
    row = tl.program_id(0)
    head = tl.program_id(1)
    low = 0
    high = samples
    for _ in range(SEARCH):  # finds the sample of the row
        middle = (low + high) // 2
        mine = tl.load(LAYOUT + middle) <= row
        low = tl.where(mine, middle, low)
        high = tl.where(mine, high, middle)
    columns = samples + 1
    if row >= tl.load(LAYOUT + samples):
        return
    start = tl.load(LAYOUT + columns + low)
    past = tl.load(LAYOUT + 2 * columns + low).to(tl.int32)
    region = tl.load(LAYOUT + 3 * columns + low)
    tree = (tl.load(LAYOUT + 3 * columns + low + 1) - region).to(tl.int32)
    position = tl.load(POSITIONS + row).to(tl.int32)
    if CAUSAL:  # the row's place in the region
        position = past + tree - (tl.load(LAYOUT + low + 1) - row).to(tl.int32)
        past = position + 1  # all keys that it sees are consecutive

    lanes = tl.arange(0, BLOCK_M)
    q_head = head * G + lanes
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    j = tl.arange(0, 64)
    at = row.to(tl.int64)
    q = tl.load(
        Q + at * stride_qt + q_head[:, None] * stride_qh + d[None, :], mask=(lanes < G)[:, None] & (d < D)[None, :],
        other=0.0,
    )  # fmt: skip
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_tile = K + head * stride_kh + d[:, None]
    v_tile = V + head * stride_vh + dv[None, :]

    begin = 0
    if WINDOW:
        begin = tl.maximum(position - window + 1, 0) // BLOCK_N
    last = position // BLOCK_N
    whole = tl.maximum(begin, tl.minimum(past // BLOCK_N, last + 1))
    PER: tl.constexpr = SPAN // BLOCK_N  # tiles of a segment
    first_segment = begin // PER
    parts = last // PER - first_segment + 1
    from_segment = first_segment
    until = first_segment + parts
    if SPAN == ALL:  # as constants, which leave no loop over segments
        from_segment = 0
        until = 1
    if SPLIT:
        if parts > tl.num_programs(2):  # there are too few programs: the first one does it all
            parts = 1
            until = tl.where(tl.program_id(2) == 0, until, from_segment)
        else:
            from_segment += tl.program_id(2)
            until = tl.minimum(from_segment + 1, until)
        if from_segment >= until:
            return
    for segment in range(from_segment, until):
        m_s = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total_s = tl.zeros([BLOCK_M], tl.float32)
        acc_s = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        near = begin
        far = last + 1
        if SPAN < ALL:
            near = tl.maximum(begin, segment * PER)
            far = tl.minimum(last + 1, segment * PER + PER)
        for tile in range(near, tl.minimum(whole, far)):  # committed keys alone
            key = tile * BLOCK_N + n
            slot = start + key
            k = tl.load(k_tile + slot[None, :] * stride_kp, mask=(d < D)[:, None], other=0.0)
            v = tl.load(v_tile + slot[:, None] * stride_vp, mask=(dv < DV)[None, :], other=0.0)
            there = key >= 0
            if WINDOW:
                there = key > position - window
            s = scores(q, k, there[None, :], scale, softcap, SOFTCAP, UPCAST, PRECISION)
            m_s, total_s, acc_s = accumulate(s, v, m_s, total_s, acc_s, UPCAST, PRECISION)
        for tile in tl.range(tl.maximum(whole, near), far, num_stages=1):
            key = tile * BLOCK_N + n
            slot = start + key
            there = key <= position
            if not CAUSAL:  # find the draft at each position that is an ancestor, or the row itself
                found = tl.zeros([BLOCK_N], tl.int32)
                for word in range(W):
                    column = word * 64 + j
                    seen = ((tl.load(WORDS + at * W + word) >> j.to(tl.int64)) & 1) != 0
                    seen = seen & (column < tree)
                    where = tl.load(REGION + region + column, mask=seen, other=-1).to(tl.int32)
                    same = (where[None, :] == key[:, None]) & seen[None, :]
                    slot += tl.sum(tl.where(same, (past + column)[None, :] - key[:, None], 0), 1)
                    found += tl.sum(same.to(tl.int32), 1)
                there = there & ((key < past) | (found > 0))
            if WINDOW:
                there = there & (key > position - window)
            k = tl.load(k_tile + slot[None, :] * stride_kp, mask=(d < D)[:, None] & there[None, :], other=0.0)
            v = tl.load(v_tile + slot[:, None] * stride_vp, mask=there[:, None] & (dv < DV)[None, :], other=0.0)
            s = scores(q, k, there[None, :], scale, softcap, SOFTCAP, UPCAST, PRECISION)
            m_s, total_s, acc_s = accumulate(s, v, m_s, total_s, acc_s, UPCAST, PRECISION)
        if SPAN == ALL:
            m, total, acc = m_s, total_s, acc_s
        else:
            m, total, acc = merge(m, total, acc, m_s, total_s, acc_s)

    real = lanes < G
    there_out = real[:, None] & (dv < DV)[None, :]
    if SPLIT:  # noqa: SIM102 - a constant and a number of the device
        if parts > 1:
            cell = at * tl.num_programs(1) + head
            here = (cell * tl.num_programs(2) + tl.program_id(2)) * G + lanes
            tl.store(STATS + 2 * here, m, mask=real)
            tl.store(STATS + 2 * here + 1, total, mask=real)
            tl.store(PART + here[:, None] * DV + dv[None, :], acc, mask=there_out)
            is_last = arrived(ARRIVALS + cell, parts, False).to(tl.int32)
            there_out = there_out & (is_last + lanes * 0 > 0)[:, None]
            m = tl.full([BLOCK_M], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            for part in range(is_last * parts):
                here = (cell * tl.num_programs(2) + part) * G + lanes
                # Past the first-level cache, which may hold older bytes.
                m_s = tl.load(STATS + 2 * here, mask=real, other=-float("inf"), cache_modifier=".cg")
                total_s = tl.load(STATS + 2 * here + 1, mask=real, other=0.0, cache_modifier=".cg")
                to_merge = PART + here[:, None] * DV + dv[None, :]
                acc_s = tl.load(to_merge, mask=there_out, other=0.0, cache_modifier=".cg")
                m, total, acc = merge(m, total, acc, m_s, total_s, acc_s)

    if SINK:
        sink = tl.load(SINKS + q_head, mask=lanes < G, other=0.0).to(tl.float32) * 1.4426950408889634
        new = tl.maximum(m, sink)
        rescale = tl.exp2(m - new)
        acc = acc * rescale[:, None]
        total = total * rescale + tl.exp2(sink - new)
    out = acc / tl.where(total == 0, 1.0, total)[:, None]
    to = OUT + at * stride_ot + q_head[:, None] * stride_oh + dv[None, :]
    tl.store(to, out.to(OUT.dtype.element_ty), mask=there_out)


def split_rows(pairs: int, positions: int, span: int, processors: int) -> int:
    """Returns the programs of each row and key head: one per segment if rows alone leave processors idle.

    Args:
        pairs: rows times key heads.
        positions: positions of the longest row. If it has more after all, one program computes it.
        span: keys of a segment.
        processors: processors of the device.
    """
    segments = -(-positions // span)
    return segments if pairs < 2 * processors and pairs <= ARRIVALS else 1


def launch_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Tensor,
    region: Tensor | None,
    positions: Tensor,
    words: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    most_positions: int,
    arrivals: Tensor | None,
) -> Tensor:
    """See :func:`arbordraft.kernels.ragged_tree_attention.reference.attention_by_layout`."""
    rows, heads, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    samples, group = layout.shape[1] - 1, heads // kv_heads
    out = query.new_empty(rows, heads, value_dim)
    if rows == 0:
        return out
    tile = row_tile(group, dim, value_dim, query.dtype)
    segments = split_rows(rows * kv_heads, most_positions, tile["SPAN"], processors(query.device))
    part, stats = (
        query.new_empty((rows, kv_heads, segments if segments > 1 else 0, group, size), dtype=torch.float32)
        for size in (value_dim, 2)
    )
    if arrivals is None:
        arrivals = query.new_zeros(ARRIVALS if segments > 1 else 0, dtype=torch.int32)
    attend_row[rows, kv_heads, segments](
        query, keys, values, out, part, stats, arrivals, out if sinks is None else sinks, layout,
        positions if region is None else region, positions, positions if words is None else words, scale,
        softcap or 1.0, window, samples,
        *(stride for tensor in (query, keys, values, out) for stride in tensor.stride()[:2]),
        G=group, D=dim, DV=value_dim, **tile,
        W=1 if words is None else words.shape[1], SEARCH=samples.bit_length(), CAUSAL=words is None, WINDOW=window > 0,
        SOFTCAP=softcap > 0, SINK=sinks is not None, SPLIT=segments > 1, **numbers(query), enable_fp_fusion=False,
    )  # fmt: skip
    return out


__all__ = ["attend_row", "launch_rows", "split_rows"]
