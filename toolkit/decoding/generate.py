"""Maps arguments and results of transformers' ``generate()`` to ours.

Shapes: B samples, L prompt columns (padding included).
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from arbordraft.decoding.detokenizing import IncrementalDetokenizer, TokenDecoder
from arbordraft.decoding.metrics import AnswerStats, DecodeStats
from arbordraft.decoding.settings import EXTRA_OUTPUTS, check_settings, effective, says_something
from arbordraft.sampling.kinds import transformers_name
from arbordraft.target.hf_cache import CACHE_NAMES, holds_tokens
from arbordraft.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        LogitsProcessor,
        LogitsProcessorList,
        PreTrainedTokenizerBase,
        StoppingCriteriaList,
    )
    from transformers.generation.streamers import BaseStreamer

    from arbordraft.decoding.output import SpeculativeOutput


class Decoded(Protocol):
    """Fields of a sample that the output needs."""

    tokens: list[int]
    padding: int
    stats: AnswerStats


class DecodingError(UserError):
    """Some samples could not be decoded to their end.

    Args:
        failures: reason of failure by sample.
        output: all decoded tokens, as ``generate(return_dict_in_generate=True)`` returns them; the other samples are
            complete.
    """

    def __init__(self, failures: dict[int, str], output: "SpeculativeOutput") -> None:
        reasons = "; ".join(f"sample {sample}: {reason}" for sample, reason in failures.items())
        super().__init__(f"{reasons}. The other samples are complete: see .output")
        self.failures = failures
        self.output = output


class StopTexts:
    """Stopping criterion: an answer ends with the token that completes one of several texts.

    Unlike transformers' ``StopStringCriteria``, it reads the answer without the prompt, and each new token once. So its
    cost depends neither on the length of the texts nor on the size of the vocabulary. Only decoders of this package
    support it.

    Args:
        tokenizer: decodes the answers.
        texts: texts that end an answer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | TokenDecoder", texts: Sequence[str]) -> None:
        self._token_decoder, self._texts = TokenDecoder.of(tokenizer), texts

    def answer(self) -> IncrementalDetokenizer:
        """Creates a reader for one answer."""
        return IncrementalDetokenizer(self._token_decoder, self._texts)


class Stopping:
    """Stopping criteria for samples that gain several tokens per step.

    Args:
        criteria: criteria that ``generate()`` prepared. The length limit and end-of-sequence tokens are extracted from
            them. :class:`StopTexts` read the answer. All other criteria are called for one sample at a time, after each
            of its tokens.
        batch_size: size of the batch for which the criteria were prepared. Custom criteria are called with
            ``batch_size`` equal rows, since they may treat rows differently.
        row: the sample's number in that batch.
        ends: further tokens that end a sample.
    """

    def __init__(self, criteria: "Iterable[Any]", batch_size: int = 1, row: int = 0, ends: Iterable[int] = ()) -> None:
        self.max_length = sys.maxsize
        self._batch_size, self._row = batch_size, row
        self._ends = set(ends)
        self._others, self._answers = [], list[IncrementalDetokenizer]()
        for criterion in criteria:
            if isinstance(criterion, StopTexts):
                self._answers.append(criterion.answer())
                continue
            match transformers_name(type(criterion)):
                case "MaxLengthCriteria":
                    self.max_length = min(self.max_length, criterion.max_length)
                case "EosTokenCriteria":
                    self._ends.update(criterion.eos_token_id.tolist())
                case _:
                    self._others.append(criterion)

    def __call__(self, token: int, path: Callable[[], Sequence[int]]) -> bool:
        """Returns whether a sample ends with ``token``; ``path()`` returns all its tokens, this one included."""
        for answer in self._answers:
            answer.add([token])
        if token in self._ends or any(answer.ended for answer in self._answers):
            return True
        if not self._others:
            return False
        ids = torch.tensor([path()])
        return any(self._ended(criterion, ids) for criterion in self._others)

    def _ended(self, criterion: Any, ids: Tensor) -> bool:
        """Returns whether a criterion ends ``[1, L]`` tokens as this sample's row of the batch."""
        count, row = (1, 0) if transformers_name(type(criterion)) else (self._batch_size, self._row)
        stops = torch.as_tensor(criterion(ids.repeat(count, 1), None))
        if stops.ndim > 1 or stops.numel() not in (1, count):  # some return one bool for all rows
            raise ValueError(f"{type(criterion).__name__} returned {list(stops.shape)} values for {count} samples")
        return bool(stops.expand(count)[row])


def with_stop_strings(
    criteria: "StoppingCriteriaList | None", strings: str | Sequence[str], tokenizer: "PreTrainedTokenizerBase | None"
) -> "StoppingCriteriaList":
    """Adds stop strings, if there are any, to stopping criteria.

    Raises:
        ValueError: if there are stop strings but no tokenizer.
    """
    from transformers import StoppingCriteriaList, StopStringCriteria

    if not strings:
        return StoppingCriteriaList(criteria or [])
    if tokenizer is None:
        raise ValueError("stop_strings need a tokenizer: pass tokenizer=..., or build RaggedModel(model, tokenizer)")
    return StoppingCriteriaList([*(criteria or []), StopStringCriteria(tokenizer, strings)])  # type: ignore[arg-type]


def check_prompts(input_ids: Any, attention_mask: Any, vocab_size: int) -> None:
    """Raises TypeError or ValueError unless the prompts are ``[B, L]`` token ids, not empty and padded on the left."""
    _check_whole("input_ids", input_ids)
    if input_ids.ndim != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be [batch, length] with at least one token, got {list(input_ids.shape)}")
    if not 0 <= input_ids.min() <= input_ids.max() < vocab_size:
        raise ValueError(f"input_ids hold ids outside the target's vocabulary of {vocab_size} tokens")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor, got {_described(attention_mask)}: pass torch.tensor(...)")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} must match input_ids {list(input_ids.shape)}")
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError("attention_mask must hold 1 for tokens and 0 for padding, and nothing between or beyond")
    for sample, row in enumerate(attention_mask.bool().tolist()):
        if not any(row):
            raise ValueError(f"the prompt of sample {sample} is empty; a prompt needs at least one token")
        if not all(row[row.index(True) :]):
            raise ValueError(f"the prompt of sample {sample} is not left-padded; set tokenizer.padding_side = 'left'")


def _check_whole(name: str, ids: Any) -> None:
    if not isinstance(ids, Tensor):
        inside = "; a tokenizer makes them of text" if isinstance(ids, str) else ": pass torch.tensor(...)"
        raise TypeError(f"{name} must be a tensor of token ids [batch, length], got {_described(ids)}{inside}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} must hold token ids, whole numbers, got {ids.dtype}: convert them with .long()")


def _described(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def without_padding(
    processors: "LogitsProcessorList", padding: Sequence[int], config: "GenerationConfig"
) -> "list[LogitsProcessor]":
    """Adapts the processors of a padded batch to single samples without padding.

    ``generate()`` sets how many padding columns the repetition penalty skips in each row. A sample has no padding, so
    that number is dropped. For ``min_new_tokens``, ``generate()`` prepares two processors; one of them is dropped.
    """
    from transformers import MinLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

    kept: list[LogitsProcessor] = []
    for processor in processors:
        skipped = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(skipped, Tensor):
            if skipped.tolist() != list(padding):
                raise ValueError(
                    "a prompt_ignore_length per sample that skips more or less than the padding cannot be honoured: "
                    "pass one int for all samples"
                )
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty)
        if config.min_new_tokens is None or type(processor) is not MinLengthLogitsProcessor:
            kept.append(processor)
    return kept


# Arguments that generate() passes to every decoding method, besides the inputs of the particular model.
_EXPECTED = frozenset({"attention_mask", "logits_to_keep", "position_ids", "use_cache", *CACHE_NAMES, *EXTRA_OUTPUTS})


def integral_lengths(options: Mapping[str, Any]) -> dict[str, int]:
    """Converts lengths given as whole floats, which transformers accepts, to integers."""
    names = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
    given = {name: options.get(name) for name in names}
    return {name: int(value) for name, value in given.items() if isinstance(value, float) and value.is_integer()}


def check_options(options: Mapping[str, Any], own: "GenerationConfig") -> dict[str, Any]:
    """Merges arguments of ``generate()`` with the model's own settings, checks the result and returns it by name.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for arguments that are invalid or not supported here.
    """
    from transformers import GenerationConfig

    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(
            f"generation_config must be a GenerationConfig, got {_described(config)}: write "
            "GenerationConfig(**dict), or GenerationConfig.from_pretrained(folder)"
        )
    settings = effective(options, own)
    check_settings(settings, own)
    return settings


def refuse_unsupported(
    own: "GenerationConfig", config: "GenerationConfig", attention_mask: Tensor | None, model_kwargs: dict[str, Any]
) -> None:
    """Raises ValueError for options of ``generate()`` and model inputs that are not supported here."""
    check_settings(vars(config), own)
    pasts = [past for name in CACHE_NAMES if (past := model_kwargs.get(name)) is not None]
    if any(map(holds_tokens, pasts)):
        raise ValueError("a cache cannot be continued: pass the whole text as input_ids")
    if model_kwargs.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds are not supported: drafting needs token ids")
    unused = [name for name, given in model_kwargs.items() if name not in _EXPECTED and says_something(given)]
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: inputs of the model besides its tokens would be ignored when they run packed; only "
            "text can be decoded: leave them out, or call the model's own generate()"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None and not _own_positions(positions, attention_mask):
        raise ValueError("position_ids must number each prompt's own tokens 0, 1, 2, ...: leave them out")


def _own_positions(positions: Tensor, attention_mask: Tensor | None) -> bool:
    """Returns whether ``[B, L]`` positions count each prompt's own tokens from 0."""
    if positions.ndim != 2:
        return False
    mask = torch.ones_like(positions) if attention_mask is None else attention_mask.long()
    return bool(((mask.cumsum(dim=1) - 1 == positions) | (mask == 0)).all())


def per_sample_streamers(
    streamer: "BaseStreamer | Sequence[BaseStreamer] | None", batch: int
) -> "Sequence[BaseStreamer]":
    """Returns one streamer per sample, or an empty sequence for ``None``."""
    if streamer is None:
        return ()
    streamers = streamer if isinstance(streamer, Sequence) else [streamer]
    for one in streamers:
        if not (hasattr(one, "put") and hasattr(one, "end")):
            raise TypeError(f"streamer must have put() and end(), as transformers' streamers do, got {_described(one)}")
    if len(streamers) != batch:
        raise ValueError(f"{len(streamers)} streamers for {batch} samples; pass a list with one per sample")
    return streamers


def pack_output(
    input_ids: Tensor, samples: Sequence[Decoded], stats: DecodeStats, config: "GenerationConfig"
) -> "SpeculativeOutput":
    """Builds the output: the prompts as given, each followed by its new tokens, padded on the right."""
    from arbordraft.decoding.output import SpeculativeOutput

    columns = input_ids.shape[1]
    new = [sample.tokens[columns - sample.padding :] for sample in samples]
    pad = config.pad_token_id if config.pad_token_id is not None else config.eos_token_id
    if isinstance(pad, list):
        pad = pad[0]
    sequences = input_ids.new_full((len(new), columns + max(map(len, new))), pad or 0)
    sequences[:, :columns] = input_ids
    for row, tokens in zip(sequences, new, strict=True):
        row[columns : columns + len(tokens)] = torch.tensor(tokens)
    answers = [sample.stats for sample in samples]
    return SpeculativeOutput(sequences=sequences, stats=stats, answers=answers)  # type: ignore[arg-type]
