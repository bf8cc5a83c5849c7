"""Ends of top-down paths and the tokens after them, in Triton: one program per sample.

Shapes: T rows, N nodes with children, K children, D draft rows, V vocabulary, C chunks of a row, B samples.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.kernels.verify.rejection import positive
from arbordraft.kernels.verify.triton import block_of, left_of, token_at


@triton.jit
def _node_of(INNER, row, nodes, NODES: tl.constexpr):
    """Returns the index of the node with children that has a row, -1 if none."""
    n = tl.arange(0, NODES)
    return tl.max(tl.where(tl.load(INNER + n, mask=n < nodes, other=-1) == row, n, -1), 0)


@triton.jit
def walk_down(
    ACCEPT, CHILDREN, INNER, ROOTS, UNIFORMS, END, nodes, depth, K: tl.constexpr, WIDE: tl.constexpr,
    NODES: tl.constexpr,
):  # fmt: skip
    """Finds the last accepted node of a sample."""
    sample = tl.program_id(0)
    j = tl.arange(0, WIDE)
    end = tl.load(ROOTS + sample)
    for _ in range(depth):
        node = _node_of(INNER, end, nodes, NODES)
        known = (j < K) & (node + j * 0 >= 0)
        child = tl.load(CHILDREN + node * K + j, mask=known, other=-1)
        accept = tl.load(ACCEPT + node * K + j, mask=known, other=0.0)
        before = 1.0 - (tl.cumsum(accept, 0) - accept)
        share = tl.where(before <= accept, tl.where(accept > 0, 1.0, 0.0), accept / positive(before))
        uniform = tl.load(UNIFORMS + child, mask=child >= 0, other=2.0)
        first = tl.min(tl.where(uniform < share, j, WIDE), 0)
        chosen = tl.max(tl.where(j == first, child, -1), 0)
        end = tl.where(chosen >= 0, chosen, end)
    tl.store(END + sample, end)


@triton.jit
def lift_node(
    CHANCE, REACHED, SHARE, ACCEPT, STOP, INNER, CHILDREN, K: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Hands the chance of one node on to its children; see ``lift_level_reference``."""
    node = tl.program_id(0)
    j = tl.arange(0, WIDE)
    row = tl.load(INNER + node)
    known = (j < K) & (row + j * 0 >= 0)
    child = tl.load(CHILDREN + node * K + j, mask=known, other=-1)
    accept = tl.load(ACCEPT + node * K + j, mask=known, other=0.0)
    before = 1.0 - (tl.cumsum(accept, 0) - accept)
    share = tl.where(before <= accept, tl.where(accept > 0, 1.0, 0.0), accept / positive(before))
    tl.store(CHANCE + child, share, mask=child >= 0)
    reached = tl.load(REACHED + row + j * 0, mask=known, other=0) != 0
    tl.store(REACHED + child, (j * 0 + 1).to(tl.int8), mask=(child >= 0) & reached & (accept > 0))
    rest = 1.0 - tl.sum(accept, 0) + 0.0 * accept
    stop = tl.load(STOP + node) + 0.0 * accept
    end = tl.where(rest <= stop, tl.where(stop > 0, 1.0, 0.0), stop / positive(rest))
    end = tl.where(tl.load(SHARE + node) + 0.0 * accept >= 1, 1.0, end)
    tl.store(CHANCE + row + j * 0, end, mask=known & (j == 0))


@triton.jit
def first_in_order(CHANCE, REACHED, UNIFORMS, ORDER, SAMPLE, ROOTS, END, rows, BLOCK: tl.constexpr):
    """Finds the first row of a sample, in post-order, at which the path ends."""
    sample = tl.program_id(0)
    first = tl.full([], 1 << 62, tl.int64)
    for start in range(0, rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < rows
        hit = tl.load(UNIFORMS + row, mask=inside, other=1.0) < tl.load(CHANCE + row, mask=inside, other=0.0)
        hit = hit & (tl.load(REACHED + row, mask=inside, other=0) != 0)
        hit = hit & (tl.load(SAMPLE + row, mask=inside, other=-1) == sample)
        place = tl.load(ORDER + row, mask=inside, other=0) * rows + row
        first = tl.minimum(first, tl.min(tl.where(hit, place, 1 << 62), 0))
    tl.store(END + sample, tl.where(first == 1 << 62, tl.load(ROOTS + sample), first % rows))


@triton.jit
def _argument(
    INNER, DRAFT_ROW, SHARE, SPENT, SUMS, end, nodes, NODES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns the arguments of R at a path's end: of a node with children, or -1 for the target's whole row.

    These are the node, its draft row, its weight and t.
    """
    node = _node_of(INNER, end, nodes, NODES)
    chunk = tl.arange(0, COLUMNS)
    known = (chunk < CHUNKS) & (node + chunk * 0 >= 0)
    # The mass is 0 only by rounding: stopping had probability 0.
    left = tl.sum(tl.load(SUMS + node * CHUNKS + chunk, mask=known, other=0.0), 0) > 0
    node = tl.where(left, node, -1)
    same = node + tl.arange(0, 2) * 0  # -1 if the end is a leaf: nothing to read then
    draft_row = tl.max(tl.load(DRAFT_ROW + same, mask=same >= 0, other=-1), 0)
    share = tl.max(tl.load(SHARE + same, mask=same >= 0, other=1.0), 0)
    spent = tl.max(tl.load(SPENT + same, mask=same >= 0, other=0.0), 0)
    return node, draft_row, share.to(tl.float32), spent.to(tl.float32)


@triton.jit
def mass_behind(
    SCORES, LSE, DRAFT, INNER, DRAFT_ROW, SPECIAL, SHARE, SPENT, SUMS, END, LEFT, vocabulary, stride_s, stride_d, nodes,
    K: tl.constexpr, NODES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums R at a sample's end over one chunk."""
    sample = tl.program_id(0)
    chunk = tl.program_id(1)
    end = tl.load(END + sample)
    argument = _argument(INNER, DRAFT_ROW, SHARE, SPENT, SUMS, end, nodes, NODES, CHUNKS, COLUMNS)
    node, draft_row, share, spent = argument
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    left, _ = left_of(
        SCORES, LSE, DRAFT, SPECIAL, node, end, draft_row, share, spent, at, vocabulary, vocabulary, stride_s, stride_d,
        K,
    )  # fmt: skip
    tl.store(LEFT + sample * CHUNKS + chunk, tl.sum(left, 0))


@triton.jit
def pick_behind(
    SCORES, LSE, DRAFT, INNER, DRAFT_ROW, SPECIAL, SHARE, SPENT, SUMS, END, LEFT, UNIFORMS, TOKEN, vocabulary, stride_s,
    stride_d, nodes, K: tl.constexpr, NODES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the token in which a sample's uniform falls: first its chunk, then its place there."""
    sample = tl.program_id(0)
    end = tl.load(END + sample)
    chunk = tl.arange(0, COLUMNS)
    parts = tl.load(LEFT + sample * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0).to(tl.float64)
    sums = tl.cumsum(parts, 0)
    total = tl.sum(tl.where(chunk == CHUNKS - 1, sums, 0.0), 0)
    level = tl.load(UNIFORMS + end) * total
    reached = tl.sum(((sums <= level) & (chunk < CHUNKS)).to(tl.int32), 0)
    found = tl.minimum(reached, tl.max(tl.where(parts > 0, chunk, 0), 0))
    level -= tl.sum(tl.where(chunk == found - 1, sums, 0.0), 0)
    argument = _argument(INNER, DRAFT_ROW, SHARE, SPENT, SUMS, end, nodes, NODES, CHUNKS, COLUMNS)
    node, draft_row, share, spent = argument
    at = found * BLOCK + tl.arange(0, BLOCK)
    left, _ = left_of(
        SCORES, LSE, DRAFT, SPECIAL, node, end, draft_row, share, spent, at, vocabulary, vocabulary, stride_s, stride_d,
        K,
    )  # fmt: skip
    tl.store(TOKEN + sample, token_at(left, at, level).to(tl.int64))


def launch_last_top_down(
    chances: Tensor, children: Tensor, inner: Tensor, roots: Tensor, uniforms: Tensor, depth: int
) -> Tensor:
    """See :func:`arbordraft.kernels.verify.reference.last_top_down_reference`."""
    end = roots.new_empty(len(roots))
    nodes, width = children.shape
    if len(roots):
        walk_down[(len(roots),)](
            chances.contiguous(), children.contiguous(), inner, roots, uniforms.double().contiguous(), end, nodes,
            depth, K=width, WIDE=triton.next_power_of_2(width), NODES=triton.next_power_of_2(max(nodes, 1)),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return end


def launch_lift_level(
    chance: Tensor, reached: Tensor, weight: Tensor, accept: Tensor, stop: Tensor, inner: Tensor, children: Tensor
) -> None:
    """See :func:`arbordraft.kernels.verify.reference.lift_level_reference`."""
    nodes, width = children.shape
    if nodes:
        lift_node[(nodes,)](
            chance, reached.view(torch.int8), weight.contiguous(), accept.contiguous(), stop.contiguous(),
            inner.contiguous(), children.contiguous(), K=width, WIDE=triton.next_power_of_2(width), num_warps=1,
            enable_fp_fusion=False,
        )  # fmt: skip


def launch_lifted_ends(
    chance: Tensor, reached: Tensor, uniforms: Tensor, order: Tensor, sample: Tensor, roots: Tensor
) -> Tensor:
    """See :func:`arbordraft.kernels.verify.reference.lifted_ends_reference`."""
    end, rows = roots.new_empty(len(roots)), len(order)
    if len(roots):
        first_in_order[(len(roots),)](
            chance, reached.view(torch.int8), uniforms.double().contiguous(), order.contiguous(), sample.contiguous(),
            roots.contiguous(), end, rows, BLOCK=min(1024, triton.next_power_of_2(rows)), num_warps=1,
        )  # fmt: skip
    return end


def launch_draw_behind(
    scores: Tensor, lse: Tensor, draft: Tensor, inner: Tensor, draft_row: Tensor, tokens: Tensor, weight: Tensor,
    taken: Tensor, mass: Tensor, end: Tensor, uniforms: Tensor,
) -> Tensor:  # fmt: skip
    """See :func:`arbordraft.kernels.verify.reference.draw_behind_reference`."""
    samples, (nodes, width), (_, vocabulary) = len(end), tokens.shape, scores.shape
    token, chunks = end.new_empty(samples), triton.cdiv(vocabulary, CHUNK)
    if samples == 0:
        return token
    left = scores.new_empty((samples, chunks), dtype=torch.float32)
    special = tokens.contiguous() if nodes else end.new_empty(width)  # not an empty one: kernels read before they ask
    tables = (
        scores, lse, draft, inner.contiguous(), draft_row.contiguous(), special, weight.contiguous(),
        taken.contiguous(), mass.contiguous(), end.contiguous(), left,
    )  # fmt: skip
    sizes = vocabulary, scores.stride(0), draft.stride(0), nodes
    how = {
        **{"K": width, "NODES": triton.next_power_of_2(max(nodes, 1)), "CHUNKS": chunks},
        **{"COLUMNS": triton.next_power_of_2(chunks), "BLOCK": block_of(vocabulary), "num_warps": 8},
    }
    mass_behind[samples, chunks](*tables, *sizes, **how)
    pick_behind[(samples,)](*tables, uniforms.double().contiguous(), token, *sizes, **how)
    return token


__all__ = [
    "first_in_order",
    "launch_draw_behind",
    "launch_last_top_down",
    "launch_lift_level",
    "launch_lifted_ends",
    "lift_node",
    "mass_behind",
    "pick_behind",
    "walk_down",
]
