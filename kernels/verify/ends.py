"""Ends of top-down paths and the tokens after them, in Triton: one program per sample.

Shapes: T rows, N nodes with children, K children, D draft rows, V vocabulary, C chunks of a row, B samples.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.kernels.verify.rejection import positive
from arbordraft.kernels.verify.triton import launch_left_mass, launch_left_pick


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
def look_up(
    INNER, DRAFT_ROW, TOKENS, SHARE, SPENT, SUMS, END, OWN_ROW, WEIGHT, TAKEN, SPECIAL, nodes, K: tl.constexpr,
    WIDE: tl.constexpr, NODES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Reads the arguments of R at a sample's end: of a node with children, or the target's whole row."""
    sample = tl.program_id(0)
    node = _node_of(INNER, tl.load(END + sample), nodes, NODES)
    chunk = tl.arange(0, COLUMNS)
    known = (chunk < CHUNKS) & (node + chunk * 0 >= 0)
    # The mass is 0 only by rounding: stopping had probability 0.
    left = tl.sum(tl.load(SUMS + node * CHUNKS + chunk, mask=known, other=0.0), 0) > 0
    j = tl.arange(0, WIDE)
    same = node + j * 0  # -1 if the end is a leaf: nothing to read then
    here = (same >= 0) & (j * 0 + left.to(tl.int32) != 0)
    tokens = tl.load(TOKENS + node * K + j, mask=here & (j < K), other=-1)
    own_row = tl.load(DRAFT_ROW + same, mask=here, other=-1)
    share = tl.load(SHARE + same, mask=here, other=1.0)
    spent = tl.load(SPENT + same, mask=here, other=0.0)
    tl.store(OWN_ROW + sample, tl.max(own_row, 0))
    tl.store(WEIGHT + sample, tl.max(share, 0).to(tl.float32))
    tl.store(TAKEN + sample, tl.max(spent, 0).to(tl.float32))
    tl.store(SPECIAL + sample * K + j, tokens, mask=j < K)


@triton.jit
def choose_chunk(LEFT, END, UNIFORMS, WHERE, LEVEL, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Finds the chunk in which a sample's uniform falls, and the level within that chunk."""
    sample = tl.program_id(0)
    chunk = tl.arange(0, COLUMNS)
    parts = tl.load(LEFT + sample * CHUNKS + chunk, mask=chunk < CHUNKS, other=0.0).to(tl.float64)
    sums = tl.cumsum(parts, 0)
    total = tl.sum(tl.where(chunk == CHUNKS - 1, sums, 0.0), 0)
    level = tl.load(UNIFORMS + tl.load(END + sample)) * total
    reached = tl.sum(((sums <= level) & (chunk < CHUNKS)).to(tl.int32), 0)
    last = tl.max(tl.where(parts > 0, chunk, 0), 0)
    found = tl.minimum(reached, last)
    passed = tl.sum(tl.where(chunk == found - 1, sums, 0.0), 0)
    tl.store(WHERE + sample, found.to(tl.int64))
    tl.store(LEVEL + sample, level - passed)


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
    samples, (nodes, width), chunks = len(end), tokens.shape, triton.cdiv(scores.shape[1], CHUNK)
    if samples == 0:
        return end.new_empty(0)
    own_row, where = end.new_empty(samples), end.new_empty(samples)
    own_weight, own_taken = (scores.new_empty(samples, dtype=torch.float32) for _ in range(2))
    special = end.new_empty((samples, width))
    level = scores.new_empty(samples, dtype=torch.float64)
    columns = {"CHUNKS": chunks, "COLUMNS": triton.next_power_of_2(chunks), "num_warps": 1}
    look_up[(samples,)](
        inner, draft_row, tokens.contiguous(), weight.contiguous(), taken, mass, end, own_row, own_weight, own_taken,
        special, nodes, K=width, WIDE=triton.next_power_of_2(width), NODES=triton.next_power_of_2(max(nodes, 1)),
        **columns,
    )  # fmt: skip
    arguments = scores, lse, draft, end, own_row, own_weight, own_taken, special
    left, _ = launch_left_mass(*arguments)
    choose_chunk[(samples,)](left, end, uniforms.double().contiguous(), where, level, **columns)
    return launch_left_pick(*arguments, where, level)


__all__ = [
    "choose_chunk",
    "first_in_order",
    "launch_draw_behind",
    "launch_last_top_down",
    "launch_lift_level",
    "launch_lifted_ends",
    "lift_node",
    "look_up",
    "walk_down",
]
