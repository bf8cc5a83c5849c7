"""The description of one packed forward, shared by every implementation of ragged tree attention.

Shapes: B samples of this forward, T packed rows, W ancestor words, P pool rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

import torch
from torch import Tensor

from arbordraft.kernels.transfer import upload

WORD_BITS = 64
ARRIVALS = 1024  # counters of programs that share a tile of rows


class Span(NamedTuple):
    """One sample in a packed forward.

    Args:
        row: its first packed row.
        rows: number of its rows.
        start: first pool row that any of its rows sees.
        length: number of pool rows from ``start`` on.
        bias: ``[copies * rows, length]``, added to the scores: 0 if a row sees a key, otherwise ``-inf``. ``None`` if
            every row sees all keys, or if ``causal``.
        causal: the rows are the beginning of a text, and each sees only itself and the rows before it.
    """

    row: int
    rows: int
    start: int
    length: int
    bias: Tensor | None
    causal: bool


@dataclass(frozen=True)
class RaggedBatch:
    """Packed rows of every sample, the pool rows of their keys, and the keys that each row sees.

    A sample's keys lie in consecutive pool rows: ``past`` committed ones, visible to every row, then the rows of the
    draft tree. The rows of this forward are the last ones of the tree region and are already in the pool.

    Args:
        rows: number of packed rows of every sample.
        starts: first pool row of every sample.
        past: committed keys of every sample.
        tree_positions: positions of the keys of the tree region, for sliding windows; as many as the region has keys.
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
    _spans: dict[tuple[int | None, int, torch.dtype, bool], list[Span]] = field(default_factory=dict, repr=False)

    @cached_property
    def most_rows(self) -> int:
        """The largest number of rows of a sample."""
        return max(self.rows, default=0)

    @cached_property
    def longest(self) -> int:
        """The largest number of committed keys of a sample."""
        return max(self.past, default=0)

    @cached_property
    def layout(self) -> Tensor:
        """``[4, B + 1]`` int64, on the device of the rows.

        The rows hold each sample's first packed row, first pool row, committed keys and first key in :attr:`region`.
        The last column is the end of the packed rows and of the regions.
        """
        first_rows = (0, *accumulate(self.rows))
        first_keys = (0, *accumulate(map(len, self.tree_positions)))
        table = [first_rows, (*self.starts, 0), (*self.past, 0), first_keys]
        return torch.tensor(table, dtype=torch.int64).to(self.positions.device)

    @cached_property
    def region(self) -> Tensor:
        """Positions of the keys of all tree regions, one sample after another, int64, on the device of the rows."""
        positions = [position for positions in self.tree_positions for position in positions]
        return torch.tensor(positions, dtype=torch.int64).to(self.positions.device)

    @cached_property
    def arrivals(self) -> Tensor | None:
        """``[1024]`` int32 zeros with which programs on a GPU count each other; ``None`` on a CPU.

        Every launch leaves zeros, so the layers of a forward share them. Forwards that may overlap do not.
        """
        return arrivals(self.positions)

    @classmethod
    def from_layout(cls, layout: Tensor, region: Tensor | None, positions: Tensor, words: Tensor | None) -> Self:
        """Builds a batch from :attr:`layout` and :attr:`region`, without slots, which attention does not read.

        Only windows need a region. Without one, positions of the tree regions are 0.
        """
        first_rows, starts, past, first_keys = layout.tolist()
        keys = [0] * first_keys[-1] if region is None else region.tolist()
        return cls(
            rows=[end - begin for begin, end in pairwise(first_rows)],
            starts=starts[:-1],
            past=past[:-1],
            tree_positions=[keys[begin:end] for begin, end in pairwise(first_keys)],
            positions=positions,
            slots=positions.new_empty(0),
            words=words,
        )

    def to(self, device: torch.device) -> Self:
        """Returns the batch with its tensors on ``device``, moved in one upload."""
        return self.upload(device)[0]

    def upload(self, device: torch.device, *beside: Tensor) -> tuple[Self, list[Tensor]]:
        """Returns the batch and some integers, such as the tokens of its rows, on ``device``, moved in one upload."""
        if self.positions.device == device:
            return self, [part.to(device) for part in beside]
        waiting = [part for part in beside if part.device != device]
        words = [] if self.words is None else [self.words]
        parts = [self.positions, self.slots, self.layout, self.region, *words, *waiting]
        positions, slots, layout, region, *others = upload(device, *parts)
        moved = replace(self, positions=positions, slots=slots, words=others.pop(0) if words else None, _spans={})
        vars(moved).update(layout=layout, region=region)
        return moved, [part if part.device == device else others.pop(0) for part in beside]

    def spans(
        self, window: int | None = None, copies: int = 1, dtype: torch.dtype = torch.float32, dense: bool = False
    ) -> list[Span]:
        """Returns the span of each sample that has rows, made once per forward and shared by all layers.

        Args:
            window: a row at position ``i`` sees keys at positions above ``i - window``.
            copies: how often a sample's rows are stacked, once per query head of a group.
            dtype: dtype of the scores.
            dense: whether to build causal masks too.
        """
        key = (window, copies, dtype, dense)
        if key not in self._spans:
            self._spans[key] = [self._span(sample, *key) for sample, rows in enumerate(self.rows) if rows]
        return self._spans[key]

    def _span(self, sample: int, window: int | None, copies: int, dtype: torch.dtype, dense: bool) -> Span:
        row, rows = sum(self.rows[:sample]), self.rows[sample]
        past, tree = self.past[sample], len(self.tree_positions[sample])
        begins = self.words is None and past == 0 and rows == tree and (window is None or rows <= window)
        if begins and not dense:
            return Span(row, rows, self.starts[sample], tree, None, causal=True)
        first, visible = self._visible(sample, window)
        bias = None
        if visible is not None:
            hidden = torch.full(visible.shape, float("-inf"), dtype=dtype, device=visible.device)
            bias = hidden.masked_fill_(visible, 0).repeat(copies, 1)
        return Span(row, rows, self.starts[sample] + first, past - first + tree, bias, causal=False)

    def _visible(self, sample: int, window: int | None) -> tuple[int, Tensor | None]:
        rows, past, tree = self.rows[sample], self.past[sample], len(self.tree_positions[sample])
        first_row = sum(self.rows[:sample])
        device = self.positions.device
        positions = self.positions[first_row : first_row + rows]
        first = 0 if window is None else min(past, max(0, int(positions.min()) - window + 1))
        if rows == 1 and tree == 1:
            return first, None  # plain decoding: the slice needs no mask
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


def arrivals(positions: Tensor) -> Tensor | None:
    """Returns counters for a forward with these positions; see :attr:`RaggedBatch.arrivals`."""
    return positions.new_zeros(ARRIVALS, dtype=torch.int32) if positions.is_cuda else None
