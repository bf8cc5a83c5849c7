"""Gumbel noise in Triton, and the highest of scores with noise in one pass over them: no row of noise is written.

The noise has the bits of the definition. For that, launches forbid to contract products and sums, and real numbers are
float64; the quotient of two of those is rounded correctly by Triton, that of two float32 where it is asked for.

A program looks at one chunk of one row. A counter of Philox gives words for four tokens, 16 apart, so programs count in
lanes, which have a counter each, and take their four tokens in turn.

Shapes: R rows, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.gumbel import reference

BLOCK = 2048  # tokens of a chunk
EXACT = {"num_warps": 8, "enable_fp_fusion": False}  # how every kernel here is launched
_GROUP: tl.constexpr = tl.constexpr(reference.GROUP)
_LANES: tl.constexpr = tl.constexpr(reference.LANES)
_LN2: tl.constexpr = tl.constexpr(reference.LN2)
_ROOT_HALF: tl.constexpr = tl.constexpr(reference.ROOT_HALF)
_TERMS: tl.constexpr = tl.constexpr(reference.TERMS)
_NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _logarithm(x):
    """See :func:`arbordraft.kernels.gumbel.reference.logarithm`."""
    bits = x.to(tl.int64, bitcast=True)
    m = ((bits & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = m < _ROOT_HALF
    e = (bits >> 52) - tl.where(small, 1023, 1022)
    m = tl.where(small, m + m, m)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = square * 0.0 + 1.0 / (2 * _TERMS - 1)
    for term in tl.static_range(2, _TERMS + 1):
        series = series * square + 1.0 / (2 * (_TERMS - term) + 1)
    return e.to(tl.float64) * _LN2 + (s + s) * series


@triton.jit
def _gumbel(upper, lower):
    """See :func:`arbordraft.kernels.gumbel.reference.gumbel_of`."""
    y = ((lower.to(tl.float64) + 0.5) * 2.0**-32 + upper.to(tl.float64)) * 2.0**-32
    y = tl.minimum(y, 1.0 - 2.0**-53)
    rest = 1.0 - y
    lost = rest == 1.0
    exact = -_logarithm(rest) * (y / tl.where(lost, y, 1.0 - rest))
    return -_logarithm(tl.where(lost, y, exact))


@triton.jit
def _words(SEEDS, POSITIONS, row, chunk, BLOCK: tl.constexpr):
    """The upper and the lower words of four tokens of each lane, and the first of these tokens; the others follow it
    16 apart."""
    lane = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    nothing = tl.zeros_like(lane)
    seed, position = tl.load(SEEDS + row), tl.load(POSITIONS + row).to(tl.int32)
    upper = tl.philox(seed, lane, nothing + position, nothing, nothing)
    lower = tl.philox(seed, lane, nothing + position, nothing + 1, nothing)
    return upper, lower, lane // _LANES * _GROUP + lane % _LANES


@triton.jit
def gumbel_noise(SEEDS, POSITIONS, NOISE, vocabulary, BLOCK: tl.constexpr):
    """The noise of one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    upper, lower, first = _words(SEEDS, POSITIONS, row, tl.program_id(1), BLOCK)
    for word in tl.static_range(4):
        at = first + word * _LANES
        tl.store(NOISE + row * vocabulary + at, _gumbel(upper[word], lower[word]), mask=at < vocabulary)


@triton.jit
def gumbel_draw(
    SCORES, SEEDS, POSITIONS, LOWEST, BEST, TOKENS, vocabulary, temperature, TRUNCATED: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The highest score with noise of one chunk of one row, and the first token that has it; -1 if that is -inf."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    upper, lower, first = _words(SEEDS, POSITIONS, row, chunk, BLOCK)
    highest = tl.full([BLOCK // 4], -float("inf"), tl.float64)
    token = tl.full([BLOCK // 4], _NOWHERE, tl.int32)
    for word in tl.static_range(4):
        at = first + word * _LANES
        x = tl.load(SCORES + row * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        x = tl.div_rn(x, temperature)
        if TRUNCATED:
            x = tl.where(x < tl.load(LOWEST + row), -float("inf"), x)
        value = x.to(tl.float64) + _gumbel(upper[word], lower[word])
        better = value > highest
        highest, token = tl.where(better, value, highest), tl.where(better, at, token)
    best = tl.max(highest, 0)
    # No reduction promises which of several equal ones it returns the place of.
    winner = tl.min(tl.where(highest == best, token, _NOWHERE), 0)
    tl.store(BEST + row * CHUNKS + chunk, best)
    tl.store(TOKENS + row * CHUNKS + chunk, tl.where(winner == _NOWHERE, -1, winner).to(tl.int64))


def _grid(rows: int, vocabulary: int) -> tuple[tuple[int, int], int]:
    """Programs, and tokens of each: a chunk, or all there are."""
    block = max(reference.GROUP, min(BLOCK, triton.next_power_of_2(vocabulary)))
    return (rows, triton.cdiv(vocabulary, block)), block


def launch_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel`."""
    out = seeds.new_empty((len(seeds), vocabulary), dtype=torch.float64)
    if out.numel():
        grid, block = _grid(len(seeds), vocabulary)
        gumbel_noise[grid](seeds.contiguous(), positions.contiguous(), out, vocabulary, BLOCK=block, **EXACT)
    return out


def launch_draw(
    scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, lowest: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``[R, C]`` float64 and int64: the highest ``scores / temperature + noise`` of each chunk, and where it is."""
    rows, vocabulary = scores.shape
    grid, block = _grid(rows, vocabulary)
    highest = scores.new_empty(grid, dtype=torch.float64)
    tokens = scores.new_empty(grid, dtype=torch.int64)
    inputs = (tensor.contiguous() for tensor in (scores, seeds, positions, scores if lowest is None else lowest))
    if rows:
        gumbel_draw[grid](
            *inputs, highest, tokens, vocabulary, temperature, TRUNCATED=lowest is not None, CHUNKS=grid[1],
            BLOCK=block, **EXACT,
        )  # fmt: skip
    return highest, tokens


__all__ = ["BLOCK", "EXACT", "gumbel_draw", "gumbel_noise", "launch_draw", "launch_noise"]
