"""Builds the samples of one ``generate()`` call and decodes them to the end.

Shapes: B samples, L prompt columns.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.decoding.generate import Stopping, check_prompts, without_padding
from arbordraft.decoding.lengths import check_positions
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.scheduler import Entry, Scheduler
from arbordraft.decoding.state import Sample
from arbordraft.decoding.step import Stepper
from arbordraft.grammars import Grammar, GrammarError, grammars_of
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import StatefulProcessor
from arbordraft.target.cache import CacheOverflow
from arbordraft.target.model import RaggedModel
from arbordraft.utils.checks import check_int, check_sequence

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteriaList

Constrain = Callable[[Grammar, Sequence[int], int], StatefulProcessor]
_OWN = (FloatingPointError, GrammarError)  # end one sample; the rest of its batch goes on


def batch_of(stepper: Stepper, samples: Sequence[Sample], max_tokens: int | None) -> Scheduler:
    """Builds a fixed batch and admits all of its samples; no others join.

    Args:
        stepper: runs the steps.
        samples: all samples of the batch.
        max_tokens: most rows of each KV cache; ``None`` for no limit.

    Raises:
        CacheOverflow: if the samples do not fit into the cache.
        ValueError: if a sample asks for something that these steps do not support.
    """
    scheduler = Scheduler(stepper, max_tokens, len(samples), None, stepper.can_share, fixed_batch=True)
    for sample in samples:
        stepper.check(sample)
        scheduler.check(sample)
    stepper.decider.expect(sum(sample.budget for sample in samples))
    scheduler.add(*map(Entry, samples))
    scheduler.admit()
    if scheduler.waiting:
        raise CacheOverflow(
            f"the KV cache may hold {max_tokens} tokens and has no room for all of these {len(samples)} samples: raise "
            "max_cache_tokens, shorten the prompts, lower max_new_tokens or decode fewer samples at once"
        )
    return scheduler


def decode_batch(scheduler: Scheduler, samples: Sequence[Sample]) -> DecodeStats:
    """Decodes a batch to its end; raises the errors of its samples' processors, criteria and streamers."""
    busy = True
    while busy:
        busy = scheduler.advance()
        for sample in samples:
            if sample.failure is not None and not isinstance(sample.failure, _OWN):
                raise sample.failure
    scheduler.stepper.close(scheduler.state)
    stats = scheduler.state.stats
    stats.emitted, stats.forwards = [s.stats.emitted for s in samples], [s.stats.forwards for s in samples]
    return stats


def samples_of(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    processors: "LogitsProcessorList",
    criteria: "StoppingCriteriaList",
    config: "GenerationConfig",
    *,
    target: RaggedModel,
    constrain: Constrain,
    seeds: Sequence[int] | None = None,
    grammar: Grammar | Sequence[Grammar | None] | None = None,
    max_drafts: int | Sequence[int | None] | None = None,
    predictions: Sequence[Sequence[int] | None] | None = None,
) -> list[Sample]:
    """Builds the samples of a batch from the inputs that transformers has prepared.

    Args:
        input_ids: ``[B, L]``, left-padded.
        attention_mask: ``[B, L]``; ``None`` if nothing is padded.
        processors: logits processors of the batch.
        criteria: stopping criteria of the batch.
        config: the request's settings.
        target: decodes the samples.
        constrain: builds a processor from a grammar, the tokens that end an answer, and its most tokens.
        seeds: one per sample; if ``None``, torch's generator draws them.
        grammar: one for all samples, or one per sample.
        max_drafts: one for all samples, or one per sample.
        predictions: token ids of one prediction per sample; ``None`` for a sample without one.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument cannot be used.
    """
    check_prompts(input_ids, attention_mask, target.vocab_size)
    batch, padded = input_ids.shape
    padding = [0] * batch if attention_mask is None else (attention_mask == 0).sum(dim=1).tolist()
    prompts = [row[pad:] for row, pad in zip(input_ids.tolist(), padding, strict=True)]
    stopping = [Stopping(criteria, batch, row) for row in range(batch)]
    budget = stopping[0].max_length - padded
    check_positions(target, max(map(len, prompts)), budget)
    if seeds is None:
        seeds = torch.randint(2**62, (batch,)).tolist()  # follows torch.manual_seed
    seeds = check_sequence("seeds", seeds, lambda _, seed: check_int("seed", seed, 0, 2**64 - 1))
    if len(seeds) != batch:
        raise ValueError(f"{len(seeds)} seeds for {batch} samples")
    bounds, expected = _bounds(max_drafts, batch), _predictions(predictions, batch, target.vocab_size)
    kept = without_padding(processors, padding, config)
    pipelines = _pipelines(kept, padding, grammars_of(grammar, batch), config, constrain, budget)
    return [
        Sample(prompt, budget, seed, pipeline, stops, pad, max_drafts=most, prediction=prediction)
        for prompt, seed, pipeline, stops, pad, most, prediction in zip(
            prompts, seeds, pipelines, stopping, padding, bounds, expected, strict=True
        )
    ]


def _bounds(max_drafts: Any, batch: int) -> list[int | None]:
    """Returns the bound on drafts of each sample."""

    def checked(name: str, bound: Any) -> int | None:
        return None if bound is None else check_int(name, bound, 0)

    if not isinstance(max_drafts, Sequence):
        return [checked("max_drafts", max_drafts)] * batch
    bounds = check_sequence("max_drafts", max_drafts, checked)
    if len(bounds) != batch:
        raise ValueError(
            f"max_drafts has {len(bounds)} bounds for {batch} samples; pass one for all, or a list with one per sample"
        )
    return list(bounds)


def _predictions(predictions: Any, batch: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Returns the prediction of each sample."""
    if predictions is None:
        return [()] * batch
    found = check_sequence("predictions", predictions, lambda name, one: () if one is None else _tokens(name, one))
    if len(found) != batch:
        raise ValueError(f"{len(found)} predictions for {batch} samples; pass None for a sample without one")
    if max((max(one, default=0) for one in found), default=0) >= vocab_size:
        raise ValueError(f"predictions hold ids outside the target's vocabulary of {vocab_size} tokens")
    return list(found)


def _tokens(name: str, tokens: Any) -> tuple[int, ...]:
    return check_sequence(name, tokens, lambda entry, token: check_int(entry, token, 0))


def _pipelines(
    processors: "Sequence[LogitsProcessor]",
    padding: Sequence[int],
    grammars: Sequence[Grammar | None],
    config: "GenerationConfig",
    constrain: Constrain,
    budget: int,
) -> list[LogitsPipeline]:
    """Builds the logits pipeline of each sample; samples that share one object are processed together."""
    ends = config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    made: dict[tuple[Grammar | None, int, int], LogitsPipeline] = {}
    keys = [(one, *LogitsPipeline.row_and_padding(processors, row, padding[row])) for row, one in enumerate(grammars)]
    for grammar, row, columns in keys:
        if (grammar, row, columns) not in made:
            chain: list[Any] = [] if grammar is None else [constrain(grammar, ends, budget)]
            made[grammar, row, columns] = LogitsPipeline(
                [*chain, *processors], len(grammars), row=row, padding=columns, greedy=not config.do_sample
            )
    return [made[key] for key in keys]


__all__ = ["batch_of", "decode_batch", "samples_of"]
