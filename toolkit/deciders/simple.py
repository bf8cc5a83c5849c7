"""Deciders without parameters to train."""

import math
from collections.abc import Sequence

from arbordraft.deciders.base import Decider
from arbordraft.types import StepView


class FixedDepth(Decider):
    """Drafts down to ``depth`` always; by default down to the topology's leaves."""

    def __init__(self, depth: int | None = None) -> None:
        super().__init__()
        if depth is not None and depth < 0:
            raise ValueError(f"depth must not be negative, got {depth}")
        self.depth = depth

    def forward(self, view: StepView) -> Sequence[bool]:
        return [self.depth is None or view.depth < self.depth] * len(view.history)

    def extra_repr(self) -> str:
        return f"depth={self.depth}"


class ConfidenceThreshold(Decider):
    """Goes on while some token of the last level had a draft probability of at least ``threshold``.

    Source: the confidence stop of Hugging Face's assisted generation, per sample and for trees.
    """

    def __init__(self, threshold: float = 0.4) -> None:
        super().__init__()
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be a probability, got {threshold}")
        self.threshold = threshold

    def forward(self, view: StepView) -> Sequence[bool]:
        return [max(nodes) >= self.threshold for nodes in view.confidence]

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}"


class EntropyBound(Decider):
    """Goes on while the entropy of some draft row still promises an acceptance of at least ``threshold``.

    The promise is ``1 - sqrt(gamma * H)``, ``H`` in nats.

    Source: AdaEDL (Agrawal et al., 2024).
    """

    def __init__(self, threshold: float = 0.3, gamma: float = 0.2) -> None:
        super().__init__()
        if not 0 <= threshold <= 1 or gamma <= 0:
            raise ValueError(f"threshold must lie in [0, 1] and gamma be positive, got {threshold} and {gamma}")
        self.threshold = threshold
        self.gamma = gamma

    def forward(self, view: StepView) -> Sequence[bool]:
        return [1 - math.sqrt(self.gamma * min(nodes)) >= self.threshold for nodes in view.entropy]

    def extra_repr(self) -> str:
        return f"threshold={self.threshold}, gamma={self.gamma}"


class Backoff(Decider):
    """Rests from drafting while drafts keep failing, and tries again after ever longer pauses.

    After ``patience`` drafted steps in a row without an accepted token a sample pauses for 1, 2, 4, ... steps, at most
    ``longest``, with one attempt between pauses. An accepted token ends it.
    """

    def __init__(self, patience: int = 2, longest: int = 16) -> None:
        super().__init__()
        if patience < 1 or longest < 1:
            raise ValueError(f"patience and longest must be positive, got {patience} and {longest}")
        self.patience = patience
        self.longest = longest

    def forward(self, view: StepView) -> Sequence[bool]:
        return [
            past.failures < self.patience or past.idle >= min(self.longest, 2 ** min(past.failures - self.patience, 30))
            for past in view.history
        ]

    def extra_repr(self) -> str:
        return f"patience={self.patience}, longest={self.longest}"
