"""What verification reads off rows of scores, in plain PyTorch: the truth for every other implementation.

Shapes: R rows, V vocabulary.
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
