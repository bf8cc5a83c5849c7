"""Compares a predicted answer with the answer.

Shapes: none; tokens are lists.
"""

from collections.abc import Iterable, Sequence


class CommonTokens:
    """Counts the tokens of a prediction that a growing answer contains in their order.

    This is the length of the longest common subsequence. A token costs a few operations on an integer of as many bits
    as the prediction has tokens.

    Args:
        prediction: token ids.

    Source: Hyyrö, Bit-parallel LCS-length computation revisited (2004).

    Examples:
        >>> common = CommonTokens([1, 2, 3, 4])
        >>> common.add([1, 9, 3])
        >>> common.counts
        (2, 2)
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._places: dict[int, int] = {}  # by token, the bits of its places
        for place, token in enumerate(prediction):
            self._places[token] = self._places.get(token, 0) | 1 << place
        self._all = self._lacking = (1 << len(prediction)) - 1

    def add(self, tokens: Iterable[int]) -> None:
        """Adds the next tokens of the answer."""
        for token in tokens:
            matched = self._lacking & self._places.get(token, 0)
            self._lacking = ((self._lacking + matched) | (self._lacking - matched)) & self._all

    @property
    def counts(self) -> tuple[int, int]:
        """Number of tokens of the prediction that the answer contains so far, and of the others."""
        lacking = self._lacking.bit_count()
        return self._all.bit_length() - lacking, lacking


__all__ = ["CommonTokens"]
