"""What forwards and steps cost on this machine."""

import hashlib
import json
import logging
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import version
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from arbordraft.checks import each, instance, whole
from arbordraft.costs import CostTable, StepCosts
from arbordraft.coupling import Coupling
from arbordraft.deciders import Decider, FixedDepth
from arbordraft.decisions import StepView
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.drafters import Drafter, NGramDrafter
from arbordraft.kernels.native.build import cache_folder, cpu
from arbordraft.prompts import chat_batches, check_texts, left_padded, plain_request
from arbordraft.state import DecodeState
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree, Verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kept = TypeVar("Kept", CostTable, StepCosts)

_ROWS = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
_MOST_READ = 2048  # tokens of prompts in one forward
_MOST_ROWS, _LONGEST = 2**14, 2**20  # of a forward that is timed, and of the text before it: their memory is real
# Kernels take rows in blocks: the first row of a block may cost as much as all of it.
_KEPT_ROWS = (1, 2, 4, 5, 8, 9, 12, 16, 17, 24, 25, 32, 33, 48, 49, 64)
_KEPT_REPEATS, _KEPT_BATCHES = 6, (1, 4, 16)  # what is kept for ever is worth some seconds
_METHOD = 2  # what was found by another one is measured anew
_BATCHES = (1, 2, 4, 8, 16)
_WIDTH = 4  # nodes of a sample that get children, where drafts are trees
_SAID, _TIMES = 8, 4  # tokens that are said again and again, for lookups to find, as models then go on saying them


def measure_rows(
    target: RaggedModel, rows: Sequence[int] = _ROWS, *, context: int = 256, repeats: int = 5
) -> CostTable:
    """Times forwards of a chain behind ``context`` tokens: the best of ``repeats``, which noise disturbs least.

    Every other round goes from the most rows to the fewest. A row alone takes a fifth longer where many were before it
    than it does in decoding, where few were; and then rows would look cheaper than they are.

    Args:
        rows: numbers of rows to time, ascending from 1 to at most 16384.
        context: tokens before them, at most 2^20, and less where the target has not so many positions.
        repeats: measurements of each, 1 or more.

    Raises:
        TypeError: if an argument is no number of its kind.
        ValueError: if one is out of range.
    """
    instance("target", target, RaggedModel)
    rows = each("rows", rows, lambda name, value: whole(name, value, 1, _MOST_ROWS))
    CostTable(rows, (1.0,) * len(rows))  # checks their order before anything is timed
    context, repeats = whole("context", context, 0, _LONGEST), whole("repeats", repeats, 1)
    if target.max_positions is not None:
        if max(rows) > target.max_positions:
            raise ValueError(f"{max(rows)} rows exceed the target's {target.max_positions} positions")
        context = min(context, target.max_positions - max(rows))
    cache = RaggedKVCache()
    sample = cache.open(context + max(rows))
    target.prefill({sample: [0] * context}, cache)
    best = dict.fromkeys(rows, float("inf"))
    for turn in range(repeats):
        for count in rows[:: 1 - 2 * (turn % 2)]:  # in turns, so that a slow spell does not hit one number alone
            batch, tokens = cache.plan([sample], [range(count)]), torch.zeros(count, dtype=torch.int64)
            start = time.perf_counter()
            target(tokens, batch, cache)
            if target.device.type == "cuda":  # which only began
                torch.cuda.synchronize(target.device)
            best[count] = min(best[count], time.perf_counter() - start)
            cache.drop([sample])
    # Noise only adds: fewer rows never take longer than more, however often they were unlucky.
    return CostTable(rows, tuple(accumulate(reversed(best.values()), min))[::-1])


def known_rows(target: RaggedModel, *, renew: bool = False) -> CostTable:
    """What :func:`measure_rows` found on this machine before, for a model of this kind; measured now if it did not.

    What was measured is kept in the cache folder, by processor, threads, versions, the model's shapes, dtype and
    kernels. A file that is damaged is measured anew, with a warning.

    Args:
        renew: measure anew all the same.
    """
    rows = [count for count in _KEPT_ROWS if count <= (target.max_positions or count)]
    return _known(cost_file(target), CostTable.load, lambda: measure_rows(target, rows, repeats=_KEPT_REPEATS), renew)


def rows_within(target: RaggedModel, seconds: float = 0.2) -> int:
    """Tokens of prompts to read at a time (``max_rows`` of an engine), so that streams stall no longer than this.

    By :func:`known_rows`; at least 1, at most the 2,048 that one forward over prompts takes.
    """
    return known_rows(target).within(seconds, _MOST_READ)


def known_costs(target: RaggedModel, drafter: Drafter, *, renew: bool = False) -> StepCosts:
    """The same for whole steps with a drafter: :func:`known_rows`, and what :func:`measure_steps` finds on short
    texts without meaning.

    Args:
        renew: measure anew all the same.
    """
    rows = known_rows(target, renew=renew)
    drafts = _known(cost_file(target, drafter), StepCosts.load, lambda: _on_noise(target, drafter, rows), renew)
    return replace(drafts, target=rows)


def _on_noise(target: RaggedModel, drafter: Drafter, rows: CostTable) -> StepCosts:
    source = random.Random(0)
    texts = [[source.randrange(target.vocab_size) for _ in range(8)] for _ in range(max(_KEPT_BATCHES))]
    return measure_steps(target, drafter, texts, batches=sorted(2 * _KEPT_BATCHES), new_tokens=12, rows=rows)


def _known(path: Path, load: Callable[[Path], Kept], measure: Callable[[], Kept], renew: bool) -> Kept:
    if not renew and path.exists():
        try:
            return load(path)
        except ValueError as error:
            warnings.warn(f"{error}: measuring now", stacklevel=3)
    logging.getLogger("arbordraft").info("measuring what steps cost, once per machine and kind of model")
    costs = measure()
    try:
        costs.save(path)
    except OSError as error:
        warnings.warn(f"what steps cost is measured in every process: {error}", stacklevel=3)
    return costs


def cost_file(target: RaggedModel, drafter: Drafter | None = None) -> Path:
    """Where :func:`known_rows`, or with a drafter :func:`known_costs`, keeps its measurement."""
    model = target.model
    shapes = [(name, list(parameter.shape)) for name, parameter in model.named_parameters()]
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu()
    versions = [torch.__version__, *map(version, ("arbordraft", "transformers"))]
    kernels = [str(model.dtype), target.backend, str(target.prepacking)]
    asked = [_METHOD, _KEPT_ROWS, [part.name for part in fields(StepCosts)]]
    parts = [device, torch.get_num_threads(), versions, type(model).__name__, shapes, kernels, asked]
    if drafter is not None:
        network = drafter.state_dict()
        parts += [repr(drafter), [(name, list(tensor.shape)) for name, tensor in network.items()]]
    return cache_folder() / "costs" / f"{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"


def measure_costs(
    target: RaggedModel, drafter: Drafter, tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str]
) -> StepCosts:
    """Times forwards of the target, levels of drafting by their rows, and what a step takes besides.

    Args:
        prompts: first user turns.

    Raises:
        TypeError: if ``prompts`` is no list of texts.
        ValueError: if there is no prompt.
    """
    check_texts(prompts)
    texts = [inputs["input_ids"][0].tolist() for inputs in chat_batches(tokenizer, prompts, 1)]
    return measure_steps(target, drafter, texts)


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
) -> StepCosts:
    """The same for tokenized prompts, a learned decider and other sizes.

    Drafts are chains, and of the largest batch forks too, whose levels have more rows; drawn with shared noise, which
    is what drafts cost at most. What lookups take is measured with whatever drafter, as they may stand before it.

    Args:
        texts: tokens to begin with.
        decider: asked before every level, though nothing stops here; none costs nothing.
        batches: numbers of samples to decode at a time, ascending from 1.
        depth: of the chains, at least 2 whatever is said: a level is what the others take beside the first.
        new_tokens: length of the answers; who drafts is timed while no tree is cut by their end.
        rows: numbers of rows to time the target's forward with, see :func:`measure_rows`; or what they cost.
    """
    depth, lookups, endless = max(2, depth), NGramDrafter(longest=8, shortest=1), cycle(texts)
    few, many = min(batches), max(batches)
    questions: list[float] = []
    # Least seconds of a step besides the target's forward: by who drafts, samples, trees and whether tokens are drawn.
    # Noise only adds, to each of them: a least difference of two would be one that noise has made small.
    least: dict[tuple[Drafter, int, int, int, bool], float] = {}

    def decode(batch: int, width: int, levels: int, who: Drafter = drafter, sampled: bool = True) -> None:
        watch = _Stopwatch(decider) if decider is not None and levels > 1 and who is drafter else FixedDepth()
        topology = TreeTopology.fork(width, levels) if width > 1 else TreeTopology.chain(levels)
        decoder = SpeculativeDecoder(target, who, topology, Coupling.shared(max(1, topology.width)), watch)
        asked = watch.questions if isinstance(watch, _Stopwatch) else []
        # At every verdict, between two of which lies a whole step. Before the first drafters also read the prompts; and
        # where a sample is near its end, its tree is cut.
        spent = [0.0] if who is lookups else []

        def note(state: DecodeState, tree: DraftTree, verdict: Verdict) -> None:
            if who is drafter and spent and any(sample.budget <= levels for sample in state.samples if sample):
                raise _Enough
            seconds = state.stats.seconds
            spent.append(sum(seconds.get(phase, 0.0) for phase in ("draft", "verify", "commit")) - sum(asked))

        decoder.on_step = note
        begun = list(islice(endless, batch))
        if who is lookups:
            begun = [[*text[-_SAID:]] * _TIMES for text in begun]  # there is something to be found
        with suppress(_Enough):
            decoder.generate(**left_padded(begun), **plain_request(float(sampled), new_tokens), eos_token_id=None)
        step = (spent[-1] - spent[0]) / (len(spent) - 1) if len(spent) > 1 else spent[0]
        key = (who, batch, width, levels, sampled)
        least[key] = min(least.get(key, math.inf), step)
        questions.extend(asked)

    # Forks need no more than two levels, which have as many rows.
    shapes = {} if drafter.free else {**{(batch, 1): depth for batch in batches}, (many, _WIDTH): 2}
    for batch in batches:
        for (samples, width), deepest in shapes.items():
            if samples == batch:
                decode(batch, width, 1)
                decode(batch, width, deepest)
        if batch in (few, many):
            if not drafter.free:
                decode(batch, 1, 0)
                decode(batch, 1, 0, sampled=False)
            for levels in (0, depth):
                decode(batch, 1, levels, lookups, sampled=False)
    if not isinstance(rows, CostTable):
        # Forwards take longer behind long texts: these are as long as the prompts and half an answer.
        rows = measure_rows(target, rows, context=int(statistics.median(map(len, texts))) + 64)

    level, start, looked = {1: 1e-9}, {few: 0.0, many: 0.0}, {few: 0.0, many: 0.0}
    for (batch, width), deepest in shapes.items():
        deep, once = (least[drafter, batch, width, levels, True] for levels in (deepest, 1))
        level[batch * width] = max(1e-9, (deep - once) / (deepest - 1))
    for batch in start:
        if not drafter.free:
            once, idle = (least[drafter, batch, 1, levels, True] for levels in (1, 0))
            start[batch] = max(0.0, once - idle - level[batch])
        found, idle = (least[lookups, batch, 1, levels, False] for levels in (depth, 0))
        looked[batch] = max(0.0, found - idle)
    decide = statistics.median(questions) if questions else 0.0
    rest = least[lookups if drafter.free else drafter, few, 1, 0, False]
    draft = CostTable(tuple(level), tuple(level.values()))
    return StepCosts(rows, draft, decide, rest, *_by_sample(start), *_by_sample(looked))


def _by_sample(seconds: Mapping[int, float]) -> tuple[float, float]:
    """What the smallest batch takes, and every sample more."""
    few, many = min(seconds), max(seconds)
    return seconds[few], max(0.0, seconds[many] - seconds[few]) / max(1, many - few)


class _Enough(Exception):
    """Ends a decoding of which no more is to be timed."""


class _Stopwatch(Decider):
    """Never stops; times another decider."""

    def __init__(self, decider: Decider) -> None:
        super().__init__()
        self.decider = decider
        self.questions: list[float] = []

    def forward(self, view: StepView) -> Sequence[bool]:
        start = time.perf_counter()
        self.decider(view)
        self.questions.append(time.perf_counter() - start)
        return [True] * len(view.paths)


__all__ = ["cost_file", "known_costs", "known_rows", "measure_costs", "measure_rows", "measure_steps", "rows_within"]
