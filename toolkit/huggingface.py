"""How the arguments and results of transformers' ``generate()`` map to ours.

Shapes: B samples, L prompt columns (padding included).
"""

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from arbordraft.metrics import DecodeStats

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessor,
        LogitsProcessorList,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

    from arbordraft.output import SpeculativeOutput


class Decoded(Protocol):
    """What of a decoding state ends up in the output."""

    tokens: list[list[int]]
    padding: list[int]
    stats: DecodeStats


class DecodingError(RuntimeError):
    """Some samples could not be decoded to their end.

    Args:
        failures: reason by sample.
        output: everything that was decoded, as ``generate(return_dict_in_generate=True)`` returns it; samples that
            did not fail are complete.
    """

    def __init__(self, failures: dict[int, str], output: "SpeculativeOutput") -> None:
        reasons = "; ".join(f"sample {sample}: {reason}" for sample, reason in failures.items())
        super().__init__(f"{reasons}. The other samples are complete: see .output")
        self.failures = failures
        self.output = output


class Stopping:
    """Stopping criteria for samples that gain several tokens per step.

    Args:
        criteria: what ``generate()`` prepared. The length limit and end-of-sequence tokens are read off; any other
            criterion is asked about one sample at a time, after each of its tokens.
    """

    def __init__(self, criteria: "StoppingCriteriaList") -> None:
        self.max_length = sys.maxsize
        self._ends: set[int] = set()
        self._others = []
        for criterion in criteria:
            match type(criterion).__name__:
                case "MaxLengthCriteria":
                    self.max_length = min(self.max_length, criterion.max_length)
                case "EosTokenCriteria":
                    self._ends.update(criterion.eos_token_id.tolist())
                case _:
                    self._others.append(criterion)

    def __call__(self, token: int, path: Callable[[], Sequence[int]]) -> bool:
        """Whether a sample ends with ``token``; ``path()`` gives all its tokens up to and with that one."""
        if token in self._ends:
            return True
        if not self._others:
            return False
        ids = torch.tensor([path()])
        return any(bool(criterion(ids, None).all()) for criterion in self._others)


def with_stop_strings(
    criteria: "StoppingCriteriaList | None", strings: str | list[str], tokenizer: "PreTrainedTokenizerBase | None"
) -> "StoppingCriteriaList":
    """Adds stop strings to stopping criteria; transformers would not pass the tokenizer on to a custom method."""
    from transformers import StoppingCriteriaList, StopStringCriteria

    if tokenizer is None:
        raise ValueError("stop_strings need a tokenizer: pass tokenizer=..., or build RaggedModel(model, tokenizer)")
    return StoppingCriteriaList([*(criteria or []), StopStringCriteria(tokenizer, strings)])


def check_prompts(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> None:
    """Raises ValueError unless the prompts are ``[B, L]``, not empty, in the vocabulary and padded on the left."""
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be [batch, length] with at least one token, got {list(input_ids.shape)}")
    if not 0 <= input_ids.min() <= input_ids.max() < vocab_size:
        raise ValueError(f"input_ids hold ids outside the target's vocabulary of {vocab_size} tokens")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} must match input_ids {list(input_ids.shape)}")
    for sample, row in enumerate(attention_mask.bool().tolist()):
        if not any(row):
            raise ValueError(f"the prompt of sample {sample} is empty; a prompt needs at least one token")
        if not all(row[row.index(True) :]):
            raise ValueError(f"the prompt of sample {sample} is not left-padded; set tokenizer.padding_side = 'left'")


def without_padding(processors: "LogitsProcessorList", padding: Sequence[int]) -> "list[LogitsProcessor]":
    """Processors for single samples whose paths hold no padding tokens.

    The repetition penalty that ``generate()`` prepares is told how many padding tokens each row of the batch starts
    with. Here there are none to skip, and no batch to apply it to.
    """
    from transformers import RepetitionPenaltyLogitsProcessor

    found: list[LogitsProcessor] = []
    for processor in processors:
        skipped = getattr(processor, "prompt_ignore_length", None)
        if isinstance(skipped, Tensor):
            if skipped.tolist() != list(padding):
                raise ValueError(
                    "a prompt_ignore_length per sample that skips more or less than the padding cannot be honoured: "
                    "pass one int for all samples"
                )
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty)
        found.append(processor)
    return found


def refuse_unsupported(config: "GenerationConfig", model_kwargs: dict[str, Any]) -> None:
    """Raises ValueError for options of ``generate()`` that speculative decoding cannot honour."""
    wanted = [name for name in ("output_attentions", "output_hidden_states", "output_logits", "output_scores")
              if getattr(config, name, False)]  # fmt: skip
    if wanted and config.return_dict_in_generate:
        raise ValueError(f"{', '.join(wanted)}: per-token outputs are not kept when several tokens are decided at once")
    if (config.num_beams or 1) > 1:
        raise ValueError("beam search cannot be combined with speculative decoding; set num_beams=1")
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() > 0:
        raise ValueError("past_key_values cannot be continued: pass the whole text as input_ids")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds are not supported: drafting needs token ids")


def per_sample_streamers(
    streamer: "BaseStreamer | Sequence[BaseStreamer] | None", batch: int
) -> "Sequence[BaseStreamer]":
    """One streamer per sample, or none."""
    if streamer is None:
        return ()
    streamers = streamer if isinstance(streamer, Sequence) else [streamer]
    if len(streamers) != batch:
        raise ValueError(f"{len(streamers)} streamers for {batch} samples; pass a list with one per sample")
    return streamers


def pack_output(input_ids: Tensor, state: Decoded, config: "GenerationConfig") -> "SpeculativeOutput":
    """The committed tokens behind the prompts as given, padded on the right."""
    from arbordraft.output import SpeculativeOutput

    columns = input_ids.shape[1]
    new = [tokens[columns - padding :] for tokens, padding in zip(state.tokens, state.padding, strict=True)]
    pad = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    if isinstance(pad, list):
        pad = pad[0]
    sequences = input_ids.new_full((len(new), columns + max(map(len, new))), pad or 0)
    sequences[:, :columns] = input_ids
    for row, tokens in zip(sequences, new, strict=True):
        row[columns : columns + len(tokens)] = torch.tensor(tokens)
    return SpeculativeOutput(sequences=sequences, stats=state.stats)  # type: ignore[arg-type]
