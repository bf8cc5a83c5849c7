"""Passes over rows of scores as operators of torch, each with a plain implementation beside the Triton one.

The kernels compute in float32. Float64 scores are given to the plain implementations everywhere: what they find would
else be compared with, or subtracted from, numbers that have another rounding.

Shapes: R rows, N nodes, D draft rows, V vocabulary, C chunks of a row, K special tokens of a node.
"""

import torch
from torch import Tensor

from arbordraft.kernels.choice import interpreted
from arbordraft.kernels.verify.reference import CHUNK, lowest_kept_reference, wide


def _launches(scores: Tensor) -> bool:
    """Whether a kernel runs on these scores."""
    return (scores.is_cuda or interpreted()) and scores.dtype != torch.float64


def _chunks(x: Tensor, fill: float) -> Tensor:
    """``[..., V]`` as ``[..., C, CHUNK]``; a row that is shorter than a chunk is one as it is."""
    size = min(x.shape[-1], CHUNK)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=fill)
    return padded.unflatten(-1, (-1, size))


@torch.library.custom_op("arbordraft::row_stats", mutates_args=())
def row_stats(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one pass over ``[R, V]`` scores finds, chunk by chunk.

    Returns:
        ``[R, C]`` highest scores, NaN where a chunk holds one; ``[R, C]`` int64, the first place of each; ``[R, C]``
        sums of ``exp(score - highest)``. Float32, or float64 if the scores are, except for the places.
    """
    if _launches(scores):
        from arbordraft.kernels.verify.triton import launch_row_stats

        return launch_row_stats(scores)
    parts = _chunks(scores.to(wide(scores)), -torch.inf)
    highest, place = parts.max(dim=-1)
    first = torch.arange(parts.shape[-2], device=scores.device) * CHUNK
    below = highest.masked_fill(highest == -torch.inf, 0)
    return highest, place + first, (parts - below[..., None]).exp().sum(dim=-1)


@torch.library.custom_op("arbordraft::left_mass", mutates_args=())
def left_mass(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    taken: Tensor,
    special: Tensor,
) -> tuple[Tensor, Tensor]:
    """Sums over chunks of ``R(x) = max(w p(x) - t q(x), 0)`` and of q(x), without the special tokens of a node.

    Args:
        scores: ``[R, V]``.
        lse: ``[R]``, the logarithm of the sum of their exponentials; float32, or float64 if the scores are.
        draft: ``[D, V]`` probabilities.
        row: ``[N]`` int64 row of scores of every node.
        draft_row: ``[N]`` int64 row it drew from, -1 for none: q is 0 then.
        weight: ``[N]`` w, of the same dtype as ``lse``.
        taken: ``[N]`` t, likewise.
        special: ``[N, K]`` int64 tokens to leave out, -1 for none.

    Returns:
        ``[N, C]`` and ``[N, C]`` of the same dtype.
    """
    if _launches(scores):
        from arbordraft.kernels.verify.triton import launch_left_mass

        return launch_left_mass(scores, lse, draft, row, draft_row, weight, taken, special)
    left, drawn = _left(scores, lse, draft, row, draft_row, weight, taken, special)
    return _chunks(left, 0).sum(dim=-1), _chunks(drawn, 0).sum(dim=-1)


@torch.library.custom_op("arbordraft::left_pick", mutates_args=())
def left_pick(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    taken: Tensor,
    special: Tensor,
    chunk: Tensor,
    level: Tensor,
) -> Tensor:
    """The token of a chunk at which the running sum of R exceeds a level; the last possible one if none does.

    Args:
        scores: as for :func:`left_mass`, and so are the others up to ``special``.
        lse: as above.
        draft: as above.
        row: as above.
        draft_row: as above.
        weight: as above.
        taken: as above.
        special: as above.
        chunk: ``[N]`` int64.
        level: ``[N]`` float64.

    Returns:
        ``[N]`` int64 tokens, -1 where R is 0 all over the chunk.
    """
    if _launches(scores):
        from arbordraft.kernels.verify.triton import launch_left_pick

        return launch_left_pick(scores, lse, draft, row, draft_row, weight, taken, special, chunk, level)
    left, _ = _left(scores, lse, draft, row, draft_row, weight, taken, special)
    part = _chunks(left, 0)[torch.arange(len(row)), chunk]
    reached = (part.double().cumsum(dim=-1) > level[:, None]) & (part > 0)
    place = torch.arange(part.shape[-1], device=scores.device)
    first = torch.where(reached, place, CHUNK).amin(dim=-1)
    last = torch.where(part > 0, place, -1).amax(dim=-1)
    place = torch.where(first == CHUNK, last, first)
    return torch.where(place < 0, place, place + chunk * CHUNK)


def _left(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    row: Tensor,
    draft_row: Tensor,
    weight: Tensor,
    taken: Tensor,
    special: Tensor,
) -> tuple[Tensor, Tensor]:
    p = (scores[row].to(lse.dtype) - lse[row][:, None]).exp() * weight[:, None]
    q = draft[draft_row.clamp(min=0)].to(p.dtype) if len(draft) else torch.zeros_like(p)
    q = q * (draft_row >= 0)[:, None]
    vocabulary = p.shape[1]
    ordinary = torch.ones(len(p), vocabulary + 1, dtype=torch.bool, device=p.device)  # -1 is marked behind the last one
    ordinary = ordinary.scatter_(1, torch.where(special < 0, vocabulary, special), False)[:, :vocabulary]
    return (p - taken[:, None] * q).clamp(min=0) * ordinary, q * ordinary


@torch.library.custom_op("arbordraft::lowest_kept", mutates_args=())
def lowest_kept(scores: Tensor, lse: Tensor, count: int, mass: float) -> Tensor:
    """See :func:`arbordraft.kernels.verify.lowest_kept`.

    Args:
        scores: ``[R, V]``.
        lse: ``[R]``, the logarithm of the sum of their exponentials.
        count: tokens to keep at least.
        mass: probability to keep at least.
    """
    if _launches(scores):
        from arbordraft.kernels.verify.triton import launch_lowest_kept

        return launch_lowest_kept(scores, lse, count, mass)
    return lowest_kept_reference(scores, count, mass)


@lowest_kept.register_fake
def _(scores: Tensor, lse: Tensor, count: int, mass: float) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=wide(scores))


@row_stats.register_fake
def _(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    shape = (scores.shape[0], -(-scores.shape[1] // CHUNK))
    floats = [scores.new_empty(shape, dtype=wide(scores)) for _ in range(2)]
    return floats[0], scores.new_empty(shape, dtype=torch.int64), floats[1]


@left_mass.register_fake
def _(scores: Tensor, lse: Tensor, draft: Tensor, row: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    shape = (row.shape[0], -(-scores.shape[1] // CHUNK))
    return scores.new_empty(shape, dtype=wide(scores)), scores.new_empty(shape, dtype=wide(scores))


@left_pick.register_fake
def _(scores: Tensor, lse: Tensor, draft: Tensor, row: Tensor, *_: object) -> Tensor:
    return scores.new_empty(row.shape[0], dtype=torch.int64)


def log_sum_exp(scores: Tensor) -> Tensor:
    """``[R]`` of ``[R, V]`` scores: float32, or float64 if the scores are."""
    highest, _, mass = row_stats(scores)
    return (highest + mass.log()).logsumexp(dim=-1)


__all__ = ["left_mass", "left_pick", "log_sum_exp", "lowest_kept", "row_stats"]
