"""Children of a level of draft trees in Triton, in one pass over its scores.

One program per chunk of a row finds the highest score of each of its segments. The k best scores of a row are in the k
segments with the highest maxima. A second kernel, one program per row, selects these segments and sorts their scores.
It compares int64 keys, a score followed by its place, so no two are equal and the first of equal scores wins.

Shapes: R nodes, V vocabulary, C chunks of a row, S segments of a row, k children.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # scores of a chunk
SEGMENT = 32  # scores of a segment
MOST = 256  # children of a node: a row's best segments have to fit into one program


@triton.jit
def _key(x, real, place):
    """Returns int64 keys in the order of the float32: NaN highest, places without a score lowest, first place wins."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(x != x, 0x7FC00000, ordered)
    ordered = tl.where(real, ordered, -2147483648)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def _place(key):
    """Returns the place within a key."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def maxima_of_chunk(
    SCORES, MAXIMA, HIGHEST, MASS, stride_s, vocabulary, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """Finds the highest score of every segment and of the chunk, and the sum of exponentials relative to the latter."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    segments: tl.constexpr = BLOCK // SEGMENT
    segment = tl.arange(0, segments)
    at = chunk * BLOCK + segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    x = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    # Not tl.max alone: it may ignore NaN, which has to reach the caller.
    bad = tl.max(tl.max((x != x).to(tl.int32), 1), 0)
    maxima = tl.max(tl.where(x != x, float("inf"), x), 1)
    highest = tl.max(maxima, 0)
    below = tl.where(highest == -float("inf"), 0.0, highest)
    part = row * CHUNKS + chunk
    tl.store(MAXIMA + part * segments + segment, maxima)
    tl.store(HIGHEST + part, tl.where(bad > 0, float("nan"), highest))
    tl.store(MASS + part, tl.sum(tl.sum(tl.exp(x - below), 1), 0))


@triton.jit
def children_of_row(
    SCORES, MAXIMA, HIGHEST, MASS, TOKENS, LOG_PROBS, stride_s, vocabulary, children,
    K: tl.constexpr, CHUNKS: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, WIDE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Finds the K highest scores of a row's K best segments, and their log-probabilities, one row per program."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, WIDE)
    maxima = tl.load(MAXIMA + row * SEGMENTS + segment, mask=segment < SEGMENTS, other=0.0)
    best = _place(tl.topk(_key(maxima, segment < SEGMENTS, segment), K))
    at = best[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    x = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=0.0).to(tl.float32)
    token = _place(tl.topk(tl.reshape(_key(x, at < vocabulary, at), [K * SEGMENT]), K))
    part = tl.arange(0, PARTS)
    highest = tl.load(HIGHEST + row * CHUNKS + part, mask=part < CHUNKS, other=-float("inf"))
    mass = tl.load(MASS + row * CHUNKS + part, mask=part < CHUNKS, other=0.0)
    bad = tl.max((highest != highest).to(tl.int32), 0)
    above = tl.max(tl.where(highest != highest, -float("inf"), highest), 0)
    safe = tl.where(above == -float("inf"), 0.0, above)
    lse = above + tl.log(tl.sum(tl.where(highest == -float("inf"), 0.0, mass * tl.exp(highest - safe)), 0))
    lse = tl.where(bad > 0, float("nan"), lse)
    j = tl.arange(0, K)
    real = j < children
    x = tl.load(SCORES + row * stride_s + token, mask=real, other=0.0).to(tl.float32)
    tl.store(TOKENS + row * children + j, token.to(tl.int64), mask=real)
    tl.store(LOG_PROBS + row * children + j, x - lse, mask=real)


def launch(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.tree_expand.tree_expand`."""
    if k > MOST:
        raise ValueError(f"at most {MOST} children of a node are found at a time, {k} were asked for")
    rows, vocabulary = scores.shape
    chunks = triton.cdiv(vocabulary, BLOCK)
    tokens = scores.new_empty((rows, k), dtype=torch.int64)
    log_probs = scores.new_empty((rows, k), dtype=torch.float32)
    if rows == 0:
        return tokens, log_probs
    wide = max(2, triton.next_power_of_2(k))
    block = max(SEGMENT, min(BLOCK, triton.next_power_of_2(vocabulary)))
    segments = chunks * block // SEGMENT
    maxima = scores.new_empty((rows, segments), dtype=torch.float32)
    highest, mass = (scores.new_empty((rows, chunks), dtype=torch.float32) for _ in range(2))
    maxima_of_chunk[(rows, chunks)](
        scores, maxima, highest, mass, scores.stride(0), vocabulary, CHUNKS=chunks, BLOCK=block, SEGMENT=SEGMENT,
        num_warps=4,
    )  # fmt: skip
    children_of_row[(rows,)](
        scores, maxima, highest, mass, tokens, log_probs, scores.stride(0), vocabulary, k, K=wide, CHUNKS=chunks,
        SEGMENT=SEGMENT, SEGMENTS=segments, WIDE=max(wide, triton.next_power_of_2(segments)),
        PARTS=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    return tokens, log_probs
