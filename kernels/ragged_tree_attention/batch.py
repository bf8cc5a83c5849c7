"""The description of one packed forward, shared by every implementation of ragged tree attention.

Shapes: B samples of this forward, T packed rows, W ancestor words, P pool rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

WORD_BITS = 64


@dataclass(frozen=True)
class RaggedBatch:
    """Which packed rows belong to which sample, where their keys lie and what each row may see.

    A sample's keys lie in consecutive pool rows: ``past`` committed ones, visible to every row, then the rows of the
    draft tree. The rows of this forward are the last ones of the tree region and are already in the pool.

    Args:
        rows: number of packed rows of every sample.
        starts: first pool row of every sample.
        past: committed keys of every sample.
        tree_positions: positions of the keys of the tree region, for sliding windows; its length is the region's.
        positions: ``[T]`` int64 positions of the packed rows.
        slots: ``[T]`` int64 pool rows of the packed rows.
        words: ``[T, W]`` int64 ancestor words over the tree region; ``None`` if every row sees all rows before it.
    """

    rows: Sequence[int]
    starts: Sequence[int]
    past: Sequence[int]
    tree_positions: Sequence[Sequence[int]]
    positions: Tensor
    slots: Tensor
    words: Tensor | None = None
    _biases: dict[tuple[int, int | None, int, torch.dtype], tuple[int, Tensor | None]] = field(
        default_factory=dict, repr=False
    )

    def to(self, device: torch.device) -> Self:
        """The same batch with its tensors on ``device``."""
        if self.positions.device == device:
            return self
        words = self.words if self.words is None else self.words.to(device)
        return replace(self, positions=self.positions.to(device), slots=self.slots.to(device), words=words, _biases={})

    def is_prompt(self, sample: int, window: int | None = None) -> bool:
        """Whether a sample's rows are the beginning of its text: each sees just itself and the rows before it."""
        rows, tree = self.rows[sample], len(self.tree_positions[sample])
        return self.words is None and self.past[sample] == 0 and rows == tree and (window is None or rows <= window)

    def bias(
        self, sample: int, window: int | None = None, copies: int = 1, dtype: torch.dtype = torch.float32
    ) -> tuple[int, Tensor | None]:
        """Dense mask of one sample, made once per forward and shared by all layers.

        Args:
            sample: index into this forward's samples.
            window: a row at position ``i`` sees keys at positions above ``i - window``.
            copies: how often the rows are stacked, for as many query heads.
            dtype: that of the scores.

        Returns:
            The first key any row sees, and ``[copies * rows, keys from there on]`` to add to the scores: 0 where a
            row sees a key, else ``-inf``. ``None`` if it would be all zeros.
        """
        key = (sample, window, copies, dtype)
        if key not in self._biases:
            first, visible = self._visible(sample, window)
            bias = None
            if visible is not None:
                hidden = torch.full(visible.shape, float("-inf"), dtype=dtype, device=visible.device)
                bias = hidden.masked_fill_(visible, 0).repeat(copies, 1)
            self._biases[key] = first, bias
        return self._biases[key]

    def _visible(self, sample: int, window: int | None) -> tuple[int, Tensor | None]:
        rows, past, tree = self.rows[sample], self.past[sample], len(self.tree_positions[sample])
        first_row = sum(self.rows[:sample])
        device = self.positions.device
        positions = self.positions[first_row : first_row + rows]
        first = 0 if window is None else min(past, max(0, int(positions.min()) - window + 1))
        if rows == 1 and tree == 1:
            return first, None  # plain decoding: the slice itself is the mask
        mask = torch.ones(rows, past - first + tree, dtype=torch.bool, device=device)
        if self.words is None:
            mask[:, past - first :] = torch.ones(rows, tree, dtype=torch.bool, device=device).tril(tree - rows)
        else:
            columns = torch.arange(tree, device=device)
            words = self.words[first_row : first_row + rows, columns // WORD_BITS]
            mask[:, past - first :] = (words >> (columns % WORD_BITS)) & 1 == 1
        if window is not None:
            committed = torch.arange(first, past, device=device)
            keys = torch.cat([committed, torch.tensor(self.tree_positions[sample], device=device)])
            mask &= positions[:, None] - keys[None, :] < window
        return first, mask
