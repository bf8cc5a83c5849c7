"""Gumbel noise in Triton, and the highest of scores with noise in one pass over them: no row of noise is written.

The noise has the bits of the definition: real numbers are float64, and launches forbid contracting products and sums.
Triton rounds quotients of float64 correctly, and quotients of float32 if asked to.

A program handles one chunk of one row. A Philox counter gives words for four tokens, 16 apart, so a lane of a program
is one counter with four tokens. To draw, programs first bound the values of each lane, in float32 and from upper words
alone. They keep the two highest bounds of a chunk. Then one program per row computes lanes exactly, one at a time,
until no other lane can reach the best value. So float64 runs for one or two lanes of a row, not of each chunk.

Shapes: R rows, V vocabulary, C chunks of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.gumbel import reference

NOISE_BLOCK, DRAW_BLOCK = 2048, 4096  # tokens of a chunk
# Without contraction, the bits are those of the definition.
NOISE_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
DRAW_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
_GROUP: tl.constexpr = tl.constexpr(reference.GROUP)
_LANES: tl.constexpr = tl.constexpr(reference.LANES)
_LN2: tl.constexpr = tl.constexpr(reference.LN2)
_ROOT_HALF: tl.constexpr = tl.constexpr(round(reference.ROOT_HALF * 2**53) & 0xFFFFFFFFFFFFF)  # its mantissa
_TERMS: tl.constexpr = tl.constexpr(reference.TERMS)
_NOWHERE: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def _logarithm(x):
    """See :func:`arbordraft.kernels.gumbel.reference.logarithm`."""
    bits = x.to(tl.int64, bitcast=True)
    mantissa = bits & 0xFFFFFFFFFFFFF
    m = (mantissa | 0x3FE0000000000000).to(tl.float64, bitcast=True)
    small = mantissa < _ROOT_HALF  # as integers: in comparisons with float64, Triton 3.7 rounds the constant to float32
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
    y = tl.minimum(y, (y * 0.0 + 1.0) - 2.0**-53)  # in float64: Triton 3.7 rounds a constant to 1
    rest = 1.0 - y
    lost = rest == 1.0
    exact = -_logarithm(rest) * (y / tl.where(lost, y, 1.0 - rest))
    return -_logarithm(tl.where(lost, y, exact))


@triton.jit
def _bound(upper):
    """Returns an upper bound of the noise, given its upper word; seldom more than 0.01 above the noise."""
    y = (upper >> 8).to(tl.float32) * 2.0**-24  # cut off, so that it is no greater
    least = tl.maximum(y, -tl.log(1.0 - y) - 1e-5)  # lower bound of -ln(1 - y); GPU logarithms err by about 2**-20
    return tl.where(y > 0, 1e-4 - tl.log(tl.maximum(least, 2.0**-24)), 46.0)  # the highest noise there is


@triton.jit
def _words(SEEDS, POSITIONS, row, counter, half: tl.constexpr):
    """Returns the four words of counters: upper words of tokens (half 0) or lower words (half 1)."""
    nothing = counter * 0
    position = tl.load(POSITIONS + row).to(tl.int32)
    return tl.philox(tl.load(SEEDS + row), counter, nothing + position, nothing + half, nothing)


@triton.jit
def _token(counter, word):
    """Returns the token that a word of a counter belongs to."""
    return counter // _LANES * _GROUP + counter % _LANES + word * _LANES


@triton.jit
def _scores(SCORES, LOWEST, row, at, vocabulary, temperature, TRUNCATED: tl.constexpr):
    """Returns divided scores in float32, -inf for tokens that cannot be drawn."""
    x = tl.load(SCORES + row * vocabulary + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    x = tl.div_rn(x, temperature)
    return tl.where(x < tl.load(LOWEST + row), -float("inf"), x) if TRUNCATED else x


@triton.jit
def _pick(words, index):
    """Returns one of four numbers, selected by a tensor of indices."""
    return tl.where(index < 2, tl.where(index == 0, words[0], words[1]), tl.where(index == 2, words[2], words[3]))


@triton.jit
def _best_of_four(
    SCORES, SEEDS, POSITIONS, LOWEST, row, counter, vocabulary, temperature, TRUNCATED: tl.constexpr,
):  # fmt: skip
    """Returns the highest score with noise among the tokens of a counter, and the first token that has it."""
    word = tl.arange(0, 4)
    at = _token(counter, word)
    upper, lower = _words(SEEDS, POSITIONS, row, counter, 0), _words(SEEDS, POSITIONS, row, counter, 1)
    x = _scores(SCORES, LOWEST, row, at, vocabulary, temperature, TRUNCATED)
    value = x.to(tl.float64) + _gumbel(_pick(upper, word), _pick(lower, word))
    found = tl.max(value, 0)
    # Reductions do not promise which of several equal values they return the place of.
    return found, tl.min(tl.where(value == found, at, _NOWHERE), 0)


@triton.jit
def gumbel_noise(SEEDS, POSITIONS, NOISE, vocabulary, BLOCK: tl.constexpr):
    """Writes the noise of one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    upper, lower = _words(SEEDS, POSITIONS, row, lane, 0), _words(SEEDS, POSITIONS, row, lane, 1)
    for word in tl.static_range(4):
        at = _token(lane, word)
        tl.store(NOISE + row * vocabulary + at, _gumbel(upper[word], lower[word]), mask=at < vocabulary)


@triton.jit
def _bounds(
    SCORES, SEEDS, POSITIONS, LOWEST, row, lane, vocabulary, temperature, TRUNCATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Returns upper bounds of scores with noise of the four tokens of each lane, -inf where none can be drawn."""
    upper = _words(SEEDS, POSITIONS, row, lane, 0)
    bound = tl.full([BLOCK // 4], -float("inf"), tl.float32)
    for word in tl.static_range(4):
        x = _scores(SCORES, LOWEST, row, _token(lane, word), vocabulary, temperature, TRUNCATED)
        above = tl.maximum(x * (1 + 1e-6), x * (1 - 1e-6)) + 1e-3  # plus the largest rounding error
        bound = tl.maximum(bound, above + _bound(upper[word]))
    return bound


@triton.jit
def gumbel_bound(
    SCORES, SEEDS, POSITIONS, LOWEST, BOUNDS, COUNTERS, vocabulary, temperature, TRUNCATED: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the two highest bounds of one chunk of one row, and the counter of the first."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    bound = _bounds(SCORES, SEEDS, POSITIONS, LOWEST, row, lane, vocabulary, temperature, TRUNCATED, BLOCK)
    highest = tl.max(bound, 0)
    counter = tl.min(tl.where(bound == highest, lane, _NOWHERE), 0)
    at = row * CHUNKS + tl.program_id(1)
    tl.store(BOUNDS + 2 * at, highest)
    tl.store(BOUNDS + 2 * at + 1, tl.max(tl.where(lane == counter, -float("inf"), bound), 0))
    tl.store(COUNTERS + at, counter)


@triton.jit
def gumbel_draw(
    SCORES, SEEDS, POSITIONS, LOWEST, BOUNDS, COUNTERS, TOKENS, vocabulary, temperature, TRUNCATED: tl.constexpr,
    CHUNKS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the first token of a row that has the highest score with noise; -1 if that is -inf."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = row * CHUNKS + part
    top = tl.load(BOUNDS + 2 * at, mask=part < CHUNKS, other=-float("inf"))
    second = tl.load(BOUNDS + 2 * at + 1, mask=part < CHUNKS, other=-float("inf"))
    counters = tl.load(COUNTERS + at, mask=part < CHUNKS, other=0)
    best = tl.full([], -float("inf"), tl.float64)
    token = tl.full([], _NOWHERE, tl.int32)
    highest = tl.max(top, 0)
    while (highest >= best) & (highest > -float("inf")):  # an equal value wins if its token is lower
        chunk = tl.min(tl.where(top == highest, part, _NOWHERE), 0)
        counter = tl.max(tl.where(part == chunk, counters, -1), 0)
        found, first = _best_of_four(
            SCORES, SEEDS, POSITIONS, LOWEST, row, counter, vocabulary, temperature, TRUNCATED
        )  # fmt: skip
        better = (found > best) | ((found == best) & (first < token))
        best, token = tl.where(better, found, best), tl.where(better, first, token)
        highest = tl.max(tl.where(part == chunk, second, -float("inf")), 0)
        if (highest >= best) & (highest > -float("inf")):  # rarely: other counters of the chunk, one at a time
            lane = chunk * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            bound = _bounds(SCORES, SEEDS, POSITIONS, LOWEST, row, lane, vocabulary, temperature, TRUNCATED, BLOCK)
            bound = tl.where(lane == counter, -float("inf"), bound)
            while (highest >= best) & (highest > -float("inf")):
                counter = tl.min(tl.where(bound == highest, lane, _NOWHERE), 0)
                found, first = _best_of_four(
                    SCORES, SEEDS, POSITIONS, LOWEST, row, counter, vocabulary, temperature, TRUNCATED
                )  # fmt: skip
                better = (found > best) | ((found == best) & (first < token))
                best, token = tl.where(better, found, best), tl.where(better, first, token)
                bound = tl.where(lane == counter, -float("inf"), bound)
                highest = tl.max(bound, 0)
        top = tl.where(part == chunk, -float("inf"), top)
        highest = tl.max(top, 0)
    tl.store(TOKENS + row, tl.where(token == _NOWHERE, -1, token).to(tl.int64))


def _grid(rows: int, vocabulary: int, most: int) -> tuple[tuple[int, int], int]:
    """Returns the grid of programs and the tokens of each: a chunk, or the whole vocabulary."""
    block = max(reference.GROUP, min(most, triton.next_power_of_2(vocabulary)))
    return (rows, triton.cdiv(vocabulary, block)), block


def launch_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel`."""
    out = seeds.new_empty((len(seeds), vocabulary), dtype=torch.float64)
    if out.numel():
        grid, block = _grid(len(seeds), vocabulary, NOISE_BLOCK)
        gumbel_noise[grid](seeds, positions, out, vocabulary, BLOCK=block, **NOISE_OPTIONS)
    return out


def launch_argmax(
    scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, lowest: Tensor | None
) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel_argmax`."""
    rows, vocabulary = scores.shape
    grid, block = _grid(rows, vocabulary, DRAW_BLOCK)
    bounds = scores.new_empty((*grid, 2), dtype=torch.float32)
    counters = scores.new_empty(grid, dtype=torch.int32)
    tokens = scores.new_empty(rows, dtype=torch.int64)
    if rows:
        given = scores, seeds, positions, scores if lowest is None else lowest, bounds, counters
        how = {"TRUNCATED": lowest is not None, "CHUNKS": grid[1], "BLOCK": block, **DRAW_OPTIONS}
        gumbel_bound[grid](*given, vocabulary, temperature, **how)
        parts = triton.next_power_of_2(grid[1])
        gumbel_draw[rows,](*given, tokens, vocabulary, temperature, PARTS=parts, **how)
    return tokens


__all__ = [
    "DRAW_BLOCK",
    "DRAW_OPTIONS",
    "NOISE_BLOCK",
    "NOISE_OPTIONS",
    "gumbel_bound",
    "gumbel_draw",
    "gumbel_noise",
    "launch_argmax",
    "launch_noise",
]
