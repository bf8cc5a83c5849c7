"""The growth rule of draft trees: which nodes get children, and the reach of these children.

Functions take numpy arrays and tensors alike, so a recorded graph runs them too. A node's reach is the chance that its
path is accepted, times the worth of its sample's tokens.

Shapes: S samples, n nodes of one depth, M drafts of all samples so far, N nodes of the topology, k children.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from arbordraft.kernels.draft_tree import Growth

Tokens = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Array = TypeVar("Array", Reals, Tensor)
Flags = Any  # an array or tensor of booleans


def reach_below(reach: Array, trust: Array, chance: Array) -> Array:
    """Returns the reach of children, given the reach of their parents; ``trust`` corrects draft probabilities."""
    return reach * (trust * chance).clip(0, 1)


def gains(reach: Array, following: Array, row: "float | Array") -> Array:
    """Returns the tokens that children bring, less the price of their parents' rows.

    Args:
        reach: ``[S, n]``.
        following: ``[S, 1]`` or ``[S, n]`` how often some child is expected to be accepted.
        row: price of a row: tokens that it could bring elsewhere.
    """
    return reach * following - row


def fits(reach: Array, drafts: Array, budget: "int | Tensor") -> Flags:
    """Returns ``[S, n]``: whether a node fits, which means that fewer than ``budget`` drafts have a greater reach.

    If a node does not fit, its descendants do not fit either.

    Args:
        reach: ``[S, n]``.
        drafts: ``[M]`` reach of all drafts so far; negative at places without a draft.
        budget: at least 1.
    """
    return (drafts > reach[..., None]).sum(-1) < budget


def growing(gain: Array, able: Flags, level: "float | Array", axis: int | None = None) -> Flags:
    """Returns ``[S, n]``: nodes that get children: those that gain, if together they are worth a level's time.

    Args:
        gain: ``[S, n]``.
        able: ``[S, n]`` whether a node exists, may have children and fits.
        level: price of a level.
        axis: 1 lets every sample decide by itself; by default the batch decides together.
    """
    going = able & (gain >= 0)
    return going & ((gain * going).sum(axis=axis, keepdims=True) >= level)


def growing_whole(gain: Array, able: Flags, level: "float | Array") -> Flags:
    """Returns ``[S, n]``: which nodes of randomly drawn trees get children, all nodes of a sample or none.

    A choice among drafts by their tokens would change the law of the remaining ones.
    """
    total = (gain * able).sum(axis=1, keepdims=True)
    return able & (total >= 0) & (total >= level)


def chosen(
    reach: Sequence[float],
    following: Sequence[float],
    row: float,
    level: float,
    drafts: Sequence[float] = (),
    budget: int = 0,
    *,
    whole: bool = False,
) -> list[bool]:
    """Returns which of n nodes get children. For few nodes, plain numbers are faster than arrays.

    Args:
        reach: ``[n]`` reach of nodes that exist and may have children.
        following: ``[n]`` how often some child is expected to be accepted.
        row: price of a row.
        level: price of a level.
        drafts: reach of all drafts so far.
        budget: number of drafts that fit; 0 for no limit.
        whole: whether to decide for all nodes of one sample together, as :func:`growing_whole` does.
    """
    gain = [own * next_ - row for own, next_ in zip(reach, following, strict=True)]
    if whole:
        return [0 <= sum(gain) >= level] * len(gain)
    least = sorted(drafts, reverse=True)[budget - 1] if 0 < budget <= len(drafts) else 0.0
    going = [own >= 0 and far >= least for own, far in zip(gain, reach, strict=True)]
    worth = sum(own for own, goes_on in zip(gain, going, strict=True) if goes_on)
    return going if worth >= level else [False] * len(going)


def grow(growth: "Growth", draw: Callable[[int, list[int], Tokens], tuple[Tokens, Reals]]) -> tuple[Tokens, Reals]:
    """Grows trees of most probable tokens on the host, level by level.

    Args:
        growth: limits of the trees.
        draw: takes a depth, n of its nodes and their ``[S, n]`` tokens. Returns the ``[S, n, k]`` tokens of their
            children, the best one first, and their draft probabilities. The token of a root or of a missing node is -1.

    Returns:
        ``[S, N]`` tokens, -1 for roots and missing nodes, and ``[S, N]`` draft probabilities.
    """
    samples, nodes = len(growth.levels), len(growth.offsets) - 1
    trust, following = (np.reshape(told, (samples, -1)) for told in (growth.trust, growth.next))
    tokens, chances, reach = np.full((samples, nodes), -1), np.zeros((samples, nodes)), np.full((samples, nodes), -1.0)
    reach[:, 0] = growth.weights
    here: list[int] = [0]
    for depth in range(max(growth.levels)):
        inner = [node for node in here if growth.offsets[node] < growth.offsets[node + 1]]
        if not inner:
            break
        known = min(depth, trust.shape[1] - 1)
        own = reach[:, inner]
        able = (own >= 0) & (depth < np.array(growth.levels))[:, None]
        if growth.budget > 0:
            able &= fits(own, reach[:, 1:].ravel(), growth.budget)
        going = growing(gains(own, following[:, known, None], growth.row), able, growth.level)
        drawn, chance = draw(depth, inner, tokens[:, inner])
        for place, node in enumerate(inner):
            for rank, child in enumerate(growth.children[growth.offsets[node] : growth.offsets[node + 1]]):
                added = going[:, place] & (chance[:, place, rank] > 0)
                tokens[added, child] = drawn[added, place, rank]
                chances[added, child] = chance[added, place, rank]
                below = reach_below(own[:, place], trust[:, known], chance[:, place, rank])
                reach[added, child] = below[added]
        here = [child for node in here for child in growth.children[growth.offsets[node] : growth.offsets[node + 1]]]
    return tokens, chances


__all__ = ["chosen", "fits", "gains", "grow", "growing", "growing_whole", "reach_below"]
