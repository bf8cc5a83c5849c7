"""Verification of several independent paths by one joint decision.

Shapes: V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from arbordraft.sampling.laws import IID, DraftLaw, given
from arbordraft.sampling.rows import Rows
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Causality
from arbordraft.verifiers.rules import RecursiveRejection, Remembered
from arbordraft.verifiers.trees import Decision, Lifted, TreeVerifier

BLOCK_VERIFICATION = Lifted(RecursiveRejection())  # on a chain


class GreedyMultiPath(TreeVerifier):
    """Picks the best of K independent paths, then judges it by block verification.

    The best path has the greatest ratios of target to draft probability, compared lexicographically: at the first
    token, then at the second, and so on. Its law is known: the draft law skewed towards great ratios. Block
    verification of this path, with the skewed rows as its draft rows, is lossless.

    Trees must be a trunk, possibly empty, that ends in K chains of one length, such as ``TreeTopology.fork(K, depth)``.
    Their children must be :class:`~arbordraft.sampling.laws.IID`. The paper's trees have no trunk. Equal tokens in
    different paths stay separate rows. Deciders must not look at drafts, since the law of the best path takes the
    paths for independent, however long they are.

    Source: greedy multi-path block verification (Thomas and Pal, 2026, arXiv 2602.16961).

    Examples:
        >>> from arbordraft.verifiers.coupling import Coupling
        >>> coupling = Coupling(IID(3), GreedyMultiPath())
        >>> coupling.check(TreeTopology.fork(3, 4))
        >>> coupling.check(TreeTopology.k_ary(2, 2))
        Traceback (most recent call last):
            ...
        ValueError: GreedyMultiPath() needs a trunk that ends in chains of one length, got levels of [1, 2, 4] nodes
    """

    growth = Causality.FIXED

    def supports(self, law: DraftLaw) -> bool:
        return law.replacement and law.tops == 0

    def check(self, topology: TreeTopology) -> None:
        """Raises ValueError unless the tree is a trunk that ends in chains of one length."""
        sizes = [len(level) for level in topology.levels]
        widths = [len(children) for children in topology.child_list]
        forks = sum(width > 1 for width in widths)
        if forks > 1 or widths.count(0) != sizes[-1]:
            raise ValueError(f"{self} needs a trunk that ends in chains of one length, got levels of {sizes} nodes")

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        path, chain, rows = self._best(tree, target)
        decision = BLOCK_VERIFICATION.decide(chain, rows)
        try:
            node, probability = next(decision)
            while True:
                node, probability = decision.send((yield path[node], probability))
        except StopIteration as stopped:
            node, weights = stopped.value
            return path[node], weights

    def law(self, tree: SampleTree, target: Rows[Tensor]) -> list[tuple[float, list[int], Tensor]]:
        path, chain, rows = self._best(tree, target)
        ends = Lifted(Remembered(RecursiveRejection())).law(chain, rows)
        return [(probability, [path[node] for node in nodes], law) for probability, nodes, law in ends]

    def _best(self, tree: SampleTree, target: Rows[Tensor]) -> tuple[list[int], SampleTree, list[Tensor]]:
        """Returns the rows of the best path, the path as a chain with skewed draft rows, and its target rows."""
        path, skewed = self.pick(tree, target)
        tokens = {node: tree.token(row) for node, row in enumerate(path)}
        chain = DraftTree.of(TreeTopology.chain(len(path) - 1), IID(1), [tokens], [dict(enumerate(skewed))])[0]
        return path, chain, [target[row].double() for row in path]

    def pick(self, tree: SampleTree, target: Rows[Tensor]) -> tuple[list[int], list[Tensor]]:
        """Returns the rows of the best path, leaf included, and the ``[V]`` law of each of its tokens but the root's.

        Raises:
            ValueError: if a node has no draft row.
        """
        path, skewed = [tree.root], []
        alike = [tree.root]  # rows whose paths have the chosen tokens so far, one per draw
        draws = 1
        below, here = 0.0, 1.0  # share of paths that rank below these tokens, and share of paths that have them
        while children := [child for row in alike for child in tree.children(row)]:
            if draws == 1:  # in the trunk, or at its end
                draws = len(children)
            q = given(tree.drawn_from(path[-1])).double()
            q = q / q.sum()
            order = torch.where(q > 0, target[path[-1]].double() / q, -1.0).argsort(stable=True)
            place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
            lower = below + here * (q[order].cumsum(0) - q[order])[place]
            own = here * q
            # P(token) = ((lower + own)**draws - lower**draws) / ((below + here)**draws - below**draws)
            law = q * _sum_of_powers(draws, lower, lower + own) / _sum_of_powers(draws, below, below + here)
            skewed.append(law / law.sum())
            token = max((tree.token(child) for child in children), key=lambda token: int(place[token]))
            alike = [child for child in children if tree.token(child) == token]
            path.append(alike[0])
            if draws > 1:  # in a trunk, all paths have the same tokens
                below, here = lower[token].item(), own[token].item()
                below, here = below / (below + here), here / (below + here)
        return path, skewed


def _sum_of_powers(draws: int, least: Any, most: Any) -> Any:
    """Returns ``(most**draws - least**draws) / (most - least)`` without subtracting nearly equal numbers."""
    return sum(most**power * least ** (draws - 1 - power) for power in range(draws))
