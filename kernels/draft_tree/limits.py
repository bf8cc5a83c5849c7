"""Draft trees while they grow, and the limits of their growth, as arrays.

Shapes: S samples, N nodes of the topology, M drafts of all samples, K depths with values of their own.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]


@dataclass(eq=False)
class Trees:
    """Trees while they grow: numpy arrays on a host, tensors on a device.

    Args:
        token: ``[S, N]`` token of each node, -1 where there is none.
        chance: ``[S, N]`` draft probability of each node, given its parent; 0 where none was stated.
        reach: ``[S, N]`` chance that the path to a node is accepted, times its sample's weight; -1 where there is none.
    """

    token: Any
    chance: Any
    reach: Any


@dataclass(frozen=True)
class Verification:
    """The price of verifying drafts, for the choice of how many of the likeliest are verified.

    A rate is tokens per second. The choice maximises the drafts' expected tokens, less ``rate`` times the seconds of
    their rows. With a ``base``, the rate that the chosen drafts bring replaces a smaller ``rate``.

    Args:
        seconds: ``[M + 1]`` seconds that 0 to M drafts add to a step; more than M drafts are never verified.
        rate: tokens that decoding brings per second.
        alike: number of samples that each sample stands for.
        base: seconds of the step without drafts; infinite to keep ``rate``.
        tokens: worth of the tokens of a step without drafts.
        margin: factor by which drafts must bring more than they cost.
    """

    seconds: Reals
    rate: float
    alike: int = 1
    base: float = math.inf
    tokens: float = 0.0
    margin: float = 1.0


@dataclass(frozen=True)
class Limits:
    """Limits of the trees of S samples, decided before they are drafted.

    The reach of a node is the chance that its path is accepted, times the worth of its sample. The chance is the
    product of the draft probabilities along the path, each multiplied by its ``calibration`` and capped at 1.

    A node gets children if ``reach * expected - row_cost`` is not negative. A level is drafted if the sum of these
    gains over its nodes is at least ``level_cost``. Trees that were drawn at random are only ended, not pruned node by
    node, since verification would no longer be lossless.

    Args:
        levels: ``[S]`` greatest number of levels; 0 drafts nothing.
        calibration: ``[S, K]`` by depth of the parent, the acceptance of drafts relative to their draft probabilities.
            The last value also applies to greater depths.
        expected: ``[S, K]`` by depth of the parent, how often some child is expected to be accepted.
        weight: ``[S]`` worth of a sample's tokens to the batch.
        level_cost: tokens that the nodes of a level must gain together; a number, or ``[S, 1]``.
        row_cost: tokens that a node must gain for its rows; a number, or ``[S, 1]``.
        budget: greatest number of drafts of all samples, of which the likeliest are taken; -1 for no limit.
        verification: price of verifying drafts; ``None`` verifies all within the budget.
        gains: ``[S]`` tokens that drafting is expected to bring, less those that its time could bring elsewhere.
            Without values, the drafts of this drafter replace no others.
        group: ``[S]`` number of the group of samples that decides together; ``None`` for one group of all samples.
            Budget and verification are then lists, with an entry for each group.
        whole: whether trees are ended as a whole, not pruned; a truth value, or ``[S, 1]``.
    """

    levels: Any
    calibration: Any
    expected: Any
    weight: Any
    level_cost: Any = 0.0
    row_cost: Any = 0.0
    budget: Any = -1
    verification: Any = None
    gains: Any = None
    group: Any = None
    whole: Any = False

    @classmethod
    def everything(cls, levels: Sequence[int], **limits: Any) -> Self:
        """Allows every node that the topology offers down to these levels, and takes draft probabilities as stated."""
        ones = np.ones((len(levels), 1))
        return cls(np.array(levels, dtype=np.int64), ones, ones, ones[:, 0], **limits)

    @classmethod
    def of(
        cls,
        levels: Sequence[int],
        calibration: Sequence[Sequence[float]],
        expected: Sequence[Sequence[float]],
        weight: Sequence[float] = (),
        **limits: Any,
    ) -> Self:
        """Builds limits from lists; without weights, all samples are worth the same."""
        known = max(map(len, (*calibration, *expected)))
        return cls(
            np.array(levels, dtype=np.int64),
            _by_depth(calibration, known),
            _by_depth(expected, known),
            np.array(weight, dtype=np.float64) if len(weight) else np.ones(len(levels)),
            **limits,
        )

    def calibration_at(self, depth: int) -> Any:
        """Returns ``[S, 1]`` corrections of draft probabilities of children of nodes at a depth."""
        return self.calibration[:, min(depth, self.calibration.shape[1] - 1), None]

    def expected_at(self, depth: int) -> Any:
        """Returns ``[S, 1]``: how often some child of a node at a depth is expected to be accepted."""
        return self.expected[:, min(depth, self.expected.shape[1] - 1), None]

    def price_of(self, group: int) -> tuple[int, Verification | None]:
        """Returns the budget of a group and the price of verifying its drafts."""
        if self.group is None:
            return self.budget, self.verification
        return self.budget[group], self.verification[group]

    def budgets(self) -> Iterator[tuple[Any, Any]]:
        """Yields the samples of every group with a budget, and the budget."""
        if self.group is None:
            if isinstance(self.budget, Tensor) or self.budget > 0:
                yield slice(None), self.budget
            return
        for number, budget in enumerate(self.budget):
            if budget > 0:
                yield (self.group == number).nonzero()[0], budget


def _by_depth(factors: Sequence[Sequence[float]], known: int) -> Reals:
    """Returns ``[S, K]`` numbers, of which the last one of each sample fills up its row."""
    return np.array([[*own, *[own[-1]] * (known - len(own))] for own in factors], dtype=np.float64)


__all__ = ["Limits", "Trees", "Verification"]
