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
def row_stats(
    SCORES, HIGHEST, PLACE, MASS, SAMPLE, TEMPERATURE, UNSOUND, stride_s, vocabulary, samples, HEATED: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the highest score of one chunk of one row, its first place, and the sum of exponentials relative to it.

    If ``HEATED``, the sum is that of scores divided by temperatures; the first program also sets the samples' counts of
    broken rows to 0.
    """
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
    if HEATED:
        heat = _heat(SAMPLE, TEMPERATURE, row)
        x, below = tl.div_rn(x, heat), tl.div_rn(below, heat)
        if (row == 0) & (chunk == 0):
            for first in range(0, samples, 128):
                sample = first + tl.arange(0, 128)
                tl.store(UNSOUND + sample, sample.to(tl.int64) * 0, mask=sample < samples)
    tl.store(MASS + row * CHUNKS + chunk, tl.sum(tl.exp(x - below), 0))


@triton.jit
def _heat(SAMPLE, TEMPERATURE, row):
    """Returns the temperature by which a row is divided; 1 at temperature 0."""
    heat = tl.load(TEMPERATURE + tl.load(SAMPLE + row)).to(tl.float32)
    return tl.where(heat > 0, heat, 1.0)


@triton.jit
def _sum_up(highest, mass):
    """Returns the log-sum-exp of a row from the highest scores and masses of its chunks."""
    part = highest + tl.log(mass)
    # Not tl.max alone: it may ignore NaN, which has to reach the caller.
    bad = tl.max((part != part).to(tl.int32), 0)
    top = tl.max(tl.where(part != part, -float("inf"), part), 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    lse = top + tl.log(tl.sum(tl.exp(part - safe), 0))
    return tl.where(bad > 0, float("nan"), lse)


@triton.jit
def add_chunks(HIGHEST, MASS, LSE, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """Computes the log-sum-exp of one row from the results of its chunks."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, COLUMNS)
    inside = chunk < CHUNKS
    highest = tl.load(HIGHEST + row * CHUNKS + chunk, mask=inside, other=-float("inf"))
    tl.store(LSE + row, _sum_up(highest, tl.load(MASS + row * CHUNKS + chunk, mask=inside, other=0.0)))


@triton.jit
def best_of_row(
    HIGHEST, PLACE, MASS, TOKENS, SAMPLE, TEMPERATURE, BEST, UNSOUND, LSE, vocabulary, HEATED: tl.constexpr,
    CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Finds the best token of one row from the results of its chunks, and counts the row if it is broken."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, COLUMNS)
    inside = chunk < CHUNKS
    highest = tl.load(HIGHEST + row * CHUNKS + chunk, mask=inside, other=-float("inf"))
    place = tl.load(PLACE + row * CHUNKS + chunk, mask=inside, other=_NOWHERE)
    bad = tl.max((highest != highest).to(tl.int32), 0)
    top = tl.max(tl.where(highest != highest, -float("inf"), highest), 0)
    best = tl.min(tl.where(highest == top, place, _NOWHERE), 0)
    tl.store(BEST + row, tl.minimum(best, vocabulary - 1))
    broken = (bad > 0) | (tl.abs(top) == float("inf"))
    sample = tl.load(SAMPLE + row)
    if broken & (tl.load(TOKENS + row) >= 0):
        tl.atomic_add(UNSOUND + sample, tl.full([], 1, tl.int64), sem="relaxed")
    if HEATED:
        heat = _heat(SAMPLE, TEMPERATURE, row)
        mass = tl.load(MASS + row * CHUNKS + chunk, mask=inside, other=0.0)
        lse = _sum_up(tl.div_rn(highest, heat), mass)
        certain = tl.load(TEMPERATURE + sample) <= 0
        tl.store(LSE + row, tl.where(certain, tl.where(bad > 0, float("nan"), top), lse))


@triton.jit
def divided_scores(SCORES, SAMPLE, TEMPERATURE, BEST, DIVIDED, stride_s, vocabulary, BLOCK: tl.constexpr):
    """Divides one chunk of a row by its temperature; at 0, keeps the best token alone."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=0.0).to(tl.float32)
    certain = tl.load(TEMPERATURE + tl.load(SAMPLE + row)) <= 0
    x = tl.div_rn(x, _heat(SAMPLE, TEMPERATURE, row))
    x = tl.where(at == tl.load(BEST + row), x, tl.where(certain, -float("inf"), x))
    tl.store(DIVIDED + row * vocabulary + at, x, mask=at < vocabulary)


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
    return _row_stats(scores, scores, scores, None)


def _row_stats(
    scores: Tensor, sample: Tensor, temperature: Tensor, broken: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, vocabulary = scores.shape
    chunks = triton.cdiv(vocabulary, CHUNK)
    highest, mass = (scores.new_empty((rows, chunks), dtype=torch.float32) for _ in range(2))
    place = scores.new_empty((rows, chunks), dtype=torch.int64)
    if rows:
        row_stats[(rows, chunks)](
            scores, highest, place, mass, sample, temperature, place if broken is None else broken, scores.stride(0),
            vocabulary, 0 if broken is None else len(broken), HEATED=broken is not None, CHUNKS=chunks,
            BLOCK=block_of(vocabulary), num_warps=8,
        )  # fmt: skip
    return highest, place, mass


def launch_score_rows(
    logits: Tensor, tokens: Tensor, sample: Tensor, temperature: Tensor, divide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.reference.score_rows_reference`."""
    rows, vocabulary = logits.shape
    broken, best = sample.new_empty(len(temperature)), sample.new_empty(rows)
    scores = logits.new_empty((rows, vocabulary) if divide else (0, 0), dtype=torch.float32)
    lse = logits.new_empty(rows if divide else 0, dtype=torch.float32)
    if rows == 0:
        return best, broken.zero_(), scores, lse
    tables = sample.contiguous(), temperature.contiguous()
    highest, place, mass = _row_stats(logits, *tables, broken)
    chunks = highest.shape[1]
    best_of_row[(rows,)](
        highest, place, mass, tokens.contiguous(), *tables, best, broken, lse, vocabulary, HEATED=divide, CHUNKS=chunks,
        COLUMNS=triton.next_power_of_2(chunks), num_warps=1,
    )  # fmt: skip
    if divide:
        divided_scores[(rows, chunks)](
            logits, *tables, best, scores, logits.stride(0), vocabulary, BLOCK=block_of(vocabulary), num_warps=8
        )  # fmt: skip
    return best, broken, scores, lse


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
    "best_of_row",
    "block_of",
    "divided_scores",
    "launch_left_mass",
    "launch_left_pick",
    "launch_log_sum_exp",
    "launch_row_max",
    "launch_row_stats",
    "launch_score_rows",
    "left_at",
    "left_mass",
    "left_of",
    "left_pick",
    "row_stats",
    "token_at",
]
