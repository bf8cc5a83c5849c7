"""Ends of paths by recursive rejection, for all trees of a batch in one launch, in Triton.

:mod:`arbordraft.kernels.verify.tree` derives the computation. Sums over the vocabulary are float32 by chunk. The
arithmetic on one number per child is float64, by the last program of a node's pass.

**Order.** Passes need each other's results, and a level of lifted trees needs those of the level above. So a program
takes the next number, from which its work follows, and waits only for programs with lower numbers. These have started,
and none of them waits for a higher number, so each wait ends. First come the masses of draft rows, which need nothing.
Then come the passes, and last the samples, which find their ends.

Shapes: T rows, N nodes, D draft rows, M tops, V vocabulary, C chunks of a row, K children, B samples.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.kernels.verify.triton import block_of

# Counters of a launch: numbers given out, nodes and samples that are finished. Then two by node: programs that have
# summed its draft row, and programs that have finished passes. Then the turns of a node that were taken. Then by row:
# 0 until its chance is known, 2 if its turn may come, else 1.
_FIRST: tl.constexpr = tl.constexpr(3)


@triton.jit
def positive(x):
    """See :func:`arbordraft.kernels.verify.reference.positive`."""
    # Made from bits: a constant may be rounded to float32, where it is 0.
    return tl.maximum(x, tl.full([], 1 << 52, tl.int64).to(tl.float64, bitcast=True))


@triton.jit
def _settle(CELL, FENCED: tl.constexpr):
    """Lets other programs see the stores of all threads before the next atomic operation of this program.

    On AMD's GPUs, a barrier does not wait for stores. If ``FENCED``, each wave adds 0 first, which does.
    """
    if FENCED:
        thread = tl.arange(0, 512)  # at least one per thread of eight waves
        tl.atomic_add(CELL + 0 * thread, 0 * thread, sem="release", scope="gpu")
    tl.debug_barrier()


@triton.jit
def _count(CELL, FENCED: tl.constexpr):
    """Counts this program, after its stores; returns the number of programs before it, whose stores it may read."""
    _settle(CELL, FENCED)
    return tl.atomic_add(CELL, 1, sem="acq_rel", scope="gpu")


@triton.jit
def _wait(CELL, number):
    """Waits until a counter has reached a number."""
    seen = tl.atomic_add(CELL, 0, sem="acquire", scope="gpu")
    while seen < number:
        seen = tl.atomic_add(CELL, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


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
def _children(CHILDREN, TOKENS, TOPS, node, draft_row, K: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr):
    """Returns tokens of a node's children, whether there is a child, and whether it was not drawn at random."""
    j = tl.arange(0, WIDE)
    real = tl.load(CHILDREN + node * K + j, mask=j < K, other=-1) >= 0
    token = tl.load(TOKENS + node * K + j, mask=j < K, other=-1)
    sure = real & (draft_row + j * 0 < 0)
    for index in tl.static_range(M):
        top = tl.load(TOPS + tl.maximum(draft_row, 0) * M + index)
        sure = sure | (real & (token == top))
    return token, real, sure


@triton.jit
def _ordinary(special, at, K: tl.constexpr, WIDE: tl.constexpr):
    """Returns which tokens ``at`` are not special."""
    j = tl.arange(0, WIDE)
    found = at >= 0
    for index in tl.static_range(K):
        found = found & (at != tl.sum(tl.where(j == index, special, 0), 0).to(tl.int32))
    return found


@triton.jit
def _take_turn(
    child, token, real, sure, p, q, frozen, special, accept, spent, rest, mass, drawable, REPLACEMENT: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Tries the next child of a node; returns its state, and whether sums over the vocabulary change."""
    mine = tl.arange(0, WIDE) == child
    drawable = positive(drawable)
    held = tl.where(sure, frozen, tl.maximum(p - spent * q, 0.0))
    asked = positive(mass * tl.where(sure, 1.0, q / drawable))
    ratio = tl.sum(tl.where(mine & real, tl.minimum(held / asked, 1.0), 0.0), 0)
    ratio = tl.where(mass > 0, ratio, 0.0)
    accept = tl.where(mine, rest * ratio, accept)
    # After a rejection a certain token has no mass left, and the proposal of a drawn one is subtracted from all.
    drawn = mine & real & ~sure
    changed = tl.max(drawn.to(tl.int32), 0)
    spent = tl.where(changed != 0, spent + mass / drawable, spent)
    if REPLACEMENT:
        frozen = tl.where(mine & sure, 0.0, frozen)
    else:
        frozen = tl.where(mine, tl.where(drawn, tl.maximum(p - spent * q, 0.0), 0.0), frozen)
        special = tl.where(drawn, token, special)
    return frozen, special, accept, spent, rest * (1.0 - ratio), changed


@triton.jit
def _hand_on(
    CHANCE, FLAGS, CHILDREN, node, row, root, share, accept, stop, K: tl.constexpr, WIDE: tl.constexpr,
    FENCED: tl.constexpr,
):  # fmt: skip
    """Hands the chance of a finished node on to its children; see ``lift_level_reference``."""
    j = tl.arange(0, WIDE)
    child = tl.load(CHILDREN + node * K + j, mask=j < K, other=-1)
    before = 1.0 - (tl.cumsum(accept, 0) - accept)
    chance = tl.where(before <= accept, tl.where(accept > 0, 1.0, 0.0), accept / positive(before))
    tl.store(CHANCE + child, chance, mask=child >= 0)
    rest = 1.0 - tl.sum(accept, 0)
    end = tl.where(rest <= stop, tl.where(stop > 0, 1.0, 0.0), stop / positive(rest))
    tl.store(CHANCE + row, tl.where(share >= 1, 1.0, end))
    reached = root | (tl.load(FLAGS + row) == 2)
    _settle(FLAGS + row, FENCED)
    turn = tl.where((accept > 0) & (reached | (j < 0)), 2, 1)
    tl.atomic_xchg(FLAGS + child, turn, mask=child >= 0, sem="release", scope="gpu")


@triton.jit
def _walk_down(
    ACCEPT, CHILDREN, INNER, UNIFORMS, end, nodes, depth, K: tl.constexpr, WIDE: tl.constexpr, NODES: tl.constexpr
):  # fmt: skip
    """Returns the last accepted node below a root."""
    j = tl.arange(0, WIDE)
    for _ in range(depth):
        node = node_of(INNER, end, nodes, NODES)
        known = (j < K) & (node + j * 0 >= 0)
        child = tl.load(CHILDREN + node * K + j, mask=known, other=-1)
        accept = tl.load(ACCEPT + node * K + j, mask=known, other=0.0)
        before = 1.0 - (tl.cumsum(accept, 0) - accept)
        share = tl.where(before <= accept, tl.where(accept > 0, 1.0, 0.0), accept / positive(before))
        uniform = tl.load(UNIFORMS + child, mask=child >= 0, other=2.0)
        first = tl.min(tl.where(uniform < share, j, WIDE), 0)
        chosen = tl.max(tl.where(j == first, child, -1), 0)
        end = tl.where(chosen >= 0, chosen, end)
    return end


@triton.jit
def _first_in_order(CHANCE, FLAGS, UNIFORMS, ORDER, SAMPLE, root, sample, rows, ROWS: tl.constexpr):
    """Returns the first row of a sample, in post-order, at which the path ends; the root comes last."""
    first = tl.full([], 1 << 62, tl.int64)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < rows
        mine = inside & (tl.load(SAMPLE + row, mask=inside, other=-1) == sample)
        mine = mine & (tl.load(FLAGS + row, mask=inside, other=0) == 2)
        hit = mine & (tl.load(UNIFORMS + row, mask=mine, other=1.0) < tl.load(CHANCE + row, mask=mine, other=0.0))
        place = tl.load(ORDER + row, mask=inside, other=0) * rows + row
        first = tl.minimum(first, tl.min(tl.where(hit, place, 1 << 62), 0))
    return tl.where(first == 1 << 62, root, first % rows)


@triton.jit
def node_of(INNER, row, nodes, NODES: tl.constexpr):
    """Returns the index of the node with children that has a row, -1 if none."""
    n = tl.arange(0, NODES)
    return tl.max(tl.where(tl.load(INNER + n, mask=n < nodes, other=-1) == row, n, -1), 0)


@triton.jit(do_not_specialize=["nodes", "rows", "samples", "top", "depth", "cells"])
def reject_in_turn(
    SCORES, LSE, DRAFT, INNER, DRAFT_ROW, CHILDREN, TOKENS, TOPS, ROOTS, UNIFORMS, ORDER, SAMPLE, END, SHARE, SPENT,
    SUMS, CHANCE, ACCEPT, FROZEN, SPECIAL, CHANGED, UNDECIDED, REMAINS, OFFERED, LEFT, DRAWN, COUNTERS, vocabulary,
    stride_s, stride_d, nodes, rows, samples, top, depth, cells, K: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr,
    NODES: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    REPLACEMENT: tl.constexpr, LIFTED: tl.constexpr, FENCED: tl.constexpr,
):  # fmt: skip
    """Does the next piece of work: sums a chunk of a draft row, a chunk of a node's pass, or finds a sample's end."""
    number = tl.atomic_add(COUNTERS, 1, sem="relaxed", scope="gpu")
    PASSES: tl.constexpr = K + REPLACEMENT
    parts = nodes * CHUNKS
    SUMMED = COUNTERS + _FIRST
    ARRIVED, TAKEN = SUMMED + nodes, SUMMED + 2 * nodes
    FLAGS = SUMMED + 3 * nodes
    j = tl.arange(0, WIDE)
    if number < parts:
        node, chunk = (number // CHUNKS).to(tl.int64), number % CHUNKS
        if tl.load(INNER + node) >= 0:
            draft_row = tl.load(DRAFT_ROW + node)
            token, _, sure = _children(CHILDREN, TOKENS, TOPS, node, draft_row, K, WIDE, M)
            at = chunk * BLOCK + tl.arange(0, BLOCK)
            drawn = (at < vocabulary) & (draft_row + tl.zeros([1], tl.int64) >= 0)
            q = tl.load(DRAFT + draft_row * stride_d + at, mask=drawn, other=0.0).to(tl.float32)
            ordinary = _ordinary(tl.where(sure, token, -1), at, K, WIDE)
            tl.store(OFFERED + node * CHUNKS + chunk, tl.sum(tl.where(ordinary, q, 0.0), 0))
            _count(SUMMED + node, FENCED)
    elif number < parts * (1 + PASSES):
        # Lifted, a node's passes follow each other, as its children need them. Otherwise all nodes take turns together.
        index = number - parts
        if LIFTED:
            node, turn, chunk = index // (PASSES * CHUNKS), index // CHUNKS % PASSES, index % CHUNKS
        else:
            turn, node, chunk = index // parts, index % parts // CHUNKS, index % CHUNKS
        node = node.to(tl.int64)
        row = tl.load(INNER + node)
        draft_row = tl.load(DRAFT_ROW + node)
        token, real, sure = _children(CHILDREN, TOKENS, TOPS, node, draft_row, K, WIDE, M)
        count = tl.maximum(tl.max(tl.where(real, j + 1, 0), 0), 1)  # later turns change nothing
        if (row >= 0) & (turn < count + REPLACEMENT):
            place = tl.maximum(token, 0)
            inside = (j < K) & (token >= 0)
            lse = tl.load(LSE + row)
            x = tl.load(SCORES + row * stride_s + place, mask=inside, other=-float("inf")).to(tl.float64)
            wanted = inside & (draft_row + j * 0 >= 0)
            q = tl.load(DRAFT + draft_row * stride_d + place, mask=wanted, other=0.0).to(tl.float64)
            _wait(SUMMED + node, CHUNKS)
            share = tl.full([], 1.0, tl.float64)
            if LIFTED:  # noqa: SIM102  (a constant, which leaves the branch out)
                if node >= top:
                    _wait(FLAGS + row, 1)
                    share = tl.load(CHANCE + row)
            p = tl.exp(x - lse.to(tl.float64)) * share
            mass = tl.full([], 1.0, tl.float64)
            if turn == 0:
                frozen = tl.where(_first_of(token, sure, WIDE), p, 0.0)
                drawable = _sum_of(OFFERED, node, CHUNKS, COLUMNS)
                frozen, special, accept, spent, rest, changed = _take_turn(
                    turn, token, real, sure, p, q, frozen, tl.where(sure, token, -1), p * 0.0, share * 0.0, mass, mass,
                    drawable, REPLACEMENT, WIDE,
                )  # fmt: skip
                changed = changed * 0 + 1  # no sums are known yet
            else:
                _wait(TAKEN + node, turn)
                frozen = tl.load(FROZEN + node * K + j, mask=j < K, other=0.0)
                special = tl.load(SPECIAL + node * K + j, mask=j < K, other=-1)
                accept = tl.load(ACCEPT + node * K + j, mask=j < K, other=0.0)
                spent, rest = tl.load(SPENT + node), tl.load(UNDECIDED + node)
                mass = tl.load(REMAINS + node)
                changed = tl.load(CHANGED + node)
            if changed != 0:
                at = chunk * BLOCK + tl.arange(0, BLOCK)
                score = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=-float("inf"))
                chance = tl.exp(score.to(tl.float32) - lse) * share.to(tl.float32)
                drawn = (at < vocabulary) & (draft_row + tl.zeros([1], tl.int64) >= 0)
                offer = tl.load(DRAFT + draft_row * stride_d + at, mask=drawn, other=0.0).to(tl.float32)
                ordinary = _ordinary(special, at, K, WIDE)
                left = tl.where(ordinary, tl.maximum(chance - spent.to(tl.float32) * offer, 0.0), 0.0)
                tl.store(LEFT + node * CHUNKS + chunk, tl.sum(left, 0))
                tl.store(DRAWN + node * CHUNKS + chunk, tl.sum(tl.where(ordinary, offer, 0.0), 0))
            if _count(ARRIVED + node, FENCED) == CHUNKS * (turn + 1) - 1:
                total = _sum_of(LEFT, node, CHUNKS, COLUMNS)
                now = tl.where(rest > 0, total + tl.sum(frozen, 0) + (1.0 - share), 0.0)
                if turn < count + REPLACEMENT - 1:
                    if turn < count - 1:
                        drawable = _sum_of(DRAWN, node, CHUNKS, COLUMNS)
                        frozen, special, accept, spent, rest, changed = _take_turn(
                            turn + 1, token, real, sure, p, q, frozen, special, accept, spent, rest, now, drawable,
                            REPLACEMENT, WIDE,
                        )  # fmt: skip
                    else:  # the path goes on with a drafted token instead of emitting it
                        first = _first_of(token, real & ~sure, WIDE)
                        frozen = tl.where(first, tl.maximum(p - spent * q, 0.0), frozen)
                        special = tl.where(real, token, -1)
                        changed = tl.max(real.to(tl.int32), 0)
                    tl.store(FROZEN + node * K + j, frozen, mask=j < K)
                    tl.store(SPECIAL + node * K + j, special, mask=j < K)
                    tl.store(ACCEPT + node * K + j, accept, mask=j < K)
                    tl.store(SPENT + node, spent)
                    tl.store(UNDECIDED + node, rest)
                    tl.store(REMAINS + node, now)
                    tl.store(CHANGED + node, changed)
                    _count(TAKEN + node, FENCED)
                else:
                    if not REPLACEMENT:
                        mass = now
                    scale = rest / positive(mass)
                    accept += scale * frozen
                    tl.store(ACCEPT + node * K + j, accept, mask=j < K)
                    tl.store(SHARE + node, share)
                    tl.store(SPENT + node, spent)
                    part = tl.arange(0, COLUMNS)
                    sums = tl.load(LEFT + node * CHUNKS + part, mask=part < CHUNKS, other=0.0)
                    tl.store(SUMS + node * CHUNKS + part, sums.to(tl.float64), mask=part < CHUNKS)
                    if LIFTED:
                        _hand_on(
                            CHANCE, FLAGS, CHILDREN, node, row, node < top, share, accept, scale * total, K, WIDE,
                            FENCED,
                        )  # fmt: skip
                    _count(COUNTERS + 1, FENCED)
    else:
        sample = number - parts * (1 + PASSES)
        n = tl.arange(0, NODES)
        known = tl.load(INNER + n, mask=n < nodes, other=-1) >= 0
        _wait(COUNTERS + 1, tl.sum(known.to(tl.int32), 0))
        root = tl.load(ROOTS + sample)
        if LIFTED:
            end = _first_in_order(CHANCE, FLAGS, UNIFORMS, ORDER, SAMPLE, root, sample, rows, ROWS)
        else:
            end = _walk_down(ACCEPT, CHILDREN, INNER, UNIFORMS, root, nodes, depth, K, WIDE, NODES)
        tl.store(END + sample, end)
        if _count(COUNTERS + 2, FENCED) == samples - 1:  # no other program counts any more: zeros for the next launch
            for start in range(0, cells, ROWS):
                cell = start + tl.arange(0, ROWS)
                tl.store(COUNTERS + cell, cell * 0, mask=cell < cells)


def launch_rejection_ends(
    scores: Tensor, lse: Tensor, draft: Tensor, inner: Tensor, draft_row: Tensor, children: Tensor, tokens: Tensor,
    tops: Tensor, roots: Tensor, uniforms: Tensor, order: Tensor, sample: Tensor, levels: Sequence[int],
    replacement: bool, lifted: bool, counters: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`arbordraft.kernels.verify.reference.rejection_ends_reference`."""
    (nodes, width), (rows, vocabulary) = children.shape, scores.shape
    chunks, samples = triton.cdiv(vocabulary, CHUNK), len(roots)
    end = roots.new_empty(samples)
    share, spent = (scores.new_empty(nodes, dtype=torch.float64) for _ in range(2))
    sums = scores.new_empty((nodes, chunks), dtype=torch.float64)
    if samples == 0:
        return end, share, spent, sums
    used = _FIRST.value + 3 * nodes + rows
    if counters is None or len(counters) < used:
        counters = roots.new_zeros(used, dtype=torch.int32)
    chance = scores.new_empty(rows, dtype=torch.float64)
    accept, frozen = (scores.new_empty((nodes, width), dtype=torch.float64) for _ in range(2))
    special = roots.new_empty((nodes, width))
    changed = roots.new_empty(nodes, dtype=torch.int32)
    rest, remains = (scores.new_empty(nodes, dtype=torch.float64) for _ in range(2))
    offered, left, drawn = (scores.new_empty((nodes, chunks), dtype=torch.float32) for _ in range(3))
    tables = (one.contiguous() for one in (inner, draft_row, children, tokens, tops, roots))
    reject_in_turn[(nodes * chunks * (1 + width + replacement) + samples,)](
        scores, lse, draft, *tables, uniforms.double().contiguous(), order.contiguous(), sample.contiguous(), end,
        share, spent, sums, chance, accept, frozen, special, changed, rest, remains, offered, left, drawn, counters,
        vocabulary, scores.stride(0), draft.stride(0), nodes, rows, samples, levels[0] if levels else 0, len(levels),
        used, K=width, WIDE=triton.next_power_of_2(width), M=tops.shape[1], NODES=triton.next_power_of_2(max(nodes, 1)),
        ROWS=min(1024, triton.next_power_of_2(rows)), CHUNKS=chunks, COLUMNS=triton.next_power_of_2(chunks),
        BLOCK=block_of(vocabulary), REPLACEMENT=replacement, LIFTED=lifted, FENCED=torch.version.hip is not None,
        num_warps=8, enable_fp_fusion=False,  # without contraction, results are rounded as in torch's float64
    )  # fmt: skip
    return end, share, spent, sums


__all__ = ["launch_rejection_ends", "node_of", "positive", "reject_in_turn"]
