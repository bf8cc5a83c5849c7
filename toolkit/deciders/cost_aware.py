"""The policy that spends a step's time where it brings most tokens.

Everything is weighed in tokens: a second is worth the tokens that decoding brings in it, and a draft its chance to be
accepted. What drafts cost is measured once, what they bring is learned from every verdict.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice, takewhile
from operator import mul

from arbordraft.deciders.base import Decider
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.deciders.decisions import Plan, RowPrices, Situation, StepView
from arbordraft.deciders.simple import PathSurvival
from arbordraft.trees.verdict import Outcome
from arbordraft.utils.checks import check_float, check_instance, check_int

_DEPTHS = 4  # depths that are told apart; the last one stands for all that are deeper
_FALL = 0.85  # acceptance below the first level relative to that there, where nothing is known
_WEIGHT, _LEAST = 4.0, 0.1  # drafted steps that what is known beforehand counts for, until more is known, and then
_IDLE = 0.99  # what a step without drafts leaves of what was learned: what was bad for them may have passed
_AHEAD = 16  # rows of a sample among which the cheapest ones are looked for
_PACE = 8  # a batch takes as long as its last sample: tokens of those ahead are worth less, by this power
_SOON = 16  # steps in which what a drafter has to read first is to pay, or in all that are left
_MARGIN = 1.1  # how much more than they take drafts must bring: not all that they take is known
_LAG, _MOST = 0.1, 4  # more for every doubling of a batch that ends with its last sample: what others gain is half lost
_PATIENCE, _PAUSE = 2, 16  # steps without drafts after which fewer look for some, and the fewest: one in so many
_WORTH, _LARGE = 512, 8192  # tokens, decoded by rough costs or wanted at once, that are worth a measurement
_ROUNDS = 3  # the rate that drafts bring and the drafts that are worth it settle together


@dataclass
class _Record:
    """Of a sample and a drafter, by depth, recent steps counting more."""

    tried: list[float] = field(default_factory=lambda: [0.0] * _DEPTHS)  # nodes whose children were verified
    accepted: list[float] = field(default_factory=lambda: [0.0] * _DEPTHS)  # those of which one was accepted
    stated: list[float] = field(default_factory=lambda: [0.0] * _DEPTHS)  # as many as were expected to
    presumed: list[float] = field(default_factory=lambda: [_WEIGHT] * _DEPTHS)  # what was known beforehand counts for
    steps: int = 0
    idle: int = 0  # of them since drafts of this drafter were verified
    quiet: int = 0  # of them without drafts of anybody, which are still to fade

    @property
    def rests(self) -> bool:
        """Whether this step is not one to look for drafts: to weigh them takes time, too.

        The longer nothing paid, the fewer are; those of samples that began together are the same ones.
        """
        return self.idle >= _PATIENCE and self.steps % min(_PAUSE, 1 << (self.idle.bit_length() - 1)) > 0

    def fade(self, share: float) -> None:
        for sums in (self.tried, self.accepted, self.stated):
            sums[:] = [share * value for value in sums]

    def wake(self) -> None:
        """Fades for the steps without drafts, at once: most of them are followed by another."""
        if self.quiet:
            share, self.quiet = _IDLE**self.quiet, 0
            self.fade(share)
            self.presumed = [_WEIGHT - share * (_WEIGHT - weight) for weight in self.presumed]


class CostAware(Decider):
    """Drafts and verifies what raises expected tokens per second, down to nothing, and more again when it pays again.

    Before a step it follows from the acceptance of the samples' drafts lately and from what forwards and levels cost on
    this machine which samples draft at all, and what one level more, and one row more, would have to gain. Then trees
    grow where they gain that by their draft probabilities, corrected by how often such probabilities came true. In the
    end the likeliest drafts are verified, as many as pay. Samples whose text does not depend on what is drafted, greedy
    ones and those with shared noise, are weighed together. Any other decides for itself, for a batch of its like (see
    ``expected_batch`` of :class:`~arbordraft.SpeculativeDecoder`), and its trees are ended, not pruned.

    Args:
        costs: measured by :func:`~arbordraft.decoding.measuring.known_costs`, or by ``arbordraft tune --costs``; a
            :class:`CostTable` of rows alone takes drafting for free.
        nodes: most rows of a sample that are verified on average, root included; by default as many as pay.
        survival: estimates the chances of paths instead of draft probabilities, level by level; its threshold is not
            used.
        decay: share of the old averages in the new ones, in [0, 1].

    Attributes:
        measure: where ``costs`` are rough, a function that finds better ones, else ``None``. It is called once decoding
            is worth it: behind the first 512 tokens, or before thousands are wanted at once, while nothing is decoded.
            Given a function that says whether to break off, or ``None``, it returns costs, or ``None`` if it did.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if one is out of range.

    Source: the gain of the best (sample, position) pairs from TETRIS (Wu et al., ACL 2025) and DSpark
    (arXiv:2607.05147); expanding and reranking from EAGLE-2 (Li et al., 2024); weighing gains against the long-run rate
    is renewal reward theory.

    Examples:
        >>> costs = StepCosts(CostTable((1, 9), (1.0, 2.0)), CostTable((1, 8), (0.3, 0.3)))
        >>> decider = CostAware(costs)
        >>> decider.plan(Situation([6], [decider.start()], acceptance=[0.8])).levels
        [6]
        >>> decider.plan(Situation([6], [decider.start()], acceptance=[0.2])).levels
        [0]
    """

    def __init__(
        self,
        costs: StepCosts | CostTable,
        nodes: int | None = None,
        survival: PathSurvival | None = None,
        decay: float = 0.95,
    ) -> None:
        super().__init__()
        check_instance("costs", costs, StepCosts, CostTable)
        self.costs = StepCosts(costs, CostTable((1,), (1e-9,))) if isinstance(costs, CostTable) else costs
        self.measure: Callable[[Callable[[], bool] | None], StepCosts | None] | None = None
        self._decoded = 0
        self.nodes = None if nodes is None else check_int("nodes", nodes, 1)
        self.survival = survival
        if survival is not None:
            check_instance("survival", survival, PathSurvival)
            self.anticipating = survival.anticipating
        self.decay = check_float("decay", decay, 0, 1)
        self._slopes: dict[int, float] = {}
        self._times = [0.0]

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        """Whether draft probabilities are the chances of paths: ``survival`` has to be asked level by level."""
        return self.survival is None

    def start(self) -> dict[str, _Record]:
        return {}

    def expect(self, tokens: int, hurry: Callable[[], bool] | None = None) -> None:
        if self._decoded >= _WORTH or tokens >= _LARGE:
            self.settle(hurry)

    def settle(self, hurry: Callable[[], bool] | None = None) -> None:
        """Measures now what is still rough; a failure is warned of, and leaves the costs as they are.

        Args:
            hurry: whether to break off, and go on being rough; ``None`` never to.
        """
        measure, self.measure = self.measure, None
        if measure is None:
            return
        try:
            found = measure(hurry)
        except Exception as error:
            warnings.warn(f"what steps cost could not be measured, rough costs stay: {error}", stacklevel=2)
            return
        if found is None:
            self.measure = measure
        else:
            self.costs = found
            self._slopes, self._times = {}, [0.0]  # of the old ones

    def learn(self, memory: dict[str, _Record], outcome: Outcome) -> None:
        self._decoded += outcome.accepted + 1
        for source, record in memory.items():
            record.steps += 1
            record.idle = 0 if outcome.drafted and source == outcome.source else record.idle + 1
        if not outcome.drafted:
            for record in memory.values():
                record.quiet += 1
            return
        record = memory.setdefault(outcome.source, _Record())
        record.wake()
        record.fade(self.decay)
        for depth, stated in enumerate(outcome.stated):
            if depth in outcome.certain:
                continue
            at = min(depth, _DEPTHS - 1)
            record.tried[at] += 1
            record.accepted[at] += depth < outcome.accepted
            record.stated[at] += min(1.0, stated)
        # A promise that does not come true is forgotten, or whoever makes a high one would be drafted with for ever.
        for at in range(min(len(outcome.stated), _DEPTHS)):
            record.presumed[at] = max(_LEAST, self.decay * record.presumed[at])

    def rests(self, memory: dict[str, _Record]) -> bool:
        return bool(memory) and all(record.rests for record in memory.values())

    def forward(self, view: StepView) -> Sequence[bool]:
        """Asks for one level what :meth:`plan` answers for all."""
        reaches = (self.survival or PathSurvival()).survival(view)
        max_depth = [view.depth + 1] * len(reaches)
        plan = self.plan(Situation(max_depth, view.memory, view.alike, view.source, view.acceptance))
        gains = [
            sum(reach * next_[min(view.depth, len(next_) - 1)] - plan.row for reach in nodes)
            for nodes, next_ in zip(reaches, plan.next, strict=True)
        ]
        going = [levels > 0 and gain >= 0 for levels, gain in zip(plan.levels, gains, strict=True)]
        together = sum(gain for gain, goes_on in zip(gains, going, strict=True) if goes_on) * view.alike
        return [goes_on and together >= plan.level for goes_on in going]

    def plan(self, situation: Situation) -> Plan:
        records = [memory.setdefault(situation.source, _Record()) for memory in situation.memory]
        if all(record.rests for record in records):
            return Plan.everything([0] * len(records))
        for record in records:
            record.wake()
        samples = len(records) * situation.alike + situation.extra_rows
        base = self._target(samples) + self.costs.rest
        longest = max(situation.left, default=1)
        weights = [(left / longest) ** _PACE for left in situation.left] or [1.0] * len(records)
        # A token more of everybody who is last saves a step: the fewer these are, the more each of theirs is worth.
        worth = sum(weights) * situation.alike + situation.extra_rows
        margin = _MARGIN + (
            _LAG * min(_MOST, math.log2(len(records) + situation.extra_rows)) if situation.left else 0.0
        )
        rate = margin * worth / base
        row = self._slope(samples)
        budget = None if self.nodes is None else len(records) * (self.nodes - 1)
        if budget is not None:
            situation = replace(situation, max_depth=[min(max_depth, budget) for max_depth in situation.max_depth])
        trust = [_trust(record) for record in records]
        if situation.free:  # they are found first: how far they go on is for what was found to say
            looking = self.costs.looking(samples)
            keep = self._keeping(samples, worth, situation.alike, rate, budget, margin, looking)
            ones = [(1.0,)] * len(records)
            levels = [
                0 if record.rests else max_depth for record, max_depth in zip(records, situation.max_depth, strict=True)
            ]
            return Plan(levels, trust, ones, row=rate * row, budget=budget, keep=keep, weights=weights)
        fall = _FALL if situation.informative else 1.0
        following = [_expected(record, situation.acceptance, fall) for record in records]
        draft, widest = self.costs.draft, self.costs.draft.rows[-1]
        level = draft(1) + self.costs.decide
        each = 0.0 if widest == 1 else (draft(widest) - draft(1)) / (widest - 1)
        row += each
        # Where drafts are as good as those before them, to stop early saves nothing of what was not known.
        ahead = margin if situation.informative else 1.0
        for _ in range(_ROUNDS):
            lengths, gains, gained, seconds = self._chains(situation, following, weights, rate, level, row, each)
            before, rate = rate, max(rate, ahead * (worth + gained) / (base + seconds))
            if rate == before:
                break
        lag = situation.lag or [0] * len(gains)
        soon = [min(_SOON, left) for left in situation.left] or [_SOON] * len(gains)
        reading = [rate * each * tokens / steps for tokens, steps in zip(lag, soon, strict=True)]
        gains = [gain - cost for gain, cost in zip(gains, reading, strict=True)]
        longest_trees = situation.max_depth if situation.informative else lengths
        return Plan(
            [most if gain > 0 else 0 for most, gain in zip(longest_trees, gains, strict=True)],
            trust,
            following,
            level=rate * level,
            row=rate * row,
            budget=budget,
            keep=RowPrices(self._price(samples, situation.alike, rate), budget),
            weights=weights,
            gains=gains,
        )

    def _chains(
        self,
        situation: Situation,
        following: Sequence[Sequence[float]],
        weights: Sequence[float],
        rate: float,
        extra: float,
        row: float,
        each: float,
    ) -> tuple[list[int], list[float], float, float]:
        """The chains that bring most: their lengths, what each is worth, and what all together bring and take.

        Of what is drafted only the likeliest part is verified, as far as it pays. A row takes ``row`` at least,
        ``each`` of it in drafting.
        """
        alike = situation.alike
        samples, drafted = len(situation.max_depth) * alike + situation.extra_rows, 0
        before = self._target(samples)
        chains: list[list[float]] = []
        for max_depth, next_, weight in zip(situation.max_depth, following, weights, strict=True):
            chances = (next_[min(depth, len(next_) - 1)] for depth in range(max_depth))
            path = islice(accumulate(chances, mul, initial=weight), 1, None)
            chains.append(list(takewhile(lambda reach: reach >= rate * row, path)))
        start = self.costs.starting(alike * sum(map(bool, chains)))
        best, worth, gained, seconds, share = 0, 0.0, 0.0, 0.0, 0.0
        reaches: list[float] = []
        for level in range(max(map(len, chains), default=0)):
            here = [chain[level] for chain in chains if len(chain) > level]
            drafted += len(here) * alike
            drafting = start + (level + 1) * extra + each * drafted
            reaches = sorted(reaches + here, reverse=True)
            for verified, total in enumerate(accumulate(reaches), 1):
                time = drafting + self._target(samples + verified * alike) - before
                if total * alike - rate * time > worth:
                    best, worth, gained, seconds = level + 1, total * alike - rate * time, total * alike, time
                    share = (start + extra * best) / (verified * alike)  # of the levels, for every row of them
        chains = [chain[:best] for chain in chains]
        worths = [sum(chain) - rate * (row + share) * len(chain) for chain in chains]
        return list(map(len, chains)), worths, gained, seconds

    def _target(self, rows: int) -> float:
        """Seconds of a forward, looked up: they are asked for by the hundred in every step."""
        times = self._times  # which another thread may replace
        while len(times) <= rows:
            times.append(self.costs.target(len(times)))
        return times[rows]

    def _slope(self, samples: int) -> float:
        """Seconds of a row more, where rows are cheapest."""
        slopes = self._slopes
        if samples not in slopes:
            slopes[samples] = self.costs.target.least_slope(samples, _AHEAD * samples)
        return slopes[samples]

    def _price(self, samples: int, alike: int, rate: float) -> Callable[[int], float]:
        """What the rows of drafts, by their number, could bring elsewhere, where decoding brings ``rate``."""
        before = self._target(samples)
        return lambda drafts: rate * (self._target(samples + drafts * alike) - before) / alike

    def _keeping(
        self,
        samples: int,
        tokens: float,
        alike: int,
        rate: float,
        budget: int | None,
        margin: float,
        drafting: float,
    ) -> Callable[[Sequence[float]], int]:
        """How many drafts are worth their rows by what they bring themselves, and at least ``rate``.

        Without drafts ``samples`` rows bring what counts for ``tokens``; with any the step takes ``drafting`` more.
        """
        before = self._target(samples)
        base = before + self.costs.rest

        def keep(chances: Sequence[float]) -> int:
            gained = list(accumulate(chances[:budget], initial=0.0))
            times = (drafting + self._target(samples + drafts * alike) - before for drafts in range(1, len(gained)))
            taken = [0.0, *times]
            worth, count = rate, 0
            for _ in range(_ROUNDS):
                count = max(range(len(gained)), key=lambda drafts: gained[drafts] * alike - worth * taken[drafts])
                worth = max(worth, margin * (tokens + gained[count] * alike) / (base + taken[count]))
            return count

        return keep


def _expected(record: _Record, acceptance: Sequence[float], fall: float) -> list[float]:
    """How often some child of a node is accepted, by depth: unless it is known, ``fall`` times as often deeper down."""
    known = [acceptance[0], *[fall * acceptance[0]] * (_DEPTHS - 1)]
    sums = zip(record.accepted, record.tried, record.presumed, known, strict=True)
    return [(right + weight * before) / (tried + weight) for right, tried, weight, before in sums]


def _trust(record: _Record) -> list[float]:
    """How often drafts came true for every time that they were expected to, by depth."""
    sums = zip(record.accepted, record.stated, record.presumed, strict=True)
    return [(right + weight) / (stated + weight) for right, stated, weight in sums]
