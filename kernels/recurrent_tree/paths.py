"""The paths of a forward's rows through draft trees, and the states and inputs that lie on them.

Shapes: B samples of this forward, T packed rows, W width of a convolution.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.transfer import upload

PREVIOUS = -1  # reads the state of the row before
NOWHERE = -1  # writes no state
_SCRATCH = 2  # scratch state i has the index -2 - i


@dataclass(frozen=True)
class Schedule:
    """States that every row reads and writes: rows of a sample run in order, samples in any order.

    An index from 0 on is a committed state, and ``-2 - i`` is scratch state i.

    Args:
        first: ``[B + 1]`` int64 first row of each sample, and the end of the rows.
        read: ``[T]`` int64 state that a row starts from; -1 for that of the row before.
        write: ``[T]`` int64 state that a row leaves its own in; -1 for none.
        scratch: number of scratch states.
    """

    first: Tensor
    read: Tensor
    write: Tensor
    scratch: int

    def to(self, device: torch.device) -> Self:
        """Returns the schedule with its tensors on ``device``, moved in one upload."""
        first, read, write = upload(device, self.first, self.read, self.write)
        return type(self)(first, read, write, self.scratch)


@dataclass(frozen=True)
class Paths:
    """Packed rows as nodes of trees, whose roots follow committed states.

    Args:
        parent: ``[T]`` parent of each row, a row before it of its own sample; -1 for a root.
        rows: number of rows of each sample.
        states: committed state of each sample; all different.

    Raises:
        ValueError: if the rows are not as many as parents, a parent is not an earlier row of the sample, or two samples
            share a state.
    """

    parent: Sequence[int]
    rows: Sequence[int]
    states: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.states) or sum(self.rows) != len(self.parent):
            raise ValueError(
                f"{len(self.rows)} samples of {sum(self.rows)} rows need as many states and parents, got "
                f"{len(self.states)} and {len(self.parent)}"
            )
        if len(set(self.states)) != len(self.states) or min(self.states, default=0) < 0:
            raise ValueError(f"every sample needs a committed state of its own, got {list(self.states)}")
        parent, row = np.asarray(self.parent, dtype=np.int64), np.arange(len(self.parent))
        wrong = (parent >= row) | ((parent < np.repeat(self._first[:-1], self.rows)) & (parent != -1))
        if wrong.any():
            t = int(wrong.argmax())
            raise ValueError(f"the parent of row {t} must be an earlier row of its sample, or -1; got {parent[t]}")

    @classmethod
    def chains(cls, rows: Sequence[int], states: Sequence[int]) -> Self:
        """Returns the paths of prompts, or of accepted rows: each row follows the one before it."""
        parent = np.arange(-1, sum(rows) - 1)
        firsts = np.fromiter(accumulate((0, *rows)), np.int64)[:-1]
        parent[[first for first, count in zip(firsts, rows, strict=True) if count]] = -1
        return cls(parent.tolist(), rows, states)

    @property
    def _first(self) -> list[int]:
        return list(accumulate(self.rows, initial=0))

    def schedule(self, *, commit: bool = False) -> Schedule:
        """Plans the states of the rows, with as few scratch states as the order of the rows allows.

        Args:
            commit: let the last row of each sample write its committed state; the rows must be chains.

        Raises:
            ValueError: if ``commit`` is set and the rows of a sample are not a chain.
        """
        first, total = self._first, len(self.parent)
        read, write = (np.full(total, index, dtype=np.int64) for index in (PREVIOUS, NOWHERE))
        last_reader = {}  # by row that later rows, other than the next one, continue
        for row, parent in enumerate(self.parent):
            if parent >= 0 and parent != row - 1:
                last_reader[parent] = row
        scratch = 0
        for (begin, end), state in zip(pairwise(first), self.states, strict=True):
            free: list[int] = []  # samples share no scratch states, since they run in any order
            held: dict[int, int] = {}  # scratch state by row
            for row in range(begin, end):
                parent = self.parent[row]
                if parent == -1:
                    read[row] = state
                elif parent != row - 1:
                    read[row] = -_SCRATCH - held[parent]
                if last_reader.get(parent) == row:
                    free.append(held.pop(parent))
                if row in last_reader:
                    if not free:
                        free.append(scratch)
                        scratch += 1
                    held[row] = free.pop()
                    write[row] = -_SCRATCH - held[row]
            if commit and begin < end:
                if any(self.parent[row] != row - 1 for row in range(begin + 1, end)):
                    raise ValueError("only a chain of rows ends in one state: gather the rows of the accepted path")
                write[end - 1] = state
        bounds = np.asarray(first, dtype=np.int64)
        return Schedule(torch.from_numpy(bounds), torch.from_numpy(read), torch.from_numpy(write), scratch)

    def history(self, width: int) -> Tensor:
        """Finds the inputs before each row on its path, the oldest first.

        Args:
            width: width W of the convolution.

        Returns:
            ``[T, W - 1]`` int64. An index from 0 on is a packed row. ``-1 - i`` is row i of all committed windows,
            ``windows.flatten(0, 1)[i]``.
        """
        return self._inputs(np.asarray(self.parent, dtype=np.int64), np.repeat(self.states, self.rows), width)

    def windows(self, ends: Sequence[int], width: int) -> Tensor:
        """Finds the inputs of the windows that commits leave, the oldest first.

        Args:
            ends: last accepted row of every sample, -1 if none was accepted.
            width: width W of the convolution.

        Returns:
            ``[B, W - 1]`` int64, as in :meth:`history`.

        Raises:
            ValueError: if an end is not a row of its sample.
        """
        self._check_ends(ends)
        return self._inputs(np.asarray(ends, dtype=np.int64), np.asarray(self.states), width)

    def accepted(self, ends: Sequence[int]) -> tuple[list[int], Self]:
        """Finds the rows that a commit runs once more, from each sample's committed state.

        Args:
            ends: last accepted row of every sample, -1 if none was accepted.

        Returns:
            The accepted rows, sample after sample, and their paths, which are chains.

        Raises:
            ValueError: if an end is not a row of its sample.
        """
        self._check_ends(ends)
        rows: list[int] = []
        counts = []
        for end in ends:
            path = []
            while end >= 0:
                path.append(end)
                end = self.parent[end]
            rows += reversed(path)
            counts.append(len(path))
        return rows, self.chains(counts, self.states)

    def _check_ends(self, ends: Sequence[int]) -> None:
        for sample, (end, (begin, after)) in enumerate(zip(ends, pairwise(self._first), strict=True)):
            if end != -1 and not begin <= end < after:
                raise ValueError(f"sample {sample} has rows {begin} to {after - 1}, and {end} cannot be its last one")

    def _inputs(self, newest: "np.ndarray[tuple[int], np.dtype[np.int64]]", states: object, width: int) -> Tensor:
        """Follows paths upwards; committed inputs are numbered -1, -2, ... from the newest one."""
        parent, found = np.asarray([*self.parent, -1], dtype=np.int64), []  # the last one of no row: there may be none
        for _ in range(width - 1):
            found.append(newest)
            newest = np.where(newest >= 0, parent[np.maximum(newest, -1)], newest - 1)
        places = np.stack(found[::-1], axis=1) if found else np.zeros((len(newest), 0), np.int64)
        committed = np.asarray(states, dtype=np.int64)[:, None] * (width - 1) + (width - 1) + places
        return torch.from_numpy(np.where(places >= 0, places, -1 - committed))


__all__ = ["NOWHERE", "PREVIOUS", "Paths", "Schedule"]
