"""From logits to probabilities, and from probabilities and noise to tokens.

Shapes: B samples, N topology nodes, R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.checks import whole
from arbordraft.kernels import choice
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax
from arbordraft.kernels.verify import lowest_kept

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
            They must be functions of the tokens before a row and of its scores; processors known not to be
            are refused.
        batch_size: number of samples of the batch.
        padding: columns in front of each sample's prompt in the batch that the processors were prepared for; their
            paths have none of them.

    Raises:
        TypeError: if a processor cannot be called, or ``batch_size`` is no whole number.
        ValueError: if a processor keeps state between calls, or indexes the batch while there are several
            samples.
    """

    def __init__(
        self,
        processors: "LogitsProcessorList | Sequence[LogitsProcessor]",
        batch_size: int = 1,
        padding: Sequence[int] = (),
    ) -> None:
        self.processors = list(processors)
        self._own = {columns: [_counting_less(one, columns) for one in self.processors] for columns in {0, *padding}}
        self._padding = padding
        whole("batch_size", batch_size, 0)
        for processor in self.processors:
            if not callable(processor):
                raise TypeError(f"a logits processor is a function of input_ids and scores, got {processor!r}")
            names = {cls.__name__ for cls in type(processor).__mro__}
            if (library := type(processor).__module__.partition(".")[0]) in _FOLLOWING:
                raise ValueError(
                    f"{library}'s {type(processor).__name__} follows one text token by token; it cannot judge the "
                    "nodes of a tree, which branch"
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
        if not self.processors:
            return 1.0
        only = len(self.processors) == 1 and type(self.processors[0]).__name__ == "TemperatureLogitsWarper"
        return float(self.processors[0].temperature) if only else None

    @property
    def constants(self) -> tuple[tuple[str, tuple[tuple[str, float], ...]], ...]:
        """What tells lists of static processors apart: their names and numbers."""
        return tuple((type(one).__name__, tuple(sorted(vars(one).items()))) for one in self.processors)

    def __call__(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        sample_of: Callable[[int], int] = lambda row: row,
    ) -> Tensor:
        """Processed logits in float32 (float64 stays float64).

        Args:
            logits: ``[R, V]``, left as they are.
            path_of: token ids that precede the prediction of a row, prompt included; called only if needed.
            sample_of: the sample that a row belongs to, by default that of the same number.
        """
        return self._processed(logits, path_of, sample_of)

    def untruncated(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        sample_of: Callable[[int], int] = lambda row: row,
    ) -> Tensor:
        """The same without top-k and top-p, which take long and which drafts that are but guesses can do without."""
        truncating = {place for place, one in enumerate(self.processors) if _truncates(one)}
        return self._processed(logits, path_of, sample_of, truncating)

    def trimmed(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        sample_of: Callable[[int], int] = lambda row: row,
    ) -> "tuple[Tensor, LogitsProcessor | None]":
        """What to draw from: scores, and top-k or top-p if it comes last and is still to be done."""
        last = len(self.processors) - 1
        if last < 0 or not _truncates(self.processors[last]):
            return self(logits, path_of, sample_of), None
        return self._processed(logits, path_of, sample_of, {last}), self.processors[last]

    def _processed(
        self,
        logits: Tensor,
        path_of: Callable[[int], Sequence[int]],
        sample_of: Callable[[int], int],
        skipped: Collection[int] = (),
    ) -> Tensor:
        """What all processors but those at some places make of logits."""
        scores = widened(logits)
        paths: list[Tensor] = []
        columns: list[int] = []
        for place, processor in enumerate(self.processors):
            if place in skipped:
                continue
            if type(processor).__name__ in _PATH_FREE:  # a subclass may look at the path after all
                scores = _truncate(processor, scores)
            elif len(scores):
                if not paths:
                    paths = [torch.tensor([list(path_of(row))], device=scores.device) for row in range(len(scores))]
                    columns = [self._padding[sample_of(row)] if self._padding else 0 for row in range(len(scores))]
                # A clone per row: processors are free to write into the scores they are given.
                rows = [
                    _called(self._own[columns[row]][place], path, scores[row : row + 1].clone())
                    for row, path in enumerate(paths)
                ]
                scores = torch.cat(rows)
        return scores


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
            "processors have to be functions of the tokens before a row and of its scores"
        ) from error


def _truncates(processor: Any) -> bool:
    return type(processor).__name__ in _TRUNCATING and processor.filter_value == -math.inf


def _truncate(processor: Any, scores: Tensor) -> Tensor:
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
    return _truncate(processor, scores), None


def _lowest(processor: Any, scores: Tensor) -> Tensor:
    """``[R]`` the lowest scores that top-k or top-p keep."""
    if type(processor).__name__ == "TopKLogitsWarper":
        return lowest_kept(scores, processor.top_k)
    return lowest_kept(scores, processor.min_tokens_to_keep, processor.top_p)


def _surely_kept(processor: Any, scores: Tensor, tokens: Sequence[int]) -> list[bool]:
    """Whether top-k or top-p keep a token of each row, however they treat its equals and round."""
    chosen = torch.tensor(tokens, device=scores.device)[:, None]
    before = scores >= scores.gather(1, chosen)  # what may come before it, itself not counted
    before.scatter_(1, chosen, False)
    if type(processor).__name__ == "TopKLogitsWarper":
        return (before.sum(dim=1) < processor.top_k).tolist()
    return ((scores.softmax(dim=1) * before).sum(dim=1) < processor.top_p - _ROUNDING).tolist()


class SoftmaxRows:
    """The softmax of ``[T, V]`` scores, row by row, as far as somebody reads them.

    A verifier that stops at the first rejection leaves most rows of a tree alone.

    Args:
        scores: the scores, or logits that ``process`` makes scores of.
        process: given ``[R, V]`` of the logits and the numbers of these rows, returns their scores; row by row.
        trim: likewise, but what :meth:`Warp.trimmed` returns; to go with ``process``.
        temperature: of logits that are divided by it and not processed otherwise; in place of both.
    """

    def __init__(
        self,
        scores: Tensor,
        process: Callable[[Tensor, Sequence[int]], Tensor] | None = None,
        trim: "Callable[[Tensor, Sequence[int]], tuple[Tensor, LogitsProcessor | None]] | None" = None,
        temperature: float | None = None,
    ) -> None:
        self._logits, self._process, self._trim, self._temperature = scores, process, trim, temperature
        self._found: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, row: int) -> Tensor:
        if row not in self._found:
            self._found[row] = self.scores_of([row])[0].softmax(dim=-1)
        return self._found[row]

    @cached_property
    def scores(self) -> Tensor:
        """``[T, V]``, all of them."""
        return self.scores_of(range(len(self)))

    def scores_of(self, rows: Sequence[int]) -> Tensor:
        """``[R, V]`` scores of some rows."""
        logits = self._taken(rows)
        if self._process is not None:
            return self._process(logits, rows)
        return logits if self._temperature is None else widened(logits) / self._temperature

    def draw(self, rows: Sequence[int], noise: "GumbelNoise", places: Sequence[tuple[int, int]]) -> list[int]:
        """Draws behind some rows, in which the noise is that of ``places``: see :meth:`GumbelNoise.draw`.

        What would have been drawn without top-k or top-p is also drawn with it if it is kept. That can nearly always be
        told without sorting the row.
        """
        if self._process is None:
            return noise.draw(self._taken(rows), None, places, self._temperature or 1.0)
        if self._trim is None:
            return noise.draw(self.scores_of(rows), None, places)
        scores, processor = self._trim(self._taken(rows), rows)
        if processor is None or choice.wants_triton("truncate", scores):
            return noise.draw(*truncated(processor, scores), places)
        tokens = noise.draw(scores, None, places)
        doubtful = [row for row, kept in enumerate(_surely_kept(processor, scores, tokens)) if not kept]
        if doubtful:
            again = noise.draw(_truncate(processor, scores[doubtful]), None, [places[row] for row in doubtful])
            for row, token in zip(doubtful, again, strict=True):
                tokens[row] = token
        return tokens

    def _taken(self, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(self))):
            return self._logits
        return self._logits[rows[0] : rows[0] + 1] if len(rows) == 1 else self._logits[list(rows)]


def widened(logits: Tensor) -> Tensor:
    """In float32; float64 stays float64."""
    return logits if logits.dtype == torch.float64 else logits.float()


@dataclass(frozen=True)
class Noise:
    """The uniforms of one step: one per sample, node and purpose, so that no draw is ever used twice.

    All are ``[B, N]`` float64 in [0, 1), indexed by topology node: ``draft`` draws the node's own token,
    ``accept`` decides about the node, ``final`` draws the recovered or bonus token if the path ends there.
    """

    draft: Tensor
    accept: Tensor
    final: Tensor

    @staticmethod
    def source(seed: int) -> np.random.Generator:
        """The generator of a request, in which every bit of its seed counts.

        It is Philox, seeded by way of numpy's ``SeedSequence``. Torch's own generator on the CPU would look at the
        lower 32 bits alone.

        Args:
            seed: 0 to 2**64 - 1.

        Raises:
            TypeError: if the seed is no whole number.
            ValueError: if it is out of range.
        """
        return np.random.Generator(np.random.Philox(whole("seed", seed, 0, 2**64 - 1)))

    @classmethod
    def draw(cls, generators: Sequence[np.random.Generator], nodes: int) -> Self:
        """Draws from one :meth:`source` per sample, always as much, so that a request's stream is its own."""
        uniforms = torch.zeros(3, len(generators), nodes, dtype=torch.float64)
        for sample, source in enumerate(generators):
            uniforms[:, sample] = torch.from_numpy(source.random((3, nodes)))
        return cls(*uniforms)


class SharedSource:
    """Where the noise comes from that target and drafter share: of every sample, a function of its seed alone.

    Args:
        seeds: one per sample, 0 to 2**64 - 1.

    Raises:
        TypeError: if a seed is no whole number.
        ValueError: if one is out of range.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        checked = [whole("seed", seed, 0, 2**64 - 1) for seed in seeds]
        self.seeds = [seed - 2**64 if seed >= 2**63 else seed for seed in checked]  # as int64 has them
        self._rows: dict[tuple[int, int], Tensor] = {}

    def at(self, lengths: Sequence[int]) -> "GumbelNoise":
        """The noise of a step.

        Args:
            lengths: committed tokens of every sample, prompt included.
        """
        self._rows = {place: row for place, row in self._rows.items() if place[1] >= lengths[place[0]]}
        return GumbelNoise(self, tuple(lengths))

    def rows(self, places: Sequence[tuple[int, int]], vocabulary: int) -> list[Tensor]:
        """``[V]`` float32 noise at some positions, which steps that overlap share."""
        if missing := [place for place in dict.fromkeys(places) if place not in self._rows]:
            noise = gumbel(*self.keys(missing), vocabulary)
            self._rows |= zip(missing, noise.float(), strict=True)
        return [self._rows[place] for place in places]

    def keys(self, places: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """``[R]`` seeds and positions of places, each a sample and a position, as kernels take them."""
        seeds = torch.tensor([self.seeds[sample] for sample, _ in places], device=device)
        return seeds, torch.tensor([position for _, position in places], device=device)


@dataclass(frozen=True)
class GumbelNoise:
    """The noise of one step that target and drafter share, by sample, position in its text and token.

    Positions count from the beginning of a sample's own text, so the noise behind a node follows from its depth: no
    matter in which step, at which node or beside which samples it is asked for, it is the same.

    Args:
        source: of all steps.
        lengths: committed tokens of every sample, prompt included: the position of what follows their roots.
    """

    source: SharedSource
    lengths: tuple[int, ...]

    def perturb(self, scores: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Adds to draft scores the noise with which the target will draw.

        Args:
            scores: ``[R, V]``.
            places: per row the sample, and the depth of the node whose children it predicts.

        Returns:
            ``[R, V]`` of the same dtype: the noise is rounded, as drafts are but guesses.
        """
        positions = self._positions(places)
        if not scores.is_cpu or choice.wants_triton("perturb", scores):
            return scores + gumbel(*self.source.keys(positions, scores.device), scores.shape[1]).to(scores.dtype)
        rows = self.source.rows(positions, scores.shape[1])
        return torch.stack([score + row for score, row in zip(scores, rows, strict=True)])

    def draw(
        self,
        scores: Tensor,
        lowest: Tensor | None,
        places: Sequence[tuple[int, int]],
        temperature: float = 1.0,
    ) -> list[int]:
        """Draws the target's tokens: the highest of ``scores / temperature + g``.

        Args:
            scores: ``[R, V]``.
            lowest: ``[R]`` lowest ones to draw, once they are divided; ``None`` for no bound.
            places: per row the sample, and the depth of the node behind which the token stands.
            temperature: above 0.

        Raises:
            ValueError: if no score of a row is above -inf.
        """
        keys = self.source.keys(self._positions(places), scores.device)
        tokens: list[int] = gumbel_argmax(scores, *keys, temperature, lowest).tolist()
        if min(tokens) < 0:
            raise ValueError("cannot draw from a row in which no token has any probability; check the processors")
        return tokens

    def _positions(self, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(sample, self.lengths[sample] + depth) for sample, depth in places]


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Target mass that the draft did not cover, unnormalised: ``(target - draft)+``."""
    return (target - draft).clamp_min_(0)


def draw(weights: Tensor, uniform: float) -> int:
    """Inverse-CDF draw from unnormalised weights.

    Args:
        weights: ``[V]``, non-negative with a positive sum.
        uniform: in [0, 1).

    Returns:
        A token of positive weight.

    Raises:
        ValueError: if the weights sum to zero or are not finite.

    Examples:
        >>> draw(torch.tensor([1.0, 0.0, 3.0]), uniform=0.25)
        2
    """
    cumulative = weights.double().cumsum(0)  # in float32 a large vocabulary loses its tail
    total = cumulative[-1].item()
    if not 0 < total < math.inf:
        raise ValueError(f"cannot draw from weights with the sum {total}")
    token = int(torch.searchsorted(cumulative, uniform * total, right=True))
    if token < len(weights):
        return token  # the sum grew at this token, so its weight is positive
    return int(weights.nonzero()[-1])  # uniform * total was rounded up to the total
