"""Timing whole decodes of the same prompts by several decoders, in turns.

Everything is measured in rounds in which each decoder has its turn: a slow spell of the machine hits all of them.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.bench.measure import Tell, precision, quiet
from arbordraft.decoder import SpeculativeDecoder
from arbordraft.metrics import DecodeStats
from arbordraft.prompts import chat_batches, plain_request

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Request = dict[str, Any]


@dataclass(frozen=True)
class DecodeRow:
    """What decoding some prompts with one decoder took and gave.

    Args:
        dtype: of the target.
        batch: prompts at a time.
        temperature: 0 for greedy.
        decoder: its name.
        exactness: what it promises about the output law.
        tokens_per_second: median of the rounds, prompts included.
        speed_up: over the reference, the first decoder: median of the rounds' ratios.
        tau: emitted tokens per target forward of a sample.
        acceptance: by depth, how often a child was accepted when there was one to accept.
        by_rank: by rank among its siblings, share of the accepted tokens.
        drafted: drafted tokens per target forward of a sample.
        rows: rows of the target's forwards per emitted token.
        pad_rows: share of the rows that belong to no token.
        pad_keys: attended cache columns that belong to no token, per emitted token.
        seconds: by phase, share of the time.
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


@dataclass
class Total:
    """Counts of several decodes."""

    emitted: int = 0
    forwards: int = 0
    drafted: int = 0
    rows: int = 0
    pad_rows: int = 0
    pad_keys: int = 0
    tried: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    exactness: str = "exact"

    def add(self, stats: DecodeStats) -> None:
        """Adds one decode."""
        self.emitted += sum(stats.emitted)
        self.forwards += sum(stats.forwards)
        self.exactness = stats.exactness
        for name in ("drafted", "rows", "pad_rows", "pad_keys"):
            setattr(self, name, getattr(self, name) + getattr(stats, name))
        self.tried += stats.tried
        self.accepted += stats.accepted
        self.ranks += stats.accepted_rank
        for phase, seconds in stats.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


# Decodes one batch, given a seed, and returns what it emitted: a decoder's statistics, or, of somebody else's, the
# number of tokens.
Decode = Callable[[dict[str, Any], Request, int], "DecodeStats | int"]


def ours(decoder: SpeculativeDecoder) -> Decode:
    """Decoding with one of our decoders; samples have their own seeds, the same for every decoder."""

    def decode(inputs: dict[str, Any], request: Request, seed: int) -> DecodeStats:
        seeds = [1000 * (seed + 1) + sample for sample in range(len(inputs["input_ids"]))]
        output: Any = decoder.generate(**inputs, **request, seeds=seeds, return_dict_in_generate=True)
        stats: DecodeStats = output.stats
        return stats

    return decode


def theirs(model: "PreTrainedModel", **options: Any) -> Decode:
    """Decoding with transformers, one prompt at a time if it assists, which supports no batches.

    Args:
        model: the target.
        **options: of its ``generate``, such as ``assistant_model`` or ``prompt_lookup_num_tokens``.
    """

    def decode(inputs: dict[str, Any], request: Request, seed: int) -> int:
        torch.manual_seed(seed)
        if not options:
            found: Any = model.generate(**inputs, **request)  # type: ignore[operator]
            return emitted(found[:, inputs["input_ids"].shape[1] :], model)
        total = 0
        for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
            prompt = ids[mask.bool()][None]
            found = model.generate(  # type: ignore[operator]
                prompt, attention_mask=torch.ones_like(prompt), **request, **options
            )
            total += emitted(found[:, prompt.shape[1] :], model)
        return total

    return decode


def emitted(answers: Tensor, model: "PreTrainedModel") -> int:
    """Tokens of ``[B, L]`` answers up to the end of each, which counts, the padding behind it not."""
    ends = model.generation_config.eos_token_id
    known = torch.tensor(ends if isinstance(ends, list) else [ends] if ends is not None else [])
    over = torch.isin(answers.cpu(), known)
    return int((over.cumsum(dim=1) - over.long() == 0).sum())


def in_turns(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    decoders: Mapping[str, Decode],
    *,
    batch: int,
    temperature: float = 0.0,
    new_tokens: int = 128,
    repeats: int = 3,
    seed: int = 0,
    tell: Tell = quiet,
) -> Iterator[DecodeRow]:
    """Decodes all prompts with every decoder, in turns; speed-ups are over the first one.

    Args:
        model: the target, whose dtype is told.
        tokenizer: its tokenizer.
        prompts: first user turns.
        decoders: by name.
        batch: prompts at a time.
        temperature: 0 for greedy.
        new_tokens: longest answer.
        repeats: rounds, after one that warms up on the first batch.
        seed: of what is sampled.
        tell: is told what is going on.
    """
    batches = chat_batches(tokenizer, prompts, batch)
    request = plain_request(temperature, new_tokens)
    for decode in decoders.values():
        decode(batches[0], request | {"max_new_tokens": min(new_tokens, 8)}, seed)
    done, rounds = 0, repeats * len(decoders) * len(batches)
    rates: dict[str, list[float]] = {name: [] for name in decoders}
    totals: dict[str, Total] = {}
    for _ in range(repeats):
        for name, decode in decoders.items():
            total, tokens = Total(), 0
            start = time.perf_counter()
            for inputs in batches:
                tell(f"batch {batch}, temperature {temperature:g}, {name}", done, rounds)
                done += 1
                found = decode(inputs, request, seed)
                if isinstance(found, int):
                    tokens += found
                else:
                    total.add(found)
            seconds = time.perf_counter() - start
            rates[name].append((tokens + total.emitted) / seconds)
            totals[name] = total
    reference = next(iter(rates.values()))
    for name, found_rates in rates.items():
        total = totals[name]
        row: dict[str, Any] = {
            "dtype": precision(model),
            "batch": batch,
            "temperature": temperature,
            "decoder": name,
            "exactness": total.exactness,
            "tokens_per_second": statistics.median(found_rates),
            "speed_up": statistics.median(mine / base for mine, base in zip(found_rates, reference, strict=True)),
        }
        if total.forwards:
            accepted, spent = sum(total.ranks.values()), sum(total.seconds.values())
            row |= {
                "tau": total.emitted / total.forwards,
                "acceptance": [total.accepted[depth] / total.tried[depth] for depth in sorted(total.tried)],
                "by_rank": [total.ranks[rank] / accepted for rank in sorted(total.ranks)],
                "drafted": total.drafted / total.forwards,
                "rows": total.rows / total.emitted,
                "pad_rows": total.pad_rows / max(1, total.rows),
                "pad_keys": total.pad_keys / total.emitted,
                "seconds": {phase: seconds / spent for phase, seconds in total.seconds.items()},
            }
        yield DecodeRow(**row)
