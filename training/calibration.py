"""Calibrates a decider on held-out text: measures the error of its chances, and the speed of stopping by them.

A label is the share of the draft row that the target accepts, 1 - TV(p, q). An example counts as accepted with that
share of its weight, and as rejected with the rest.

Shapes: N examples, M drafts along held-out text, G drafting steps.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOWEST, _HIGHEST = 0.05, 20.0  # temperatures; beyond them, chances are all 0 or 1, or all 1/2


def ece(chances: Tensor, labels: Tensor, weights: Tensor, bins: int = 15) -> float:
    """Computes the expected calibration error: the gap of mean prediction and mean label, averaged over bins.

    Args:
        chances: ``[N]`` predictions in [0, 1].
        labels: ``[N]`` in [0, 1].
        weights: ``[N]``, not negative.
        bins: number of bins of equal width.

    Returns:
        A number in [0, 1], NaN if there is no weight.

    Source: Guo et al., ICML 2017.
    """
    chances, labels, weights = _double(chances, labels, weights)
    places = (chances * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add(0, places, weights * (chances - labels))
    return float(gaps.abs().sum() / weights.sum())


def fit_temperature(logits: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Finds the temperature in [0.05, 20] at which the logits have the least cross entropy; 1 without any weight.

    Args:
        logits: ``[N]``.
        labels: ``[N]`` in [0, 1].
        weights: ``[N]``, not negative.

    Source: temperature scaling (Guo et al., ICML 2017); by depth as in DSpark (arXiv:2607.05147).
    """
    logits, labels, weights = _double(logits, labels, weights)
    if weights.sum() == 0:
        return 1.0
    low, high = _LOWEST, _HIGHEST
    for _ in range(50):
        middle = (low * high) ** 0.5
        # The cross entropy is convex in 1 / T: if it rises with 1 / T, T is too small.
        rises = (weights * logits * ((logits / middle).sigmoid() - labels)).sum() > 0
        low, high = (middle, high) if rises else (low, middle)
    return (low * high) ** 0.5


def drafted_lengths(chances: Tensor, threshold: float) -> Tensor:
    """Returns ``[M]`` numbers of tokens that a learned decider drafts, given its ``[G, M]`` predictions."""
    survival = torch.cat([torch.ones_like(chances[:1]), chances[:-1]]).cumprod(dim=0)
    return (survival >= threshold).sum(dim=0)


def tokens_per_second(lengths: Tensor, passes: Tensor, seconds: Sequence[float]) -> float:
    """Computes the expected speed of decoding one text with chains of drafts, along text that the target wrote.

    The number of accepted tokens is exact, see :func:`~arbordraft.training.validation.chain_accepted`. The length of a
    draft that leaves the text is unknown: it is taken to be as long as the draft that follows the text.

    Args:
        lengths: ``[M]`` int64 number of tokens of each draft, 0..G.
        passes: ``[G, M]`` chance that the text's own token passes at that step, given that those before it did.
        seconds: duration of a decoding step by its number of drafted tokens, G + 1 numbers.
    """
    drafted = torch.arange(1, len(passes) + 1, device=lengths.device)[:, None] <= lengths
    emitted = 1 + (passes.double().cumprod(dim=0) * drafted).sum(dim=0)
    return float(emitted.sum() / torch.tensor(seconds, dtype=torch.float64, device=lengths.device)[lengths].sum())


def _double(*values: Tensor) -> list[Tensor]:
    return [part.detach().cpu().double() for part in values]
