"""Deciders that look only at the drafts of the current step."""

import math
from collections.abc import Sequence

from arbordraft.deciders.base import Decider
from arbordraft.deciders.decisions import Limits, Situation, StepView
from arbordraft.trees.verdict import Causality
from arbordraft.utils.checks import check_float, check_int, check_positive


class FixedDepth(Decider):
    """Drafts down to ``depth`` (0 or more) always; by default down to the topology's leaves."""

    can_plan = True
    growth = Causality.FIXED

    def __init__(self, depth: int | None = None) -> None:
        super().__init__()
        self.depth = None if depth is None else check_int("depth", depth, 0)

    def plan(self, situation: Situation) -> Limits:
        return Limits.everything(
            [max_depth if self.depth is None else min(max_depth, self.depth) for max_depth in situation.max_depth]
        )

    def forward(self, view: StepView) -> Sequence[bool]:
        return [self.depth is None or view.depth < self.depth] * len(view.paths)


class NodeBudget(Decider):
    """Drafts as many of the likeliest tokens as fit into a fixed budget of nodes, regardless of the cost of rows.

    If the topology offers more nodes than the budget, trees take the shape that suits each step. EAGLE-2
    (Li et al., 2024) calls this expanding and reranking. The decider looks at drawn tokens, so sampling needs shared
    noise.

    Args:
        nodes: nodes per sample, root included; 1 or more. Samples of a batch share their budgets.

    Raises:
        TypeError: if ``nodes`` is not a whole number.
        ValueError: if ``nodes`` is below 1.

    Examples:
        >>> NodeBudget(4).plan(Situation(max_depth=[6, 6], memory=[None, None])).budget
        6
    """

    can_plan = True
    growth = Causality.ANTICIPATING

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = check_int("nodes", nodes, 1)

    def plan(self, situation: Situation) -> Limits:
        budget = len(situation.max_depth) * (self.nodes - 1)
        levels = [max_depth if budget else 0 for max_depth in situation.max_depth]
        return Limits.everything(levels, budget=budget)

    def forward(self, view: StepView) -> Sequence[bool]:
        return [True] * len(view.paths)


class ConfidenceThreshold(Decider):
    """Goes on while some token of the last level had a draft probability of at least ``threshold``, in [0, 1].

    Source: the confidence stop of Hugging Face's assisted generation, per sample and for trees.

    Examples:
        >>> from arbordraft.deciders.decisions import Draw, Origin
        >>> sure, unsure = Draw(0.9, Origin()), Draw(0.3, Origin())
        >>> view = StepView(depth=1, paths=[[[sure]], [[unsure]]], memory=[None, None])
        >>> ConfidenceThreshold(0.4)(view)
        [True, False]
    """

    def __init__(self, threshold: float = 0.4) -> None:
        super().__init__()
        self.threshold = check_float("threshold", threshold, 0, 1)

    def forward(self, view: StepView) -> Sequence[bool]:
        return [max(nodes) >= self.threshold for nodes in view.confidence]


class EntropyBound(Decider):
    """Goes on while the entropy of some draft row promises an acceptance of at least ``threshold``, in [0, 1].

    The promise is ``1 - sqrt(gamma * H)``, with ``H`` in nats and ``gamma`` above 0. SVIP's rule, which stops at
    ``sqrt(0.15 H) > 0.3``, is ``EntropyBound(0.7, 0.15)``.

    Source: AdaEDL (Agrawal et al., 2024), SVIP (Zhang et al., 2024).
    """

    def __init__(self, threshold: float = 0.3, gamma: float = 0.2) -> None:
        super().__init__()
        self.threshold = check_float("threshold", threshold, 0, 1)
        self.gamma = check_positive("gamma", gamma)

    def forward(self, view: StepView) -> Sequence[bool]:
        return [promise >= self.threshold for promise in self.promises(view)]

    def promises(self, view: StepView) -> list[float]:
        """Returns the promise of each sample's row of least entropy."""
        return [1 - math.sqrt(self.gamma * max(0.0, min(nodes))) for nodes in view.entropy]


class PathSurvival(Decider):
    """Goes on while some path to the frontier survives verification as a whole with a chance of at least ``threshold``.

    The chance is the product of the draft probabilities along the path, 1 at the root. The ``threshold`` must not be
    negative; if it is above 1, nothing is drafted.
    :class:`~arbordraft.deciders.LearnedDecider` replaces draft probabilities by better chances.

    Source: the product rule of SpecDec++ (Huang et al., 2024), which stops at ``1 - chance > h``.

    Examples:
        >>> from arbordraft.deciders.decisions import Draw, Origin
        >>> half = Draw(0.5, Origin())
        >>> PathSurvival(0.3).survival(StepView(depth=2, paths=[[[half, half]], [[half]]], memory=[None, None]))
        [[0.25], [0.5]]
    """

    def __init__(self, threshold: float = 0.3) -> None:
        super().__init__()
        self.threshold = check_float("threshold", threshold, 0)

    def forward(self, view: StepView) -> Sequence[bool]:
        return [max(nodes) >= self.threshold for nodes in self.survival(view)]

    def survival(self, view: StepView) -> list[list[float]]:
        """Returns the chance of the path to each frontier node, sample by sample; 1 for a root."""
        return [[math.prod(draw.probability for draw in path) for path in nodes] for nodes in view.paths]
