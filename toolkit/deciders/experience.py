"""Experience with drafts: their acceptance by depth, and the yield of looking for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from arbordraft.trees.verdict import Outcome

DEPTHS = 4  # depths with records of their own; the last one stands for all greater depths
_PRIOR_STEPS, _LEAST_PRIOR_STEPS = 4.0, 0.1  # drafted steps that the prior counts for: at first, and at least
COMMON_PRIOR_STEPS = 16.0  # of the experience over all texts; a text's own verdicts count in its record already
_QUIET_DECAY = 0.99  # of a record, per step without drafts, since the reasons against drafts may have passed
_PATIENCE, _PAUSE = 2, 16  # steps without drafts before fewer steps look for drafts; at least one in this many does
_LATELY, _FIRST_LOOKS, _LONGEST_PAUSE = 0.8, 4.0, 64  # of looks: share of older ones, gain of the first ones, steps
_LOOK_MARGIN = 1.5  # factor by which looks must bring more than they cost


@dataclass
class Record:
    """Experience with one drafter for one sample, by depth; recent steps count more."""

    tried: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)  # nodes whose children were verified
    accepted: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)  # tried nodes with an accepted child
    stated: list[float] = field(default_factory=lambda: [0.0] * DEPTHS)  # tried nodes expected to have one
    prior_steps: float = _PRIOR_STEPS  # drafted steps that the prior counts for at first
    presumed: list[float] = field(init=False)  # and now, by depth
    steps: int = 0
    idle: int = 0  # steps since drafts of this drafter were verified
    quiet: int = 0  # steps without drafts of any drafter, for which the record is still to fade
    weight: float = 1.0  # worth of the sample's tokens in this step

    def __post_init__(self) -> None:
        self.presumed = [self.prior_steps] * DEPTHS

    @property
    def rests(self) -> bool:
        """Whether this step looks for no drafts, since weighing them takes time, too.

        The longer no drafts paid, the fewer steps look for any. Samples that began together look in the same steps.
        """
        return skips_step(self.idle, self.steps)

    def note(self, outcome: Outcome, decay: float) -> None:
        """Takes the verdict about some drafts."""
        self.fade(decay)
        for depth, stated in enumerate(outcome.stated):
            if depth in outcome.certain:
                continue
            at = min(depth, DEPTHS - 1)
            self.tried[at] += 1
            self.accepted[at] += depth < outcome.accepted
            self.stated[at] += min(1.0, stated)

    def rates(self, prior: Sequence[float]) -> list[float]:
        """Returns how often some child of a node is accepted, by depth, given the rates before any experience."""
        sums = zip(self.accepted, self.tried, self.presumed, prior, strict=True)
        return [(right + weight * before) / (tried + weight) for right, tried, weight, before in sums]

    def trust(self, usual: Sequence[float]) -> list[float]:
        """Returns, by depth, the acceptance of drafts relative to their draft probabilities, given the usual one."""
        sums = zip(self.accepted, self.stated, self.presumed, usual, strict=True)
        return [(right + weight * before) / (stated + weight) for right, stated, weight, before in sums]

    def doubt(self, levels: int, share: float) -> None:
        """Lets the prior count less at the first levels; one that is too high would keep its drafter for ever."""
        for at in range(min(levels, DEPTHS)):
            self.presumed[at] = max(_LEAST_PRIOR_STEPS, share * self.presumed[at])

    def pass_step(self) -> None:
        """Counts a step without drafts of any drafter."""
        self.steps += 1
        self.idle += 1
        self.quiet += 1

    def fade(self, share: float) -> None:
        """Lets all verdicts so far count less."""
        for sums in (self.tried, self.accepted, self.stated):
            sums[:] = [share * value for value in sums]

    def wake(self) -> None:
        """Fades the record for all steps without drafts at once, since most of them are followed by another."""
        if self.quiet:
            share, self.quiet = _QUIET_DECAY**self.quiet, 0
            self.fade(share)
            self.presumed = [self.prior_steps - share * (self.prior_steps - steps) for steps in self.presumed]


def skips_step(idle: int, steps: int) -> bool:
    """Returns whether step number ``steps`` looks for no drafts after ``idle`` steps without any."""
    return idle >= _PATIENCE and steps % min(_PAUSE, 1 << (idle.bit_length() - 1)) > 0


@dataclass
class Looks:
    """Recent yield of looking for drafts, over all samples whose texts do not depend on drafts."""

    average: float = _FIRST_LOOKS  # gain of a look, in multiples of its cost
    rate: float = 0.0  # tokens that a second is worth
    gained: float = 0.0  # worth of the drafts accepted since the last look, in tokens
    pause: int = 1  # steps without a look after the next one that does not pay
    wait: int = 0  # steps without a look that are left

    def note(self, seconds: float) -> None:
        """Takes the outcome of a look that took so many seconds, those of verifying its drafts included."""
        gain = self.gained / max(self.rate * seconds, 1e-9)
        self.gained = 0.0
        self.average = _LATELY * self.average + (1 - _LATELY) * gain
        if self.average >= _LOOK_MARGIN:
            self.wait, self.pause = 0, 1
        elif gain >= _LOOK_MARGIN:
            self.wait, self.pause = 1, 2
        else:
            self.wait, self.pause = self.pause, min(_LONGEST_PAUSE, 2 * self.pause)


__all__ = ["COMMON_PRIOR_STEPS", "DEPTHS", "Looks", "Record", "skips_step"]
