"""From logits to probabilities, and from probabilities and noise to tokens.

Shapes: B samples, N topology nodes, R rows, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.checks import whole
from arbordraft.kernels import choice
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax
from arbordraft.processors import surely_kept, truncate, truncated, widened

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class SoftmaxRows:
    """The softmax of ``[T, V]`` scores, row by row, as far as somebody reads them.

    A verifier that stops at the first rejection leaves most rows of a tree alone.

    Args:
        scores: the scores, or logits that ``process`` makes scores of.
        process: given ``[R, V]`` of the logits and the numbers of these rows, returns their scores; row by row.
        trim: likewise, but what :meth:`~arbordraft.processors.Warp.trimmed` returns; to go with ``process``.
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
        doubtful = [row for row, kept in enumerate(surely_kept(processor, scores, tokens)) if not kept]
        if doubtful:
            again = noise.draw(truncate(processor, scores[doubtful]), None, [places[row] for row in doubtful])
            for row, token in zip(doubtful, again, strict=True):
                tokens[row] = token
        return tokens

    def _taken(self, rows: Sequence[int]) -> Tensor:
        if list(rows) == list(range(len(self))):
            return self._logits
        return self._logits[rows[0] : rows[0] + 1] if len(rows) == 1 else self._logits[list(rows)]


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
