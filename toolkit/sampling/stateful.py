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
    """A logits processor that knows where it is in a text, as a grammar does.

    Trees branch, so it has to be forked: the state behind a node is a fork of its parent's that accepted one token
    more. What is given to a decoder is a template, which begins behind the prompt; every sample starts from a fork.
    """

    def fork(self) -> Self:
        """An independent copy in the same state."""
        ...

    def accept(self, token: int) -> None:
        """Goes on behind a token.

        Drafts are guesses, so it may be one whose score it makes -inf. That never becomes text, nor does what follows
        it: then any state will do, and it may raise.
        """
        ...

    def __call__(self, scores: Tensor) -> Tensor:
        """``[V]`` scores of the token that comes next, processed; those given may be overwritten."""
        ...


class Allowed:
    """The tokens that may come next.

    Args:
        bits: one for every token, the first ones in the lowest bits; tokens beyond them are not allowed.
    """

    def __init__(self, bits: bytes) -> None:
        self._bits = bits

    def __contains__(self, token: int) -> bool:
        return token >> 3 < len(self._bits) and bool(self._bits[token >> 3] >> (token & 7) & 1)

    def __and__(self, other: "Allowed") -> "Allowed":
        return Allowed(bytes(map(and_, self._bits, other._bits)))

    def tokens(self) -> list[int]:
        """All of them, ascending."""
        bits: list[int] = np.unpackbits(np.frombuffer(self._bits, np.uint8), bitorder="little").nonzero()[0].tolist()
        return bits

    @cached_property
    def only(self) -> int | None:
        """The token, if there is but one."""
        number = int.from_bytes(self._bits, "little")
        return number.bit_length() - 1 if number and not number & (number - 1) else None

    def mask(self, scores: Tensor) -> Tensor:
        """``[V]`` scores with -inf for all others, overwritten."""
        if self.only is not None:  # however unlikely a model takes it to be
            scores.fill_(-torch.inf)
            scores[self.only : self.only + 1] = 0.0
            return scores
        return scores.masked_fill_(self._forbidden(len(scores)).to(scores.device), -torch.inf)

    def _forbidden(self, vocabulary: int) -> Tensor:
        bits = np.unpackbits(np.frombuffer(self._bits, np.uint8), count=vocabulary, bitorder="little")
        return torch.from_numpy(bits == 0)


@runtime_checkable
class Constraint(StatefulProcessor, Protocol):
    """A stateful processor that only forbids tokens, and says which: then none of those is drafted."""

    def allowed(self) -> Allowed | None:
        """The tokens that may come next; ``None`` for all of them."""
        ...


class PathState:
    """The stateful processors of a text behind one path of a tree, and behind those that go on from it.

    A processor may fail, as a grammar does that becomes too complex. Behind committed tokens that ends the sample.
    Behind drafted ones it is remembered only: the draft may be rejected, and whether a text fails must not depend on
    drafts. If it is accepted, the sample ends with it.

    Args:
        processors: in their states behind this path.
        drafted: whether the path holds tokens that are not committed.
        failure: why these states cannot be used, if they cannot.

    Attributes:
        failure: why one of the processors failed here, as far as they were asked.
    """

    def __init__(
        self, processors: Sequence[StatefulProcessor], drafted: bool = False, failure: Exception | None = None
    ) -> None:
        self.processors, self.failure = processors, failure
        self._drafted = drafted
        self._longer: dict[int, PathState] = {}

    def along(self, tokens: Sequence[int]) -> "PathState":
        """The states some drafted tokens later."""
        state = self
        for token in tokens:
            if token not in state._longer:
                state._longer[token] = state._after(token)
            state = state._longer[token]
        return state

    def commit(self, token: int) -> "PathState":
        """The states behind a token that was committed."""
        state = self.along([token])
        state._drafted = False
        return state

    def processed(self, number: int, scores: Tensor) -> Tensor:
        """``[V]`` scores of the token that comes next, processed by the processor with a number.

        Behind drafted tokens where it fails they stay as they are: nothing that is drawn from them is committed.

        Raises:
            Exception: what the processor raised, behind committed tokens.
        """
        if self.failure is None:
            try:
                return self.processors[number](scores)
            except Exception as error:
                self.failure = error
        self.fail(self.failure)
        return scores

    def fail(self, reason: Exception) -> None:
        """Remembers that no text goes on here; raises that behind committed tokens."""
        self.failure = reason
        if not self._drafted:
            raise reason

    def allowed(self, tokens: Sequence[int]) -> Allowed | None:
        """What constraints let come next some tokens later: ``None`` for everything, none where a processor fails."""
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
                said = [one.allowed() for one in self.processors if isinstance(one, Constraint)]
            except Exception as error:
                self.failure = error
        if self.failure is not None:
            return Allowed(b"")
        known = [allowed for allowed in said if allowed is not None]
        return reduce(and_, known) if known else None


__all__ = ["Allowed", "Constraint", "PathState", "StatefulProcessor"]
