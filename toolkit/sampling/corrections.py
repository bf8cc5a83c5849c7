"""Changes that logits processors make to the scores of single tokens, as far as one call can follow them.

Where acceptance is matching, drafts are guesses: changes that are left out cost accepted drafts, never the output law.

Shapes: n changes, see :class:`~arbordraft.kernels.draft_tree.Corrections`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.kernels.draft_tree import Truncation
from arbordraft.sampling.kinds import transformers_name

Changes = npt.NDArray[np.float64]
_NONE: Changes = np.empty((0, 5))
_ALWAYS = 2.0**53  # deeper than any tree


class CountPenalty:
    """Presence and frequency penalties as OpenAI defines them, over the tokens of the answer.

    Args:
        prompt: length of the prompt, whose tokens do not count.
        presence: subtracted once from the score of a token that occurred.
        frequency: subtracted once per occurrence.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class TextCorrections:
    """The changes for one text, which only grows; a call takes time for the new tokens and the changes alone.

    Args:
        processors: processors of the text. Those whose effect is not known token by token are left out.
    """

    def __init__(self, processors: Sequence[Any]) -> None:
        self._parts = [part for one in processors if (part := _part_of(one)) is not None]

    def __call__(self, tokens: Sequence[int]) -> Changes:
        """Returns the ``[n, 5]`` changes after these tokens, which continue those of the last call."""
        if not self._parts:
            return _NONE
        return np.concatenate([part(tokens) for part in self._parts])


def temperature_of(processors: Sequence[Any]) -> float:
    """Returns the divisor of scores that all temperatures among the processors make together."""
    own = [one.temperature for one in processors if transformers_name(type(one)) == "TemperatureLogitsWarper"]
    return math.prod(own)


def truncation_of(processors: Sequence[Any]) -> Truncation:
    """Returns the joint effect of top-k, top-p and min-p among the processors."""
    found = Truncation()
    for one in processors:
        match transformers_name(type(one)):
            case "TopKLogitsWarper":
                found = found._replace(top_k=min(one.top_k, found.top_k or one.top_k))
            case "TopPLogitsWarper":
                found = found._replace(top_p=min(one.top_p, found.top_p))
            case "MinPLogitsWarper":
                found = found._replace(min_p=max(one.min_p, found.min_p))
    return found


def _part_of(processor: Any) -> Callable[[Sequence[int]], Changes] | None:
    """Returns a function that lists a processor's changes after a text; ``None`` if they are not known."""
    if type(processor) is CountPenalty:
        presence, frequency = processor.presence, processor.frequency
        return _Counted(processor.prompt, lambda counts: (1.0, -presence - frequency * counts))
    match transformers_name(type(processor)):
        case "RepetitionPenaltyLogitsProcessor":
            if isinstance(ignored := processor.prompt_ignore_length, Tensor) and ignored.numel() != 1:
                return None  # a number for each sample of a batch
            return _Counted(0 if ignored is None else int(ignored), lambda _: (processor.penalty, 0.0))
        case "NoRepeatNGramLogitsProcessor":
            return _Repeated(processor.ngram_size)
        case "SequenceBiasLogitsProcessor" | "NoBadWordsLogitsProcessor":
            return _Biased({tuple(sequence): bias for sequence, bias in processor.sequence_bias.items()})
        case "SuppressTokensLogitsProcessor":
            return _Constant(_banned(processor.suppress_tokens.tolist()))
        case "SuppressTokensAtBeginLogitsProcessor":
            banned, begin = processor.begin_suppress_tokens.tolist(), processor.begin_index
            return lambda tokens: _banned(banned, begin - len(tokens), begin - len(tokens) + 1)
        case "MinLengthLogitsProcessor":
            ends, least = processor.eos_token_id.flatten().tolist(), processor.min_length
            return lambda tokens: _banned(ends, 0, least - len(tokens))
        case "MinNewTokensLengthLogitsProcessor":
            ends, least = (
                processor.eos_token_id.flatten().tolist(),
                processor.prompt_length_to_skip + processor.min_new_tokens,
            )
            return lambda tokens: _banned(ends, 0, least - len(tokens))
    return None


def _changes(tokens: Any, factor: Any = 1.0, bias: Any = 0.0, first: float = 0.0, last: float = _ALWAYS) -> Changes:
    found = np.empty((len(tokens), 5))
    for column, values in enumerate((tokens, factor, bias, first, last)):
        found[:, column] = values
    return found


def _banned(tokens: Iterable[int], first: float = 0.0, last: float = _ALWAYS) -> Changes:
    return _changes(list(tokens), bias=-np.inf, first=first, last=last) if last > max(0.0, first) else _NONE


class _Constant:
    """Changes that are the same after any text."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def __call__(self, tokens: Sequence[int]) -> Changes:
        return self._changes


class _Counted:
    """Penalties of tokens that occurred, counted as the text grows.

    Args:
        ignored: number of first tokens that do not count.
        penalty: returns factor and bias of tokens that occurred so often.
    """

    def __init__(self, ignored: int, penalty: "Callable[[npt.NDArray[np.int64]], tuple[Any, Any]]") -> None:
        self._read, self._penalty = ignored, penalty
        self._counts = Counter[int]()

    def __call__(self, tokens: Sequence[int]) -> Changes:
        self._counts.update(tokens[self._read :])
        self._read = max(self._read, len(tokens))
        seen = len(self._counts)
        factor, bias = self._penalty(np.fromiter(self._counts.values(), np.int64, seen))
        return _changes(np.fromiter(self._counts, np.int64, seen), factor, bias)


class _Repeated:
    """Bans of tokens that would repeat an n-gram, at the roots; those of deeper nodes depend on drafts."""

    def __init__(self, size: int) -> None:
        self._size, self._read = size, 0
        self._next: dict[tuple[int, ...], set[int]] = {}

    def __call__(self, tokens: Sequence[int]) -> Changes:
        before = self._size - 1
        for place in range(max(before, self._read), len(tokens)):
            self._next.setdefault(tuple(tokens[place - before : place]), set()).add(tokens[place])
        self._read = len(tokens)
        last = tuple(tokens[len(tokens) - before :])
        return _banned(self._next.get(last, ()), 0.0, _ALWAYS if not before else 1.0)


class _Biased:
    """Biases of single tokens everywhere, and at roots those of the last tokens of sequences that came before them."""

    def __init__(self, biases: dict[tuple[int, ...], float]) -> None:
        single = {sequence[0]: bias for sequence, bias in biases.items() if len(sequence) == 1}
        self._single = _changes(list(single), bias=list(single.values()))
        self._longer = [(list(words[:-1]), words[-1], bias) for words, bias in biases.items() if len(words) > 1]

    def __call__(self, tokens: Sequence[int]) -> Changes:
        due = [(last, bias) for before, last, bias in self._longer if list(tokens[-len(before) :]) == before]
        if not due:
            return self._single
        ends, biases = zip(*due, strict=True)
        return np.concatenate([self._single, _changes(ends, bias=biases, last=1.0)])


__all__ = ["Changes", "CountPenalty", "TextCorrections", "temperature_of", "truncation_of"]
