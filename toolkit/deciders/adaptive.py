"""Deciders that learn, sample by sample, from the acceptance of earlier drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from arbordraft.deciders.base import Decider, growth_of
from arbordraft.deciders.decisions import StepView
from arbordraft.deciders.simple import EntropyBound
from arbordraft.trees.verdict import Causality, Outcome
from arbordraft.utils.checks import check_float, check_instance, check_int, check_positive


@dataclass
class _Length:
    levels: float


class Heuristic(Decider):
    """Drafts two levels more after a step that accepted all levels, one level less after any other step.

    Args:
        first: number of levels in a sample's first step with drafts, 1 or more.
        longest: greatest number of levels; at least ``first``.

    Source: the "heuristic" schedule of Hugging Face's assisted generation, per sample.
    """

    growth = Causality.FIXED

    def __init__(self, first: int = 5, longest: int = 20) -> None:
        super().__init__()
        self.longest = check_int("longest", longest, 1)
        self.first = check_int("first", first, 1, self.longest)

    def start(self) -> _Length:
        return _Length(self.first)

    def learn(self, memory: _Length, outcome: Outcome) -> None:
        if outcome.drafted:
            change = 2 if outcome.accepted == outcome.drafted else -1
            memory.levels = min(self.longest, max(1, memory.levels + change))

    def forward(self, view: StepView) -> Sequence[bool]:
        return [view.depth < past.levels for past in view.memory]


class AcceptedAverage(Decider):
    """Drafts ``margin`` levels more than were accepted on average lately.

    Args:
        first: average that a sample starts with, 0 or more.
        margin: levels beyond the average, above 0; may be a fraction.
        decay: share of the old average in the new one, in [0, 1].

    Source: the moving average behind SGLang's adaptive draft lengths, without its tiers.
    """

    growth = Causality.FIXED

    def __init__(self, first: float = 3.0, margin: float = 1.0, decay: float = 0.8) -> None:
        super().__init__()
        self.first = check_float("first", first, 0)
        self.margin = check_positive("margin", margin)
        self.decay = check_float("decay", decay, 0, 1)

    def start(self) -> _Length:
        return _Length(self.first)

    def learn(self, memory: _Length, outcome: Outcome) -> None:
        if outcome.drafted:
            memory.levels = self.decay * memory.levels + (1 - self.decay) * outcome.accepted

    def forward(self, view: StepView) -> Sequence[bool]:
        return [view.depth < past.levels + self.margin for past in view.memory]


@dataclass
class _Bound:
    threshold: float
    accepted: float


class AdaEDL(EntropyBound):
    """An entropy bound whose threshold follows the sample's own acceptance.

    If the share of accepted levels is below ``wanted``, the threshold rises; otherwise it falls.

    Args:
        threshold: threshold that a sample starts with.
        gamma: see :class:`EntropyBound`.
        wanted: share of accepted levels to aim for, in [0, 1].
        step: distance from the threshold to its aim, above 0.
        decay: share of the old threshold in the new one, in [0, 1]; the rest is its aim. The old average of acceptance
            always counts half.

    Source: AdaEDL (Agrawal et al., 2024) with the update of Draft & Verify (Zhang et al., ACL 2024).
    """

    def __init__(
        self, threshold: float = 0.3, gamma: float = 0.2, wanted: float = 0.7, step: float = 0.05, decay: float = 0.5
    ) -> None:
        super().__init__(threshold, gamma)
        self.wanted = check_float("wanted", wanted, 0, 1)
        self.step = check_positive("step", step)
        self.decay = check_float("decay", decay, 0, 1)

    def start(self) -> _Bound:
        return _Bound(self.threshold, self.wanted)

    def learn(self, memory: _Bound, outcome: Outcome) -> None:
        if outcome.drafted:
            memory.accepted += (outcome.accepted / outcome.drafted - memory.accepted) / 2
            aim = memory.threshold + (self.step if memory.accepted < self.wanted else -self.step)
            memory.threshold = min(1.0, max(0.0, self.decay * memory.threshold + (1 - self.decay) * aim))

    def forward(self, view: StepView) -> Sequence[bool]:
        return [promise >= past.threshold for promise, past in zip(self.promises(view), view.memory, strict=True)]


@dataclass
class _Arms:
    memories: list[Any]
    pulls: list[int]
    rewards: list[float]
    arm: int = 0


class Bandit(Decider):
    """Finds out by UCB1, sample by sample, which of several deciders pays best.

    A step's reward is its tokens divided by its time, as a share of the greatest possible ratio: that of ``longest``
    accepted levels. The time is predicted, not measured, so the choice does not depend on the machine's other load.

    Args:
        deciders: two or more deciders to choose from. One decides in each step; all learn from it.
        cost: time of drafting and verifying one more level, in units of a decoding step without drafts; 0 or more.
        longest: number of draft levels that the topology allows, 1 or more.
        exploration: weight of the bonus for deciders that were seldom tried, 0 or more.

    Source: UCB1 (Auer et al., 2002) over stopping rules as in TapOut (2025), over settings as in BanditSpec (2025).
    """

    def __init__(
        self, deciders: Sequence[Decider], cost: float = 0.2, longest: int = 8, exploration: float = 0.5
    ) -> None:
        super().__init__()
        check_instance("deciders", deciders, Sequence, nn.ModuleList)
        for index, decider in enumerate(deciders):
            check_instance(f"deciders[{index}]", decider, Decider)
        if len(deciders) < 2:
            raise ValueError(f"a bandit needs at least two deciders to choose from, got {len(deciders)}")
        self.growth = max(map(growth_of, deciders))
        self.deciders: Sequence[Decider] = nn.ModuleList(deciders)  # type: ignore[assignment]
        self.cost = check_float("cost", cost, 0)
        self.longest = check_int("longest", longest, 1)
        self.exploration = check_float("exploration", exploration, 0)

    def start(self) -> _Arms:
        count = len(self.deciders)
        return _Arms([decider.start() for decider in self.deciders], [0] * count, [0.0] * count)

    def learn(self, memory: _Arms, outcome: Outcome) -> None:
        for decider, known in zip(self.deciders, memory.memories, strict=True):
            decider.learn(known, outcome)
        best = (1 + self.longest) / (1 + self.cost * self.longest)
        memory.pulls[memory.arm] += 1
        memory.rewards[memory.arm] += (1 + outcome.accepted) / (1 + self.cost * outcome.drafted) / best
        steps = sum(memory.pulls)

        def bound(arm: int) -> float:
            pulls = memory.pulls[arm]
            if not pulls:
                return math.inf
            return memory.rewards[arm] / pulls + self.exploration * math.sqrt(2 * math.log(steps) / pulls)

        memory.arm = max(range(len(memory.pulls)), key=bound)

    def forward(self, view: StepView) -> Sequence[bool]:
        answers = [False] * len(view.paths)
        for arm, decider in enumerate(self.deciders):
            if mine := [sample for sample, past in enumerate(view.memory) if past.arm == arm]:
                part = replace(
                    view,
                    paths=[view.paths[sample] for sample in mine],
                    memory=[view.memory[sample].memories[arm] for sample in mine],
                )
                for sample, goes_on in zip(mine, decider(part), strict=True):
                    answers[sample] = goes_on
        return answers
