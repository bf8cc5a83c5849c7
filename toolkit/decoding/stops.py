"""Finds the text that ends an answer, however long it is."""

import copy
from collections.abc import Iterable
from typing import Self


class Stops:
    """Finds the first of several texts in another one, letter by letter.

    How long these texts are makes no difference to the work per letter (Knuth, Morris and Pratt).
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = tuple(texts)
        self._sizes = [0] * len(self._texts)  # letters of each that the text ends with
        # Per text and length: the longest proper beginning that its first so many letters end with. Made when needed.
        self._borders = [[0] for _ in self._texts]

    def __bool__(self) -> bool:
        return bool(self._texts)

    @property
    def begun(self) -> int:
        """Letters at the end of the text that may be the beginning of a stop."""
        return max(self._sizes, default=0)

    def add(self, letter: str) -> int:
        """The length of the longest stop that ends with this letter, or 0."""
        found = 0
        for index, (text, size, borders) in enumerate(zip(self._texts, self._sizes, self._borders, strict=True)):
            while size and text[size] != letter:
                size = borders[size - 1]
            size += text[size] == letter
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
        """Whether a stop ends in some more text."""
        return any(map(self.add, text))

    def fork(self) -> Self:
        """Another one that goes on from here."""
        other = copy.copy(self)
        other._sizes = [*self._sizes]
        return other


__all__ = ["Stops"]
