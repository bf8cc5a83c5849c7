"""Rows of samples whose processors the kernels know: the token after each is drawn in one call for all.

Shapes: T packed rows, R of them, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.kernels.next_tokens import RowSettings, next_tokens
from arbordraft.sampling.corrections import Changes
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.sampling.owned_rows import RowOwner
from arbordraft.sampling.rows import SoftmaxRows


class CorrectedOwner(RowOwner, Protocol):
    """A sample whose processors are known token by token."""

    def changes_after(self, drafted: Sequence[int]) -> Changes:
        """Returns the ``[n, 3]`` changes of scores after drafted tokens."""


class DrawnRows(SoftmaxRows):
    """Rows whose next tokens are drawn in one call, each under the settings of its own sample.

    Args:
        logits: ``[T, V]``.
        best: the most probable token of each row before any processor.
        owners: the sample of each row.
        drafted: returns the drafted tokens before a row's prediction.
        processed: returns the rows as a row's own processors compute them, for laws.
    """

    def __init__(
        self,
        logits: Tensor,
        best: Sequence[int],
        owners: Sequence[CorrectedOwner],
        drafted: Callable[[int], Sequence[int]],
        processed: Callable[[int], SoftmaxRows],
    ) -> None:
        super().__init__(logits, best=best)
        self._owners, self._drafted, self._processed = owners, drafted, processed

    def __getitem__(self, row: int) -> Tensor:
        return self._processed(row)[row]

    @property
    def alike(self) -> bool:
        return False

    def certain(self, row: int) -> bool:
        return self._owners[row].pipeline.temperature == 0

    def scores_of(self, rows: Sequence[int]) -> Tensor:
        return torch.cat([self._processed(row).scores_of([row]) for row in rows])

    def draw(self, rows: Sequence[int], noise: GumbelNoise, places: Sequence[tuple[int, int]]) -> list[int]:
        drawing = [at for at, row in enumerate(rows) if not self.certain(row)]
        return self._next(rows, drawing, torch.stack(noise.keys(places)).numpy())

    def most_probable(self, rows: Sequence[int]) -> list[int]:
        return self._next(rows, [], np.zeros((2, len(rows)), np.int64))

    def _next(self, rows: Sequence[int], drawing: Sequence[int], keys: npt.NDArray[np.int64]) -> list[int]:
        """Returns the token after each row: drawn at the places ``drawing``, otherwise the most probable one.

        Args:
            rows: R rows.
            drawing: places among the rows.
            keys: ``[2, R]`` seeds and positions of the noise.
        """
        owners = [self._owners[row] for row in rows]
        changes = [owner.changes_after(self._drafted(row)) for owner, row in zip(owners, rows, strict=True)]
        tokens = [self._best[row] for row in rows]  # type: ignore[index]
        asked = sorted({*drawing, *(at for at, own in enumerate(changes) if len(own))})
        if not asked:
            return tokens
        temperatures = dict.fromkeys(asked, 0.0) | {at: owners[at].pipeline.temperature for at in drawing}
        seeds, positions = keys[:, asked].tolist()
        settings = RowSettings(
            seeds,
            positions,
            [temperatures[at] for at in asked],
            [number for at in asked for number in owners[at].pipeline.truncation],
            torch.from_numpy(np.concatenate([changes[at] for at in asked])),
            np.cumsum([0, *(len(changes[at]) for at in asked)]).tolist(),
        )
        for at, token in zip(asked, next_tokens(self.logits, [rows[at] for at in asked], settings), strict=True):
            tokens[at] = token
        return tokens


__all__ = ["DrawnRows"]
