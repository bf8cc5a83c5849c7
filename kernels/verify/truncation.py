"""The lowest score that top-k or top-p keeps of every row, in Triton and without a sort.

Number and probability of the scores above a value fall as the value rises. So a search finds the lowest value with
little enough above it. The host waits for none of the three launches:

1. :func:`sum_above`, one program per chunk: number and probability above a few pivots, chosen from the log-sum-exp.
2. :func:`collect`, one program per list: adds the sums up, which leaves one interval between two pivots. Copies the
   scores in that interval to its list.
3. :func:`lowest_kept`, one program per row: searches the lists, among integers that order as the scores do. If a list
   has no room for its scores in the interval, searches the row itself, which is slower and as exact.

All sums have a fixed order that depends on the vocabulary alone, so results are the same in every run and batch.

Shapes: R rows, V vocabulary, C chunks of a row, P pivots, L room of a list.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from arbordraft.kernels.verify.reference import CHUNK

PIVOTS = 4
ROOM = 512  # scores that a list holds
DIRECT = 2 * CHUNK  # vocabularies up to this size are searched in one launch
SEGMENT = 128  # neighbouring tokens in one list; the next ones go to another, as probable tokens are often neighbours
GROUP = 8  # segments that are read at a time
TILE = 4096  # scores that the search reads at a time
SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # bits of a float32 that a score does not have
FIRST = 8.0  # at most exp(8), about 3000, scores are this close to the log-sum-exp: few enough to search
_LEAST: tl.constexpr = tl.constexpr(-2139095041)  # the key of -inf
_MOST: tl.constexpr = tl.constexpr(0x7F800000)  # the key of inf
_NAN: tl.constexpr = tl.constexpr(0x7FC00000)  # the key of NaN, which is above inf as in a sort


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Returns int32 keys in the order of the float32, NaN highest; drops the SHIFT bits that no score has."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, _NAN, key) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Returns the score of a key."""
    bits = key << SHIFT
    # In the key of a negative score, the missing bits are ones.
    bits = tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def sum_above(
    SCORES, LSE, NUMBER, ABOVE, stride_s, vocabulary, first, spacing, COUNTED: tl.constexpr, MASSED: tl.constexpr,
    PIVOTS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums number and probability of the scores of one chunk of one row above each pivot."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(SCORES + row * stride_s + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
    lse = tl.load(LSE + row)
    p = tl.exp(x - lse)
    pivot = lse - first
    for index in tl.static_range(PIVOTS):
        # Rounded to a score, so that shifted keys order pivots and scores as their values do.
        above = x > pivot.to(SCORES.dtype.element_ty).to(tl.float32)
        part = (row * PIVOTS + index) * CHUNKS + chunk
        if COUNTED:
            tl.store(NUMBER + part, tl.sum(above.to(tl.int32), 0))
        if MASSED:
            tl.store(ABOVE + part, tl.sum(tl.where(above, p, 0.0), 0))
        pivot -= spacing


@triton.jit
def _keeps_too_little(number, probability, count, mass, COUNTED: tl.constexpr, MASSED: tl.constexpr):
    """Returns whether a value is kept: less than ``count`` or ``mass`` is above it."""
    if COUNTED and MASSED:
        return (number < count) | (probability < mass)
    elif COUNTED:
        return number < count
    else:
        return probability < mass


@triton.jit
def _in_interval(source, to_end, floor, ceiling, LEAP: tl.constexpr, GROUP: tl.constexpr):
    """Returns the scores of the next segments of a list, and which of them are in an interval.

    Args:
        source: pointers to the first of these segments, one per column.
        to_end: scores from each pointer to the end of the row.
        floor: lowest score of the interval.
        ceiling: highest score of the interval.
        LEAP: distance from a segment to the next one of the same list.
        GROUP: number of segments.
    """
    leaps = tl.arange(0, GROUP)[:, None] * LEAP
    x = tl.load(source[None, :] + leaps, mask=leaps < to_end[None, :], other=float("nan")).to(tl.float32)
    return x, (x >= floor) & (x <= ceiling)


@triton.jit
def collect(
    SCORES, LSE, NUMBER, ABOVE, INTERVAL, HELD, FOUND, LISTS, stride_s, vocabulary, count, mass, first, spacing,
    COUNTED: tl.constexpr, MASSED: tl.constexpr, SHIFT: tl.constexpr, PIVOTS: tl.constexpr, CHUNKS: tl.constexpr,
    PARTS: tl.constexpr, ROOM: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Finds the interval of the lowest kept score of a row, and copies the scores in it to one list.

    An interval is three numbers: its lowest key, its highest key, and the number of scores above it.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    part = tl.arange(0, PARTS)
    low = tl.full([], (_LEAST >> SHIFT) - 1, tl.int32)
    high = tl.full([], _NAN >> SHIFT, tl.int32)
    above_number = tl.full([], 0, tl.int32)
    above_mass = tl.full([], 0.0, tl.float32)
    lse = tl.load(LSE + row)
    pivot = lse - first
    for index in tl.static_range(PIVOTS):
        where = (row * PIVOTS + index) * CHUNKS + part
        number, probability = above_number, above_mass
        if COUNTED:
            number = tl.sum(tl.load(NUMBER + where, mask=part < CHUNKS, other=0), 0)
        if MASSED:
            probability = tl.sum(tl.load(ABOVE + where, mask=part < CHUNKS, other=0.0), 0)
        # Pivots fall: the ones that keep too little come first.
        keeps = _keeps_too_little(number, probability, count, mass, COUNTED, MASSED)
        key = _key(pivot.to(SCORES.dtype.element_ty).to(tl.float32), SHIFT)
        high = tl.where(keeps, key, high)
        low = tl.where(keeps, low, tl.maximum(low, key))
        above_number = tl.where(keeps, number, above_number)
        above_mass = tl.where(keeps, probability, above_mass)
        pivot -= spacing
    low += 1
    floor, ceiling = _value(low, SHIFT), _value(tl.minimum(high, _MOST >> SHIFT), SHIFT)
    # A column belongs to a thread. Swapping neighbours makes Triton give each thread one score at a time. Scores are
    # also stored one at a time, so without the swap threads would have to exchange them.
    leap: tl.constexpr = CHUNKS * SEGMENT
    begin = chunk * SEGMENT + (tl.arange(0, SEGMENT) ^ 1)
    number = tl.zeros([SEGMENT], tl.int32)
    source, to_end = SCORES + row * stride_s + begin, vocabulary - begin
    for _ in range(0, SEGMENTS, GROUP):
        _, inside = _in_interval(source, to_end, floor, ceiling, leap, GROUP)
        number += tl.sum(inside.to(tl.int32), 0)
        source += GROUP * leap
        to_end -= GROUP * leap
    found = tl.where(lse == lse, tl.sum(number, 0), ROOM + 1)  # rows with NaN have no list
    tl.store(FOUND + row * CHUNKS + chunk, found)
    if found <= ROOM:  # else the row itself is searched
        source, to_end = SCORES + row * stride_s + begin, vocabulary - begin
        target = LISTS + (row * CHUNKS + chunk) * ROOM
        place = tl.cumsum(number, 0) - number
        for _ in range(0, SEGMENTS, GROUP):
            x, inside = _in_interval(source, to_end, floor, ceiling, leap, GROUP)
            here = inside.to(tl.int32)
            to = place[None, :] + tl.cumsum(here, 0) - 1
            tl.store(target + to, x.to(LISTS.dtype.element_ty), mask=inside)
            place += tl.sum(here, 0)
            source += GROUP * leap
            to_end -= GROUP * leap
    if chunk == 0:
        tl.store(INTERVAL + row * 3, low)
        tl.store(INTERVAL + row * 3 + 1, high)
        tl.store(INTERVAL + row * 3 + 2, above_number)
        tl.store(HELD + row, above_mass)


@triton.jit
def _read(source, step, part, at, size, SHIFT: tl.constexpr):
    """Reads scores and keys of all lists at some places; after the end of a list, the key is below all others."""
    inside = at[None, :] < size[:, None]
    x = tl.load(source + part[:, None] * step + at[None, :], mask=inside, other=0.0).to(tl.float32)
    return x, tl.where(inside, _key(x, SHIFT), (_LEAST >> SHIFT) - 1)


@triton.jit
def _tally(
    numbers, masses, above_number, above_mass, count, mass, COUNTED: tl.constexpr, MASSED: tl.constexpr,
):  # fmt: skip
    """Returns whether a pivot is kept, given the sums above it at every place of a tile and above the interval."""
    number, probability = above_number, above_mass
    if COUNTED:
        number += tl.sum(tl.sum(numbers, 1), 0)
    if MASSED:
        probability += tl.sum(tl.sum(masses, 1), 0)
    return _keeps_too_little(number, probability, count, mass, COUNTED, MASSED)


@triton.jit
def lowest_kept(
    SCORES, LSE, INTERVAL, HELD, FOUND, LISTS, LOWEST, stride_s, vocabulary, count, mass, COUNTED: tl.constexpr,
    MASSED: tl.constexpr, SHIFT: tl.constexpr, DIRECT: tl.constexpr, CHUNKS: tl.constexpr, PARTS: tl.constexpr,
    ROOM: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Finds the lowest kept score of one row: the interval is cut into four until it has one key."""
    row = tl.program_id(0).to(tl.int64)
    lse = tl.load(LSE + row)
    part = tl.arange(0, PARTS)
    source = SCORES + row * stride_s
    size = tl.minimum(tl.maximum(vocabulary - part * SIZE, 0), SIZE)
    step = tl.full([], SIZE, tl.int32)
    low = tl.full([], _LEAST >> SHIFT, tl.int64)
    high = tl.full([], _NAN >> SHIFT, tl.int64)
    above_number = tl.full([], 0, tl.int32)
    above_mass = tl.full([], 0.0, tl.float32)
    if not DIRECT:
        low = tl.load(INTERVAL + row * 3).to(tl.int64)
        high = tl.load(INTERVAL + row * 3 + 1).to(tl.int64)
        found = tl.load(FOUND + row * CHUNKS + part, mask=part < CHUNKS, other=0)
        if tl.max(found, 0) <= ROOM:
            source = LISTS + row * CHUNKS * ROOM
            size = found
            step = tl.full([], ROOM, tl.int32)
            above_number = tl.load(INTERVAL + row * 3 + 2)
            above_mass = tl.load(HELD + row)
    longest = tl.max(size, 0)
    column = tl.arange(0, WIDE)
    while low < high:
        width = (high - low + 4) // 4
        first = tl.minimum(low + width - 1, high).to(tl.int32)
        second = tl.minimum(low + 2 * width - 1, high).to(tl.int32)
        third = tl.minimum(low + 3 * width - 1, high).to(tl.int32)
        first_number = tl.zeros([PARTS, WIDE], tl.int32)
        second_number = tl.zeros([PARTS, WIDE], tl.int32)
        third_number = tl.zeros([PARTS, WIDE], tl.int32)
        first_mass = tl.zeros([PARTS, WIDE], tl.float32)
        second_mass = tl.zeros([PARTS, WIDE], tl.float32)
        third_mass = tl.zeros([PARTS, WIDE], tl.float32)
        for begin in range(0, longest, WIDE):
            x, key = _read(source, step, part, begin + column, size, SHIFT)
            if COUNTED:
                first_number += (key > first).to(tl.int32)
                second_number += (key > second).to(tl.int32)
                third_number += (key > third).to(tl.int32)
            if MASSED:
                p = tl.exp(x - lse)
                first_mass += tl.where(key > first, p, 0.0)
                second_mass += tl.where(key > second, p, 0.0)
                third_mass += tl.where(key > third, p, 0.0)
        # The lowest kept of the three ends the interval, which begins after the highest one that is not kept.
        if _tally(first_number, first_mass, above_number, above_mass, count, mass, COUNTED, MASSED):
            high = first.to(tl.int64)
        elif _tally(second_number, second_mass, above_number, above_mass, count, mass, COUNTED, MASSED):
            low = first.to(tl.int64) + 1
            high = second.to(tl.int64)
        elif _tally(third_number, third_mass, above_number, above_mass, count, mass, COUNTED, MASSED):
            low = second.to(tl.int64) + 1
            high = third.to(tl.int64)
        else:
            low = third.to(tl.int64) + 1
    # If all scores are kept, or rounding decides, no score may have this key: the next higher score is the result.
    nearest = tl.full([PARTS, WIDE], _NAN >> SHIFT, tl.int32)
    for begin in range(0, longest, WIDE):
        _, key = _read(source, step, part, begin + column, size, SHIFT)
        nearest = tl.where(key >= low.to(tl.int32), tl.minimum(nearest, key), nearest)
    tl.store(LOWEST + row, _value(tl.min(tl.min(nearest, 1), 0), SHIFT))


def launch_lowest_kept(scores: Tensor, lse: Tensor, count: int, mass: float) -> Tensor:
    """See :func:`arbordraft.kernels.verify.lowest_kept`."""
    rows, vocabulary = scores.shape
    lowest = scores.new_empty(rows, dtype=torch.float32)
    if rows == 0:
        return lowest
    chunks, direct = triton.cdiv(vocabulary, CHUNK), vocabulary <= DIRECT
    count = min(count, vocabulary)
    counted, massed = count > 1 or mass <= 0, mass > 0
    parts = triton.next_power_of_2(chunks)
    how = {"COUNTED": counted, "MASSED": massed, "CHUNKS": chunks}
    interval = found = held = lists = lowest  # placeholders, never read
    if not direct:
        pivots = _pivots(vocabulary, count, mass)
        number, above = (
            scores.new_empty((rows, PIVOTS, chunks) if wanted else 0, dtype=dtype)
            for wanted, dtype in ((counted, torch.int32), (massed, torch.float32))
        )
        interval, held = scores.new_empty((rows, 3), dtype=torch.int32), scores.new_empty(rows, dtype=torch.float32)
        found = scores.new_empty((rows, chunks), dtype=torch.int32)
        lists = scores.new_empty((rows, chunks, ROOM))
        sum_above[(rows, chunks)](
            scores, lse, number, above, scores.stride(0), vocabulary, *pivots, PIVOTS=PIVOTS, BLOCK=CHUNK, num_warps=4,
            **how,
        )  # fmt: skip
        collect[(rows, chunks)](
            scores, lse, number, above, interval, held, found, lists, scores.stride(0), vocabulary, count, mass,
            *pivots, SHIFT=SHIFTS[scores.dtype], PIVOTS=PIVOTS, PARTS=parts, ROOM=ROOM, SEGMENT=SEGMENT,
            SEGMENTS=CHUNK // SEGMENT, GROUP=GROUP, num_warps=4, **how,
        )  # fmt: skip
    lowest_kept[(rows,)](
        scores, lse, interval, held, found, lists, lowest, scores.stride(0), vocabulary, count, mass,
        SHIFT=SHIFTS[scores.dtype], DIRECT=direct, PARTS=parts, ROOM=ROOM, SIZE=CHUNK,
        WIDE=max(1, min(TILE, triton.next_power_of_2(vocabulary)) // parts), num_warps=8, **how,
    )  # fmt: skip
    return lowest


def _pivots(vocabulary: int, count: int, mass: float) -> tuple[float, float]:
    """Returns the distance of the first pivot below the log-sum-exp, and the spacing of the others."""
    if mass > 0:
        # Scores further below than this have less than 1 - mass together.
        furthest = math.log(vocabulary / max(1 - mass, 1e-4))
        return FIRST, max(furthest - FIRST, 1.0) / PIVOTS
    # The score of rank k is below the log-sum-exp by at least the logarithm of k, and far more in peaked rows.
    return max(FIRST, math.log(max(count, 1)) + 2), 4.0


__all__ = ["DIRECT", "PIVOTS", "ROOM", "collect", "launch_lowest_kept", "lowest_kept", "sum_above"]
