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
_LAW = ["TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"]  # in their usual order


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

    def after(self, tokens: Sequence[int], drafted: Sequence[int]) -> Changes:
        """Returns the ``[n, 3]`` changes of the token after some drafts, in the order and rounding of the processors.

        Args:
            tokens: the text, which continues that of the last call.
            drafted: the drafts that follow it.
        """
        if not self._parts:
            return _NONE[:, :3]
        found = np.concatenate([part.after(tokens, drafted) for part in self._parts])
        return found[(found[:, 3] <= len(drafted)) & (found[:, 4] > len(drafted)), :3]


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


def are_known(processors: Sequence[Any], vocabulary: int) -> bool:
    """Returns whether all processors are changes of single tokens, then a temperature, top-k, top-p and min-p.

    Args:
        processors: processors of a text.
        vocabulary: number of tokens; processors that name others may refuse them.
    """
    last = -1
    for one in processors:
        name = transformers_name(type(one))
        if name in _LAW:
            place = _LAW.index(name)
            if place <= last or getattr(one, "filter_value", -math.inf) != -math.inf:
                return False
            if getattr(one, "min_tokens_to_keep", 1) != 1:
                return False
            last = place
        elif last >= 0 or (part := _part_of(one)) is None or part.largest >= vocabulary:
            return False
    return True


def _part_of(processor: Any) -> "_Part | None":
    """Returns a processor's changes; ``None`` if they are not known."""
    if type(processor) is CountPenalty:
        return _Counted(processor.prompt, _subtracted(processor.presence, processor.frequency))
    match transformers_name(type(processor)):
        case "RepetitionPenaltyLogitsProcessor":
            if isinstance(ignored := processor.prompt_ignore_length, Tensor) and ignored.numel() != 1:
                return None  # a number for each sample of a batch
            penalty = processor.penalty
            return _Counted(0 if ignored is None else int(ignored), lambda tokens, _: _changes(tokens, penalty))
        case "NoRepeatNGramLogitsProcessor":
            return _Repeated(processor.ngram_size)
        case "SequenceBiasLogitsProcessor" | "NoBadWordsLogitsProcessor":
            return _Biased({tuple(sequence): bias for sequence, bias in processor.sequence_bias.items()})
        case "SuppressTokensLogitsProcessor":
            return _Part(lambda tokens: _banned(processor.suppress_tokens.tolist()))
        case "SuppressTokensAtBeginLogitsProcessor":
            banned, begin = processor.begin_suppress_tokens.tolist(), processor.begin_index
            return _Part(lambda tokens: _banned(banned, begin - len(tokens), begin - len(tokens) + 1))
        case "MinLengthLogitsProcessor":
            return _ended_late(processor.eos_token_id, processor.min_length)
        case "MinNewTokensLengthLogitsProcessor":
            return _ended_late(processor.eos_token_id, processor.prompt_length_to_skip + processor.min_new_tokens)
    return None


def _changes(tokens: Any, factor: Any = 1.0, bias: Any = 0.0, first: float = 0.0, last: float = _ALWAYS) -> Changes:
    found = np.empty((len(tokens), 5))
    for column, values in enumerate((tokens, factor, bias, first, last)):
        found[:, column] = values
    return found


def _banned(tokens: Iterable[int], first: float = 0.0, last: float = _ALWAYS) -> Changes:
    return _changes(list(tokens), bias=-np.inf, first=first, last=last) if last > max(0.0, first) else _NONE


def _ended_late(ends: Tensor, least: int) -> "_Part":
    tokens = ends.flatten().tolist()
    return _Part(lambda text: _banned(tokens, 0, least - len(text)))


def _subtracted(presence: float, frequency: float) -> "Penalty":
    """Returns the penalties of tokens that occurred so often, rounded as tensors of float32 round them."""

    def penalties(tokens: Sequence[int], counts: "npt.NDArray[np.int64]") -> Changes:
        by_count = np.float32(frequency) * counts.astype(np.float32)
        parts = [_changes(tokens, bias=-by_count)] if frequency else []
        return np.concatenate([*parts, _changes(tokens, bias=-presence)] if presence or not parts else parts)

    return penalties


Penalty = Callable[[Sequence[int], "npt.NDArray[np.int64]"], Changes]
"""Given tokens and how often each occurred, returns their changes."""


class _Part:
    """Changes of one processor that depend on the length of a text alone.

    Args:
        changes: returns the changes after a text, for every depth below it.
    """

    largest = -1  # token that the processor names and may refuse

    def __init__(self, changes: Callable[[Sequence[int]], Changes]) -> None:
        self._changes = changes

    def __call__(self, tokens: Sequence[int]) -> Changes:
        """Returns the changes after a text, as far as they do not depend on drafts."""
        return self._changes(tokens)

    def after(self, tokens: Sequence[int], drafted: Sequence[int]) -> Changes:
        """Returns changes of which those at the depth of the last draft are all that hold after it."""
        return self(tokens)


class _Counted(_Part):
    """Penalties of tokens that occurred, counted as the text grows.

    Args:
        ignored: number of first tokens that do not count.
        penalty: returns the changes of tokens that occurred so often.
    """

    def __init__(self, ignored: int, penalty: Penalty) -> None:
        self._ignored = self._read = ignored
        self._penalty = penalty
        self._counts = Counter[int]()
        self._known: Changes | None = _NONE

    def __call__(self, tokens: Sequence[int]) -> Changes:
        if len(tokens) > self._read:
            self._counts.update(tokens[self._read :])
            self._read, self._known = len(tokens), None
        if self._known is None:
            self._known = self._of(self._counts)
        return self._known

    def after(self, tokens: Sequence[int], drafted: Sequence[int]) -> Changes:
        before = self(tokens)
        counted = Counter(drafted[max(0, self._ignored - len(tokens)) :])
        if not counted:
            return before
        changed = Counter({token: count + self._counts[token] for token, count in counted.items()})
        return np.concatenate([before[~np.isin(before[:, 0], list(changed))], self._of(changed)])

    def _of(self, counts: Counter[int]) -> Changes:
        return self._penalty(list(counts), np.fromiter(counts.values(), np.int64, len(counts)))


class _Repeated(_Part):
    """Bans of tokens that would repeat an n-gram; drafts know those at their roots."""

    def __init__(self, size: int) -> None:
        self._before, self._read = size - 1, 0
        self._next: dict[tuple[int, ...], set[int]] = {}

    def __call__(self, tokens: Sequence[int]) -> Changes:
        for place in range(max(self._before, self._read), len(tokens)):
            self._next.setdefault(tuple(tokens[place - self._before : place]), set()).add(tokens[place])
        self._read = len(tokens)
        last = tuple(tokens[len(tokens) - self._before :])
        return _banned(self._next.get(last, ()), 0.0, _ALWAYS if not self._before else 1.0)

    def after(self, tokens: Sequence[int], drafted: Sequence[int]) -> Changes:
        if not drafted:
            return self(tokens)
        self(tokens)
        text = [*tokens[max(0, len(tokens) - self._before) :], *drafted]  # every n-gram that ends in a draft lies here
        last = tuple(text[len(text) - self._before :])
        found = set(self._next.get(last, ()))
        for place in range(max(self._before, len(text) - len(drafted)), len(text)):
            if tuple(text[place - self._before : place]) == last:
                found.add(text[place])
        return _banned(found)


class _Biased(_Part):
    """Biases of tokens, and of last tokens of sequences that came before; drafts know the latter at their roots."""

    def __init__(self, biases: dict[tuple[int, ...], float]) -> None:
        self._single = {sequence[0]: np.float32(bias) for sequence, bias in biases.items() if len(sequence) == 1}
        self._everywhere = _changes(list(self._single), bias=list(self._single.values()))
        longer = [(list(words[:-1]), words[-1], np.float32(bias)) for words, bias in biases.items() if len(words) > 1]
        self._longer = sorted(longer, key=lambda sequence: len(sequence[0]))
        self._context = max((len(before) for before, _, _ in longer), default=0)
        self.largest = max((token for sequence in biases for token in sequence), default=-1)

    def __call__(self, tokens: Sequence[int]) -> Changes:
        due = self._due(tokens)
        if not due:
            return self._everywhere
        single = self._everywhere.copy()
        single[np.isin(single[:, 0], list(due)), 3] = 1.0  # below the root
        return np.concatenate([single, _changes(list(due), bias=list(due.values()), last=1.0)])

    def after(self, tokens: Sequence[int], drafted: Sequence[int]) -> Changes:
        found = self._single | self._due([*tokens[max(0, len(tokens) - self._context) :], *drafted])
        return _changes(list(found), bias=list(found.values()))

    def _due(self, tokens: Sequence[int]) -> dict[int, np.float32]:
        """Returns the whole bias of tokens that would complete a sequence."""
        due: dict[int, np.float32] = {}
        for before, last, bias in self._longer:
            if list(tokens[-len(before) :]) == before:
                due[last] = due.get(last, self._single.get(last, np.float32(0))) + bias
        return due


__all__ = ["Changes", "CountPenalty", "TextCorrections", "are_known", "temperature_of", "truncation_of"]
