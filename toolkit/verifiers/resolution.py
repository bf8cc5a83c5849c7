"""The optimal coupling of independent drafts, at real vocabularies.

Shapes: V vocabulary, n drafts, G groups of tokens with one weight, S points in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw, given
from arbordraft.utils.checks import check_int, check_positive
from arbordraft.verifiers.rules import NodeLaw, Rule, scaled
from arbordraft.verifiers.transport import Array, as_array

STEP = 0.25  # of the logarithm of time; the error of the trapezoid rule is then below float64 precision
LARGEST = 30.0  # bound on the log-ratio of two weights
LONGEST = 4.0  # bound on a step of a log-weight
SMALLEST = 1e-3  # least slope that a step is divided by


class GlobalResolution(Rule):
    """Picks one of the drafts by a race, then accepts it as a single one; the weights of the race reach the optimum.

    Every draft gets an exponential clock whose rate is the weight of its token, and the first to ring is picked. The
    law r of the picked token is an integral over time. This leaves the coupling of a single draft of law r. It is
    accepted with probability min(1, p / r), otherwise replaced by the residual of p and r. Any weights are lossless.

    The best weights solve two convex problems in at most V variables, one on each side of a set H of tokens. H is the
    set that attains the optimum of the draft law. Tokens outside H are picked before those inside, and at most as often
    as the target wants them. Tokens inside H are picked at least as often. Tokens with about the same ratio of p and q
    share a weight. Weights are improved until the chance of acceptance is within ``tolerance`` of the optimum, as long
    as that helps.

    Args:
        tolerance: distance from the optimal chance of acceptance, above 0.
        groups: number of groups of tokens that share a weight, about as many in each half; at least 1.
        rounds: greatest number of rounds that improve the weights, at least 1.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if an argument is out of range.

    Source: Thomas and Pal (ICLR 2026, arXiv 2511.15898) for the convex problem and its two halves, Khisti et al.
    (2024, arXiv 2410.18234) for picking one draft and verifying it alone. The race is ours: it replaces their sums over
    all tuples of drafts.
    """

    def __init__(self, tolerance: float = 1e-3, groups: int = 512, rounds: int = 100) -> None:
        super().__init__()
        self.tolerance = check_positive("tolerance", tolerance)
        self.groups = check_int("groups", groups, 1)
        self.rounds = check_int("rounds", rounds, 1)

    def supports(self, law: DraftLaw) -> bool:
        return law.replacement and law.tops == 0

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        p, q = as_array(target), as_array(given(draft))
        p, q = p * (weight / p.sum()), q / q.sum()
        race = self.race(p, q, len(tokens))
        r = race.law
        taken = np.minimum(p, r)
        accept = [
            float(share * taken[token] / r[token]) for share, token in zip(race.shares(tokens), tokens, strict=True)
        ]
        left, null = torch.as_tensor(p - taken, device=target.device), 1 - weight
        return NodeLaw(accept, *scaled(left, null, max(0.0, 1 - sum(accept))))

    def race(self, p: Array, q: Array, draws: int) -> "Race":
        """Returns the best weights for ``[V]`` rows of the target and the draft; the drawn tokens do not matter."""
        return Race.best(p, q, draws, tolerance=self.tolerance, groups=self.groups, rounds=self.rounds)

    def extra_repr(self) -> str:
        return f"tolerance={self.tolerance:g}, groups={self.groups}"


@dataclass(frozen=True)
class Race:
    """Weights that pick one of several independent drafts, and the law of the picked token.

    Args:
        outside: ``[V]`` whether a token is outside H, and so picked before all tokens inside.
        weights: ``[V]`` logarithms of the weights.
        law: ``[V]`` probability that each token is the one picked.
    """

    outside: NDArray[np.bool_]
    weights: Array
    law: Array

    @classmethod
    def best(cls, p: Array, q: Array, draws: int, *, tolerance: float, groups: int, rounds: int) -> Self:
        """Finds the best weights for ``[V]`` rows of the target, which may sum to less than 1, and of the draft."""
        (drawable,) = q.nonzero()
        order = drawable[np.argsort(p[drawable] / q[drawable], kind="stable")]
        # The set H is a prefix of that order: the one with the least p(H) - q(H)**n (Hu et al., ICLR 2025).
        size = int(np.append(0.0, p[order].cumsum() - q[order].cumsum() ** draws).argmin())
        race = cls(np.zeros(len(q), dtype=bool), np.zeros(len(q)), np.zeros(len(q)))
        race.outside[order[size:]] = True
        for half, unheard in ((order[:size], 0.0), (order[size:], float(q[order[:size]].sum()))):
            if len(half):
                clocks = _Clocks.of(p[half], q[half], unheard, draws, groups)
                least, most = (0.0, LARGEST) if unheard == 0 and size else (-LARGEST, 0.0)
                race.weights[half], race.law[half] = clocks.improved(least, most, tolerance / 2, rounds)
        return race

    def shares(self, tokens: Sequence[int]) -> Array:
        """Returns the chance of each drawn token to be picked; equal tokens split theirs."""
        drawn = np.array(tokens)
        heard = self.outside[drawn] if self.outside[drawn].any() else np.ones(len(drawn), dtype=bool)
        weights = np.where(heard, self.weights[drawn], -np.inf)
        rates = np.exp(weights - weights.max())
        shares: Array = rates / rates.sum()
        return shares


@dataclass(frozen=True)
class _Clocks:
    """One half of the tokens, in groups with one weight each.

    Args:
        p: ``[T]`` target probabilities of the tokens, by ascending ``p / q``.
        q: ``[T]`` their draft probabilities.
        group: ``[T]`` group of each token.
        unheard: probability of drafting a token that has no clock in this half.
        draws: number of drafts.
    """

    p: Array
    q: Array
    group: NDArray[np.int64]
    unheard: float
    draws: int

    @classmethod
    def of(cls, p: Array, q: Array, unheard: float, draws: int, groups: int) -> Self:
        """Forms groups of about the same mass along ``p / q``, which alone determines the best weight."""
        mass = (p + q).cumsum()
        _, group = np.unique((mass * (groups / mass[-1])).astype(np.int64), return_inverse=True)
        return cls(p, q, group, unheard, draws)

    def improved(self, least: float, most: float, tolerance: float, rounds: int) -> tuple[Array, Array]:
        """Returns ``[T]`` log-weights within bounds, and the law of the picked token.

        Each round moves every log-weight by a Newton step, as if all others were fixed. The logarithm of its group's
        chance grows with it at a known slope. A common factor of all weights changes nothing, so a step leaves an
        average of the groups' errors.
        """
        wanted, drafted = (np.bincount(self.group, row).astype(np.float64) for row in (self.p, self.q))
        weights, before = np.zeros(len(wanted)), np.inf
        while True:
            chances, slopes = self._chances(weights, drafted)
            law = self.q * chances[self.group]
            lost = float(np.maximum(law - self.p if least < 0 else self.p - law, 0).sum())
            rounds -= 1
            if rounds <= 0 or lost <= tolerance or lost > 0.98 * before:  # the remaining loss is within groups
                return weights[self.group], law
            before = lost
            with np.errstate(divide="ignore"):
                steps = np.log(wanted / (drafted * chances)) / slopes
            weights = np.clip(weights + np.clip(steps, -LONGEST, LONGEST), least, most)

    def _chances(self, weights: Array, drafted: Array) -> tuple[Array, Array]:
        """Returns, by group, the chance that a token rings first, divided by its draft probability, and the slope.

        For weight w, the ratio is ``n w`` times the integral over s of ``exp(-s w) F(s)**(n - 1)``. Here F(s) is the
        chance that a draft has not rung by time s. The slope is that of the ratio's logarithm in the logarithm of w.
        """
        times = np.exp(np.arange(-weights.max() - 38, 7 - weights.min(), STEP))
        rates = np.exp(weights)
        silent = np.exp(-rates[:, None] * times)
        waiting = times * (self.unheard + drafted @ silent) ** (self.draws - 1)
        moments = silent @ np.stack([waiting, times * waiting], axis=1)
        slopes = 1 - rates * moments[:, 1] / moments[:, 0]
        return self.draws * STEP * rates * moments[:, 0], np.maximum(slopes, SMALLEST)
