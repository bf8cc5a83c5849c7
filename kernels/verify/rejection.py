"""Tries the children of nodes in turn, in Triton: per child a pass over the rows of the nodes and some arithmetic.

:mod:`arbordraft.kernels.verify.tree` derives the computation. A pass sums R and q by chunk, in float32. The arithmetic,
one program per node, is float64. A pass reads only nodes whose sums the previous child changed: the child exists and
was drawn. For nodes that will change, the first pass finds only the mass of q.

Shapes: N nodes, D draft rows, V vocabulary, C chunks of a row, K children.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.kernels.verify.triton import block_of, left_at


@triton.jit
def positive(x):
    """See :func:`arbordraft.kernels.verify.reference.positive`."""
    # Made from bits: a constant may be rounded to float32, where it is 0.
    return tl.maximum(x, tl.full([], 1 << 52, tl.int64).to(tl.float64, bitcast=True))


@triton.jit
def _first_of(token, among, WIDE: tl.constexpr):
    """Returns which of the children ``among`` are the first with their token."""
    j = tl.arange(0, WIDE)
    earlier = (token[:, None] == token[None, :]) & among[None, :] & (j[None, :] < j[:, None])
    return among & (tl.max(earlier.to(tl.int32), 1) == 0)


@triton.jit
def _sum_of(PARTS, node, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds up the chunks of a node."""
    chunk = tl.arange(0, COLUMNS)
    return tl.sum(tl.load(PARTS + node * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0).to(tl.float64), 0)


@triton.jit
def start_turns(
    SCORES, LSE, DRAFT, ROW, DRAFT_ROW, SHARE, TOKENS, REAL, CERTAIN, WANTED, OFFERED, FROZEN, ACCEPT, SPECIAL, SURE,
    SPENT, UNDECIDED, REMAINS, WEIGHT, TAKEN, CHANGED, stride_s, stride_d, K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Writes the state of a node before its first child is tried."""
    node = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDE)
    inside = j < K
    row = tl.load(ROW + node)
    draft_row = tl.load(DRAFT_ROW + node)
    share = tl.load(SHARE + node)
    token = tl.load(TOKENS + node * K + j, mask=inside, other=-1)
    real = tl.load(REAL + node * K + j, mask=inside, other=0) != 0
    has_row = (draft_row + j * 0) >= 0
    sure = ((tl.load(CERTAIN + node * K + j, mask=inside, other=0) != 0) | ~has_row) & real
    place = tl.maximum(token, 0)
    x = tl.load(SCORES + row * stride_s + place, mask=inside, other=-float("inf")).to(tl.float64)
    p = tl.exp(x - tl.load(LSE + row).to(tl.float64)) * share
    q = tl.load(DRAFT + draft_row * stride_d + place, mask=inside & has_row, other=0.0).to(tl.float64)
    tl.store(WANTED + node * K + j, p, mask=inside)
    tl.store(OFFERED + node * K + j, q, mask=inside)
    tl.store(FROZEN + node * K + j, tl.where(_first_of(token, sure, WIDE), p, 0.0), mask=inside)
    tl.store(ACCEPT + node * K + j, p * 0.0, mask=inside)
    tl.store(SPECIAL + node * K + j, tl.where(sure, token, -1), mask=inside)
    tl.store(SURE + node * K + j, sure.to(tl.int32), mask=inside)
    tl.store(SPENT + node, share * 0.0)
    tl.store(UNDECIDED + node, share * 0.0 + 1.0)
    tl.store(REMAINS + node, share * 0.0 + 1.0)
    tl.store(WEIGHT + node, share.to(tl.float32))
    tl.store(TAKEN + node, 0.0)
    tl.store(CHANGED + node, tl.max(tl.where((j == 0) & real & ~sure, 1, 0), 0))


@triton.jit
def turn_mass(
    SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, CHANGED, LEFT, DRAWN, vocabulary, stride_s, stride_d,
    FIRST: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums R and q over one chunk of a changed node; if ``FIRST``, of every node, but R only if it will not change."""
    node = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    changed = tl.load(CHANGED + node)
    if FIRST:
        scored = tl.where(changed != 0, 0, vocabulary)
        changed = 1
    else:
        scored = vocabulary
    if changed != 0:
        at = chunk * BLOCK + tl.arange(0, BLOCK)
        left, drawn = left_at(
            SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, node, at, vocabulary, scored, stride_s,
            stride_d, K,
        )  # fmt: skip
        tl.store(LEFT + node * CHUNKS + chunk, tl.sum(left, 0))
        tl.store(DRAWN + node * CHUNKS + chunk, tl.sum(drawn, 0))


@triton.jit(do_not_specialize=["child"])
def take_turn(
    TOKENS, REAL, WANTED, OFFERED, FROZEN, ACCEPT, SPECIAL, SURE, SPENT, UNDECIDED, REMAINS, SHARE, TAKEN, CHANGED,
    LEFT, DRAWN, child, REPLACEMENT: tl.constexpr, K: tl.constexpr, WIDE: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Tries the next child of a node; after the last child, makes the drafted tokens special."""
    node = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDE)
    inside = j < K
    token = tl.load(TOKENS + node * K + j, mask=inside, other=-1)
    real = tl.load(REAL + node * K + j, mask=inside, other=0) != 0
    sure = tl.load(SURE + node * K + j, mask=inside, other=0) != 0
    p = tl.load(WANTED + node * K + j, mask=inside, other=0.0)
    q = tl.load(OFFERED + node * K + j, mask=inside, other=0.0)
    frozen = tl.load(FROZEN + node * K + j, mask=inside, other=0.0)
    special = tl.load(SPECIAL + node * K + j, mask=inside, other=-1)
    spent, rest = tl.load(SPENT + node), tl.load(UNDECIDED + node)
    now = _sum_of(LEFT, node, CHUNKS, COLUMNS) + tl.sum(frozen, 0) + (1.0 - tl.load(SHARE + node))
    mass = tl.where(child == 0, tl.load(REMAINS + node), tl.where(rest > 0, now, 0.0))
    if child < K:
        mine = j == child
        drawable = positive(_sum_of(DRAWN, node, CHUNKS, COLUMNS))
        held = tl.where(sure, frozen, tl.maximum(p - spent * q, 0.0))
        asked = positive(mass * tl.where(sure, 1.0, q / drawable))
        ratio = tl.sum(tl.where(mine & real, tl.minimum(held / asked, 1.0), 0.0), 0)
        ratio = tl.where(mass > 0, ratio, 0.0)
        tl.store(ACCEPT + node * K + j, rest * ratio + 0.0 * p, mask=inside & mine)
        # After a rejection a certain token has no mass left, and the proposal of a drawn one is subtracted from all.
        drawn = mine & real & ~sure
        changed = tl.max(drawn.to(tl.int32), 0)
        spent = tl.where(changed != 0, spent + mass / drawable, spent)
        if REPLACEMENT:
            frozen = tl.where(mine & sure, 0.0, frozen)
        else:
            frozen = tl.where(mine, tl.where(drawn, tl.maximum(p - spent * q, 0.0), 0.0), frozen)
            special = tl.where(drawn, token, special)
        tl.store(UNDECIDED + node, rest * (1.0 - ratio))
        tl.store(SPENT + node, spent)
        tl.store(TAKEN + node, spent.to(tl.float32))
    else:
        first = _first_of(token, real & ~sure, WIDE)
        frozen = tl.where(first, tl.maximum(p - spent * q, 0.0), frozen)
        special = tl.where(real, token, -1)
        changed = tl.max(real.to(tl.int32), 0)
    tl.store(REMAINS + node, mass)
    tl.store(FROZEN + node * K + j, frozen, mask=inside)
    tl.store(SPECIAL + node * K + j, special, mask=inside)
    tl.store(CHANGED + node, changed)


@triton.jit
def end_turns(
    FROZEN, ACCEPT, UNDECIDED, REMAINS, SHARE, LEFT, STOP, SUMS, REPLACEMENT: tl.constexpr, K: tl.constexpr,
    WIDE: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Finishes a node after its last child: chances to go on with a child after all, and to end at the node."""
    node = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDE)
    frozen = tl.load(FROZEN + node * K + j, mask=j < K, other=0.0)
    rest = tl.load(UNDECIDED + node)
    left = _sum_of(LEFT, node, CHUNKS, COLUMNS)
    if REPLACEMENT:
        mass = tl.load(REMAINS + node)
    else:
        mass = tl.where(rest > 0, left + tl.sum(frozen, 0) + (1.0 - tl.load(SHARE + node)), 0.0)
    scale = rest / positive(mass)
    accept = tl.load(ACCEPT + node * K + j, mask=j < K, other=0.0)
    tl.store(ACCEPT + node * K + j, accept + scale * frozen, mask=j < K)
    tl.store(STOP + node, scale * left)
    chunk = tl.arange(0, COLUMNS)
    parts = tl.load(LEFT + node * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0)
    tl.store(SUMS + node * CHUNKS + chunk, parts.to(tl.float64), mask=chunk < CHUNKS)


def launch_rejection_laws(
    scores: Tensor, lse: Tensor, draft: Tensor, row: Tensor, draft_row: Tensor, weight: Tensor, tokens: Tensor,
    real: Tensor, certain: Tensor, replacement: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`arbordraft.kernels.verify.reference.rejection_laws_reference`."""
    (nodes, children), vocabulary = tokens.shape, scores.shape[1]
    chunks = triton.cdiv(vocabulary, CHUNK)
    spent, rest, remains, stop = (scores.new_empty(nodes, dtype=torch.float64) for _ in range(4))
    p, q, frozen, accept = (scores.new_empty((nodes, children), dtype=torch.float64) for _ in range(4))
    sums = scores.new_empty((nodes, chunks), dtype=torch.float64)
    if nodes == 0:
        return spent, accept, stop, sums
    special = scores.new_empty((nodes, children), dtype=torch.int64)
    sure = scores.new_empty((nodes, children), dtype=torch.int32)
    share, taken = (scores.new_empty(nodes, dtype=torch.float32) for _ in range(2))
    changed = scores.new_empty(nodes, dtype=torch.int32)
    left, drawn = (scores.new_empty((nodes, chunks), dtype=torch.float32) for _ in range(2))
    there, tops = real.contiguous().view(torch.int8), certain.contiguous().view(torch.int8)
    tokens, weight = tokens.contiguous(), weight.contiguous()
    # Without contraction, results are rounded as in torch's float64 arithmetic.
    how = {"K": children, "WIDE": triton.next_power_of_2(children), "num_warps": 1, "enable_fp_fusion": False}
    columns = {"CHUNKS": chunks, "COLUMNS": triton.next_power_of_2(chunks), "REPLACEMENT": replacement}

    def add_up(first: bool = False) -> None:
        turn_mass[(nodes, chunks)](
            scores, lse, draft, row, draft_row, share, taken, special, changed, left, drawn, vocabulary,
            scores.stride(0), draft.stride(0), FIRST=first, K=children, CHUNKS=chunks, BLOCK=block_of(vocabulary),
            num_warps=8,
        )  # fmt: skip

    start_turns[(nodes,)](
        scores, lse, draft, row, draft_row, weight, tokens, there, tops, p, q, frozen, accept, special, sure, spent,
        rest, remains, share, taken, changed, scores.stride(0), draft.stride(0), **how,
    )  # fmt: skip
    add_up(first=True)
    for child in range(children + replacement):
        take_turn[(nodes,)](
            tokens, there, p, q, frozen, accept, special, sure, spent, rest, remains, weight, taken, changed, left,
            drawn, child, **how, **columns,
        )  # fmt: skip
        add_up()
    end_turns[(nodes,)](frozen, accept, rest, remains, weight, left, stop, sums, **how, **columns)
    return spent, accept, stop, sums


__all__ = ["end_turns", "launch_rejection_laws", "positive", "start_turns", "take_turn", "turn_mass"]
