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
from typing import NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.verify import draw_behind, last_top_down, log_sum_exp, rejection_laws
from arbordraft.kernels.verify.reference import before, follow, share


@dataclass(frozen=True)
class PackedTree:
    """The trees of a batch as tables; nodes are rows, one sample after another.

    Args:
        roots: ``[B]`` int64 rows of the roots.
        inner: ``[N]`` int64 rows of the nodes with children, levels closer to the root first; -1 for unused places.
        levels: number of inner nodes at each depth, unused places included.
        draft_row: ``[N]`` int64 draft row that a node's children were drawn from, -1 for none.
        children: ``[N, K]`` int64 rows of the children in the order of their verification, -1 after the last.
        tokens: ``[N, K]`` int64 tokens of the children.
        certain: ``[N, K]`` bool: whether a child was not drawn at random; such children may repeat a token, like IID
            draws.
        parent: ``[N]`` int64 index of the parent among the inner nodes; -1 for roots.
        place: ``[N]`` int64 index of the node among its parent's children; -1 for roots.
        order: ``[T]`` int64 place of a row in the post-order of its sample.
        sample: ``[T]`` int64 sample of a row.
        replacement: whether draws may repeat a token.
    """

    roots: Tensor
    inner: Tensor
    levels: Sequence[int]
    draft_row: Tensor
    children: Tensor
    tokens: Tensor
    certain: Tensor
    parent: Tensor
    place: Tensor
    order: Tensor
    sample: Tensor
    replacement: bool


class _Laws(NamedTuple):
    """Results of :func:`rejection_laws` for some inner nodes, in float64.

    Args:
        taken: ``[N]`` t after the last child.
        accept: ``[N, K]`` chance to go on with a child.
        stop: ``[N]`` chance to end at the node.
        mass: ``[N, C]`` mass of the tokens that may be emitted there, by chunk.
    """

    taken: Tensor
    accept: Tensor
    stop: Tensor
    mass: Tensor

    @property
    def before(self) -> Tensor:
        """``[N, K]`` chance that a child's turn comes."""
        return before(self.accept)


def verify_tree(
    scores: Tensor, draft: Tensor, tree: PackedTree, accept: Tensor, final: Tensor, *, lifted: bool
) -> tuple[Tensor, Tensor]:
    """Returns the ends of the paths of all samples, and the tokens that follow.

    Args:
        scores: ``[T, V]`` target scores, processed.
        draft: ``[D, V]`` draft probabilities.
        tree: the trees.
        accept: ``[T]`` uniforms that decide about nodes.
        final: ``[T]`` uniforms that draw tokens after nodes.
        lifted: whether to verify paths lifted, from their end, instead of top-down.

    Returns:
        ``[B]`` int64 rows of the last accepted nodes and ``[B]`` int64 tokens.
    """
    lse = log_sum_exp(scores)
    count, device = len(tree.inner), scores.device
    weight = torch.ones(count, dtype=torch.float64, device=device)
    laws: list[_Laws] = []
    begin = 0
    for size in tree.levels if lifted and count else [count]:
        nodes = slice(begin, begin + size)
        if lifted and begin:
            above, place = tree.parent[nodes].clamp(min=0), tree.place[nodes].clamp(min=0)
            known = _joined(laws)
            weight[nodes] = share(known.accept, known.before)[above, place]
        laws.append(_laws(scores, lse, draft, tree, nodes, weight[nodes]))
        begin += size
    law = _joined(laws)
    if lifted:
        end = _last_lifted(tree, law, weight, accept)
    else:
        end = last_top_down(law.accept, tree.children, tree.inner, tree.roots, accept, len(tree.levels))
    token = draw_behind(
        scores, lse, draft, tree.inner, tree.draft_row, tree.tokens, weight, law.taken, law.mass, end, final
    )
    return end, token


def _laws(scores: Tensor, lse: Tensor, draft: Tensor, tree: PackedTree, nodes: slice, weight: Tensor) -> _Laws:
    row, real = tree.inner[nodes].clamp(min=0), tree.children[nodes] >= 0
    return _Laws(
        *rejection_laws(
            scores, lse, draft, row, tree.draft_row[nodes], weight, tree.tokens[nodes], real, tree.certain[nodes],
            tree.replacement,
        )
    )  # fmt: skip


def _joined(laws: Sequence[_Laws]) -> _Laws:
    return laws[0] if len(laws) == 1 else _Laws(*(torch.cat(parts) for parts in zip(*laws, strict=True)))


def walk(tree: PackedTree, taken: Tensor) -> Tensor:
    """Returns where paths from the roots end; a path goes on with the first child that is taken.

    Args:
        tree: the trees.
        taken: ``[N, K]`` bool, false if there is no child.

    Returns:
        ``[B]`` int64 rows.
    """
    return follow(taken, tree.children, tree.inner, tree.roots, len(tree.order), len(tree.levels))


def _last_lifted(tree: PackedTree, law: _Laws, weight: Tensor, accept: Tensor) -> Tensor:
    # Entries without a row go to an extra row after the last: to leave them out, the host would have to count.
    rows, samples = len(tree.order), len(tree.roots)
    below = torch.where(tree.children < 0, rows, tree.children)
    inner = torch.where(tree.inner < 0, rows, tree.inner)
    # A leaf ends the path with its weight, an inner node with the mass that its children left.
    chance = accept.new_zeros(rows + 1)
    chance.scatter_(0, below.flatten(), share(law.accept, law.before).flatten())
    chance.index_fill_(0, tree.roots, 1.0)  # a root without children
    rest = 1 - law.accept.sum(dim=1)
    chance.scatter_(0, inner, torch.where(weight >= 1, 1.0, share(law.stop, rest)))
    reached = torch.zeros_like(chance, dtype=torch.bool).index_fill_(0, tree.roots, True)
    begin = 0
    for size in tree.levels:  # a node is visited if its parent is and its turn may come
        nodes = slice(begin, begin + size)
        visited = reached[inner[nodes]][:, None] & (law.accept[nodes] > 0)
        reached.scatter_(0, torch.where(visited, below[nodes], rows).flatten(), True)
        begin += size
    hit = reached[:rows] & (accept < chance[:rows])
    order = torch.where(hit, tree.order, rows)
    best = torch.full_like(tree.roots, rows).scatter_reduce(0, tree.sample, order, "amin")
    chosen = hit & (tree.order == best[tree.sample])
    end = torch.cat([tree.roots, tree.roots[:1]])
    end.scatter_(0, torch.where(chosen, tree.sample, samples), torch.arange(rows, device=end.device))
    return end[:samples]


__all__ = ["PackedTree", "verify_tree", "walk"]
