"""What verification reads off rows of scores, in plain PyTorch: the truth for every other implementation.

Shapes: R rows, N nodes, D draft rows, V vocabulary, C chunks of a row, K special tokens of a node.
"""

import torch
from torch import Tensor

CHUNK = 4096  # tokens of a chunk


def wide(scores: Tensor) -> torch.dtype:
    """The precision of everything computed from scores: float32, or float64 if they are."""
    return torch.promote_types(scores.dtype, torch.float32)


def row_max_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.verify.row_max`."""
    values, tokens = logits.max(dim=-1)
    return values.to(wide(values)), tokens


def lowest_kept_reference(scores: Tensor, count: int, mass: float) -> Tensor:
    """See :func:`arbordraft.kernels.verify.lowest_kept`."""
    ordered = scores.to(wide(scores)).sort(dim=-1, descending=True).values
    probs = ordered.softmax(dim=-1)
    above = probs.double().cumsum(dim=-1) - probs
    # Equal scores stay together: all of them have above them what the first of them has.
    place = torch.arange(scores.shape[-1], device=scores.device).expand_as(ordered)
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    first = torch.where(begins, place, 0).cummax(dim=-1).values
    kept = (first < count) | (above.gather(1, first) < mass)
    return ordered.gather(1, kept.sum(dim=-1, keepdim=True) - 1)[:, 0]


def chunked(x: Tensor, fill: float) -> Tensor:
    """``[..., V]`` as ``[..., C, CHUNK]``; a row that is shorter than a chunk is one as it is."""
    size = min(x.shape[-1], CHUNK)
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % size), value=fill)
    return padded.unflatten(-1, (-1, size))


def row_stats_reference(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What one pass over ``[R, V]`` scores finds, chunk by chunk.

    Returns:
        ``[R, C]`` highest scores, NaN where a chunk holds one; ``[R, C]`` int64, the first place of each; ``[R, C]``
        sums of ``exp(score - highest)``. Float32, or float64 if the scores are, except for the places.
    """
    parts = chunked(scores.to(wide(scores)), -torch.inf)
    highest, place = parts.max(dim=-1)
    first = torch.arange(parts.shape[-2], device=scores.device) * CHUNK
    below = highest.masked_fill(highest == -torch.inf, 0)
    return highest, place + first, (parts - below[..., None]).exp().sum(dim=-1)


def left_mass_reference(
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
    left, drawn = _left(scores, lse, draft, row, draft_row, weight, taken, special)
    return chunked(left, 0).sum(dim=-1), chunked(drawn, 0).sum(dim=-1)


def left_pick_reference(
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
        scores: as for :func:`left_mass_reference`, and so are the others up to ``special``.
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
    left, _ = _left(scores, lse, draft, row, draft_row, weight, taken, special)
    part = chunked(left, 0)[torch.arange(len(row), device=row.device), chunk]
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
