"""Grows one level of all draft trees of a batch on a device, in one launch."""

from torch import Tensor

from arbordraft.kernels.dispatch import Operator
from arbordraft.kernels.grow_level.reference import grow_level_reference

_grow = Operator(
    "grow_level(Tensor(a!) token, Tensor(b!) chance, Tensor(c!) reach, Tensor(d!) broken, Tensor levels, "
    "Tensor calibration, Tensor expected, Tensor costs, Tensor budget, Tensor inner, Tensor parent, Tensor rank, "
    "Tensor fed, Tensor tokens, Tensor log_probs, Tensor? vocabulary, int depth, int below) -> Tensor",
    grow_level_reference,
    lambda token, *others: token.new_empty(len(token) * len(others[11])),
    triton="arbordraft.kernels.grow_level.triton:launch",
)


def grow_level(
    token: Tensor,
    chance: Tensor,
    reach: Tensor,
    broken: Tensor,
    levels: Tensor,
    calibration: Tensor,
    expected: Tensor,
    costs: Tensor,
    budget: Tensor,
    inner: Tensor,
    parent: Tensor,
    rank: Tensor,
    fed: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    vocabulary: Tensor | None,
    depth: int,
    below: int,
) -> Tensor:
    """Decides which nodes of a depth get children, adds these in place, and returns the tokens that run next.

    The rule is that of :mod:`arbordraft.kernels.draft_tree.reference`; all samples decide together.

    Args:
        token: ``[S, N]`` int64 tokens of the trees, -1 where there is no node; contiguous, and changed.
        chance: ``[S, N]`` float64 draft probabilities; contiguous, and changed.
        reach: ``[S, N]`` float64 reach, -1 where there is no node; contiguous, and changed.
        broken: ``[S]`` float64 numbers of nodes whose scores were no numbers; those of this depth are added.
        levels: ``[S]`` int64 greatest numbers of levels.
        calibration: ``[S, K]`` float64, see :class:`~arbordraft.kernels.draft_tree.Limits`.
        expected: ``[S, K]`` float64, see there.
        costs: ``[2]`` float64 costs of a level and of a row.
        budget: ``[1]`` int64 greatest number of drafts of all samples.
        inner: ``[n]`` int64 nodes of this depth with children in the topology.
        parent: ``[m]`` int64, by node one depth below: place of its parent among the n.
        rank: ``[m]`` int64, by node one depth below: its rank among its parent's children; each parent has a rank 0.
        fed: ``[n']`` int64 nodes one depth below that have children in the topology.
        tokens: ``[S n, k]`` int64 most probable outputs after each of the n nodes.
        log_probs: ``[S n, k]`` float32 log-probabilities. Children of rank k or more are not added.
        vocabulary: ``[D]`` int64 tokens of the outputs; ``None`` if they are the tokens.
        depth: the depth, 0 for the roots.
        below: first node one depth below.

    Returns:
        ``[S n']`` int64 tokens of the nodes ``fed``, of the root where there is no node.
    """
    return _grow(
        token, chance, reach, broken, levels, calibration, expected, costs, budget, inner, parent, rank, fed, tokens,
        log_probs, vocabulary, depth, below,
    )  # fmt: skip


__all__ = ["grow_level", "grow_level_reference"]
