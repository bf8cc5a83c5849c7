"""Costs of steps as the running program measures them: a table measured once is only where they begin.

A machine is busier than it was, texts get longer, requests have processors whose rows take time to verify. So seconds
of parts of steps are compared with those that the table predicts, and later predictions are multiplied with the ratio.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from operator import mul

import numpy as np
import numpy.typing as npt

from arbordraft.deciders.costs import CostTable, StepCosts, levelled

Reals = npt.NDArray[np.float64]

_RECENT = 0.9  # share of older observations in an average, per observation
_STEADY = 0.97  # the same for rows of the target, which change less than the speed of the machine
_KEPT = 0.995  # share of the observations of a drafter that still counts after a step in which it did not draft
_PRIOR = 1.0  # observations that a table counts for
_MOST_CHANGE = 3.0  # most factor by which an observation may exceed the average: a paused process is no evidence
_NOTED = 0.05  # relative change of a time from which plans follow it
_SMALL = 0.002  # change, in forwards of one row, below which they never do


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step; on a CPU, those in which the decoding thread had a processor.

    Args:
        samples: number of samples that took part.
        rows: rows of the target's forward.
        drafted: levels that each kind of drafter drafted, those included whose drafts were dropped.
        read: committed tokens that drafters read first, those of resting drafters above all.
        draft: seconds of drafting.
        target: seconds of the target's forward.
        rest: all other seconds.
    """

    samples: int
    rows: int
    drafted: Mapping[str, int]
    draft: float
    target: float
    rest: float
    read: int = 0


class _Average:
    """An average of recent observations, to which the prior value counts as one of them."""

    def __init__(self, prior: float) -> None:
        self.prior = self.value = prior
        self.weight = 0.0
        self._sum = 0.0

    def note(self, value: float, most: float) -> None:
        """Takes an observation, limited to ``most``."""
        self._sum, self.weight = _RECENT * self._sum + min(value, most), _RECENT * self.weight + 1
        self._settle()

    def forget(self) -> None:
        """Lets past observations count a little less, and the prior value a little more."""
        self._sum, self.weight = _KEPT * self._sum, _KEPT * self.weight
        self._settle()

    def _settle(self) -> None:
        self.value = (_PRIOR * self.prior + self._sum) / (_PRIOR + self.weight)


class _Forwards:
    """Times of the target's forwards: the speed of the machine, and a ratio to it for each number of rows.

    So steps of many rows, when they become usual, do not make those of few rows look cheap.
    """

    def __init__(self, rows: Reals) -> None:
        self._rows = rows
        self._places: dict[int, int] = {}
        self._speed: float | None = None  # seconds of the prior's unit, but for a constant factor
        self._ratios = [0.0] * len(rows)  # averages of seconds relative to that speed
        self.weights = [0.0] * len(rows)  # observations of each

    def note(self, rows: int, seconds: float) -> float:
        """Takes the seconds of a forward per unit of the prior; returns those of a usual forward."""
        if (place := self._places.get(rows)) is None:
            self._places[rows] = place = int(np.abs(self._rows - rows).argmin())
        weight, ratio = self.weights[place], self._ratios[place]
        speed = seconds if self._speed is None else self._speed
        if weight:
            known = (1 - _RECENT) * weight / (weight + _PRIOR)  # one observation says little
            speed += known * (min(seconds / ratio, _MOST_CHANGE * speed) - speed)
        now = min(seconds / speed, _MOST_CHANGE * (ratio or self._usual() or 1.0))
        self._speed, self.weights[place] = speed, _STEADY * weight + 1
        self._ratios[place] = ratio + (now - ratio) / self.weights[place]
        return speed * self._usual()

    def _usual(self) -> float:
        """Returns the average ratio."""
        shares = [weight / (weight + _PRIOR) for weight in self.weights]
        return sum(map(mul, shares, self._ratios)) / (sum(shares) or 1.0)

    def ratios(self) -> Reals:
        """Returns the times of forwards relative to usual ones, by the prior's rows.

        Rows not seen yet follow those next to them. Otherwise they would look cheap beside rows that turned out slow.
        """
        weights = np.array(self.weights)
        if not (seen := weights.nonzero()[0]).size:
            return np.ones(len(weights))
        ratios = (_PRIOR + weights * np.array(self._ratios) / self._usual()) / (_PRIOR + weights)
        return np.interp(np.arange(len(ratios)), seen, ratios[seen])


class RunningCosts:
    """Follows the costs of a program's steps.

    All costs are relative to the target's forwards, since plans depend on ratios alone. A drafter whose drafts do not
    pay is not observed any more. Observations of it then fade, the slower the more there are. So it is tried again at
    growing intervals.

    Args:
        prior: costs measured before, or estimated; in any unit.
    """

    def __init__(self, prior: StepCosts) -> None:
        self.prior = prior
        self._rows = np.array(prior.target.rows)
        self._forwards = _Forwards(self._rows)
        self._rest, self._per_row = _Average(prior.rest), _Average(0.0)
        self._looking: _Average | None = None  # seconds of lookups per sample
        self._drafting: dict[str, _Average] = {}
        self._followed: dict[str, tuple[Reals, StepCosts]] = {}

    def learn(self, times: StepTimes, free: Collection[str] = ()) -> None:
        """Takes the times of a step.

        Args:
            times: the times.
            free: kinds of drafters whose levels take almost no time.
        """
        if times.target <= 0:
            return
        one = self.prior.target(1)
        unit = self._forwards.note(times.rows, times.target / self.prior.target(times.rows))
        rest, drafts = times.rest / unit, times.rows - times.samples
        if drafts:
            self._per_row.note(max(0.0, rest - self._rest.value) / drafts, one)
        else:
            self._rest.note(rest, _MOST_CHANGE * max(self._rest.value, one))
        for kind, known in list(self._drafting.items()):  # other batches may add kinds
            if kind not in times.drafted:
                known.forget()
        costly = [kind for kind in times.drafted if kind not in free]
        if costly and (expected := self._expected(times, free)) > 0:
            average = self._drafting.setdefault(costly[-1], _Average(1.0))
            average.note(times.draft / unit / expected, _MOST_CHANGE * average.value)
        elif times.drafted and not costly:
            if self._looking is None:
                self._looking = _Average(self.prior.looking(times.samples) / times.samples)
            self._looking.note(times.draft / unit / times.samples, one)

    def _expected(self, times: StepTimes, free: Collection[str]) -> float:
        """Returns how long drafting was expected to take, in the prior's unit."""
        prior, samples, total = self.prior, times.samples, 0.0
        for kind, levels in times.drafted.items():
            if kind in free:
                total += self.looking(samples)
            elif levels:
                per_level = max(1.0, (times.rows - samples) / levels)
                total += prior.starting(samples) + levels * (prior.draft(per_level) + prior.decide)
                total += times.read * prior.per_read
        return total

    def looking(self, samples: int) -> float:
        """Returns the time of lookups for some samples, in the prior's unit."""
        return self.prior.looking(samples) if self._looking is None else self._looking.value * samples

    def seen(self, kind: str, *, free: bool) -> bool:
        """Returns whether observations of a kind of drafter count more than its prior costs."""
        average = self._looking if free else self._drafting.get(kind)
        return average is not None and average.weight > _PRIOR

    def of(self, kind: str) -> StepCosts:
        """Returns the costs of steps with a kind of drafter; the same object while they hardly change."""
        prior, drafting = self.prior, self._drafting[kind].value if kind in self._drafting else 1.0
        seconds = self._forwards.ratios() * prior.target.seconds + self._per_row.value * (self._rows - 1)
        # One slow step of a seldom number of rows must not make the rows beyond it look free.
        seconds = np.array(levelled(seconds.tolist(), [_PRIOR + weight for weight in self._forwards.weights]))
        looking = (prior.lookup, prior.finding) if self._looking is None else 2 * (self._looking.value,)
        now = np.array([*seconds, drafting * prior.draft(1), self._rest.value, *looking])
        if kind in self._followed:
            before, costs = self._followed[kind]
            if (np.abs(now - before) <= _NOTED * before + _SMALL * seconds[0]).all():
                return costs
        costs = replace(
            prior,
            target=CostTable(prior.target.rows, tuple(seconds.tolist())),
            draft=CostTable(prior.draft.rows, tuple(drafting * known for known in prior.draft.seconds)),
            rest=self._rest.value,
            start=drafting * prior.start,
            joining=drafting * prior.joining,
            lookup=looking[0],
            finding=looking[1],
        )
        self._followed[kind] = now, costs
        return costs


__all__ = ["RunningCosts", "StepTimes"]
