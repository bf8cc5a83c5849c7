"""Logits processors on the rows of ragged draft trees, each row along its own path.

Shapes: B samples, R rows, V vocabulary.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.draft_tree import Truncation
from arbordraft.kernels.verify import lowest_kept
from arbordraft.sampling.corrections import are_known, temperature_of, truncation_of
from arbordraft.sampling.kinds import (
    check_for_trees,
    counting_less,
    counts_padding,
    is_freezing,
    is_path_free,
    is_truncating,
    may_index,
    name_of,
    transformers_name,
    truncates,
)
from arbordraft.sampling.stateful import PathState, StatefulProcessor
from arbordraft.utils.checks import check_int

if TYPE_CHECKING:
    from transformers import LogitsProcessor, LogitsProcessorList

_ROUNDING = 1e-3  # far above the rounding error in the sum of a row


class LogitsPipeline:
    """Applies Hugging Face logits processors to one sample's rows of ragged draft trees, each row along its own path.

    Args:
        processors: processors that ``generate()`` prepared: penalties, temperature, top-k, top-p, user-defined ones.
            Each must be a function of the tokens before a row, the row's scores and its number in the batch, or a
            :class:`~arbordraft.sampling.stateful.StatefulProcessor`. Known processors of another kind are
            refused. Temperatures below 1e-10 are left out and count as 0.
        batch_size: samples of the batch that the processors were prepared for. Processors that may depend on the row's
            number are called with that many equal rows.
        row: the sample's number in that batch. Samples whose :meth:`row_and_padding` is equal may share an object.
        padding: columns before the sample's prompt in that batch, which its paths lack.
        greedy: whether the sample is decoded at temperature 0, so that the most probable token always wins.

    Raises:
        TypeError: if a processor cannot be called, or ``batch_size`` is not a whole number.
        ValueError: if a processor keeps state between calls, or stores padding as part of the prompts.
    """

    def __init__(
        self,
        processors: "LogitsProcessorList | Sequence[LogitsProcessor]",
        batch_size: int = 1,
        *,
        row: int = 0,
        padding: int = 0,
        greedy: bool = False,
    ) -> None:
        self._batch_size, self._row = check_int("batch_size", batch_size, 0), row
        for processor in processors:
            check_for_trees(processor, padding)
        kept = [one for one in processors if not is_freezing(one)]
        self._greedy = greedy or len(kept) < len(processors)
        self.processors = [counting_less(one, padding) for one in kept]
        self._indexing = [may_index(one) for one in self.processors]
        places = [place for place, one in enumerate(self.processors) if isinstance(one, StatefulProcessor)]
        self._followers = {place: number for number, place in enumerate(places)}
        self.stateful = [self.processors[place] for place in places]
        self._known: dict[int, bool] = {}

    @staticmethod
    def row_and_padding(processors: "Sequence[LogitsProcessor]", row: int, padding: int) -> tuple[int, int]:
        """Returns the row and the padding of a sample; 0 replaces a number that no processor uses."""
        return row if any(map(may_index, processors)) else 0, padding if any(map(counts_padding, processors)) else 0

    @cached_property
    def temperature(self) -> float:
        """Divisor of the scores, all other processors left out; 0 if the most probable token always wins."""
        return 0.0 if self._greedy else temperature_of(self.processors)

    @cached_property
    def only_divides(self) -> bool:
        """Whether the processors do nothing but divide scores by the temperature, which may be 0."""
        names = [transformers_name(type(one)) for one in self.processors]
        return names in ([], ["TemperatureLogitsWarper"])

    @cached_property
    def truncation(self) -> Truncation:
        """Joint effect of top-k, top-p and min-p on a law."""
        return truncation_of(self.processors)

    def is_known(self, vocabulary: int) -> bool:
        """Returns whether the processors only change scores of single tokens before they draw in the usual way.

        At temperature 0 the most probable token is taken, after changes of single tokens alone.

        Args:
            vocabulary: number of tokens.
        """
        if vocabulary not in self._known:
            drawing = temperature_of(self.processors) != 1 or self.truncation != Truncation()
            self._known[vocabulary] = are_known(self.processors, vocabulary) and not (self._greedy and drawing)
        return self._known[vocabulary]

    @property
    def constants(self) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
        """Names and numbers that distinguish lists of static processors."""
        return tuple((type(one).__name__, tuple(sorted(vars(one).items()))) for one in self.processors)

    def __call__(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        state_of: Callable[[int], PathState] = lambda row: PathState(()),
    ) -> Tensor:
        """Returns the processed logits in float32 (float64 stays float64).

        Args:
            logits: ``[R, V]``, not modified.
            path_of: returns the token ids before the prediction of a row, prompt included; called only if needed.
            state_of: returns the stateful processors after a row's path; called only if there are any.
        """
        return self._processed(logits, path_of, state_of)

    def untruncated(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        state_of: Callable[[int], PathState] = lambda row: PathState(()),
    ) -> Tensor:
        """Processes logits without top-k and top-p, which are slow and which drafts, being guesses, do not need."""
        truncating = {place for place, one in enumerate(self.processors) if truncates(one)}
        return self._processed(logits, path_of, state_of, truncating)

    def trimmed(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        state_of: Callable[[int], PathState] = lambda row: PathState(()),
    ) -> "tuple[Tensor, LogitsProcessor | None]":
        """Returns scores to draw from, and a top-k or top-p processor still to be applied if it comes last."""
        last = len(self.processors) - 1
        if last < 0 or not truncates(self.processors[last]):
            return self(logits, path_of, state_of), None
        return self._processed(logits, path_of, state_of, {last}), self.processors[last]

    def _processed(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        state_of: Callable[[int], PathState],
        skipped: Collection[int] = (),
    ) -> Tensor:
        """Applies all processors except those at the ``skipped`` places."""
        scores = widened(logits)
        paths: list[Tensor] = []
        for place, processor in enumerate(self.processors):
            if place in skipped:
                continue
            if place in self._followers:
                scores = _followed(processor, self._followers[place], scores, logits, state_of)
            elif is_path_free(processor):
                scores = truncate(processor, scores)
            elif len(scores):
                if not paths:
                    paths = [torch.tensor([list(path_of(row))], device=scores.device) for row in range(len(scores))]
                rows = [self._called(place, path, scores[row : row + 1]) for row, path in enumerate(paths)]
                scores = torch.cat(rows)
        return scores

    def _called(self, place: int, path: Tensor, scores: Tensor) -> Tensor:
        """Processes ``[1, V]`` scores after a ``[1, L]`` path as this sample's row of the batch."""
        processor = self.processors[place]
        count, row = (self._batch_size, self._row) if self._indexing[place] else (1, 0)
        given = scores.repeat(count, 1)  # a copy: processors may overwrite their input
        try:
            processed = processor(path.repeat(count, 1), given)
        except AssertionError as error:
            raise ValueError(
                f"{name_of(processor)} did not expect a row of a draft tree ({error or 'an assertion failed'}): "
                "processors have to be functions of the tokens before a row and of its scores, or a StatefulProcessor, "
                "with fork() and accept(token)"
            ) from error
        return _like(processor, processed, given)[row : row + 1]


def _followed(
    template: StatefulProcessor, number: int, scores: Tensor, logits: Tensor, state_of: Callable[[int], PathState]
) -> Tensor:
    """Applies the stateful processor with a number; overwrites the scores unless they are the logits."""
    scores = scores.clone() if scores is logits else scores
    for row, own in enumerate(scores):
        processed = _like(template, state_of(row).processed(number, own), own)
        if processed is not own:
            own.copy_(processed)
    return scores


def _like(processor: Any, processed: Any, given: Tensor) -> Tensor:
    """Returns a processor's result in the dtype of the given scores; raises unless it is a tensor of their shape."""
    if not isinstance(processed, Tensor):
        raise TypeError(f"{name_of(processor)} returned a {type(processed).__name__}, not a tensor of scores")
    if processed.shape != given.shape:
        raise ValueError(
            f"{name_of(processor)} returned scores of the shape {list(processed.shape)}, not "
            f"{list(given.shape)} as given"
        )
    return processed.to(given.dtype)


def truncate(processor: Any, scores: Tensor) -> Tensor:
    """Applies a processor that reads only the scores; on a GPU, top-k and top-p run without sorting."""
    if is_truncating(processor) and choice.uses_triton("truncate", scores):
        return scores.masked_fill(scores < _lowest(processor, scores)[:, None], processor.filter_value)
    return processor(scores.new_zeros(len(scores), 1, dtype=torch.long), scores)


def truncated(processor: "LogitsProcessor | None", scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Finishes :meth:`LogitsPipeline.trimmed`: truncates scores, or on a GPU finds the ``[R]`` lowest ones to draw."""
    if processor is None:
        return scores, None
    if choice.uses_triton("truncate", scores):
        return scores, _lowest(processor, scores)
    return truncate(processor, scores), None


def _lowest(processor: Any, scores: Tensor) -> Tensor:
    """Returns the ``[R]`` lowest scores that top-k or top-p keep."""
    if transformers_name(type(processor)) == "TopKLogitsWarper":
        return lowest_kept(scores, min(processor.top_k, scores.shape[1]))
    return lowest_kept(scores, processor.min_tokens_to_keep, processor.top_p)


def always_kept(processor: Any, scores: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Returns whether top-k or top-p certainly keep a token of each row, however they break ties and round."""
    chosen = torch.tensor(tokens, device=scores.device).clamp_(min=0)[:, None]  # -1: no token
    before = scores >= scores.gather(1, chosen)  # tokens that may rank before it; itself is removed next
    before.scatter_(1, chosen, False)
    if transformers_name(type(processor)) == "TopKLogitsWarper":
        return (before.sum(dim=1) < min(processor.top_k, scores.shape[1])).tolist()
    return ((scores.softmax(dim=1) * before).sum(dim=1) < processor.top_p - _ROUNDING).tolist()


def widened(logits: Tensor) -> Tensor:
    """Converts logits to float32; float64 stays float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
