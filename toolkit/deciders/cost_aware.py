"""A decider that weighs what a level of drafts may gain against the time it takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from arbordraft.checks import instance, real
from arbordraft.costs import StepCosts
from arbordraft.deciders.base import Decider
from arbordraft.deciders.simple import PathSurvival
from arbordraft.types import Outcome, StepView

_PRIOR = 0.7  # acceptance of a level of a sample of which nothing is known


@dataclass
class _Pace:
    acceptance: float  # of a level, given that the one above it was accepted
    emitted: float  # tokens per step
    drafted: float  # levels per step


class CostAware(Decider):
    """Goes on while another level is worth its time: while it gains tokens at least as fast as decoding does so far.

    That is the rule by which tokens per second are highest in the long run. A level's gain is the chance that the paths
    to the frontier survive, times the acceptance of the sample's levels lately; its time is what a forward of the
    drafter and more rows in the target's forward cost on this machine. Of a greedy batch, the samples that gain most go
    on, as many as pay together; a sampled one goes on if it would pay in a batch of its like, see ``expected_batch`` of
    :class:`~arbordraft.SpeculativeDecoder`.

    Args:
        costs: measured by :func:`~arbordraft.measuring.measure_costs`, or by ``arbordraft tune --costs``.
        survival: estimates the chances of paths; its threshold is not used.
        decay: share of the old averages in the new ones, in [0, 1].

    Source: the gain of the best (sample, position) pairs from TETRIS (Wu et al., ACL 2025) and DSpark
    (arXiv:2607.05147); marginal gain against the long-run rate: renewal reward theory.
    """

    def __init__(self, costs: StepCosts, survival: PathSurvival | None = None, decay: float = 0.9) -> None:
        super().__init__()
        instance("costs", costs, StepCosts)
        self.costs, self.decay = costs, real("decay", decay, 0, 1)
        self.survival = PathSurvival() if survival is None else survival
        instance("survival", self.survival, PathSurvival)
        self.anticipating = self.survival.anticipating

    def start(self) -> _Pace:
        return _Pace(acceptance=_PRIOR, emitted=1.0, drafted=0.0)

    def learn(self, memory: _Pace, outcome: Outcome) -> None:
        new = 1 - self.decay
        memory.emitted += new * (1 + outcome.accepted - memory.emitted)
        memory.drafted += new * (outcome.drafted - memory.drafted)
        if outcome.drafted:
            tried = min(outcome.drafted, outcome.accepted + 1)
            share = 1 - self.decay**tried
            memory.acceptance += share * (outcome.accepted / tried - memory.acceptance)
        else:  # what was bad for drafts may have passed: from time to time it has to be tried
            memory.acceptance += new / 8 * (_PRIOR - memory.acceptance)

    def forward(self, view: StepView) -> Sequence[bool]:
        chances = [min(1.0, sum(nodes)) for nodes in self.survival.survival(view)]
        gains = [chance * past.acceptance for chance, past in zip(chances, view.memory, strict=True)]
        others = view.batch / len(gains)  # those that have stopped are taken to be like those that go on
        emitted = sum(past.emitted for past in view.memory) * others
        drafted = sum(past.drafted for past in view.memory) / len(gains)
        rate = emitted / self.costs.step(view.batch, drafted)
        order = sorted(range(len(gains)), key=gains.__getitem__, reverse=True)
        gain, rows, worth, count = 0.0, 0, 0.0, 0
        for admitted, sample in enumerate(order, 1):
            gain += gains[sample] * view.alike
            rows += len(view.paths[sample]) * view.alike
            if (surplus := gain - rate * self.costs.level(view.planned, rows)) >= worth:
                worth, count = surplus, admitted
        kept = set(order[:count])
        return [sample in kept for sample in range(len(gains))]
