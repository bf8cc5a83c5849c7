"""Recursive rejection from scores for all trees of a batch at once, on the device, without waiting for the host.

A node's children are tried in turn, each against the residual that its earlier siblings left. Without normalising,

    R_0 = w p,   M_0 = 1,   R_i(x) = max(R_{i-1}(x) - M_{i-1} q_i(x), 0),   M_i = sum R_i + (1 - w),

and child i is accepted with probability min(1, R_{i-1}(x_i) / (M_{i-1} q_i(x_i))). Its proposal q_i is q / c_i on the
tokens that can still be drawn, c_i their mass, so that

    R_i(x) = max(w p(x) - t_i q(x), 0),   t_i = t_{i-1} + M_{i-1} / c_i:

one number per node replaces the whole row. *Special* tokens cannot be drawn any more: tops, and tokens drawn without
replacement. They keep the R of their own turn, and there are at most as many as children. So k draws take k passes over
the rows of all nodes together. The rest is arithmetic on one number per child. Children may repeat a token. Each IID
draw has a turn of its own. Among equal certain children, the first has all of the token's R and the others have none.

``Lifted`` needs no walk either. A node's weight and its chance to end the path follow from its parent's law, for every
noise. The path ends at the first node in post-order whose uniform is below that chance.

Shapes: T rows, D draft rows, V vocabulary, N inner nodes, K children, B samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from arbordraft.kernels.verify import draw_behind, rejection_ends


@dataclass(frozen=True)
class PackedTree:
    """The trees of a batch as tables; nodes are rows, one sample after another.

    Args:
        roots: ``[B]`` int64 rows of the roots.
        inner: ``[N]`` int64 rows of the nodes with children, levels closer to the root first; -1 for unused places.
        levels: number of inner nodes at each depth, unused places included.
        draft_row: ``[N]`` int64 draft row that a node's children were drawn from, -1 for none.
        children: ``[N, K]`` int64 rows of the children in the order of their verification, -1 after the last.
        tokens: ``[N, K]`` int64 tokens of the children, -1 after the last.
        tops: ``[D, M]`` int64 certain tokens of the draft rows, padded with -1. A child with one was not drawn at
            random; such children may repeat a token, like IID draws.
        order: ``[T]`` int64 numbers that ascend in the post-order of a sample's rows, below 2^31.
        sample: ``[T]`` int64 sample of a row.
        replacement: whether draws may repeat a token.
    """

    roots: Tensor
    inner: Tensor
    levels: Sequence[int]
    draft_row: Tensor
    children: Tensor
    tokens: Tensor
    tops: Tensor
    order: Tensor
    sample: Tensor
    replacement: bool


def verify_tree(
    scores: Tensor,
    lse: Tensor,
    draft: Tensor,
    tree: PackedTree,
    accept: Tensor,
    final: Tensor,
    *,
    lifted: bool,
    counters: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the ends of the paths of all samples, and the tokens that follow.

    Args:
        scores: ``[T, V]`` target scores, processed.
        lse: ``[T]`` their log-sum-exp.
        draft: ``[D, V]`` draft probabilities, without tops.
        tree: the trees.
        accept: ``[T]`` uniforms that decide about nodes.
        final: ``[T]`` uniforms that draw tokens after nodes.
        lifted: whether to verify paths lifted, from their end, instead of top-down.
        counters: int32 zeros for :func:`rejection_ends`, which leaves zeros.

    Returns:
        ``[B]`` int64 rows of the last accepted nodes and ``[B]`` int64 tokens.
    """
    end, weight, taken, mass = rejection_ends(
        scores, lse, draft, tree.inner, tree.draft_row, tree.children, tree.tokens, tree.tops, tree.roots, accept,
        tree.order, tree.sample, tree.levels, tree.replacement, lifted, counters,
    )  # fmt: skip
    token = draw_behind(scores, lse, draft, tree.inner, tree.draft_row, tree.tokens, weight, taken, mass, end, final)
    return end, token


__all__ = ["PackedTree", "verify_tree"]
