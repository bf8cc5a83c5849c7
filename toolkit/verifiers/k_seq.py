"""K-SEQ: one scaled target for all draws of an IID law."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw, given
from arbordraft.sampling.noise import residual
from arbordraft.verifiers.rules import NodeLaw, Rule, drafted, scaled


class KSeq(Rule):
    """Tests all IID draws against the same scaled target.

    Each draw ``x`` passes with probability ``min(1, p(x) / (rho q(x)))``. Here ``rho`` is the smallest scale at
    which no token is emitted more often than the target allows.

    Source: SpecTr (Sun et al., NeurIPS 2023), K-SEQ.
    """

    def supports(self, law: DraftLaw) -> bool:
        return law.replacement and law.tops == 0

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        p, q, k = target * weight, given(draft), len(tokens)
        rho = _scale(p, q, k)
        accept, left = [], 1.0
        for token in tokens:
            ratio = min(1.0, p[token].item() / (rho * drafted(q, token)))
            accept.append(left * ratio)
            left *= 1 - ratio
        covered = torch.minimum(p / rho, q)
        beta = min(1.0, covered.sum().item())
        gamma = _some(beta, k) / beta if beta > 0 else 0.0
        stop, null = scaled(residual(p, covered.mul_(gamma)), 1 - weight, left)
        return NodeLaw(accept, stop, null)


def _some(beta: float, k: int) -> float:
    """Returns the probability that some of ``k`` draws passes if each does with probability ``beta``."""
    return -math.expm1(k * math.log1p(-beta)) if beta < 1 else 1.0


def _scale(p: Tensor, q: Tensor, k: int) -> float:
    """Returns the root in [1, k] of ``rho * beta - (1 - (1 - beta)^k)``, where ``beta = sum(min(p / rho, q))``."""

    def excess(rho: float) -> float:
        beta = min(1.0, torch.minimum(p / rho, q).sum().item())
        return rho * beta - _some(beta, k)

    # The excess grows with rho. Its signs at the ends are known, except that a single draw or no overlap makes it
    # zero up to rounding.
    if excess(1.0) >= 0:
        return 1.0
    if excess(k) <= 0:
        return float(k)
    from scipy.optimize import brentq  # slow to import: a fifth of the time for this package

    return float(brentq(excess, 1.0, float(k), xtol=1e-15, rtol=4 * torch.finfo(q.dtype).eps))
