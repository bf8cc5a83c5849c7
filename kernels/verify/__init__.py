"""Operators of verification on rows of scores.

The Triton kernels compute in float32. On every device, float64 scores go to the references: a kernel's result would
otherwise be compared with, or subtracted from, numbers that have another rounding.
"""

import torch
from torch import Tensor

from arbordraft.kernels.dispatch import NATIVE, SINGLE, Operator
from arbordraft.kernels.verify.reference import (
    CHUNK,
    draw_behind_reference,
    left_mass_reference,
    left_pick_reference,
    log_sum_exp_reference,
    lowest_kept_reference,
    rejection_ends_reference,
    row_max_reference,
    row_stats_reference,
    score_rows_reference,
    take_tops_reference,
    wide,
)

_TRITON = "arbordraft.kernels.verify.triton:launch_"
_NODES = (
    "Tensor scores, Tensor lse, Tensor draft, Tensor row, Tensor draft_row, Tensor weight, Tensor taken, Tensor special"
)


def _per_row(scores: Tensor) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=wide(scores))


def _per_chunk(scores: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return scores.new_empty((rows.shape[0], -(-scores.shape[1] // CHUNK)), dtype=dtype or wide(scores))


_row_max = Operator(
    "row_max(Tensor logits) -> (Tensor, Tensor)",
    row_max_reference,
    lambda logits: (_per_row(logits), logits.new_empty(logits.shape[0], dtype=torch.int64)),
    triton=f"{_TRITON}row_max",
    triton_takes=SINGLE,
    native=True,
    native_takes=NATIVE,
)
row_stats = Operator(
    "row_stats(Tensor scores) -> (Tensor, Tensor, Tensor)",
    row_stats_reference,
    lambda scores: (_per_chunk(scores, scores), _per_chunk(scores, scores, torch.int64), _per_chunk(scores, scores)),
    triton=f"{_TRITON}row_stats",
    triton_takes=SINGLE,
)
_score_rows = Operator(
    "score_rows(Tensor logits, Tensor tokens, Tensor sample, Tensor temperature, bool divide) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    score_rows_reference,
    lambda logits, tokens, sample, temperature, divide: (
        torch.empty_like(sample),
        sample.new_empty(len(temperature)),
        logits.new_empty(logits.shape if divide else (0, 0), dtype=wide(logits)),
        logits.new_empty(len(logits) if divide else 0, dtype=wide(logits)),
    ),
    triton=f"{_TRITON}score_rows",
    triton_takes=SINGLE,
)
_log_sum_exp = Operator(
    "log_sum_exp(Tensor scores) -> Tensor",
    log_sum_exp_reference,
    _per_row,
    triton=f"{_TRITON}log_sum_exp",
    triton_takes=SINGLE,
)
left_mass = Operator(
    f"left_mass({_NODES}) -> (Tensor, Tensor)",
    left_mass_reference,
    lambda scores, lse, draft, row, *_: (_per_chunk(scores, row), _per_chunk(scores, row)),
    triton=f"{_TRITON}left_mass",
    triton_takes=SINGLE,
)
left_pick = Operator(
    f"left_pick({_NODES}, Tensor chunk, Tensor level) -> Tensor",
    left_pick_reference,
    lambda scores, lse, draft, row, *_: scores.new_empty(row.shape[0], dtype=torch.int64),
    triton=f"{_TRITON}left_pick",
    triton_takes=SINGLE,
)
rejection_ends = Operator(
    "rejection_ends(Tensor scores, Tensor lse, Tensor draft, Tensor inner, Tensor draft_row, Tensor children, "
    "Tensor tokens, Tensor tops, Tensor roots, Tensor uniforms, Tensor order, Tensor sample, int[] levels, "
    "bool replacement, bool lifted, Tensor(a!)? counters) -> (Tensor, Tensor, Tensor, Tensor)",
    rejection_ends_reference,
    lambda scores, lse, draft, inner, *others: (
        torch.empty_like(others[4]),
        scores.new_empty(len(inner), dtype=torch.float64),
        scores.new_empty(len(inner), dtype=torch.float64),
        _per_chunk(scores, inner, torch.float64),
    ),
    triton="arbordraft.kernels.verify.rejection:launch_rejection_ends",
    triton_takes=SINGLE,
)
draw_behind = Operator(
    "draw_behind(Tensor scores, Tensor lse, Tensor draft, Tensor inner, Tensor draft_row, Tensor tokens, "
    "Tensor weight, Tensor taken, Tensor mass, Tensor end, Tensor uniforms) -> Tensor",
    draw_behind_reference,
    lambda *tensors: torch.empty_like(tensors[9]),
    triton="arbordraft.kernels.verify.ends:launch_draw_behind",
    triton_takes=SINGLE,
)
take_tops = Operator(
    "take_tops(Tensor(a!) draft, Tensor most, Tensor threshold, int rounds) -> Tensor",
    take_tops_reference,
    lambda draft, most, threshold, rounds: most.new_empty(len(draft), rounds),
    triton="arbordraft.kernels.verify.tops:launch_take_tops",
    triton_takes=(torch.float32,),
)
keep_lowest = Operator(  # takes the log-sum-exp of rows, which the reference ignores
    "lowest_kept(Tensor scores, Tensor lse, int count, float mass) -> Tensor",
    lambda scores, lse, count, mass: lowest_kept_reference(scores, count, mass),
    lambda scores, *_: _per_row(scores),
    triton="arbordraft.kernels.verify.truncation:launch_lowest_kept",
    triton_takes=SINGLE,
)


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest logit of every row and its first position.

    Args:
        logits: ``[R, V]``.

    Returns:
        ``[R]`` values, at least in float32, NaN if the row holds one; and ``[R]`` int64 positions, without meaning if
        the value is NaN.
    """
    return _row_max(logits)


def score_rows(
    logits: Tensor, tokens: Tensor, sample: Tensor, temperature: Tensor, *, divide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Reads the rows of a step: their best tokens, how many are broken, and scores divided by temperatures.

    Args:
        logits: ``[T, V]``.
        tokens: ``[T]`` int64 tokens of the rows, -1 for rows that do not count.
        sample: ``[T]`` int64 sample of a row.
        temperature: ``[S]`` float64 temperatures of the samples.
        divide: whether to divide.

    Returns:
        ``[T]`` int64 best tokens, arbitrary if the highest logit is not a finite number; and ``[S]`` int64 numbers of
        such rows. If ``divide``, also ``[T, V]`` scores, at least in float32, and ``[T]`` their log-sum-exp; at
        temperature 0 all tokens but the best are -inf. Otherwise, both are empty.
    """
    return _score_rows(logits, tokens, sample, temperature, divide)


def lowest_kept(scores: Tensor, count: int = 0, mass: float = 0.0) -> Tensor:
    """Returns the lowest score of every row that truncation keeps: top-k with ``count``, top-p with ``mass``.

    A token is kept if fewer than ``count`` tokens, or less than ``mass`` probability, have higher scores. Equal scores
    are kept or dropped together, where a sort would cut between them.

    Args:
        scores: ``[R, V]``.
        count: minimum number of tokens to keep.
        mass: minimum probability to keep.

    Returns:
        ``[R]`` float32, or float64 if the scores are. If all tokens are kept, the value may be below the lowest score.

    Raises:
        ValueError: if neither ``count`` nor ``mass`` is positive, so that no token would be kept.
    """
    if count < 1 and mass <= 0:
        raise ValueError(f"a token must be kept: count {count} and mass {mass} keep none")
    run = keep_lowest.pick(scores)
    if run is keep_lowest.reference:
        return lowest_kept_reference(scores, count, mass)
    return run(scores, log_sum_exp(scores), count, mass)


def log_sum_exp(scores: Tensor) -> Tensor:
    """Computes ``[R]`` log-sum-exp of ``[R, V]`` scores: float32, or float64 if the scores are."""
    return _log_sum_exp(scores)


__all__ = [
    "draw_behind",
    "keep_lowest",
    "left_mass",
    "left_pick",
    "log_sum_exp",
    "lowest_kept",
    "lowest_kept_reference",
    "rejection_ends",
    "row_max",
    "row_max_reference",
    "row_stats",
    "score_rows",
    "take_tops",
]
