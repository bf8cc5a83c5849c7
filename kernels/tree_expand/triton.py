"""Children of a level of draft trees in Triton, in one pass over its scores.

Programs look for the k highest keys of one chunk of one row each; a second kernel merges the chunks of a row. A key is
a score with its place behind it in one int64: keys are never equal, and among equal scores the first place wins.

Shapes: R nodes, V vocabulary, C chunks of a row, k children.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # scores of a chunk
MOST = 256  # children: a row's chunks have to fit into one program when they are merged


@triton.jit
def _key(x, place):
    """An int64 that orders as the float32, and the smaller place above the larger one."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - place).to(tl.int64)


@triton.jit
def top_of_chunk(
    SCORES, ORDERED, HIGHEST, MASS, stride_s, vocabulary, K: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The K highest keys of one chunk, its highest score and the sum of exponentials below that."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    bad = tl.max((x != x).to(tl.int32), 0)
    highest = tl.max(tl.where(x != x, -float("inf"), x), 0)
    below = tl.where(highest == -float("inf"), 0.0, highest)
    part = row * CHUNKS + chunk
    tl.store(HIGHEST + part, tl.where(bad > 0, float("nan"), highest))
    tl.store(MASS + part, tl.sum(tl.exp(x - below), 0))
    tl.store(ORDERED + part * K + tl.arange(0, K), tl.topk(_key(x, at), K))


@triton.jit
def merge_chunks(
    SCORES, ORDERED, HIGHEST, MASS, TOKENS, LOG_PROBS, stride_s, children,
    K: tl.constexpr, CHUNKS: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One program per row: the K highest of all chunks, and their log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K)
    at = tl.arange(0, WIDE)
    lowest: tl.constexpr = -9223372036854775807
    keys = tl.load(ORDERED + row * CHUNKS * K + at, mask=at < CHUNKS * K, other=lowest)
    token = 0x7FFFFFFF - (tl.topk(keys, K) & 0xFFFFFFFF).to(tl.int32)
    part = tl.arange(0, PARTS)
    highest = tl.load(HIGHEST + row * CHUNKS + part, mask=part < CHUNKS, other=-float("inf"))
    mass = tl.load(MASS + row * CHUNKS + part, mask=part < CHUNKS, other=0.0)
    # Not tl.max alone: it may ignore NaN, which has to reach the caller.
    bad = tl.max((highest != highest).to(tl.int32), 0)
    above = tl.max(tl.where(highest != highest, -float("inf"), highest), 0)
    safe = tl.where(above == -float("inf"), 0.0, above)
    lse = above + tl.log(tl.sum(tl.where(highest == -float("inf"), 0.0, mass * tl.exp(highest - safe)), 0))
    lse = tl.where(bad > 0, float("nan"), lse)
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
    wide = max(2, triton.next_power_of_2(k))
    tokens = scores.new_empty((rows, k), dtype=torch.int64)
    log_probs = scores.new_empty((rows, k), dtype=torch.float32)
    if rows == 0:
        return tokens, log_probs
    keys = scores.new_empty((rows, chunks, wide), dtype=torch.int64)
    highest, mass = (scores.new_empty((rows, chunks), dtype=torch.float32) for _ in range(2))
    top_of_chunk[(rows, chunks)](
        scores, keys, highest, mass, scores.stride(0), vocabulary, K=wide, CHUNKS=chunks,
        BLOCK=max(wide, min(BLOCK, triton.next_power_of_2(vocabulary))), num_warps=8,
    )  # fmt: skip
    merge_chunks[(rows,)](
        scores, keys, highest, mass, tokens, log_probs, scores.stride(0), k, K=wide, CHUNKS=chunks,
        WIDE=triton.next_power_of_2(chunks * wide), PARTS=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return tokens, log_probs
