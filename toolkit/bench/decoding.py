"""Times whole decodes of the same prompts by several decoders, in turns.

Every decoder decodes a batch before the next batch begins, so a slow spell of the machine hits all of them.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from arbordraft.bench.measure import precision
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class DecodeRow:
    """Speed, acceptance and padding of one decoder on some prompts.

    Args:
        batch: prompts at a time, or clients of a server.
        exactness: promise of the decoder about the output law.
        tokens_per_second: emitted tokens per second, time of prompts included; median of the rounds.
        speed_up: speed over that of the first decoder, the reference; median of the rounds' ratios.
        request: kind of request, if one was chosen.
        spread: half the difference between the largest and the smallest of these ratios.
        tau: emitted tokens per target forward of a sample.
        acceptance: acceptance rate by depth: how often a child was accepted when one was tried.
        by_rank: share of the accepted tokens by rank among siblings.
        drafted: drafted tokens per target forward of a sample.
        rows: rows of the target's forwards per emitted token.
        pad_rows: share of the rows that belong to no token.
        pad_keys: attended cache columns that belong to no token, per emitted token.
        seconds: share of the time by phase.
        context: tokens of a prompt, if prompts were lengthened.
        served: whether a server answered; rows and shares of the time are then unknown.
        category: category of the prompts, if they were measured by category.
        steps_speed_up: speed-up of the steps alone, without the time of prompts; ``None`` if that time is unknown.
    """

    dtype: str
    batch: int
    temperature: float
    decoder: str
    exactness: str
    tokens_per_second: float
    speed_up: float
    tau: float = 1.0
    acceptance: list[float] = field(default_factory=list)
    by_rank: list[float] = field(default_factory=list)
    drafted: float = 0.0
    rows: float = 1.0
    pad_rows: float = 0.0
    pad_keys: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    request: str = ""
    spread: float = 0.0
    context: int = 0
    served: bool = False
    category: str = ""
    steps_speed_up: float | None = None


Name = TypeVar("Name", bound=Hashable)
# Decodes one batch of a workload; decoders of other libraries count only the emitted tokens.
Decode = Callable[[dict[str, Any], Workload], DecodeStats]


def ours(decoder: SpeculativeDecoder) -> Decode:
    """Returns a :data:`Decode` for one of our decoders; every decoder gets the same seed for a sample."""

    def decode(inputs: dict[str, Any], workload: Workload) -> DecodeStats:
        seeds = workload.seeds(len(inputs["input_ids"]))
        output: Any = decoder.generate(**inputs, **workload.request(), seeds=seeds, return_dict_in_generate=True)
        stats: DecodeStats = output.stats
        return stats

    return decode


def theirs(model: "PreTrainedModel", **options: Any) -> Decode:
    """Returns a :data:`Decode` for transformers; ``options`` select assistance, which takes one prompt at a time."""

    def decode(inputs: dict[str, Any], workload: Workload) -> DecodeStats:
        torch.manual_seed(workload.seed)
        masks = inputs["attention_mask"].bool()
        alone = [{name: rows[i][mask][None] for name, rows in inputs.items()} for i, mask in enumerate(masks)]
        tokens = 0
        for part in alone if options else [inputs]:
            texts: Any = model.generate(**part, **workload.request(), **options)  # type: ignore[operator]
            tokens += emitted(texts[:, part["input_ids"].shape[1] :], model)
        return DecodeStats("exact", emitted=[tokens], forwards=[])

    return decode


def answers(output: Any, inputs: dict[str, Any]) -> list[list[int]]:
    """Returns the emitted tokens of every prompt, without padding."""
    texts = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return [text[:count] for text, count in zip(texts, output.stats.emitted, strict=True)]


def emitted(answers: Tensor, model: "PreTrainedModel") -> int:
    """Counts the tokens of ``[B, L]`` answers: up to and including each end token, without padding."""
    ends = model.generation_config.eos_token_id
    known = torch.tensor(ends if isinstance(ends, list) else [ends] if ends is not None else [])
    over = torch.isin(answers.cpu(), known)
    return int((over.cumsum(dim=1) - over.long() == 0).sum())


def take_turns(
    decoders: Mapping[Name, SpeculativeDecoder | Decode],
    batches: Sequence[dict[str, Any]],
    workload: Workload,
    on_progress: ProgressCallback = quiet,
) -> Iterator[tuple[Name, float, DecodeStats]]:
    """Decodes every batch with every decoder in turn, for ``workload.repeats`` rounds.

    Args:
        decoders: by name.
        batches: arguments of ``generate``, as from :meth:`Workload.batches`.
        workload: passed on to every :data:`Decode`; this function reads only ``repeats``.
        on_progress: receives the name of the decoder whose turn it is.

    Yields:
        A decoder's name, its seconds for one batch, and the counts of that batch.
    """
    decodes = _decodes(decoders)
    done, total = 0, workload.repeats * len(batches) * len(decodes)
    for _ in range(workload.repeats):
        for inputs in batches:
            for name, decode in decodes.items():
                on_progress(str(name), done, total)
                start = time.perf_counter()
                stats = decode(inputs, workload)
                yield name, time.perf_counter() - start, stats
                done += 1


def warm_up(decoders: Mapping[Any, SpeculativeDecoder | Decode], inputs: dict[str, Any], workload: Workload) -> None:
    """Decodes a few tokens with every decoder, because the first call of a model is slower."""
    for decode in _decodes(decoders).values():
        decode(inputs, replace(workload, new_tokens=min(workload.new_tokens, 8)))


def _decodes(decoders: Mapping[Name, SpeculativeDecoder | Decode]) -> dict[Name, Decode]:
    return {name: ours(each) if isinstance(each, SpeculativeDecoder) else each for name, each in decoders.items()}


def in_turns(
    target: RaggedModel,
    decoders: Mapping[str, SpeculativeDecoder | Decode],
    workload: Workload,
    on_progress: ProgressCallback = quiet,
) -> Iterator[DecodeRow]:
    """Decodes all prompts with every decoder in turns; yields a row for each, with speed-ups over the first."""
    batches = workload.batches(target)
    warm_up(decoders, batches[0], workload)

    def show_case(name: str, done: int, of: int) -> None:
        on_progress(f"{size_of(workload)}, {case_of(workload)}, {name}", done, of)

    found: dict[str, list[tuple[float, DecodeStats]]] = {name: [] for name in decoders}
    for name, seconds, stats in take_turns(decoders, batches, workload, show_case):
        found[name].append((seconds, stats))
    references: list[list[float]] = []
    for name, timed in found.items():
        totals = [_total(timed[first : first + len(batches)]) for first in range(0, len(timed), len(batches))]
        rates, step_rates = (
            [sum(stats.emitted) / (seconds - left_out(stats)) for seconds, stats in totals]
            for left_out in (lambda stats: 0.0, lambda stats: stats.seconds.get("prefill", 0.0))
        )
        references = references or [rates, step_rates]
        ratios, step_ratios = (
            [mine / base for mine, base in zip(own, reference, strict=True)]
            for own, reference in zip((rates, step_rates), references, strict=True)
        )
        total = totals[-1][1]
        yield DecodeRow(
            dtype=precision(target.model),
            batch=workload.batch,
            temperature=workload.temperature,
            decoder=name,
            exactness=total.exactness,
            tokens_per_second=statistics.median(rates),
            speed_up=statistics.median(ratios),
            spread=(max(ratios) - min(ratios)) / 2,
            request=workload.kind,
            context=workload.context,
            served=workload.served,
            category=workload.category,
            steps_speed_up=statistics.median(step_ratios) if "prefill" in total.seconds else None,
            **_per_token(total),
        )


def size_of(case: Workload | DecodeRow) -> str:
    """Returns the batch or the number of clients of a case, for people."""
    return f"{case.batch} client{'s' * (case.batch > 1)}" if case.served else f"batch {case.batch}"


def case_of(case: Workload | DecodeRow) -> str:
    """Returns the category, the kind of request and the context of a case, for people."""
    kind = (case.kind if isinstance(case, Workload) else case.request) or f"temperature {case.temperature:g}"
    context = f"{case.context} tokens" if case.context else ""
    return ", ".join(filter(None, (case.category, kind, context)))


def _total(timed: Sequence[tuple[float, DecodeStats]]) -> tuple[float, DecodeStats]:
    """Sums seconds and counts of the batches of a round."""
    return sum(seconds for seconds, _ in timed), reduce(add, (stats for _, stats in timed))


def _per_token(stats: DecodeStats) -> dict[str, Any]:
    """Returns the :class:`DecodeRow` columns that follow from counts; none for decoders of other libraries."""
    if not stats.forwards:
        return {}
    tokens, forwards = sum(stats.emitted), sum(stats.forwards)
    accepted, spent = sum(stats.accepted_rank.values()), sum(stats.seconds.values())
    return {
        "tau": stats.tau,
        "acceptance": stats.acceptance_by_depth,
        "by_rank": [stats.accepted_rank[rank] / accepted for rank in sorted(stats.accepted_rank)],
        "drafted": stats.drafted / forwards,
        "rows": stats.rows / tokens,
        "pad_rows": stats.pad_rows / max(1, stats.rows),
        "pad_keys": stats.pad_keys / tokens,
        "seconds": {phase: seconds / spent for phase, seconds in stats.seconds.items()},
    }
