"""Gumbel noise as a function of a seed, a position and a token: the definition, in operations that any library has.

Integers are held in 64 bits and stay below 2**63, so signed integers suffice. Real numbers are float64. Their
operations have a fixed order, and IEEE 754 rounds each of them correctly, so every implementation finds the same bits.
The module has its own logarithm because logarithms of libraries differ in the last place.

Shapes: R rows, V vocabulary.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # the golden ratio and the square root of 3 less 1
WORD = 0xFFFFFFFF
LANES = 16  # neighbouring tokens that take the same word of neighbouring counters
GROUP = 4 * LANES  # tokens of LANES counters
LN2 = 0.6931471805599453
ROOT_HALF = 0.7071067811865476
TERMS = 11  # terms of the series of atanh; the next one is below 2**-56


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Computes Philox4x32-10: four 32-bit words from a counter of four and a key of two, in 64-bit integers.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    (a, b, c, d), (low, high) = counter, key
    for _ in range(ROUNDS):
        (above_a, below_a), (above_c, below_c) = _product(a, MULTIPLIERS[0]), _product(c, MULTIPLIERS[1])
        a, b, c, d = above_c ^ b ^ low, below_c, above_a ^ d ^ high, below_a
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return a, b, c, d


def _product(word: Any, multiplier: int) -> tuple[Any, Any]:
    """Returns the upper and the lower word of a product, computed by half words as it does not fit into 63 bits."""
    low = (word & 0xFFFF) * multiplier
    high = (word >> 16) * multiplier + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def logarithm(x: Any, xp: ModuleType) -> Any:
    """Computes the natural logarithm of positive normal float64 numbers, within 2 last-place units of its larger part.

    ``x = 2**e m`` with m from the root of a half to the root of two, and ``ln m = 2 atanh((m - 1) / (m + 1))``.
    """
    m, e = xp.frexp(x)
    small = m < ROOT_HALF
    m, e = xp.where(small, m + m, m), xp.where(small, e - 1, e)
    s = (m - 1) / (m + 1)
    square = s * s
    series = square * 0 + 1 / (2 * TERMS - 1)
    for power in range(2 * TERMS - 3, 0, -2):
        series = series * square + 1 / power
    return e * (m * 0 + LN2) + (s + s) * series


def gumbel_of(upper: Any, lower: Any, xp: ModuleType) -> Any:
    """Computes the noise of two 32-bit words, given as float64: ``-ln(-ln(1 - y))``, y in (0, 1) made of both words.

    The upper tail comes from small y, where all 64 bits count.
    """
    y = xp.minimum(((lower + 0.5) * 2.0**-32 + upper) * 2.0**-32, upper * 0 + (1 - 2.0**-53))
    rest = 1 - y
    lost = rest == 1
    # The second factor compensates for the rounding of 1 - y.
    exact = -logarithm(rest, xp) * (y / xp.where(lost, y, 1 - rest))
    return -logarithm(xp.where(lost, y, exact), xp)


def words_of(seeds: Any, positions: Any, counters: Any, xp: ModuleType) -> tuple[Any, Any]:
    """Returns the upper and the lower word of every token.

    Words 0 to 3 of counters ``16 g`` to ``16 g + 15`` belong to tokens ``64 g`` to ``64 g + 63``, word after word.
    Neighbouring tokens thus have neighbouring counters, which suits vector units.

    Args:
        seeds: ``[R]`` integers.
        positions: ``[R]`` integers.
        counters: ``[C]`` integers 0 to C - 1; C is a multiple of 16.
        xp: the library of the arrays.

    Returns:
        Two arrays ``[R, 4 C]`` of integers.
    """
    key = (seeds & WORD)[:, None], ((seeds >> 32) & WORD)[:, None]
    nothing = counters * 0
    halves = []
    for half in (0, 1):
        words = xp.stack(philox((counters, positions[:, None] + nothing, nothing + half, nothing), key))
        by_group = words.reshape(4, seeds.shape[0], counters.shape[0] // LANES, LANES)  # len would fix sizes in a trace
        halves.append(xp.moveaxis(by_group, 0, 2).reshape(seeds.shape[0], 4 * counters.shape[0]))
    return halves[0], halves[1]


def counters_for(vocabulary: Any) -> Any:
    """Returns how many counters a vocabulary of this size takes."""
    return (vocabulary + GROUP - 1) // GROUP * LANES


def gumbel_reference(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel`."""
    counters = torch.arange(counters_for(vocabulary), device=seeds.device)
    upper, lower = (words[:, :vocabulary].double() for words in words_of(seeds, positions, counters, torch))
    return gumbel_of(upper, lower, torch)


def gumbel_argmax_reference(
    scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, lowest: Tensor | None
) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel_argmax`."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    wide = wide / wide.new_full((), temperature)  # for a number, a GPU would multiply with its rounded inverse
    if lowest is not None:
        wide = wide.masked_fill(wide < lowest[:, None], -torch.inf)
    values = wide.double() + gumbel_reference(seeds, positions, scores.shape[1])
    highest, first = values.max(dim=-1)
    return torch.where(highest == -torch.inf, -1, first)
