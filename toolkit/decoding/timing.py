"""Times forwards, drafts and the remaining work of steps.

Shapes: none; results are seconds by rows.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate, cycle, islice, pairwise

import torch

from arbordraft.deciders import Decider, FixedDepth
from arbordraft.deciders.costs import CostTable, StepCosts
from arbordraft.deciders.decisions import StepView
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.prompts import left_padded, plain_request
from arbordraft.decoding.state import DecodeState
from arbordraft.drafters import Drafter, NGramDrafter, NoDrafter
from arbordraft.drafters.base import Lookup
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.utils.checks import check_instance, check_int, check_sequence
from arbordraft.verifiers.coupling import Coupling

_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_MOST_ROWS, _LONGEST = 2**14, 2**20  # most rows and longest context of a timed forward, to bound its memory
# Rows, and rough times of their forwards in forwards of one row, slightly too high.
_CPU = (1, 4, 8, 16, 64), (1.0, 1.25, 1.6, 2.8, 10.0)
_GPU = (1, 64), (1.0, 1.3)
_OTHER_PARTS = 0.05  # rough time of each other part of a step, in forwards of one row
_BATCHES = (1, 2, 4, 8, 16)
_WIDTH = 4  # nodes per sample and level in timed forks
# Prompts of timed lookups repeat their last tokens: models then go on repeating, and lookups find drafts.
_REPEATED_TOKENS, _REPETITIONS = 8, 4


def rough_costs(target: RaggedModel, drafter: Drafter) -> StepCosts:
    """Estimates step costs without measuring, in forwards of one row, since plans depend only on ratios."""
    on_gpu = target.device.type == "cuda"
    forward = CostTable(*_GPU if on_gpu else _CPU)
    effort = drafter.effort(target)
    return StepCosts(
        forward,
        _like(forward, max(1e-9, effort)),
        rest=_OTHER_PARTS,
        start=effort and _OTHER_PARTS,
        lookup=_OTHER_PARTS,
        reading=effort * forward.slope,
    )


def _like(forward: CostTable, level: float) -> CostTable:
    """Returns times of draft levels, given that of one row: further rows cost as much as in a forward of the target."""
    return CostTable(forward.rows, tuple(level * seconds / forward.seconds[0] for seconds in forward.seconds))


def measure_rows(
    target: RaggedModel,
    rows: Sequence[int] = _ROWS,
    *,
    context: int = 256,
    repeats: int = 5,
    enough: Callable[[], bool] = lambda: False,
) -> CostTable:
    """Times forwards of a chain after ``context`` tokens; takes the best of ``repeats``, which noise affects least.

    On a GPU whole steps of fixed shapes are timed, since decoders run that way there. Such a step lasts from the upload
    of a tree to the download of its verdict.

    Every other round goes from the most rows to the fewest. After a forward of many rows, a single row takes a fifth
    longer than in decoding, where forwards have few rows. Without this order, further rows would look too cheap.

    Args:
        rows: numbers of rows to time, ascending from 1 to at most 16384.
        context: tokens before these rows, at most 2^20; fewer if the target has too few positions.
        repeats: measurements of each number of rows, 1 or more.
        enough: called between forwards. Once it returns true, the rows timed so far form the table.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of range.
    """
    check_instance("target", target, RaggedModel)
    rows = check_sequence("rows", rows, lambda name, value: check_int(name, value, 1, _MOST_ROWS))
    CostTable(rows, (1.0,) * len(rows))  # checks their order before anything is timed
    context, repeats = check_int("context", context, 0, _LONGEST), check_int("repeats", repeats, 1)
    if target.max_positions is not None:
        if max(rows) > target.max_positions:
            raise ValueError(f"{max(rows)} rows exceed the target's {target.max_positions} positions")
        context = min(context, target.max_positions - max(rows))
    if SpeculativeDecoder(target, NoDrafter()).stepper.fixed:
        with suppress(UnsupportedModel):  # then decoders fall back to steps without fixed shapes
            return _cost_table(_recorded_seconds(target, rows, max(1, context), repeats, enough))
    cache = RaggedKVCache()
    sample = cache.open(context + max(rows))
    target.prefill({sample: [0] * context}, cache)
    best = dict.fromkeys(rows, float("inf"))
    for turn in range(repeats):
        for count in rows[:: 1 - 2 * (turn % 2)]:  # in turns, so that a slow spell does not hit one count alone
            batch, tokens = cache.lay_out([sample], [range(count)]), torch.zeros(count, dtype=torch.int64)
            start = time.perf_counter()
            target(tokens, batch, cache)
            if target.device.type == "cuda":  # kernels were only launched
                torch.cuda.synchronize(target.device)
            best[count] = min(best[count], time.perf_counter() - start)
            cache.drop([sample])
            if ended := enough():
                break
        if ended:
            break
    return _cost_table(best)


def _recorded_seconds(
    target: RaggedModel, rows: Sequence[int], context: int, repeats: int, enough: Callable[[], bool]
) -> dict[int, float]:
    """Returns the least seconds of steps by padded rows; each step is recorded before it is timed.

    Raises:
        UnsupportedModel: if no graph can hold the target's steps.
    """
    best: dict[int, float] = {}
    for count in rows:
        if best and enough():
            break
        totals: list[float] = []
        decoder = SpeculativeDecoder(target, NoDrafter(), buckets=(count,))
        decoder.on_step = lambda state, tree, verdict, totals=totals: totals.append(state.stats.seconds["target"])
        ids = torch.zeros(1, context, dtype=torch.int64, device=target.device)
        decoder.generate(ids, attention_mask=torch.ones_like(ids), **plain_request(0.0, repeats + 2), eos_token_id=None)
        best[count] = min(end - begin for begin, end in pairwise(totals))  # without the first, recorded step
    return best


def _cost_table(best: Mapping[int, float]) -> CostTable:
    """Builds a table in which fewer rows never take longer than more: noise only adds time."""
    best = {count: seconds for count, seconds in best.items() if math.isfinite(seconds)}
    return CostTable(tuple(best), tuple(accumulate(reversed(best.values()), min))[::-1])


def measure_steps(
    target: RaggedModel,
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    decider: Decider | None = None,
    *,
    batches: Sequence[int] = _BATCHES,
    depth: int = 4,
    new_tokens: int = 24,
    rows: Sequence[int] | CostTable = _ROWS,
    enough: Callable[[], bool] = lambda: False,
) -> StepCosts:
    """Times the parts of decoding steps on tokenized prompts: forwards, draft levels, lookups and the remaining work.

    Drafts are chains; the largest batch also drafts forks, whose levels have more rows. They are drawn with shared
    noise, with which drafts cost the most. Lookups are timed with any drafter, since they may run before it.

    Args:
        texts: token ids of the prompts.
        decider: asked before every level, but never stops drafting; without a decider this time is 0.
        batches: numbers of samples to decode at a time, in turn.
        depth: levels of the chains, at least 2, since the time of a level is that of the levels after the first.
        new_tokens: length of the answers; the drafter is timed only while the end of an answer shortens no tree.
        rows: numbers of rows to time the target's forward with, see :func:`measure_rows`; or its known costs.
        enough: called at every step. Once it returns true, :func:`rough_costs` replace the parts not yet timed.
    """
    depth, lookups, endless = max(2, depth), NGramDrafter(longest=8, shortest=1), cycle(texts)
    few, many = min(batches), max(batches)
    questions: list[float] = []
    # Least seconds of a step besides the target's forward, or of lookups alone if they draft: by drafter, samples,
    # width, levels and whether sampled. Noise only adds time. So least times are subtracted later; the least of
    # differences would be too small.
    least: dict[tuple[Drafter, int, int, int, bool], float] = {}

    def decode(batch: int, width: int, levels: int, timed_drafter: Drafter = drafter, sampled: bool = True) -> None:
        if enough():
            return
        watch = _Stopwatch(decider) if decider is not None and levels > 1 and timed_drafter is drafter else FixedDepth()
        topology = TreeTopology.fork(width, levels) if width > 1 else TreeTopology.chain(levels)
        decoder = SpeculativeDecoder(target, timed_drafter, topology, Coupling.shared(max(1, topology.width)), watch)
        asked = watch.questions if isinstance(watch, _Stopwatch) else []
        # Totals at each verdict; a whole step lies between two of them. The first step counts only for lookups, since
        # other drafters also read the prompts in it. The drafter's steps with trees cut by a sample's end do not count.
        spent = [0.0] if timed_drafter is lookups else []

        def note(state: DecodeState, tree: DraftTree, verdict: Verdict) -> None:
            living = [sample for sample in state.samples if sample]
            cut = timed_drafter is drafter and (
                len(living) < batch or any(sample.budget <= levels for sample in living)
            )
            if spent and (cut or enough()):
                raise _Enough
            seconds = state.stats.seconds
            phases = ("draft",) if timed_drafter is lookups and levels else ("draft", "verify", "commit")
            spent.append(sum(seconds.get(phase, 0.0) for phase in phases) - sum(asked))

        decoder.on_step = note
        prompts = list(islice(endless, batch))
        if timed_drafter is lookups:
            prompts = [[*text[-_REPEATED_TOKENS:]] * _REPETITIONS for text in prompts]
        with suppress(_Enough):
            decoder.generate(
                **{name: tensor.to(target.device) for name, tensor in left_padded(prompts).items()},
                **plain_request(float(sampled), new_tokens),
                eos_token_id=None,
                seeds=range(batch),  # leaves torch's generator, the user's, untouched
            )
        step = (spent[-1] - spent[0]) / (len(spent) - 1) if len(spent) > 1 else spent[0]
        key = (timed_drafter, batch, width, levels, sampled)
        least[key] = min(least.get(key, math.inf), step)
        questions.extend(asked)

    # Two levels suffice for forks, as both have the same number of rows.
    free = isinstance(drafter, Lookup)
    shapes = {} if free else {**{(batch, 1): depth for batch in batches}, (many, _WIDTH): 2}
    for batch in batches:
        for (samples, width), deepest in shapes.items():
            if samples == batch:
                decode(batch, width, 1)
                decode(batch, width, deepest)
        if batch in (few, many):
            if not free:
                decode(batch, 1, 0)
                decode(batch, 1, 0, sampled=False)
            for levels in (0, depth) if free else (depth,):
                decode(batch, 1, levels, lookups, sampled=False)
    if not isinstance(rows, CostTable):
        # Forwards take longer after long texts: the context is a prompt and half of a usual answer.
        rows = measure_rows(target, rows, context=int(statistics.median(map(len, texts))) + 64, enough=enough)

    guess = rough_costs(target, drafter)  # in forwards of one row
    level, start, looked = dict[int, float](), dict[int, float](), dict[int, float]()

    def known(*keys: tuple[Drafter, int, int, int, bool]) -> bool:
        return all(key in least for key in keys)

    for (batch, width), deepest in sorted(shapes.items()):
        deep, once = ((drafter, batch, width, levels, True) for levels in (deepest, 1))
        if known(deep, once):
            level[batch * width] = max(1e-9, (least[deep] - least[once]) / (deepest - 1))
    for batch in (few, many):
        once, idle = ((drafter, batch, 1, levels, True) for levels in (1, 0))
        if known(once, idle) and batch in level:
            start[batch] = max(0.0, least[once] - least[idle] - level[batch])
        if known(found := (lookups, batch, 1, depth, False)):
            looked[batch] = least[found]
    decide = statistics.median(questions) if questions else 0.0
    plain = lookups if free else drafter, few, 1, 0, False
    rest = least.get(plain, guess.rest * rows(1))
    level = _subadditive({1: 1e-9 if level or free else guess.draft(1) * rows(1), **level})
    # At real size there may be no time for batches: then further rows must not look free.
    draft = CostTable(tuple(level), tuple(level.values())) if len(level) > 1 else _like(rows, level[1])
    starting = _by_sample(start or {few: guess.start * rows(1)})
    looking = _by_sample(looked or {few: guess.lookup * rows(1)})
    # Prompts are read in forwards of many rows, whose time follows from those of the target.
    return StepCosts(rows, draft, decide, rest, *starting, *looking, reading=drafter.effort(target) * rows.slope)


def _subadditive(seconds: Mapping[int, float]) -> dict[int, float]:
    """Raises the times of few rows to their share of the time of more rows, which several calls could replace.

    Times of levels are differences of measured times, which noise may make too small.
    """
    descending = sorted(seconds, reverse=True)
    shares = accumulate((seconds[rows] / rows for rows in descending), max)
    return {rows: rows * share for rows, share in reversed([*zip(descending, shares, strict=True)])}


def _by_sample(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Returns the time of the smallest batch and the time that each further sample adds."""
    few, many = min(seconds), max(seconds)
    return seconds[few], max(0.0, seconds[many] - seconds[few]) / max(1, many - few)


class _Enough(Exception):
    """Ends a decoding once enough of it is timed."""


class _Stopwatch(Decider):
    """Times another decider and never stops drafting."""

    def __init__(self, decider: Decider) -> None:
        super().__init__()
        self.decider = decider
        self.questions: list[float] = []

    def forward(self, view: StepView) -> Sequence[bool]:
        start = time.perf_counter()
        self.decider(view)
        self.questions.append(time.perf_counter() - start)
        return [True] * len(view.paths)


__all__ = ["measure_rows", "measure_steps", "rough_costs"]
