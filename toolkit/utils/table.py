"""Tables of numbers with named parts, which reach a device in one upload."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor


class Table(ABC):
    """Names and shapes of the parts of an int64 table; the parts in ``reals`` hold the bits of float64."""

    reals: ClassVar[frozenset[str]]

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parts by name."""

    @cached_property
    def spans(self) -> tuple[tuple[str, int, int, tuple[int, ...]], ...]:
        """Name, start, end and shape of every part of the table."""
        sizes = [int(np.prod(shape)) for shape in self.fields.values()]
        ends = list(accumulate(sizes))
        begins = [0, *ends[:-1]]
        return tuple(zip(self.fields, begins, ends, self.fields.values(), strict=True))

    @property
    def size(self) -> int:
        """Length of the table."""
        return self.spans[-1][2]

    def read(self, table: Tensor) -> dict[str, Tensor]:
        """Returns the parts of a table, as views."""
        return {
            name: (table[begin:end].view(torch.float64) if name in self.reals else table[begin:end]).view(shape)
            for name, begin, end, shape in self.spans
        }

    def blank(self, table: Tensor) -> SimpleNamespace:
        """Sets a table on the host to 0 and returns its parts as writable views."""
        table.numpy().fill(0)
        return self.views(table)

    def views(self, table: Tensor) -> SimpleNamespace:
        """Returns the parts of a table on the host, as views of numpy."""
        flat = table.numpy()
        return SimpleNamespace(
            **{
                name: flat[begin:end].view(np.float64 if name in self.reals else np.int64).reshape(shape)
                for name, begin, end, shape in self.spans
            }
        )


__all__ = ["Table"]
