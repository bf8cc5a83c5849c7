"""The decider that spends a step's time where it brings most tokens.

Times and drafts are compared in tokens. A second is worth the tokens that decoding brings per second. A draft is worth
its chance of acceptance. The cost of drafts is measured once; their gain is learned from every verdict.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, takewhile
from operator import mul

import numpy as np
import numpy.typing as npt

from arbordraft.deciders.base import Decider, growth_of
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.deciders.decisions import Limits, Situation, StepView, Verification
from arbordraft.deciders.experience import COMMON_PRIOR_STEPS, DEPTHS, Looks, Record, skips_step
from arbordraft.deciders.running_costs import RunningCosts, StepTimes
from arbordraft.deciders.simple import PathSurvival
from arbordraft.trees.verdict import Causality, Outcome
from arbordraft.utils.checks import check_float, check_instance, check_int

Reals = npt.NDArray[np.float64]

_FALL = 0.85  # prior acceptance below the first level, relative to that of the first level
_COMMON_DECAY = 0.98  # of the experience over all texts, per drafted step of a text
_ROWS_AHEAD = 16  # rows per sample among which the cheapest ones are sought
_LENGTH_EXPONENT = 8  # of remaining lengths: the last sample ends a batch, so tokens of the others are worth less
_ANSWER = 64  # usual tokens of an answer, before any has ended
_READING_MARGIN = 1.25  # factor by which drafts must save more time than reading takes: most answers end early
_MARGIN, _SEEN_MARGIN = 1.1, 1.06  # factors by which drafts must bring more than estimated, or observed, costs
# Added to them for each doubling of a batch that ends with its last sample: other gains are half lost.
_MARGIN_PER_DOUBLING, _SEEN_PER_DOUBLING, _MOST_DOUBLINGS = 0.1, 0.03, 4
_TOKENS_DECODED = 512  # at rough costs, before an idle engine measures
# A caller waits for a measurement that takes at most a twentieth of the decoding, past and wanted. Before any token was
# decoded, each counts as so many seconds.
_SECONDS_DECODED, _SECONDS_PER_TOKEN = 200.0, 1e-3
_ROUNDS = 3  # iterations in which the rate and the drafts that are worth it settle together


@dataclass
class _Progress:
    """Counts of all texts; an attribute of a module would take microseconds to change."""

    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    steps: int = 0
    idle: int = 0  # steps since drafts were verified
    weighed: int = 0  # samples of the last step in which drafts were weighed


class CostAware(Decider):
    """Drafts and verifies as much as raises expected tokens per second; stops and resumes drafting accordingly.

    Before a step, the decider weighs the recent acceptance of the samples' drafts against the cost of forwards and
    levels on this machine. This decides which samples draft at all, and the gain that a further level or row must
    bring. Trees then grow where draft probabilities, corrected by past acceptance, promise this gain.
    Finally, the likeliest drafts are verified, as many as pay.

    Samples whose text does not depend on drafts, greedy ones and those with shared noise, are weighed together. Any
    other sample is planned alone, as if all samples of its batch were equal. For the size of that batch, see
    ``expected_batch`` of :class:`~arbordraft.SpeculativeDecoder`. The trees of such a sample are ended, not pruned.

    Args:
        costs: costs measured by :func:`~arbordraft.decoding.measuring.known_costs` or ``arbordraft tune --costs``. With
            a mere :class:`CostTable` of rows, drafting counts as free.
        nodes: greatest average number of verified rows per sample, root included; by default as many as pay.
        survival: estimates the chances of paths, level by level, in place of draft probabilities; its threshold is not
            used.
        decay: share of the old averages in the new ones, in [0, 1].
        running: let the seconds that steps take in this program correct the costs. Plans for texts that depend on their
            drafts never follow the clock.

    Attributes:
        measure: a function that finds better costs if ``costs`` are rough, otherwise ``None``. It is called while
            nothing is decoded. If it may break off, 512 tokens come first, else decoding that takes twenty times as
            long. Its argument is a function that says whether to break off, or ``None``. It returns costs, or ``None``
            if it broke off.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.

    Source: the gain of the best (sample, position) pairs is from TETRIS (Wu et al., ACL 2025) and DSpark
    (arXiv:2607.05147). Expanding and reranking are from EAGLE-2 (Li et al., 2024). Weighing gains against the long-run
    rate is renewal reward theory.

    Examples:
        >>> costs = StepCosts(CostTable((1, 9), (1.0, 2.0)), CostTable((1, 8), (0.3, 0.3)))
        >>> decider = CostAware(costs)
        >>> decider.plan(Situation([6], [decider.start()], acceptance=[0.8])).levels
        array([6])
        >>> decider.plan(Situation([6], [decider.start()], acceptance=[0.2])).levels
        array([0])
    """

    def __init__(
        self,
        costs: StepCosts | CostTable,
        nodes: int | None = None,
        survival: PathSurvival | None = None,
        decay: float = 0.95,
        *,
        running: bool = False,
    ) -> None:
        super().__init__()
        check_instance("costs", costs, StepCosts, CostTable)
        self.costs = StepCosts(costs, CostTable((1,), (1e-9,))) if isinstance(costs, CostTable) else costs
        self.measure: Callable[[Callable[[], bool] | None], StepCosts | None] | None = None
        self._progress = _Progress()
        self.nodes = None if nodes is None else check_int("nodes", nodes, 1)
        self.survival = survival
        if survival is not None:
            check_instance("survival", survival, PathSurvival)
            self.growth = max(Causality.CAUSAL, growth_of(survival))
        self.decay = check_float("decay", decay, 0, 1)
        self.running = running
        self._clock = RunningCosts(self.costs) if running else None
        self._free: set[str] = set()  # kinds of drafters whose levels take almost no time
        self._looks: dict[str, Looks] = {}
        self._common: dict[str, Record] = {}  # experience with each kind of drafter over all texts
        self._prices: dict[str | None, _Prices] = {}

    @property
    def can_plan(self) -> bool:  # type: ignore[override]
        """Whether draft probabilities are the chances of paths; ``survival`` estimates them level by level."""
        return self.survival is None

    def start(self) -> dict[str, Record]:
        self._progress.texts += 1
        return {}

    def expect(self, tokens: int, hurry: Callable[[], bool] | None = None) -> None:
        progress = self._progress
        each = progress.seconds / progress.tokens if progress.tokens else _SECONDS_PER_TOKEN
        pays = progress.seconds + each * tokens >= _SECONDS_DECODED
        if pays or (hurry is not None and progress.tokens >= _TOKENS_DECODED):
            self.settle(hurry)

    def settle(self, hurry: Callable[[], bool] | None = None) -> None:
        """Measures costs that are still rough; if that fails, warns and keeps the rough costs.

        Args:
            hurry: returns whether to break off and keep the rough costs; ``None`` never breaks off.
        """
        measure, self.measure = self.measure, None
        if measure is None:
            return
        try:
            found = measure(hurry)
        except Exception as error:
            warnings.warn(f"step costs could not be measured, rough costs stay: {error}", stacklevel=2)
            return
        if found is None:
            self.measure = measure
        else:
            self.costs = found
            if self._clock is not None:
                self._clock = RunningCosts(found)

    def stepped(self, drafts: int, seconds: float) -> None:
        progress = self._progress
        progress.seconds += seconds
        progress.steps += 1
        progress.idle = 0 if drafts else progress.idle + 1
        for looks in list(self._looks.values()):
            looks.wait = max(0, looks.wait - 1)

    def timed(self, times: StepTimes) -> None:
        if self._clock is None:
            return
        self._clock.learn(times, self._free)
        alone = self._free.issuperset(times.drafted)
        for kind in self._free.intersection(times.drafted).intersection(self._looks):
            prices = self._prices_at(kind, self._clock.of(kind))
            verifying = prices.target(times.rows) - prices.target(times.samples) if alone else 0.0
            self._looks[kind].note(prices.costs.looking(times.samples) + verifying)

    def _waits(self, source: str) -> bool:
        """Returns whether this step does not look for drafts, since the last looks cost more than they brought."""
        looks = self._looks.get(source)
        return looks is not None and looks.wait > 0

    def _prices_of(self, situation: Situation) -> "_Prices":
        """Returns the prices of a group's steps, which follow the clock if no text depends on the plan."""
        follow = self._clock if situation.pathwise else None
        kind, costs = (None, self.costs) if follow is None else (situation.source, follow.of(situation.source))
        return self._prices_at(kind, costs)

    def _prices_at(self, kind: str | None, costs: StepCosts) -> "_Prices":
        if (prices := self._prices.get(kind)) is None or prices.costs is not costs:
            self._prices[kind] = prices = _Prices(costs)
        return prices

    def learn(self, memory: dict[str, Record], outcome: Outcome) -> None:
        self._progress.tokens += outcome.accepted + 1
        if not outcome.drafted:
            for source, record in memory.items():
                record.pass_step()
                if source in self._common:  # or drafts that failed once would keep new texts from trying any
                    self._common[source].quiet += 1
            return
        for source, record in memory.items():
            record.steps += 1
            record.idle = 0 if source == outcome.source else record.idle + 1
        if (looks := self._looks.get(outcome.source)) is not None:
            accepted = outcome.accepted - sum(depth < outcome.accepted for depth in outcome.certain)
            looks.gained += accepted * (memory[outcome.source].weight if outcome.source in memory else 1.0)
        record = memory.setdefault(outcome.source, Record())
        record.wake()
        record.note(outcome, self.decay)
        if self._clock is not None:
            common = self._common.setdefault(outcome.source, Record(prior_steps=COMMON_PRIOR_STEPS))
            common.note(outcome, _COMMON_DECAY)
            common.doubt(len(outcome.stated), _COMMON_DECAY)
        record.doubt(len(outcome.stated), self.decay)

    def rests(self, memory: dict[str, Record]) -> bool:
        return bool(memory) and all(record.rests for record in memory.values())

    def pauses(self, samples: int) -> bool:
        progress = self._progress  # fewer samples may make drafts pay
        return self._clock is not None and samples >= progress.weighed and skips_step(progress.idle, progress.steps)

    def worth_reading(self, situation: Situation) -> Sequence[bool]:
        if not self.can_plan:
            return super().worth_reading(situation)
        levels = self.plan(replace(situation, memory=[{} for _ in situation.memory])).levels
        return [level > 0 for level in levels.tolist()]

    def forward(self, view: StepView) -> Sequence[bool]:
        """Decides about one level as :meth:`plan` does about all."""
        reaches = (self.survival or PathSurvival()).survival(view)
        max_depth = [view.depth + 1] * len(reaches)
        limits = self.plan(Situation(max_depth, view.memory, view.alike, view.source, view.acceptance))
        gains = [
            sum(reach * expected - limits.row_cost for reach in nodes)
            for nodes, expected in zip(reaches, limits.expected_at(view.depth)[:, 0].tolist(), strict=True)
        ]
        going = [levels > 0 and gain >= 0 for levels, gain in zip(limits.levels.tolist(), gains, strict=True)]
        together = sum(gain for gain, goes_on in zip(gains, going, strict=True) if goes_on) * view.alike
        return [goes_on and together >= limits.level_cost for goes_on in going]

    def plan(self, situation: Situation) -> Limits:
        records = [memory.setdefault(situation.source, Record()) for memory in situation.memory]
        if all(record.rests for record in records) or (situation.pathwise and self._waits(situation.source)):
            return Limits.everything([0] * len(records))
        for record in records:
            record.wake()
            if self._clock is not None and situation.pathwise:  # samples that began apart look in the same steps, too
                record.steps = self._progress.steps
        if situation.free:
            self._free.add(situation.source)
        prices = self._prices_of(situation)
        costs, samples = prices.costs, len(records) * situation.alike + situation.extra_rows
        if situation.pathwise:
            self._progress.weighed = samples
        base = prices.target(samples) + costs.rest
        longest = max(situation.left, default=1)
        weights = [(left / longest) ** _LENGTH_EXPONENT for left in situation.left] or [1.0] * len(records)
        # Only a further token of every slowest sample saves a step: the fewer these are, the more each token is worth.
        worth = sum(weights) * situation.alike + situation.extra_rows
        clock = self._clock if situation.pathwise else None
        seen = clock is not None and clock.seen(situation.source, free=situation.free)
        margin = _SEEN_MARGIN if seen else _MARGIN
        if situation.left:
            doublings = min(_MOST_DOUBLINGS, math.log2(len(records) + situation.extra_rows))
            margin += doublings * (_SEEN_PER_DOUBLING if seen else _MARGIN_PER_DOUBLING)
        rate = margin * worth / base
        row = prices.slope(samples)
        budget = -1 if self.nodes is None else len(records) * (self.nodes - 1)
        if self.nodes is not None:
            situation = replace(situation, max_depth=[min(max_depth, budget) for max_depth in situation.max_depth])
        common = self._common.get(situation.source) if situation.pathwise else None  # experience with other texts
        if common is not None:
            common.wake()
        usual = [1.0] * DEPTHS if common is None else common.trust([1.0] * DEPTHS)
        trust = [record.trust(usual) for record in records]
        if situation.free:  # lookups come first: the drafts that they find decide how far trees go on
            levels = [
                0 if record.rests else max_depth for record, max_depth in zip(records, situation.max_depth, strict=True)
            ]
            added = prices.added(samples, situation)
            if clock is not None:  # looks are weighed by themselves
                looks = self._looks.setdefault(situation.source, Looks())
                looks.rate = worth / base
                for record, weight in zip(records, weights, strict=True):
                    record.weight = weight
            else:
                added[1:] += costs.looking(samples)
            verification = Verification(added, rate, situation.alike, base, worth, margin)
            ones = [(1.0,)] * len(records)
            return Limits.of(
                levels, trust, ones, weights, row_cost=rate * row, budget=budget, verification=verification
            )
        fall = _FALL if situation.informative else 1.0
        prior = [situation.acceptance[0], *[fall * situation.acceptance[0]] * (DEPTHS - 1)]
        if common is not None:
            prior = common.rates(prior)  # other texts say more than the drafter's usual rates
        following = [record.rates(prior) for record in records]
        level, per_draft = costs.draft(1) + costs.decide, costs.per_draft
        row += per_draft
        # If deeper drafts are as good as the first ones, stopping early avoids no unknown cost, so no margin applies.
        chain_margin = margin if situation.informative else 1.0
        plain_rate, savings, each = rate, [0.0] * len(records), 1.0
        for number in range(_ROUNDS):
            lengths, gains, gained, seconds = self._chains(
                prices, situation, following, weights, rate, level, row, per_draft
            )
            if not number:
                savings, each = gains, 1 + gained / (len(gains) * situation.alike)  # gains and tokens of a step
            before, rate = rate, max(rate, chain_margin * (worth + gained) / (base + seconds))
            if rate == before:
                break
        if any(situation.lag):  # reading has to pay compared with decoding plainly, so at the first rate
            steps = [max(1.0, tokens / each) for tokens in self._expected(situation)]
            price = _READING_MARGIN * plain_rate * costs.per_read
            reading = [price * lag / some for lag, some in zip(situation.lag, steps, strict=True)]
            gains = [min(gain, saving - cost) for gain, saving, cost in zip(gains, savings, reading, strict=True)]
        longest_trees = situation.max_depth if situation.informative else lengths
        return Limits.of(
            [most if gain > 0 else 0 for most, gain in zip(longest_trees, gains, strict=True)],
            trust,
            following,
            weights,
            level_cost=rate * level,
            row_cost=rate * row,
            budget=budget,
            verification=Verification(prices.added(samples, situation), rate, situation.alike),
            gains=gains,
        )

    def _expected(self, situation: Situation) -> list[float]:
        """Returns, by sample, the tokens to come: up to a usual answer's length, or as many as it has got, if more."""
        progress, count, usual = self._progress, len(situation.memory), float(_ANSWER)
        if situation.pathwise:  # the past may count
            usual = (_ANSWER + progress.tokens) / (1 + max(0, progress.texts - count))
        got = situation.emitted or [0] * count
        left: Sequence[float] = situation.remaining or [math.inf] * count
        return [min(most, max(usual - some, some)) for most, some in zip(left, got, strict=True)]

    def _chains(
        self,
        prices: "_Prices",
        situation: Situation,
        following: Sequence[Sequence[float]],
        weights: Sequence[float],
        rate: float,
        per_level: float,
        row: float,
        per_draft: float,
    ) -> tuple[list[int], list[float], float, float]:
        """Chooses the chains that pay most; returns their lengths, the worth of each, and all their tokens and seconds.

        Only the likeliest drafts are verified, as many as pay. A level takes ``per_level`` seconds. Drafting
        and verifying a draft takes at least ``row`` seconds, of which ``per_draft`` go to drafting.
        """
        alike = situation.alike
        samples = len(situation.max_depth) * alike + situation.extra_rows
        before = prices.target(samples)
        chains: list[list[float]] = []
        for max_depth, next_, weight in zip(situation.max_depth, following, weights, strict=True):
            chances = (next_[min(depth, len(next_) - 1)] for depth in range(max_depth))
            path = islice(accumulate(chances, mul, initial=weight), 1, None)
            chains.append(list(takewhile(lambda reach: reach >= rate * row, path)))
        if not any(chains):
            return [0] * len(chains), [0.0] * len(chains), 0.0, 0.0
        start = prices.costs.starting(alike * sum(map(bool, chains)))
        if len(chains) == 1:
            return self._chain(prices, chains[0], alike, samples, start, rate, per_level, row, per_draft)
        reaches = np.array([reach for chain in chains for reach in chain])
        depths = np.array([depth for chain in chains for depth in range(len(chain))])
        order = (-reaches).argsort(kind="stable")
        drafted = depths[order] <= np.arange(depths.max() + 1)[:, None]  # by number of levels, whether each is a draft
        totals = np.where(drafted, reaches[order], 0.0).cumsum(axis=1) * alike
        verified = drafted.cumsum(axis=1) * alike
        levels = np.arange(1, len(drafted) + 1)
        drafting = start + levels * per_level + per_draft * verified[:, -1]
        seconds = drafting[:, None] + prices.seconds(samples + int(verified[-1, -1]))[samples + verified] - before
        worth = np.where(drafted, totals - rate * seconds, -np.inf)
        level, place = divmod(int(worth.argmax()), worth.shape[1])
        if worth[level, place] <= 0:
            return [0] * len(chains), [0.0] * len(chains), 0.0, 0.0
        best = level + 1
        share = (start + per_level * best) / int(verified[level, place])  # time of the levels per verified row
        chains = [chain[:best] for chain in chains]
        worths = [sum(chain) - rate * (row + share) * len(chain) for chain in chains]
        return list(map(len, chains)), worths, float(totals[level, place]), float(seconds[level, place])

    def _chain(
        self,
        prices: "_Prices",
        chain: Sequence[float],
        alike: int,
        samples: int,
        start: float,
        rate: float,
        per_level: float,
        row: float,
        per_draft: float,
    ) -> tuple[list[int], list[float], float, float]:
        """Chooses the length of a lone chain, all of whose drafts are verified, as :meth:`_chains` does."""
        last = samples + alike * len(chain)
        times = prices.seconds(last)[samples : last + 1 : alike].tolist()
        best, worth, gained, seconds, total = 0, 0.0, 0.0, 0.0, 0.0
        for level, reach in enumerate(chain, 1):
            total += reach
            time = start + level * per_level + per_draft * (level * alike) + times[level] - times[0]
            if total * alike - rate * time > worth:
                best, worth, gained, seconds = level, total * alike - rate * time, total * alike, time
        share = (start + per_level * best) / (best * alike) if best else 0.0  # time of the levels per verified row
        return [best], [sum(chain[:best]) - rate * (row + share) * best], gained, seconds


class _Prices:
    """Seconds of forwards, in tables, since every step needs hundreds of them."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._slopes: dict[int, float] = {}
        self._times: Reals = np.zeros(1)

    def target(self, rows: int) -> float:
        """Returns the seconds of a forward."""
        return float(self.seconds(rows)[rows])

    def seconds(self, rows: int) -> Reals:
        """Returns the seconds of forwards of 0 to at least ``rows`` rows."""
        times = self._times  # which another thread may replace
        if len(times) <= rows:
            more = range(len(times), max(rows + 1, 2 * len(times)))
            self._times = times = np.append(times, [self.costs.target(count) for count in more])
        return times

    def added(self, samples: int, situation: Situation) -> Reals:
        """Returns the seconds that verifying 0, 1, 2, ... drafts adds to a forward of one row for each sample."""
        last = samples + situation.alike * situation.drafts
        times = self.seconds(last)
        added: Reals = times[samples : last + 1 : situation.alike] - times[samples]
        return added

    def slope(self, samples: int) -> float:
        """Returns the seconds of a further row, where rows are cheapest."""
        if samples not in self._slopes:
            self._slopes[samples] = self.costs.target.least_slope(samples, _ROWS_AHEAD * samples)
        return self._slopes[samples]
