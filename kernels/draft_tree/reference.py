"""The growth rule of draft trees: which nodes get children, how much these are worth, and which drafts are verified.

Functions take numpy arrays and tensors alike: trees grow on a host, and in recorded graphs on a device. A node's reach
is the chance that its path is accepted, times the worth of its sample's tokens.

Shapes: S samples, N nodes of the topology. At one depth n nodes that may have children, m nodes below them, k children
at most. M drafts of all samples.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.draft_tree.limits import Ints, Limits, Reals, Trees, Verification

Array = TypeVar("Array", Reals, Tensor)
Numbers = Any  # an array or tensor of integers
Flags = Any  # an array or tensor of booleans

_ROUNDS = 3  # iterations in which the rate and the drafts that are worth it settle together


class Level(Protocol):
    """Constants of one depth at which nodes have children.

    Attributes:
        inner: ``[n]`` nodes with children.
        below: the m nodes one depth below.
        parent: ``[m]`` place of each one's parent among the n.
        rank: ``[m]`` rank of each one among its parent's children.
    """

    @property
    def inner(self) -> Any: ...

    @property
    def below(self) -> slice: ...

    @property
    def parent(self) -> Any: ...

    @property
    def rank(self) -> Any: ...


def reach_below(reach: Array, calibration: Array, chance: Array) -> Array:
    """Returns the reach of children, given that of their parents; ``calibration`` corrects draft probabilities."""
    return reach * (calibration * chance).clip(0, 1)


def gains(reach: Array, expected: Array, row_cost: "float | Array") -> Array:
    """Returns the tokens that children bring, less the price of their parents' rows.

    Args:
        reach: ``[S, n]``.
        expected: ``[S, 1]`` or ``[S, n]`` how often some child is expected to be accepted.
        row_cost: price of a row: tokens that it could bring elsewhere.
    """
    return reach * expected - row_cost


def fits(reach: Array, drafts: Array, budget: "int | Tensor") -> Flags:
    """Returns ``[S, n]``: whether a node fits, which means that fewer than ``budget`` drafts have a greater reach.

    If a node does not fit, its descendants do not fit either.

    Args:
        reach: ``[S, n]``.
        drafts: ``[M]`` reach of all drafts so far; negative at places without a draft.
        budget: at least 1.
    """
    return (drafts > reach[..., None]).sum(-1) < budget


def growing(
    gain: Array,
    able: Flags,
    level_cost: "float | Array",
    group: Ints | None = None,
    whole: "bool | Flags" = False,
) -> Flags:
    """Returns ``[S, n]``: nodes that get children: those that gain, if together they are worth a level's time.

    Args:
        gain: ``[S, n]``.
        able: ``[S, n]`` whether a node exists, may have children and fits.
        level_cost: price of a level.
        group: ``[S]`` number of the group of samples that decides together; by default all samples do.
        whole: whether all able nodes of a sample get children or none, as ``[S, 1]`` or for all samples. Randomly drawn
            trees are whole: a choice among drafts by their tokens would change the law of the remaining ones.
    """
    going = able & ((gain >= 0) | whole)
    worth = (gain * going).sum(axis=1, keepdims=True)
    if group is None:
        worth = worth.sum(axis=0, keepdims=True)
    elif len(group) > 1:
        worth = np.bincount(group, weights=worth[:, 0])[group][:, None]
    return going & (worth >= level_cost) & (worth >= 0)


def going(trees: Trees, limits: Limits, level: Level, depth: int) -> Flags:
    """Returns ``[S, n]``: which nodes of a depth get children.

    Args:
        trees: trees down to this depth.
        limits: how far they go on.
        level: the depth's constants.
        depth: the depth.
    """
    reach = trees.reach[:, level.inner]
    able = (reach >= 0) & (depth < limits.levels)[:, None]
    for slots, budget in limits.budgets() if depth else ():
        fit = fits(reach[slots], trees.reach[slots, 1:].ravel(), budget)
        able[slots] = able[slots] & fit
    gain = gains(reach, limits.expected_at(depth), limits.row_cost)
    return growing(gain, able, limits.level_cost, limits.group, limits.whole)


def add(
    trees: Trees, limits: Limits, level: Level, depth: int, parents: Flags, tokens: Numbers, chances: Array
) -> None:
    """Adds children to the trees, in place.

    Args:
        trees: the trees.
        limits: how far they go on.
        level: constants of the parents' depth.
        depth: the parents' depth.
        parents: ``[S, n]`` which nodes get children.
        tokens: ``[S, n, k]`` tokens of the children, -1 for none.
        chances: ``[S, n, k]`` their draft probabilities.
    """
    token, chance = tokens[:, level.parent, level.rank], chances[:, level.parent, level.rank]
    added = parents[:, level.parent] & (token >= 0)
    reach = reach_below(trees.reach[:, level.inner][:, level.parent], limits.calibration_at(depth), chance)
    where: Any = torch.where if isinstance(added, Tensor) else np.where
    for known, new in ((trees.token, token), (trees.chance, chance), (trees.reach, reach)):
        known[:, level.below] = where(added, new, known[:, level.below])


def reached(trees: Trees, limits: Limits, levels: Sequence[Level], slots: Sequence[int]) -> None:
    """Computes the reach of some samples' drafts anew, in place, after their chances were given otherwise."""
    reach = trees.reach[slots]
    for depth, level in enumerate(levels):
        below = reach_below(
            reach[:, level.inner][:, level.parent],
            limits.calibration_at(depth)[slots],
            trees.chance[slots, level.below],
        )
        reach[:, level.below] = np.where(trees.token[slots, level.below] >= 0, below, -1)
    trees.reach[slots] = reach


def number_kept(reach: Reals, budget: int, verification: Verification | None) -> int:
    """Returns how many of the likeliest drafts are verified.

    Args:
        reach: ``[M]`` reach of all drafts, descending.
        budget: greatest number of drafts; -1 for any number.
        verification: the price of their rows; ``None`` if they are free.
    """
    most = min(len(reach), budget) if budget >= 0 else len(reach)
    if verification is None:
        return most
    seconds, rate = verification.seconds[: most + 1], verification.rate
    gained = np.concatenate(([0.0], reach[: len(seconds) - 1].cumsum())) * verification.alike
    count = 0
    for _ in range(_ROUNDS):
        count = int((gained - rate * seconds).argmax())
        better = verification.margin * (verification.tokens + gained[count]) / (verification.base + seconds[count])
        if better <= rate:
            break
        rate = better
    return count


__all__ = ["Level", "add", "fits", "gains", "going", "growing", "number_kept", "reach_below", "reached"]
