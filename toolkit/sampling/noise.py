"""From probabilities and noise to tokens.

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
        return np.random.Generator(np.random.Philox(check_int("seed", seed, 0, 2**64 - 1)))

    @classmethod
    def draw(cls, generators: Sequence[np.random.Generator], nodes: int) -> Self:
        """Draws from one :meth:`source` per sample, always as much, so that a request's stream is its own."""
        return cls.of([source.random((3, nodes)) for source in generators], nodes)

    @classmethod
    def of(cls, drawn: "Sequence[npt.NDArray[np.float64] | None]", nodes: int) -> Self:
        """What was drawn for every sample, ``[3, N]``; ``None`` for those that do not take part."""
        uniforms = torch.zeros(3, len(drawn), nodes, dtype=torch.float64)
        for sample, own in enumerate(drawn):
            if own is not None:
                uniforms[:, sample] = torch.from_numpy(own)
        return cls(*uniforms)

    def seated(self, seats: Sequence[int]) -> "Noise":
        """The same for samples with other numbers: by new number the old one, -1 for nobody."""
        if len(seats) == len(self.accept):
            return self
        return Noise(*(uniforms[list(seats)] for uniforms in (self.draft, self.accept, self.final)))


class SharedSource:
    """Where the noise comes from that target and drafter share: for one text, a function of its seed alone.

    Args:
        seed: 0 to 2**64 - 1.

    Raises:
        TypeError: if the seed is no whole number.
        ValueError: if it is out of range.
    """

    def __init__(self, seed: int) -> None:
        seed = check_int("seed", seed, 0, 2**64 - 1)
        self.seed = seed - 2**64 if seed >= 2**63 else seed  # as int64 has it
        self.rows: dict[int, Tensor] = {}  # ``[V]`` float32 noise by position, which steps that overlap share

    def forget(self, length: int) -> None:
        """Gives up the rows of committed positions."""
        if self.rows:
            self.rows = {position: row for position, row in self.rows.items() if position >= length}


@dataclass(frozen=True)
class GumbelNoise:
    """The noise of one step that target and drafter share, by seed, position in the text and token.

    Positions count from the beginning of a sample's own text, so the noise behind a node follows from its depth: no
    matter in which step, at which node or beside which samples it is asked for, it is the same.

    Args:
        sources: by sample; ``None`` where nothing is drawn, since decoding is greedy.
        lengths: committed tokens of every sample, prompt included: the position of what follows their roots.
    """

    sources: Sequence[SharedSource | None]
    lengths: Sequence[int]

    def seated(self, seats: Sequence[int]) -> "GumbelNoise":
        """The same for samples with other numbers: by new number the old one, -1 for nobody."""
        if len(seats) == len(self.sources):
            return self
        sources = [self.sources[number] if number >= 0 else None for number in seats]
        return GumbelNoise(sources, [self.lengths[number] if number >= 0 else 0 for number in seats])

    def perturb(self, scores: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Adds to draft scores the noise with which the target will draw.

        Args:
            scores: ``[R, V]``.
            places: per row the sample, and the depth of the node whose children it predicts.

        Returns:
            ``[R, V]`` of the same dtype: the noise is rounded, as drafts are but guesses.
        """
        drawn = [row for row, (sample, _) in enumerate(places) if self.sources[sample] is not None]
        if len(drawn) < len(places):
            mixed = scores.clone()
            if drawn:
                mixed[drawn] = self.perturb(scores[drawn], [places[row] for row in drawn])
            return mixed
        if not scores.is_cpu or choice.wants_triton("perturb", scores):
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
            lowest: ``[R]`` lowest ones to draw, once they are divided; ``None`` for no bound.
            places: per row the sample, and the depth of the node behind which the token stands.
            temperature: above 0.

        Returns:
            One per row; -1 where no score is above -inf.
        """
        tokens: list[int] = gumbel_argmax(scores, *self.keys(places, scores.device), temperature, lowest).tolist()
        return tokens

    def keys(self, places: Sequence[tuple[int, int]], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """``[R]`` seeds and positions of places, each a sample that draws and a depth, as kernels take them."""
        seeds = [self.sources[sample].seed for sample, _ in places]  # type: ignore[union-attr]
        positions = [self.lengths[sample] + depth for sample, depth in places]
        keys = torch.from_numpy(np.array([seeds, positions], dtype=np.int64)).to(device)
        return keys[0], keys[1]

    def _rows(self, places: Sequence[tuple[int, int]], vocabulary: int) -> list[Tensor]:
        """``[V]`` float32 noise at some places."""
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
