"""Passes over rows of scores in Triton: no row of probabilities is ever written.

A row of probabilities is its scores l and one number: p(x) = exp(l(x) - lse). Recursive rejection needs the mass of a
node's residual, and at the end a draw from it:

    R(x) = max(w p(x) - t q(x), 0)

for scalars w and t, which :mod:`arbordraft.kernels.verify.tree` derives. Rows are read in chunks, one program each. The
sums of chunks are added up outside these programs.

Shapes: R rows, N nodes, D draft rows, V vocabulary, C chunks of a row, K special tokens of a node.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK

_NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def row_stats(SCORES, HIGHEST, PLACE, MASS, stride_s, vocabulary, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the highest score of one chunk of one row, its first place, and the sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 0)
    highest = tl.max(tl.where(x != x, -float("inf"), x), 0)
    # The first of several equal scores: reductions do not promise which place they return.
    place = tl.min(tl.where((at < vocabulary) & (x == highest), at, _NOWHERE), 0)
    below = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(HIGHEST + row * CHUNKS + chunk, tl.where(bad > 0, float("nan"), highest))
    tl.store(PLACE + row * CHUNKS + chunk, place)
    tl.store(MASS + row * CHUNKS + chunk, tl.sum(tl.exp(x - below), 0))


@triton.jit
def add_chunks(HIGHEST, MASS, LSE, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes the log-sum-exp of one row from the results of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, COLUMNS)
    inside = chunk < CHUNKS
    highest = tl.load(HIGHEST + row * CHUNKS + chunk, mask=inside, other=-float("inf"))
    part = highest + tl.log(tl.load(MASS + row * CHUNKS + chunk, mask=inside, other=0.0))
    # Not tl.max alone: it may ignore NaN, which has to reach the caller.
    bad = tl.max((part != part).to(tl.int32), 0)
    top = tl.max(tl.where(part != part, -float("inf"), part), 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    lse = top + tl.log(tl.sum(tl.exp(part - safe), 0))
    tl.store(LSE + row, tl.where(bad > 0, float("nan"), lse))


@triton.jit
def left_at(
    SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, node, at, vocabulary, scored, stride_s, stride_d,
    K: tl.constexpr,
):  # fmt: skip
    """Returns R and q of the tokens ``at``, 0 for special ones; R is 0 from ``scored`` on, where no score is read."""
    row = tl.load(ROW + node)
    return left_of(
        SCORES, LSE, DRAFT, SPECIAL, node, row, tl.load(DRAFT_ROW + node), tl.load(WEIGHT + node),
        tl.load(TAKEN + node), at, vocabulary, scored, stride_s, stride_d, K,
    )  # fmt: skip


@triton.jit
def left_of(
    SCORES, LSE, DRAFT, SPECIAL, node, row, draft_row, weight, taken, at, vocabulary, scored, stride_s, stride_d,
    K: tl.constexpr,
):  # fmt: skip
    """See `left_at`; a node of -1 has no special tokens."""
    inside = at < vocabulary
    x = tl.load(SCORES + row * stride_s + at, mask=at < scored, other=-float("inf")).to(tl.float32)
    p = tl.exp(x - tl.load(LSE + row)) * weight
    drawn = inside & ((draft_row + tl.zeros([1], tl.int64)) >= 0)
    q = tl.load(DRAFT + draft_row * stride_d + at, mask=drawn, other=0.0).to(tl.float32)
    ordinary = inside
    for index in tl.static_range(K):
        token = tl.load(SPECIAL + tl.maximum(node, 0) * K + index)
        ordinary = ordinary & (at != tl.where(node < 0, -1, token))
    left = tl.maximum(p - taken * q, 0.0)
    return tl.where(ordinary, left, 0.0), tl.where(ordinary, q, 0.0)


@triton.jit
def left_mass(
    SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, LEFT, DRAWN, vocabulary, stride_s, stride_d,
    K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums R and q over one chunk of one node."""
    node = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    left, drawn = left_at(
        SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, node, at, vocabulary, vocabulary, stride_s,
        stride_d, K,
    )  # fmt: skip
    tl.store(LEFT + node * CHUNKS + chunk, tl.sum(left, 0))
    tl.store(DRAWN + node * CHUNKS + chunk, tl.sum(drawn, 0))


@triton.jit
def token_at(left, at, level):
    """Returns the token at which the running sum of R exceeds a level, or else the last token with R > 0."""
    # In float32 the error of a running sum of thousands exceeds the mass of a token in a flat row.
    reached = tl.cumsum(left.to(tl.float64), 0) > level
    first = tl.min(tl.where(reached & (left > 0), at, _NOWHERE), 0)
    last = tl.max(tl.where(left > 0, at, -1), 0)
    return tl.where(first == _NOWHERE, last, first)


@triton.jit
def left_pick(
    SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, WHERE, LEVEL, TOKEN, vocabulary, stride_s, stride_d,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds a chunk's token at which the running sum of R exceeds a level, or else the last token with R > 0."""
    node = tl.program_id(0).to(tl.int64)
    at = tl.load(WHERE + node) * BLOCK + tl.arange(0, BLOCK)
    left, _ = left_at(
        SCORES, LSE, DRAFT, ROW, DRAFT_ROW, WEIGHT, TAKEN, SPECIAL, node, at, vocabulary, vocabulary, stride_s,
        stride_d, K,
    )  # fmt: skip
    tl.store(TOKEN + node, token_at(left, at, tl.load(LEVEL + node)))


def block_of(vocabulary: int) -> int:
    """Returns the tokens that a program reads: a chunk, or the whole vocabulary."""
    return min(CHUNK, triton.next_power_of_2(vocabulary))


def launch_row_stats(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.reference.row_stats_reference`."""
    rows, vocabulary = scores.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    highest, mass = (scores.new_empty((rows, chunks), dtype=torch.float32) for _ in range(2))
    place = scores.new_empty((rows, chunks), dtype=torch.int64)
    if rows:
        row_stats[(rows, chunks)](
            scores,
            highest,
            place,
            mass,
            scores.stride(0),
            vocabulary,
            CHUNKS=chunks,
            BLOCK=block_of(vocabulary),
            num_warps=8,
        )
    return highest, place, mass


def launch_log_sum_exp(scores: Tensor) -> Tensor:
    """See :func:`arbordraft.kernels.verify.log_sum_exp`."""
    highest, _, mass = launch_row_stats(scores)
    rows, chunks = highest.shape
    lse = scores.new_empty(rows, dtype=torch.float32)
    if rows:
        add_chunks[(rows,)](
            highest, mass, lse, CHUNKS=chunks, COLUMNS=triton.next_power_of_2(chunks), num_warps=1
        )  # fmt: skip
    return lse


def launch_row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.row_max`."""
    highest, place, _ = launch_row_stats(logits)
    values, chunk = highest.max(dim=-1, keepdim=True)
    return values[:, 0], place.gather(1, chunk)[:, 0]


def launch_left_mass(
    scores: Tensor, lse: Tensor, draft: Tensor, row: Tensor, draft_row: Tensor, weight: Tensor, taken: Tensor,
    special: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See :func:`arbordraft.kernels.verify.reference.left_mass_reference`."""
    nodes, vocabulary = len(row), scores.shape[1]
    chunks = triton.cdiv(vocabulary, CHUNK)
    left, drawn = (scores.new_empty((nodes, chunks), dtype=torch.float32) for _ in range(2))
    if nodes:
        left_mass[(nodes, chunks)](
            scores, lse, draft, row, draft_row, weight, taken, special, left, drawn, vocabulary, scores.stride(0),
            draft.stride(0), K=special.shape[1], CHUNKS=chunks, BLOCK=block_of(vocabulary), num_warps=8,
        )  # fmt: skip
    return left, drawn


def launch_left_pick(
    scores: Tensor, lse: Tensor, draft: Tensor, row: Tensor, draft_row: Tensor, weight: Tensor, taken: Tensor,
    special: Tensor, chunk: Tensor, level: Tensor,
) -> Tensor:  # fmt: skip
    """See :func:`arbordraft.kernels.verify.reference.left_pick_reference`."""
    token = scores.new_empty(len(row), dtype=torch.int64)
    if len(row):
        left_pick[(len(row),)](
            scores, lse, draft, row, draft_row, weight, taken, special, chunk, level, token, scores.shape[1],
            scores.stride(0), draft.stride(0), K=special.shape[1], BLOCK=block_of(scores.shape[1]), num_warps=8,
        )  # fmt: skip
    return token


__all__ = [
    "CHUNK",
    "add_chunks",
    "block_of",
    "launch_left_mass",
    "launch_left_pick",
    "launch_log_sum_exp",
    "launch_row_max",
    "launch_row_stats",
    "left_at",
    "left_mass",
    "left_of",
    "left_pick",
    "row_stats",
    "token_at",
]
