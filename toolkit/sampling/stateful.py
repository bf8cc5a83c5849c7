"""Logits processors that follow a text token by token, along the paths of draft trees.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import and_
from typing import Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor


@runtime_checkable
class StatefulProcessor(Protocol):
    """A logits processor that tracks its place in a text, as a grammar does.

    Trees branch, so states are forked: the state after a node is a fork of its parent's state that accepted one more
    token. A decoder is given a template, whose state is that just after the prompt. Every sample starts from a fork.
    """

    def fork(self) -> Self:
        """Returns an independent copy in the same state."""
        ...

    def accept(self, token: int) -> None:
        """Advances the state by a token.

        Drafts are guesses, so the token's score may be one that the processor sets to -inf. Neither such a token nor
        any token after it becomes text. In this case any state will do, and the method may raise.
        """
        ...

    def __call__(self, scores: Tensor) -> Tensor:
        """Returns the processed ``[V]`` scores of the next token; the given ones may be overwritten."""
        ...


class Allowed:
    """The tokens that may come next.

    Args:
        bits: one bit per token, the first tokens in the lowest bits; tokens beyond them are not allowed.
    """

    def __init__(self, bits: bytes) -> None:
        self.bits = bits

    def __contains__(self, token: int) -> bool:
        return token >> 3 < len(self.bits) and bool(self.bits[token >> 3] >> (token & 7) & 1)

    def __and__(self, other: "Allowed") -> "Allowed":
        return Allowed(bytes(map(and_, self.bits, other.bits)))

    def tokens(self) -> list[int]:
        """Returns all allowed tokens, ascending."""
        bits: list[int] = np.unpackbits(np.frombuffer(self.bits, np.uint8), bitorder="little").nonzero()[0].tolist()
        return bits

    @cached_property
    def only(self) -> int | None:
        """The allowed token, if there is exactly one; otherwise ``None``."""
        number = int.from_bytes(self.bits, "little")
        return number.bit_length() - 1 if number and not number & (number - 1) else None

    def mask(self, scores: Tensor) -> Tensor:
        """Sets the ``[V]`` scores of all other tokens to -inf, in place, and returns the scores."""
        if self.only is not None:  # certain, however low its score
            scores.fill_(-torch.inf)
            scores[self.only : self.only + 1] = 0.0
            return scores
        return scores.masked_fill_(self._forbidden(len(scores)).to(scores.device), -torch.inf)

    def _forbidden(self, vocabulary: int) -> Tensor:
        bits = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=vocabulary, bitorder="little")
        return torch.from_numpy(bits == 0)


@runtime_checkable
class Constraint(StatefulProcessor, Protocol):
    """A stateful processor that only forbids tokens and lists the allowed ones, so that no other is drafted."""

    def allowed(self) -> Allowed | None:
        """Returns the tokens that may come next; ``None`` for all of them."""
        ...


class PathState:
    """The stateful processors of a text after one path of a tree, and after all paths that extend it.

    A processor may fail, for example if a grammar becomes too complex. After committed tokens, a failure ends the
    sample. After drafted ones it is only recorded: the draft may be rejected, and drafts must not decide whether a text
    fails. If the draft is accepted, the sample ends with it.

    Args:
        processors: the processors in their states after this path.
        drafted: whether the path holds tokens that are not committed.
        failure: the reason why these states cannot be used, if there is one.

    Attributes:
        failure: the reason why a processor failed here, among those called so far.
    """

    def __init__(
        self, processors: Sequence[StatefulProcessor], drafted: bool = False, failure: Exception | None = None
    ) -> None:
        self.processors, self.failure = processors, failure
        self._drafted = drafted
        self._longer: dict[int, PathState] = {}

    def along(self, tokens: Sequence[int]) -> "PathState":
        """Returns the states after some more drafted tokens."""
        state = self
        for token in tokens:
            if token not in state._longer:
                state._longer[token] = state._after(token)
            state = state._longer[token]
        return state

    def commit(self, token: int) -> "PathState":
        """Returns the states after the next token, which was committed."""
        state = self.along([token])
        state._drafted = False
        return state

    def processed(self, number: int, scores: Tensor) -> Tensor:
        """Applies the processor with a number to the ``[V]`` scores of the next token.

        If it fails after drafted tokens, the scores stay as they are: no token drawn from them is committed.

        Raises:
            Exception: the processor's own, if it fails after committed tokens.
        """
        if self.failure is None:
            try:
                return self.processors[number](scores)
            except Exception as error:
                self.failure = error
        self.fail(self.failure)
        return scores

    def fail(self, reason: Exception) -> None:
        """Records why no text can go on here; after committed tokens, raises the reason."""
        self.failure = reason
        if not self._drafted:
            raise reason

    def allowed(self, tokens: Sequence[int]) -> Allowed | None:
        """Returns the tokens that constraints allow after ``tokens``: ``None`` for all, none if a processor fails."""
        return self.along(tokens)._allowed

    def _after(self, token: int) -> "PathState":
        if self.failure is not None:
            return PathState((), True, self.failure)
        forks: list[StatefulProcessor] = []
        try:
            for processor in self.processors:
                forks.append(processor.fork())
                forks[-1].accept(token)
        except Exception as error:
            return PathState((), True, error)
        return PathState(forks, True)

    @cached_property
    def _allowed(self) -> Allowed | None:
        if self.failure is None:
            try:
                masks = [one.allowed() for one in self.processors if isinstance(one, Constraint)]
            except Exception as error:
                self.failure = error
        if self.failure is not None:
            return Allowed(b"")
        known = [allowed for allowed in masks if allowed is not None]
        return reduce(and_, known) if known else None


__all__ = ["Allowed", "Constraint", "PathState", "StatefulProcessor"]
