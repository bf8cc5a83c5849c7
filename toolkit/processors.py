"""Logits processors on the rows of ragged draft trees, each row along its own path.

Shapes: B samples, R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.checks import whole
from arbordraft.kernels import choice
from arbordraft.kernels.verify import lowest_kept
from arbordraft.stateful import PathState, StatefulProcessor

if TYPE_CHECKING:
    from transformers import LogitsProcessor, LogitsProcessorList

# Processors that look at the scores alone: they run once over all rows. Any other one runs per row, on the
# row's path.
_PATH_FREE = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
_ROUNDING = 1e-3  # far above what sums of a row of probabilities lose
_TRUNCATING = frozenset({"TopKLogitsWarper", "TopPLogitsWarper"})
# Those of them that are plain arithmetic with a few numbers. The others check their arguments, which takes the host,
# or index with a mask.
_STATIC = _PATH_FREE - {"EtaLogitsWarper", "SuppressTokensLogitsProcessor", "TopHLogitsWarper"}
# Processors that keep a state from call to call, or expect a second, unconditional row: the rows of a tree
# are neither a sequence nor such a pair.
_NOT_FOR_TREES = frozenset(
    {
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
    }
)
# Libraries whose processors follow one text token by token, as a matcher of a grammar does.
_FOLLOWING = frozenset({"guidance", "llguidance", "outlines", "outlines_core", "transformers_cfg", "xgrammar"})
# Processors that count from the first column of the batch, by the attribute that says to where.
_COUNTING = {
    "ExponentialDecayLengthPenalty": "regulation_start",
    "ForcedEOSTokenLogitsProcessor": "max_length",
    "MinNewTokensLengthLogitsProcessor": "prompt_length_to_skip",
    "RepetitionPenaltyLogitsProcessor": "prompt_ignore_length",
    "SuppressTokensAtBeginLogitsProcessor": "begin_index",
}
# Processors that index the batch they were built for: they cannot be applied to one sample of several.
_BATCH_BOUND = frozenset(
    {
        "EncoderNoRepeatNGramLogitsProcessor",
        "EncoderRepetitionPenaltyLogitsProcessor",
        "PrefixConstrainedLogitsProcessor",
    }
)


class Warp:
    """Applies Hugging Face logits processors to the rows of ragged draft trees, each row along its own path.

    Args:
        processors: what ``generate()`` prepared: penalties, temperature, top-k, top-p, user-defined ones.
            They must be functions of the tokens before a row and of its scores, or follow a text as a
            :class:`~arbordraft.stateful.StatefulProcessor`; processors known to do neither are refused.
        batch_size: number of samples of the batch that the processors were prepared for.

    Raises:
        TypeError: if a processor cannot be called, or ``batch_size`` is no whole number.
        ValueError: if a processor keeps state between calls, or indexes the batch while there are several
            samples.
    """

    def __init__(
        self,
        processors: "LogitsProcessorList | Sequence[LogitsProcessor]",
        batch_size: int = 1,
    ) -> None:
        self.processors = list(processors)
        self._own = {0: self.processors}  # by the columns of padding that those who count columns are told of
        places = [place for place, one in enumerate(self.processors) if isinstance(one, StatefulProcessor)]
        self._followers = {place: number for number, place in enumerate(places)}
        self.stateful = [self.processors[place] for place in places]
        whole("batch_size", batch_size, 0)
        for processor in self.processors:
            if not callable(processor):
                raise TypeError(f"a logits processor is a function of input_ids and scores, got {processor!r}")
            if isinstance(processor, StatefulProcessor):
                continue
            names = {cls.__name__ for cls in type(processor).__mro__}
            if (library := type(processor).__module__.partition(".")[0]) in _FOLLOWING:
                raise ValueError(
                    f"{library}'s {type(processor).__name__} follows one text token by token; it cannot judge the "
                    "nodes of a tree, which branch: pass a grammar=, or make it a StatefulProcessor, with fork() "
                    "and accept(token)"
                )
            if refused := names & _NOT_FOR_TREES:
                raise ValueError(f"{refused.pop()} cannot judge the nodes of a tree: they are not one sequence")
            if batch_size > 1 and (bound := names & _BATCH_BOUND):
                raise ValueError(f"{bound.pop()} is bound to the rows of a batch; decode one prompt at a time with it")

    @staticmethod
    def is_static(processor: "LogitsProcessor") -> bool:
        """Whether a processor looks at the scores alone, and never asks the host about them."""
        return type(processor).__name__ in _STATIC

    @property
    def temperature(self) -> float | None:
        """What scores are divided by if nothing else is done to them; ``None`` if something is."""
        return _dividing(self.processors)

    @property
    def untruncated_temperature(self) -> float | None:
        """The same without top-k and top-p."""
        return _dividing([one for one in self.processors if not _truncates(one)])

    @property
    def constants(self) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
        """What tells lists of static processors apart: their names and numbers."""
        return tuple((type(one).__name__, tuple(sorted(vars(one).items()))) for one in self.processors)

    def __call__(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        padding_of: Callable[[int], int] = lambda row: 0,
        state_of: Callable[[int], PathState] = lambda row: PathState(()),
    ) -> Tensor:
        """Processed logits in float32 (float64 stays float64).

        Args:
            logits: ``[R, V]``, left as they are.
            path_of: token ids that precede the prediction of a row, prompt included; called only if needed.
            padding_of: columns in front of a row's prompt in the batch that the processors were prepared for, which
                its path has not.
            state_of: the stateful processors behind a row's path; called only if there are some.
        """
        return self._processed(logits, path_of, padding_of, state_of)

    def untruncated(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        padding_of: Callable[[int], int] = lambda row: 0,
        state_of: Callable[[int], PathState] = lambda row: PathState(()),
    ) -> Tensor:
        """The same without top-k and top-p, which take long and which drafts that are but guesses can do without."""
        truncating = {place for place, one in enumerate(self.processors) if _truncates(one)}
        return self._processed(logits, path_of, padding_of, state_of, truncating)

    def trimmed(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        padding_of: Callable[[int], int] = lambda row: 0,
        state_of: Callable[[int], PathState] = lambda row: PathState(()),
    ) -> "tuple[Tensor, LogitsProcessor | None]":
        """What to draw from: scores, and top-k or top-p if it comes last and is still to be done."""
        last = len(self.processors) - 1
        if last < 0 or not _truncates(self.processors[last]):
            return self(logits, path_of, padding_of, state_of), None
        return self._processed(logits, path_of, padding_of, state_of, {last}), self.processors[last]

    def _processed(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        padding_of: Callable[[int], int],
        state_of: Callable[[int], PathState],
        skipped: Collection[int] = (),
    ) -> Tensor:
        """What all processors but those at some places make of logits."""
        scores = widened(logits)
        paths: list[Tensor] = []
        columns: list[int] = []
        for place, processor in enumerate(self.processors):
            if place in skipped:
                continue
            if place in self._followers:
                scores = _followed(self._followers[place], scores, logits, state_of)
            elif type(processor).__name__ in _PATH_FREE:  # a subclass may look at the path after all
                scores = truncate(processor, scores)
            elif len(scores):
                if not paths:
                    paths = [torch.tensor([list(path_of(row))], device=scores.device) for row in range(len(scores))]
                    columns = [padding_of(row) for row in range(len(scores))]
                # A clone per row: processors are free to write into the scores they are given.
                rows = [
                    _called(self._for(columns[row])[place], path, scores[row : row + 1].clone())
                    for row, path in enumerate(paths)
                ]
                scores = torch.cat(rows)
        return scores

    def _for(self, columns: int) -> "Sequence[LogitsProcessor]":
        """The processors for texts that begin this many columns later."""
        if columns not in self._own:
            self._own[columns] = [_counting_less(one, columns) for one in self.processors]
        return self._own[columns]


def _followed(number: int, scores: Tensor, logits: Tensor, state_of: Callable[[int], PathState]) -> Tensor:
    """What the stateful processor with a number makes of scores, which are overwritten unless they are the logits."""
    scores = scores.clone() if scores is logits else scores
    for row, own in enumerate(scores):
        processed = state_of(row).processed(number, own)
        if processed is not own:
            own.copy_(processed)
    return scores


def _dividing(processors: Sequence[Any]) -> float | None:
    if not processors:
        return 1.0
    only = len(processors) == 1 and type(processors[0]).__name__ == "TemperatureLogitsWarper"
    return float(processors[0].temperature) if only else None


def _counting_less(processor: Any, columns: int) -> Any:
    """The processor for texts that begin this many columns later."""
    attribute = _COUNTING.get(type(processor).__name__)
    if not columns or attribute is None or getattr(processor, attribute) is None:
        return processor
    own = copy(processor)
    setattr(own, attribute, max(0, getattr(processor, attribute) - columns))
    return own


def _called(processor: Any, path: Tensor, scores: Tensor) -> Tensor:
    try:
        return processor(path, scores)
    except AssertionError as error:
        raise ValueError(
            f"{type(processor).__name__} did not expect a row of a draft tree ({error or 'an assertion failed'}): "
            "processors have to be functions of the tokens before a row and of its scores, or a StatefulProcessor, "
            "with fork() and accept(token)"
        ) from error


def _truncates(processor: Any) -> bool:
    return type(processor).__name__ in _TRUNCATING and processor.filter_value == -math.inf


def truncate(processor: Any, scores: Tensor) -> Tensor:
    """Applies a processor that looks at the scores alone; top-k and top-p, on a GPU, without their sorting."""
    if type(processor).__name__ in _TRUNCATING and choice.wants_triton("truncate", scores):
        return scores.masked_fill(scores < _lowest(processor, scores)[:, None], processor.filter_value)
    return processor(scores.new_zeros(len(scores), 1, dtype=torch.long), scores)


def truncated(processor: "LogitsProcessor | None", scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """What :meth:`Warp.trimmed` left to do: truncated scores, or on a GPU these and the ``[R]`` lowest to draw."""
    if processor is None:
        return scores, None
    if choice.wants_triton("truncate", scores):
        return scores, _lowest(processor, scores)
    return truncate(processor, scores), None


def _lowest(processor: Any, scores: Tensor) -> Tensor:
    """``[R]`` the lowest scores that top-k or top-p keep."""
    if type(processor).__name__ == "TopKLogitsWarper":
        return lowest_kept(scores, processor.top_k)
    return lowest_kept(scores, processor.min_tokens_to_keep, processor.top_p)


def surely_kept(processor: Any, scores: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether top-k or top-p keep a token of each row, however they treat its equals and round."""
    chosen = torch.tensor(tokens, device=scores.device)[:, None]
    before = scores >= scores.gather(1, chosen)  # what may come before it, itself not counted
    before.scatter_(1, chosen, False)
    if type(processor).__name__ == "TopKLogitsWarper":
        return (before.sum(dim=1) < processor.top_k).tolist()
    return ((scores.softmax(dim=1) * before).sum(dim=1) < processor.top_p - _ROUNDING).tolist()


def widened(logits: Tensor) -> Tensor:
    """In float32; float64 stays float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
