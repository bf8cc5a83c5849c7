"""Noise, and tokens drawn with it from probabilities.

Shapes: B samples, N topology nodes, R rows, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax
from arbordraft.utils.checks import check_int


@dataclass(frozen=True)
class Noise:
    """The uniforms of one step: one per sample, node and purpose, so no draw is ever used twice.

    All are ``[B, N]`` float64 in [0, 1), indexed by topology node. ``draft`` draws the node's own token, and
    ``accept`` decides about the node. ``final`` draws the recovered or bonus token if the path ends there.
    """

    draft: Tensor
    accept: Tensor
    final: Tensor

    @staticmethod
    def source(seed: int) -> np.random.Generator:
        """Returns the generator of a request; every bit of the seed counts.

        It is a Philox generator, seeded through numpy's ``SeedSequence``. Torch's CPU generator would use only the
        lower 32 bits of the seed.

        Args:
            seed: 0 to 2**64 - 1.

        Raises:
            TypeError: if the seed is not a whole number.
            ValueError: if the seed is out of range.
        """
        return np.random.Generator(np.random.Philox(check_int("seed", seed, 0, 2**64 - 1)))

    @classmethod
    def draw(cls, generators: Sequence[np.random.Generator], nodes: int) -> Self:
        """Draws ``[3, N]`` uniforms from each sample's own :meth:`source`, so requests do not affect each other."""
        return cls.of([source.random((3, nodes)) for source in generators], nodes)

    @classmethod
    def of(cls, drawn: "Sequence[npt.NDArray[np.float64] | None]", nodes: int) -> Self:
        """Stacks the ``[3, N]`` uniforms of every sample; ``None`` stands for a sample that takes no part."""
        uniforms = torch.zeros(3, len(drawn), nodes, dtype=torch.float64)
        for sample, own in enumerate(drawn):
            if own is not None:
                uniforms[:, sample] = torch.from_numpy(own)
        return cls(*uniforms)


class SharedSource:
    """Source of the noise that target and drafter share: for one text, a function of its seed alone.

    Args:
        seed: 0 to 2**64 - 1.

    Raises:
        TypeError: if the seed is not a whole number.
        ValueError: if the seed is out of range.
    """

    def __init__(self, seed: int) -> None:
        seed = check_int("seed", seed, 0, 2**64 - 1)
        self.seed = seed - 2**64 if seed >= 2**63 else seed  # the same bits as int64
        self.rows: dict[int, Tensor] = {}  # ``[V]`` float32 noise by position, shared by overlapping steps

    def forget(self, length: int) -> None:
        """Drops the rows of committed positions."""
        if self.rows:
            self.rows = {position: row for position, row in self.rows.items() if position >= length}


@dataclass(frozen=True)
class GumbelNoise:
    """The noise of one step that target and drafter share, a function of seed, text position and token.

    Positions count from the beginning of a sample's own text, so the noise after a node follows from its depth. It does
    not depend on the step, the node or the other samples.

    Args:
        sources: by sample, the source; ``None`` at temperature 0, where nothing is drawn.
        lengths: committed tokens of every sample, prompt included; equals the position of the token after the root.
    """

    sources: Sequence[SharedSource | None]
    lengths: Sequence[int]

    def seed_of(self, sample: int) -> int:
        """Returns the seed of a sample as int64; 0 if it draws nothing."""
        source = self.sources[sample]
        return 0 if source is None else source.seed

    def perturb(self, scores: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Adds to draft scores the noise with which the target will draw.

        Args:
            scores: ``[R, V]``.
            places: per row, the sample and the depth of the node whose children the row predicts.

        Returns:
            ``[R, V]`` of the same dtype. The noise is rounded to it, since drafts are only guesses.
        """
        drawn = [row for row, (sample, _) in enumerate(places) if self.sources[sample] is not None]
        if len(drawn) < len(places):
            mixed = scores.clone()
            if drawn:
                mixed[drawn] = self.perturb(scores[drawn], [places[row] for row in drawn])
            return mixed
        if not scores.is_cpu or choice.uses_triton("perturb", scores):
            return scores + gumbel(*self.keys(places, scores.device), scores.shape[1]).to(scores.dtype)
        rows = self._rows(places, scores.shape[1])
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
            lowest: ``[R]`` lowest scores to draw, after the division; ``None`` for no bound.
            places: per row, the sample and the depth of the node that the token follows.
            temperature: above 0.

        Returns:
            One token per row; -1 if no score is above -inf.
        """
        tokens: list[int] = gumbel_argmax(scores, *self.keys(places, scores.device), temperature, lowest).tolist()
        return tokens

    def keys(self, places: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Returns ``[R]`` seeds and ``[R]`` positions for kernels; a place is a sample and a depth."""
        seeds = [self.seed_of(sample) for sample, _ in places]
        positions = [self.lengths[sample] + depth for sample, depth in places]
        keys = torch.from_numpy(np.array([seeds, positions], dtype=np.int64)).to(device)
        return keys[0], keys[1]

    def _rows(self, places: Sequence[tuple[int, int]], vocabulary: int) -> list[Tensor]:
        """Returns the ``[V]`` float32 noise at each place, from the sources' rows where they hold it."""
        rows = [(self.sources[sample].rows, self.lengths[sample] + depth) for sample, depth in places]  # type: ignore[union-attr]
        missing = {
            (sample, depth): None
            for (sample, depth), (known, position) in zip(places, rows, strict=True)
            if position not in known
        }
        if missing:
            noise = gumbel(*self.keys(list(missing)), vocabulary).float()
            for (sample, depth), row in zip(missing, noise, strict=True):
                self.sources[sample].rows[self.lengths[sample] + depth] = row  # type: ignore[union-attr]
        return [known[position] for known, position in rows]


def residual(target: Tensor, draft: Tensor) -> Tensor:
    """Returns the target mass that the draft did not cover, unnormalised: ``(target - draft)+``."""
    return (target - draft).clamp_min_(0)


def draw(weights: Tensor, uniform: float) -> int:
    """Draws a token from unnormalised weights by inverse CDF.

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
