"""Closes answers within their limits: forbids tokens after which an answer could no longer end in time.

A closing is a list of tokens after which a text is complete. The engine cannot tell the shortest one, so a search finds
one by trying short tokens, and a copy of the matcher proves it. All that is forbidden follows from the tokens of a text
and its limit: drafts, batches and clocks have no part in it.

Shapes: V vocabulary.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arbordraft.sampling.stateful import Allowed

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_FEW = 64  # most tokens that are tried one by one
_TRIED = 8  # most tokens of one shape that are tried
_SPARE = 2  # tokens to spare where a few tokens speak for all of their shape
_NEAR = 16  # tokens before the latest closing from which many tokens are looked at
_LARGEST_JUMP = 1024
_REPEATED = 8  # tokens in a row that are equal: those of a string that cannot end yet
_WIDTH = 4  # texts that a search follows at once
_DEPTH, _CHOICES = 6, 3  # places where they part, in a string and in an answer
_LONGEST = 8  # bytes of the tokens that searches try
_CONTENT = re.compile(rb'[^"\\{}\[\]:,]+')
_MARK = re.compile(rb'["\\]')  # other characters mean nothing within a string
_OUTSIDE = (
    rb"[}\]][}\]]*",
    rb",",
    rb'""',
    rb'"',
    rb"[1-9]",
    rb"0",
    rb"null|true|false",
    rb"[ntf]",
    rb"\[\]",
    rb"\{\}",
    rb"[\[{]",
)
_QUOTE = rb'"[}\]]*'
_FILL = rb"[0a]"  # makes a string long enough
_TEXT = rb"[~#=|^]"  # outside of strings, JSON has none of these


class Deadline(NamedTuple):
    """How far a text is from its limit.

    Args:
        left: tokens that the answer may still get.
        due: number of tokens left at which a closing is next searched.
        closing: tokens that would complete the text, if known here; empty if it is complete.
    """

    left: int
    due: int
    closing: tuple[int, ...] | None = None


class TokenShapes:
    """The tokens of one engine by their text, for searches of closings.

    Args:
        engine: tokens as the engine has them.
        vocab_size: V.
    """

    def __init__(self, engine: "LLTokenizer", vocab_size: int) -> None:
        self.special = frozenset(token for token in range(vocab_size) if engine.is_special_token(token))
        texts = [b"" if token in self.special else engine.decode_bytes([token]) for token in range(vocab_size)]
        short = sorted((-len(text), text, token) for token, text in enumerate(texts) if 0 < len(text) <= _LONGEST)
        self.outside, (self.quotes, self.fillers, self.text) = (
            [[token for _, text, token in short if re.fullmatch(pattern, text)] for pattern in patterns]
            for patterns in (_OUTSIDE, (_QUOTE, _FILL, _TEXT))
        )
        self.single = frozenset(token for size, _, token in short if size == -1)
        self.escape = next((token for _, text, token in short if text == b"\\"), None)  # a quote after it ends nothing
        known: dict[bytes, int] = {}
        self.shapes: NDArray[np.int64] = np.array([known.setdefault(_shape(text), len(known)) for text in texts])


def _shape(text: bytes) -> bytes:
    """Returns the part of a token that matters within a string: from a quote on, its structure."""
    if mark := _MARK.search(text):
        return _CONTENT.sub(b"x", text[mark.start() :])
    if not text.isascii():
        try:
            text.decode()
        except UnicodeDecodeError:
            return b"\xff"  # a part of a character must be completed first
    return b""


class Closings:
    """Closings of the texts of one grammar.

    Args:
        shapes: tokens of the engine.
        ends: tokens that end an answer.
        definition: the grammar as the engine reads it.
    """

    def __init__(self, shapes: TokenShapes, ends: Collection[int], definition: str) -> None:
        self._shapes, self._ends = shapes, frozenset(ends)
        # A token can commit an answer to a value with everything that the value requires, about as long as its schema.
        self._jump = min(max(len(definition) // 3, 2 * _NEAR), _LARGEST_JUMP)

    def begin(self, matcher: "LLMatcher", limit: int) -> Deadline:
        """Returns the deadline of an empty answer that may have ``limit`` tokens."""
        return self._searched(matcher, limit, ())

    def after(self, matcher: "LLMatcher", deadline: Deadline, token: int) -> Deadline:
        """Returns the deadline after one more token, which the matcher has accepted."""
        left, due, known = deadline.left - 1, deadline.due, deadline.closing
        rest = known[1:] if known and known[0] == token else None
        if left > due:
            return Deadline(left, due, rest)
        return self._searched(matcher, left, [one for one in (rest, known) if one is not None])

    def timely(self, matcher: "LLMatcher", allowed: Allowed, deadline: Deadline) -> Allowed:
        """Returns the allowed tokens after which the text can still be completed and ended within its limit.

        If it cannot be ended but completed, the end token is left out. All tokens are returned if no closing is known
        that fits.
        """
        left, _, closing = deadline
        if closing is None or left - len(closing) > self._jump or allowed.only is not None:
            return allowed
        room = left - (len(closing) < left)  # one token is kept for the end, where that is possible
        bits = np.unpackbits(np.frombuffer(allowed.bits, np.uint8), bitorder="little")
        tokens = bits.nonzero()[0]
        if len(closing) > room or left <= 0 or (len(tokens) > _FEW and left - len(closing) > _NEAR):
            return allowed
        bits[tokens] = 0
        for kept in self._timely(_Trial(self, matcher, closing), tokens, room - 1):
            bits[kept] = 1
        bits[closing[0] if closing else [end for end in self._ends if end in allowed]] = 1
        return Allowed(np.packbits(bits, bitorder="little").tobytes())

    def _timely(self, trial: "_Trial", tokens: NDArray[np.int64], room: int) -> Iterator[NDArray[np.int64]]:
        """Yields the tokens after which at most ``room`` tokens complete the text."""
        if len(tokens) <= _FEW:
            yield trial.closing(tokens, room)
            return
        shapes = self._shapes.shapes[tokens]
        for shape in np.bincount(shapes).nonzero()[0]:
            alike = tokens[shapes == shape]
            if len(alike) <= _TRIED:
                yield trial.closing(alike, room)
            else:
                tried = alike[np.linspace(0, len(alike) - 1, _TRIED).astype(int)]
                yield alike[: len(alike) * (len(trial.closing(tried, room - _SPARE)) == _TRIED)]

    def _searched(self, matcher: "LLMatcher", left: int, known: Sequence[tuple[int, ...]]) -> Deadline:
        """Returns the deadline with a closing, if one is found or known; else searches again much later."""
        found = self.straight(matcher, left, patient=False)
        for closing in known:
            if (found is None or len(closing) < len(found)) and len(closing) <= left and _completes(matcher, closing):
                found = closing
        if found is None:
            found = self.straight(matcher, left)
        if found is None:
            found = self._wide(
                matcher, min(left, _CHOICES), lambda place, rest: self.straight(place, rest, patient=False), left
            )
        if found is None:
            return Deadline(left, left // 2)
        steps = (left - len(found) - self._jump) // (self._jump + 1)
        return Deadline(left, left - max(1, steps), found)

    def straight(self, matcher: "LLMatcher", most: int, *, patient: bool = True) -> tuple[int, ...] | None:
        """Follows one text to its end, always by the tokens that seem to be nearest to it.

        Args:
            matcher: state of the text; it is left as it is.
            most: most tokens of the closing.
            patient: search the ends of strings that have expressions.
        """
        matcher, closing = matcher.deep_copy(), list[int]()
        while not matcher.is_accepting():
            stuck = len(closing) >= _REPEATED and len({*closing[-_REPEATED:]}) == 1
            tokens = matcher.compute_ff_tokens() or self._next(matcher, most - len(closing), patient, stuck)
            if not tokens or len(closing) + len(tokens) > most or matcher.try_consume_tokens(tokens) < len(tokens):
                return None
            closing += tokens
        return tuple(closing)

    def _next(self, matcher: "LLMatcher", most: int, patient: bool, stuck: bool) -> list[int]:
        """Returns the tokens that seem to be nearest to the end; none if none are found."""
        shapes = self._shapes
        if stuck or _first(matcher, shapes.text):
            return _first(matcher, shapes.quotes) or self._string_end(matcher, most, patient)
        for tokens in shapes.outside:
            if found := _first(matcher, tokens):
                return found
        others = Allowed(matcher.deep_copy().compute_bitmask()).tokens()[:_TRIED]  # such as the marks of tool calls
        return [token for token in others if _completes(matcher, [token])][:1] or others[:1]

    def _string_end(self, matcher: "LLMatcher", most: int, patient: bool) -> list[int]:
        """Returns tokens after which a string may end that may not end yet: it is short, or has an expression."""
        for filler in self._shapes.fillers:
            place, text = matcher.deep_copy(), list[int]()
            while len(text) < most and place.try_consume_tokens([filler]):
                text.append(filler)
                if _first(place, self._shapes.quotes):
                    return text
        depth = min(most, _DEPTH) * patient
        ended = self._wide(matcher, depth, lambda place, _: () if _first(place, self._shapes.quotes) else None, most)
        return list(ended or ())

    def _wide(
        self,
        matcher: "LLMatcher",
        depth: int,
        end: Callable[["LLMatcher", int], tuple[int, ...] | None],
        most: int,
    ) -> tuple[int, ...] | None:
        """Follows several texts whose next tokens differ, until one of them ends.

        It finds the mark that ends thoughts, the shorter one of several schemas, and the ends of expressions.

        Args:
            matcher: state of the text; it is left as it is.
            depth: most places where texts part.
            end: returns how a text goes on to its end, in so many tokens at most; ``None`` if it does not.
            most: most tokens of the closing.
        """
        places: list[tuple[LLMatcher, tuple[int, ...]]] = [(matcher, ())]
        for _ in range(depth):
            further: dict[bytes, tuple[LLMatcher, tuple[int, ...]]] = {}
            for place, text in places:
                for tokens in self._options(place):
                    copy = place.deep_copy()
                    if (
                        copy.try_consume_tokens(tokens) == len(tokens)
                        and (mask := copy.compute_bitmask()) not in further
                    ):
                        further[mask] = copy, (*text, *tokens)
            places = list(further.values())[:_WIDTH]
            for place, text in places:
                if len(text) <= most and (rest := end(place, most - len(text))) is not None:
                    return *text, *rest
        return None

    def _options(self, matcher: "LLMatcher") -> list[list[int]]:
        """Lists the ways to go on: the forced tokens, else single tokens."""
        matcher = matcher.deep_copy()
        if forced := matcher.compute_ff_tokens():
            return [forced]
        tokens = Allowed(matcher.compute_bitmask()).tokens()
        if len(tokens) > _FEW:
            tokens = [token for token in tokens if token in self._shapes.special or token in self._shapes.single]
        return [[token] for token in tokens if token not in self._ends and token != self._shapes.escape]


def _completes(matcher: "LLMatcher", closing: Sequence[int]) -> bool:
    """Returns whether a closing completes a text."""
    copy = matcher.deep_copy()
    return copy.try_consume_tokens(list(closing)) == len(closing) and copy.is_accepting()


def _first(matcher: "LLMatcher", tokens: Sequence[int]) -> list[int]:
    """Returns the first of some tokens that may come next, alone in a list; an empty list if none may."""
    return next(([token] for token in tokens if matcher.validate_tokens([token])), [])


class _Trial:
    """Tries the tokens that may come next, with closings that were found before.

    Args:
        closings: closings of the grammar.
        matcher: state before the tokens.
        closing: closing of that state.
    """

    def __init__(self, closings: Closings, matcher: "LLMatcher", closing: tuple[int, ...]) -> None:
        self._closings, self._matcher = closings, matcher
        self._found = deque([closing], maxlen=_TRIED)

    def closing(self, tokens: NDArray[np.int64], room: int) -> NDArray[np.int64]:
        """Returns the tokens after which at most ``room`` tokens complete the text."""
        return tokens[[self.closes(token, room) for token in tokens.tolist()]]

    def closes(self, token: int, room: int) -> bool:
        """Returns whether at most ``room`` tokens complete the text after a token."""
        place = self._matcher.deep_copy()
        if room < 0 or not place.try_consume_tokens([token]):
            return False
        if any(len(closing) <= room and _completes(place, closing) for closing in self._found):
            return True
        found = self._closings.straight(place, room, patient=False)
        if found is not None:
            self._found.appendleft(found)
        return found is not None


__all__ = ["Closings", "Deadline", "TokenShapes"]
