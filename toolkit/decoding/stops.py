"""Finds texts that end an answer, at a cost that does not depend on their length."""

import copy
from collections.abc import Iterable
from typing import Self


class Stops:
    """Finds the first of several texts in another text, letter by letter.

    The work per letter does not depend on the length of these texts (Knuth, Morris and Pratt).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(texts)
        self._sizes = [0] * len(self._texts)  # by stop: letters of its beginning at the end of the text so far
        # KMP failure function per text, from length 1: longest proper prefix that is also a suffix. Extended on demand.
        self._borders = [[0] for _ in self._texts]

    def __bool__(self) -> bool:
        return bool(self._texts)

    @property
    def begun(self) -> int:
        """Number of letters at the end of the text that may begin a stop."""
        return max(self._sizes, default=0)

    def add(self, char: str) -> int:
        """Adds a letter; returns the length of the longest stop that ends with it, or 0."""
        found = 0
        for index, (text, size, borders) in enumerate(zip(self._texts, self._sizes, self._borders, strict=True)):
            while size and text[size] != char:
                size = borders[size - 1]
            size += text[size] == char
            while len(borders) < size:
                border = borders[-1]
                while border and text[len(borders)] != text[border]:
                    border = borders[border - 1]
                borders.append(border + (text[len(borders)] == text[border]))
            if size == len(text):
                found, size = max(found, size), borders[-1]
            self._sizes[index] = size
        return found

    def find(self, text: str) -> bool:
        """Adds text up to the first stop; returns whether there was one."""
        return any(map(self.add, text))

    def fork(self) -> Self:
        """Returns a copy that continues from the same state."""
        other = copy.copy(self)
        other._sizes = [*self._sizes]
        return other


__all__ = ["Stops"]
