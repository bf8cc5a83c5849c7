"""Packed rows that are computed when they are read.

Shapes: T packed rows, R of them, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from arbordraft.kernels import choice
from arbordraft.kernels.verify import row_max
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.sampling.processors import always_kept, truncate, truncated, widened

if TYPE_CHECKING:
    from transformers import LogitsProcessor

RowOut = TypeVar("RowOut", covariant=True)


class Rows(Protocol[RowOut]):
    """Packed rows: a tensor, or an object that computes them when they are read."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> RowOut: ...


class SoftmaxRows:
    """The softmax of ``[T, V]`` scores, computed row by row when a row is read.

    A verifier that stops at the first rejection never reads most rows of a tree. At temperature 0 a row is one-hot.

    Args:
        logits: the scores, or the input of ``process``.
        process: given ``[R, V]`` of the logits and the numbers of these rows, returns their scores; acts row by row.
        trim: takes the arguments of ``process``; returns scores and a processor still to be applied, see
            :meth:`~arbordraft.sampling.processors.LogitsPipeline.trimmed`. Needs ``process``, too.
        temperature: divisor of the logits; with ``process``, 0 or 1. At 0 the most probable token is certain.
        best: T most probable tokens of the logits, if they are known.
    """

    def __init__(
        self,
        logits: Tensor,
        process: Callable[[Tensor, Sequence[int]], Tensor] | None = None,
        trim: "Callable[[Tensor, Sequence[int]], tuple[Tensor, LogitsProcessor | None]] | None" = None,
        temperature: float = 1.0,
        best: Sequence[int] | None = None,
    ) -> None:
        self.logits = logits
        self._process, self._trim, self._temperature, self._best = process, trim, temperature, best
        self._found: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.logits)

    def __getitem__(self, row: int) -> Tensor:
        if row not in self._found:
            scores = self.scores_of([row])[0]
            self._found[row] = _one_hot(scores) if self.certain(row) else scores.softmax(dim=-1)
        return self._found[row]

    @property
    def alike(self) -> bool:
        """Whether all rows are processed alike, independent of the tokens before them."""
        return self._process is None

    def certain(self, row: int) -> bool:
        """Returns whether a row is one-hot, since its temperature is 0."""
        return self._temperature == 0

    @cached_property
    def scores(self) -> Tensor:
        """``[T, V]`` scores of all rows."""
        return self.scores_of(range(len(self)))

    @property
    def probabilities(self) -> Tensor:
        """``[T, V]`` probabilities of all rows."""
        found, certain = self.scores.softmax(dim=-1), [row for row in range(len(self)) if self.certain(row)]
        if certain:
            found[certain] = _one_hot(self.scores[certain])
        return found

    def scores_of(self, rows: Sequence[int]) -> Tensor:
        """Returns the ``[R, V]`` scores of some rows."""
        logits = self._taken(rows)
        if self._process is not None:
            return self._process(logits, rows)
        scores = widened(logits)
        return scores if self._temperature in (0, 1) else scores / self._temperature

    def draw(self, rows: Sequence[int], noise: GumbelNoise, places: Sequence[tuple[int, int]]) -> list[int]:
        """Draws after some rows with the noise of ``places``: see :meth:`~arbordraft.sampling.noise.GumbelNoise.draw`.

        Rows of temperature 0 give their most probable token, rows without a possible token give -1. A token drawn
        without top-k or top-p stands if these would keep it. This can nearly always be decided without sorting the row.
        """
        if self._temperature == 0:
            return self.most_probable(rows)
        if self._process is None:
            return noise.draw(self._taken(rows), None, places, self._temperature)
        if self._trim is None:
            return noise.draw(self.scores_of(rows), None, places)
        scores, processor = self._trim(self._taken(rows), rows)
        if processor is None or choice.uses_triton("truncate", scores):
            return noise.draw(*truncated(processor, scores), places)
        tokens = noise.draw(scores, None, places)
        drawn = zip(tokens, always_kept(processor, scores, tokens), strict=True)
        unkept = [row for row, (token, kept) in enumerate(drawn) if token >= 0 and not kept]
        if unkept:
            again = noise.draw(truncate(processor, scores[unkept]), None, [places[row] for row in unkept])
            for row, token in zip(unkept, again, strict=True):
                tokens[row] = token
        return tokens

    def most_probable(self, rows: Sequence[int]) -> list[int]:
        """Returns the most probable token after each of some rows."""
        if self._best is None or self._process is not None:
            found: list[int] = row_max(self.scores_of(rows))[1].tolist()
            return found
        return [self._best[row] for row in rows]

    def _taken(self, rows: Sequence[int]) -> Tensor:
        count, first = len(rows), rows[0] if rows else 0
        if count == 1 or rows == range(first, first + count) or list(rows) == list(range(first, first + count)):
            return self.logits if count == self.logits.shape[0] else self.logits[first : first + count]  # no copy
        return self.logits.index_select(0, torch.tensor(rows, device=self.logits.device))


class MixedRows(SoftmaxRows):
    """Rows of samples with different processors or temperatures.

    Args:
        ways: all T rows, processed in each of several ways.
        way_of: ``[T]`` index in ``ways`` of each row's own way.
    """

    def __init__(self, ways: Sequence[SoftmaxRows], way_of: Sequence[int]) -> None:
        self.logits, self._ways, self._way_of = ways[0].logits, ways, way_of

    @property
    def alike(self) -> bool:
        return False

    def certain(self, row: int) -> bool:
        return self._ways[self._way_of[row]].certain(row)

    def __len__(self) -> int:
        return len(self._way_of)

    def __getitem__(self, row: int) -> Tensor:
        return self._ways[self._way_of[row]][row]

    def scores_of(self, rows: Sequence[int]) -> Tensor:
        parts, order = [], []
        for way, places in self._split(rows):
            parts.append(way.scores_of([rows[place] for place in places]))
            order += places
        return torch.cat(parts)[torch.tensor(order).argsort()]

    def draw(self, rows: Sequence[int], noise: GumbelNoise, places: Sequence[tuple[int, int]]) -> list[int]:
        tokens = [0] * len(rows)
        for way, own in self._split(rows):
            drawn = way.draw([rows[at] for at in own], noise, [places[at] for at in own])
            for at, token in zip(own, drawn, strict=True):
                tokens[at] = token
        return tokens

    def most_probable(self, rows: Sequence[int]) -> list[int]:
        tokens = [0] * len(rows)
        for way, own in self._split(rows):
            for at, token in zip(own, way.most_probable([rows[at] for at in own]), strict=True):
                tokens[at] = token
        return tokens

    def _split(self, rows: Sequence[int]) -> Iterator[tuple[SoftmaxRows, list[int]]]:
        """Yields each way that some rows are processed in, with the places of its rows."""
        for number, way in enumerate(self._ways):
            if own := [place for place, row in enumerate(rows) if self._way_of[row] == number]:
                yield way, own


def _one_hot(scores: Tensor) -> Tensor:
    return one_hot(scores.argmax(dim=-1), scores.shape[-1]).to(scores)
