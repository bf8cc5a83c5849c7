"""Tokens after the ends of paths, in Triton.

Shapes: T rows, N nodes with children, K children, D draft rows, V vocabulary, C chunks of a row, B samples.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK
from arbordraft.kernels.verify.rejection import node_of
from arbordraft.kernels.verify.triton import block_of, left_of, token_at


@triton.jit
def _argument(
    INNER, DRAFT_ROW, SHARE, SPENT, SUMS, end, nodes, NODES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Returns the arguments of R at a path's end: of a node with children, or -1 for the target's whole row.

    These are the node, its draft row, its weight and t.
    """
    node = node_of(INNER, end, nodes, NODES)
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


__all__ = ["launch_draw_behind", "mass_behind", "pick_behind"]
