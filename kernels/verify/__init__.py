"""What verification reads off rows of scores."""

import torch
from torch import Tensor

from arbordraft.kernels import choice, native
from arbordraft.kernels.verify import operator
from arbordraft.kernels.verify.reference import lowest_kept_reference, row_max_reference


def row_max(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of every row and its first position.

    Args:
        logits: ``[R, V]``.

    Returns:
        ``[R]`` values, at least in float32, NaN where a row holds one; and ``[R]`` int64 positions, without meaning
        where the value is NaN.
    """
    if choice.wants_triton("row_max", logits):
        highest, place, _ = operator.row_stats(logits)
        values, chunk = highest.max(dim=-1, keepdim=True)
        return values[:, 0], place.gather(1, chunk)[:, 0]
    known = logits.is_cpu and logits.dtype in (torch.float32, torch.bfloat16)
    if known and choice.wants_native() and native.load():
        return torch.ops.arbordraft.row_max(logits.contiguous())
    return row_max_reference(logits)


def lowest_kept(scores: Tensor, count: int = 0, mass: float = 0.0) -> Tensor:
    """The lowest score of every row that truncation keeps: top-k with ``count``, top-p with ``mass``.

    A token is kept if fewer than ``count`` tokens, or less than ``mass`` probability, have higher scores. Equal scores
    are kept or left together, where a sort would cut somewhere between them.

    Args:
        scores: ``[R, V]``.
        count: tokens to keep at least.
        mass: probability to keep at least.

    Returns:
        ``[R]`` float32, or float64 if the scores are; anything below the lowest score where all are kept.

    Raises:
        ValueError: if neither is positive, so that nothing would be kept.
    """
    if count < 1 and mass <= 0:
        raise ValueError(f"a token must be kept: count {count} and mass {mass} keep none")
    if choice.wants_triton("lowest_kept", scores):
        return operator.lowest_kept(scores, operator.log_sum_exp(scores), count, mass)
    return lowest_kept_reference(scores, count, mass)


__all__ = ["lowest_kept", "lowest_kept_reference", "row_max", "row_max_reference"]
