"""Ragged tree attention in Triton.

One program attends a tile of one sample's packed rows, with all query heads of one key head, to one part of the keys.
Keys are read once for all of these rows and heads. A sample's keys are its committed prefix, which every row sees, and
its tree region. Ancestor words, one per row and tile, are the masks of the region. Prefixes are cut into splits. The
program that finishes last combines the results of all splits of its tile, in their order.

Shapes: T packed rows, B samples, P pool rows, Hq/Hkv query/key heads, G = Hq / Hkv, D/Dv head sizes, S splits,
W ancestor words.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.ragged_tree_attention.batch import ARRIVALS
from arbordraft.kernels.ragged_tree_attention.row import launch_rows
from arbordraft.kernels.ragged_tree_attention.softmax import accumulate, arrived, numbers, scores
from arbordraft.kernels.ragged_tree_attention.tiling import choose, processors


@triton.jit
def combined(
    PART,
    PART_LSE,
    SINK_OF,  # where the sinks of the lanes stand
    base,
    real,
    dv,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    SINK: tl.constexpr,
):
    """Combines the splits of a tile in their order; empty splits change no bit. Returns weights and weighted values."""
    s = tl.arange(0, SPLITS)
    # Past the first-level cache, which may hold older bytes.
    lse = tl.load(PART_LSE + base[:, None] + s[None, :], mask=real[:, None], other=-float("inf"), cache_modifier=".cg")
    m = tl.max(lse, 1)
    if SINK:
        sink = tl.load(SINK_OF, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    safe = tl.where(m == -float("inf"), 0.0, m)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    there = real[:, None] & (dv < DV)[None, :]
    for split in range(SPLITS):
        at = base + split
        weight = tl.exp2(tl.load(PART_LSE + at, mask=real, other=-float("inf"), cache_modifier=".cg") - safe)
        part = tl.load(PART + at[:, None] * DV + dv[None, :], mask=there, other=0.0, cache_modifier=".cg")
        total += weight
        acc += weight[:, None] * part
    if SINK:
        total += tl.exp2(sink - safe)
    return total, acc


@triton.jit
def attend(
    Q,
    K,
    V,
    OUT,
    PART,
    PART_LSE,
    ARRIVALS,  # finished splits of every tile of rows and key head; 0 before and after
    SINKS,
    LAYOUT,  # [4, B + 1], see RaggedBatch.layout
    REGION,  # positions of the keys of all tree regions
    POSITIONS,  # [T]
    WORDS,  # [T, W]
    scale,
    softcap,
    window,
    samples,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kh,
    stride_vp,
    stride_vh,
    stride_ot,
    stride_oh,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    W: tl.constexpr,
    SEARCH: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINK: tl.constexpr,
    FENCED: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)

    # Sample b owns the blocks from LAYOUT[0, b] // BLOCK_Q + b on: a few blocks too many, but no table is needed.
    low = 0
    high = samples
    for _ in range(SEARCH):
        middle = (low + high) // 2
        mine = tl.load(LAYOUT + middle) // BLOCK_Q + middle <= block
        low = tl.where(mine, middle, low)
        high = tl.where(mine, high, middle)
    first = tl.load(LAYOUT + low)
    rows = (tl.load(LAYOUT + low + 1) - first).to(tl.int32)
    local = block - (first // BLOCK_Q + low).to(tl.int32)
    if local * BLOCK_Q >= rows:
        return

    columns = samples + 1
    start = tl.load(LAYOUT + columns + low)
    past = tl.load(LAYOUT + 2 * columns + low).to(tl.int32)
    region = tl.load(LAYOUT + 3 * columns + low)
    tree = (tl.load(LAYOUT + 3 * columns + low + 1) - region).to(tl.int32)
    if CAUSAL:  # keys before all rows of this block are read like the prefix: without masks, and ahead of use
        before = tl.maximum(tree - rows + local * BLOCK_Q, 0)
        past += before
        region += before
        tree -= before

    lanes = tl.arange(0, BLOCK_M)
    row = local * BLOCK_Q + lanes // G
    q_head = head * G + lanes % G
    real = (row < rows) & (lanes < BLOCK_Q * G)
    at = first + row
    d = tl.arange(0, BLOCK_D)
    dv = tl.arange(0, BLOCK_DV)
    n = tl.arange(0, BLOCK_N)
    q = tl.load(
        Q + at[:, None] * stride_qt + q_head[:, None] * stride_qh + d[None, :],
        mask=real[:, None] & (d < D)[None, :],
        other=0.0,
    )
    position = tl.load(POSITIONS + at, mask=real, other=0).to(tl.int32)

    # Whole tiles of the prefix are distributed among the splits. The rest of the prefix and the tree belong to the last
    # split.
    tiles = past // BLOCK_N
    per = tl.cdiv(tiles, SPLITS)
    last = SPLITS - 1
    begin = tl.minimum(split * per, tiles)
    end = tl.minimum(begin + per, tiles)
    if WINDOW:
        nearest = tl.min(tl.where(real, position, 2147483647), 0)
        begin = tl.maximum(begin, tl.minimum((nearest - window + 1) // BLOCK_N, end))
        begin = tl.maximum(begin, 0)

    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    k_tile = K + head * stride_kh + d[:, None]
    v_tile = V + head * stride_vh + dv[None, :]

    for tile in range(begin, end):
        column = tile * BLOCK_N + n
        slot = start + column
        k = tl.load(k_tile + slot[None, :] * stride_kp, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_tile + slot[:, None] * stride_vp, mask=(dv < DV)[None, :], other=0.0)
        visible = (lanes >= 0)[:, None] & (n >= 0)[None, :]
        if WINDOW:
            visible = visible & (position[:, None] - column[None, :] < window)
        s = scores(q, k, visible, scale, softcap, SOFTCAP, UPCAST, PRECISION)
        m, l, acc = accumulate(s, v, m, l, acc, UPCAST, PRECISION)

    if split == last:
        rest = (past % BLOCK_N > 0).to(tl.int32)
        seen = tree
        if CAUSAL:  # keys that no row of this block sees are not read
            seen = tl.minimum(tree, tree - rows + (local + 1) * BLOCK_Q)
        for step in tl.range(0, rest + tl.cdiv(seen, BLOCK_N), num_stages=1):
            part = step - rest  # tile of the region; -1 is the rest of the prefix
            in_tree = (part + tl.zeros([1], tl.int32)) >= 0
            offset = tl.where(part >= 0, part * BLOCK_N, 0)  # of this tile
            column = offset + n
            limit = tl.where(part >= 0, tree, past - tiles * BLOCK_N)
            inside = column < limit
            slot = start + tl.where(part >= 0, past, tiles * BLOCK_N) + column
            k = tl.load(k_tile + slot[None, :] * stride_kp, mask=(d < D)[:, None] & inside[None, :], other=0.0)
            v = tl.load(v_tile + slot[:, None] * stride_vp, mask=inside[:, None] & (dv < DV)[None, :], other=0.0)
            if CAUSAL:
                sees = (column[None, :] <= (tree - rows + row)[:, None]) | ~in_tree[None, :]
            else:
                # BLOCK_N divides 64: a tile lies within one word.
                word = tl.load(WORDS + at * W + offset // 64, mask=real & in_tree, other=-1)
                bit = (offset % 64 + n).to(tl.int64)
                sees = ((word[:, None] >> bit[None, :]) & 1) != 0
            visible = sees & inside[None, :]
            if WINDOW:
                key_position = tl.load(REGION + region + column, mask=inside & in_tree, other=0).to(tl.int32)
                key_position = tl.where(in_tree, key_position, tiles * BLOCK_N + column)
                visible = visible & (position[:, None] - key_position[None, :] < window)
            s = scores(q, k, visible, scale, softcap, SOFTCAP, UPCAST, PRECISION)
            m, l, acc = accumulate(s, v, m, l, acc, UPCAST, PRECISION)

    out = acc / tl.where(l == 0, 1.0, l)[:, None]
    lse = tl.where(l > 0, m + tl.log2(tl.where(l > 0, l, 1.0)), -float("inf"))
    there = real[:, None] & (dv < DV)[None, :]
    where = OUT + at[:, None] * stride_ot + q_head[:, None] * stride_oh + dv[None, :]
    if SPLITS == 1:
        if SINK:  # in the order of the splits below, so a row alone gets the same bits as beside longer ones
            sink = tl.load(SINKS + q_head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            new = tl.maximum(lse, sink)
            weight = tl.exp2(lse - new)
            out = out * weight[:, None] / (weight + tl.exp2(sink - new))[:, None]
        tl.store(where, out.to(OUT.dtype.element_ty), mask=there)
    else:
        base = (at * tl.num_programs(1) * G + q_head) * SPLITS
        tl.store(PART + (base + split)[:, None] * DV + dv[None, :], out, mask=there)
        tl.store(PART_LSE + base + split, lse, mask=real)
        if arrived(ARRIVALS + block * tl.num_programs(1) + head, SPLITS, FENCED):
            total, acc = combined(PART, PART_LSE, SINKS + q_head, base, real, dv, DV, BLOCK_M, BLOCK_DV, SPLITS, SINK)
            out = acc / tl.where(total == 0, 1.0, total)[:, None]
            tl.store(where, out.to(OUT.dtype.element_ty), mask=there)


def launch(
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
    most_rows: int,
    longest: int,
    row_invariant: bool,
    arrivals: Tensor | None,
) -> Tensor:
    """See :func:`arbordraft.kernels.ragged_tree_attention.reference.attention_by_layout`."""
    if row_invariant:
        shapes = scale, window, softcap, sinks, max(most_rows, 0 if region is None else len(region)) + longest, arrivals
        return launch_rows(query, keys, values, layout, region, positions, words, *shapes)
    rows, heads, dim = query.shape
    kv_heads, value_dim = keys.shape[1], values.shape[2]
    samples = layout.shape[1] - 1
    out = query.new_empty(rows, heads, value_dim)
    if rows == 0:
        return out
    group = heads // kv_heads
    blocks = [max(16, triton.next_power_of_2(size)) for size in (dim, value_dim)]
    key_bytes = sum(blocks) * query.element_size()
    hip = torch.version.hip is not None
    exact, options = query.dtype == torch.float32, window > 0 or softcap > 0 or sinks is not None
    pairs = samples * kv_heads
    how = choose(most_rows, group, pairs, longest, processors(query.device), key_bytes, exact, options, hip)
    blocks_of_rows = rows // how.block_q + samples
    if blocks_of_rows * kv_heads > ARRIVALS:  # more tiles than counters keep every processor busy
        how = how._replace(splits=1)
    parts = how.splits if how.splits > 1 else 0
    if arrivals is None:
        arrivals = query.new_zeros(ARRIVALS if parts else 0, dtype=torch.int32)
    partial = query.new_empty((rows, heads, parts, value_dim), dtype=torch.float32)
    lse = query.new_empty((rows, heads, parts), dtype=torch.float32)
    attend[(blocks_of_rows, kv_heads, how.splits)](
        query,
        keys,
        values,
        out,
        partial,
        lse,
        arrivals,
        sinks if sinks is not None else lse,
        layout,
        region if region is not None else positions,
        positions,
        words if words is not None else positions,
        scale,
        softcap or 1.0,
        window,
        samples,
        query.stride(0),
        query.stride(1),
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        out.stride(0),
        out.stride(1),
        G=group,
        D=dim,
        DV=value_dim,
        BLOCK_D=blocks[0],
        BLOCK_DV=blocks[1],
        BLOCK_Q=how.block_q,
        BLOCK_M=how.block_m,
        BLOCK_N=how.block_n,
        SPLITS=how.splits,
        W=1 if words is None else words.shape[1],
        SEARCH=samples.bit_length(),
        CAUSAL=words is None,
        WINDOW=window > 0,
        SOFTCAP=softcap > 0,
        SINK=sinks is not None,
        FENCED=hip,
        **numbers(query),
        num_warps=how.warps,
        num_stages=how.stages,
        enable_fp_fusion=True,
    )
    return out


__all__ = ["attend", "launch"]
