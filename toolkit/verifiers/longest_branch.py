"""The verifier of improved MCSD's wide mode.

Shapes: V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import residual
from arbordraft.sampling.rows import Rows
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import Exactness
from arbordraft.verifiers.trees import Decision, TreeVerifier


class LongestBranch(TreeVerifier):
    """Commits the longest branch below candidates that the target itself has proposed. Lossy.

    Children of the root pass without a test: they were drawn from the target's own row. Every other node, siblings
    included, is tested separately against its own draft probability. A node passes if its own test and those of all
    its ancestors succeed. The first of the deepest passing nodes wins. No token is drawn after it: the next step draws
    its candidates from :meth:`following`.

    Among several candidates, the one whose branch was drafted best wins, not one drawn from the target's law. With a
    single candidate at the root and no siblings below it, this is plain speculative sampling. With more, it is lossy.

    Source: improved MCSD (Lu et al., 2024). Its fork and its static mode are this rule on a fork and on any other tree.
    """

    exactness = Exactness.LOSSY

    def supports(self, law: DraftLaw) -> bool:
        return True

    def decide(self, tree: SampleTree, target: Rows[Tensor]) -> Decision:
        depths, parents = tree.batch.depth, tree.batch.parent
        passed = {tree.root, *tree.children(tree.root)}
        for row in tree.rows:
            if depths[row] < 2:
                continue
            parent = int(parents[row])
            # Ask about every node, so that the number of questions does not depend on the answers.
            if (yield row, _ratio(tree, target, parent, row)) and parent in passed:
                passed.add(row)
        last = max(passed, key=lambda row: (depths[row], -row))
        if last == tree.root:
            return last, target[last]
        token = torch.tensor(tree.token(last), device=target[last].device)
        return int(parents[last]), functional.one_hot(token, len(target[last])).to(target[last].dtype)

    def following(self, tree: SampleTree, target: Rows[Tensor], last: int) -> Tensor:
        """Returns the ``[V]`` row from which the candidates after the committed row ``last`` are drawn.

        As in the reference, this is the residual if a draft was rejected, but the plain target row if no drafted token
        was accepted. It need not sum to 1.
        """
        draft = tree.drawn_from(last)
        if tree.batch.depth[last] < 2 or draft is None or not tree.children(last):
            return target[last]
        left = residual(target[last], draft)
        return left if left.sum() > 0 else target[last]


def _ratio(tree: SampleTree, target: Rows[Tensor], parent: int, row: int) -> float:
    """Returns min(1, p / q) of a node's token; q = 1 for a certain token."""
    token, draft = tree.token(row), tree.drawn_from(parent)
    chance = target[parent][token].item()
    return min(1.0, chance if draft is None else chance / draft[token].item())
