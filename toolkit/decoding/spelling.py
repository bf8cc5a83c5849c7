"""Spells tokens as they come: the text and the bytes of each one.

A token may be part of a character: some bytes of a byte-level tokenizer, or a SentencePiece byte token like ``<0xE6>``.
"""

from codecs import getincrementaldecoder, utf_8_decode
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.checkpoints.translation import BYTE_TOKEN, LETTERS
from arbordraft.decoding.stops import Stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNREADABLE = "\ufffd"  # replacement for bytes that are not a character
_MOST_KNOWN = 2**14  # size of the cache of token spellings
_CONTEXT = 4  # preceding tokens that may affect the spelling of a token: a character has at most four bytes


class TokenSpelling(NamedTuple):
    """Spelling of one token.

    Args:
        text: text after other tokens; bytes that are not a whole character show as U+FFFD.
        first: text at the beginning, where SentencePiece drops a blank.
        data: bytes after other tokens; ``None`` for a part of a character whose bytes the tokenizer does not tell.
        hidden: whether texts omit the token, as special tokens.
        byte: whether it is a SentencePiece byte token. Whether byte tokens form characters depends on their whole run.
    """

    text: str
    first: str
    data: bytes | None
    hidden: bool
    byte: bool


class Spelling:
    """Spellings of a tokenizer's single tokens, cached.

    Args:
        tokenizer: used only to decode, and for the names of tokens if it has names.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(_MOST_KNOWN)(self._learn)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase | Spelling") -> "Spelling":
        """Builds the spelling of a tokenizer; returns a :class:`Spelling` as it is, so that its cache is shared."""
        return tokenizer if isinstance(tokenizer, Spelling) else cls(tokenizer)

    def __getitem__(self, token: int) -> TokenSpelling:
        return self._known(token)

    def text(self, tokens: Sequence[int], *, skip: bool = False) -> str:
        """Decodes tokens and keeps blanks before punctuation; ``skip`` omits special tokens."""
        spelt: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return spelt if isinstance(spelt, str) else "".join(spelt)

    def _learn(self, token: int) -> TokenSpelling:
        first = self.text([token])
        text = self.text([token, token])[len(first) :]
        name_of: Any = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token: "")
        name = name_of(token)
        if name is None or self.text([token], skip=True) != first:
            return TokenSpelling(first, first, first.encode(), True, False)
        byte = _byte(name)
        if byte is not None and text == byte.decode(errors="replace"):
            return TokenSpelling(text, first, byte, False, True)
        data = _data(name, text, first)
        if data is not None and not is_text(data):
            text = first  # two of them could make a character
        return TokenSpelling(text, first, data, False, False)


def _byte(name: str | bytes) -> bytes | None:
    match = BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
    return bytes([int(match[1], 16)]) if match else None


def _data(name: str | bytes, text: str, first: str) -> bytes | None:
    """Returns the bytes of a token: from its texts, else from its name, else ``None``."""
    if _UNREADABLE not in first:
        return text.encode()
    data = name if isinstance(name, bytes) else bytes(LETTERS[letter] for letter in name if letter in LETTERS)
    if len(data) == len(name) and data.decode(errors="replace") == first:
        return data
    return text.encode() if isinstance(name, str) and _UNREADABLE in name else None


def is_text(data: bytes) -> bool:
    """Returns whether these bytes are whole characters in UTF-8."""
    return data.decode(errors="replace").encode() == data


@dataclass(slots=True)
class Spelt:
    """Text and bytes that a token adds to a text.

    Args:
        text: characters that end with this token; U+FFFD for bytes that are not a character.
        data: bytes of the token. The bytes of all tokens join to the UTF-8 of the text, except bytes that are not a
            character.
        begun: number of bytes of its first character that come from earlier tokens.
    """

    text: str = ""
    data: bytes = b""
    begun: int = 0


class _Decoding:
    """Spells tokens in order: their texts join to the tokenizer's decoding of all of them.

    The tokenizer decodes each new token together with a few before it. The text of those before it is cut off.

    Args:
        spelling: spelling of the tokenizer.
        kept: hidden tokens that are spelt nevertheless.

    Attributes:
        undecided: last tokens, if the next token may change their spelling. They have the text that they would have at
            the end, except a character that may still become whole.
    """

    def __init__(self, spelling: Spelling, kept: Collection[int]) -> None:
        self.undecided: list[Spelt] = []
        self._spelling, self._kept = spelling, kept
        self._window: list[int] = []  # last spelt tokens, which are decoded with the next
        self._num_spelt = 0  # letters of the decoded window that belong to spelt tokens
        self._incomplete = b""  # first bytes of an incomplete character
        self._last = Spelt()  # token that these bytes come from
        self._run: list[Spelt] = []  # consecutive byte tokens
        self._utf8 = getincrementaldecoder("utf-8")("replace")  # decodes the run

    def add(self, token: int) -> list[Spelt]:
        """Adds a token; returns the tokens whose spelling is now decided, in order."""
        known = self._spelling[token]
        if known.hidden and token not in self._kept:
            return self._decided(Spelt(), waits=bool(self.undecided), news=False)
        if known.byte:
            assert known.data is not None
            started = len(self._utf8.getstate()[0])
            self._run.append(Spelt(self._utf8.decode(known.data), known.data, started))
            self._window.append(token)
            return self._decided(self._run[-1], waits=True, news=False)
        if self._run:
            self._end_run()
        self._window.append(token)
        text = self._spelling.text(self._window)
        begun, self._incomplete, own = self._incomplete, b"", known.data
        if own is None:
            waits = text.endswith(_UNREADABLE)
        else:
            self._incomplete = (begun + own)[utf_8_decode(begun + own, "replace", False)[1] :]
            waits = bool(self._incomplete)
        end = max(self._num_spelt, len(text) - waits)
        news, self._num_spelt = text[self._num_spelt : end], end
        self._forget(waits)
        new = Spelt(news)
        if begun and news and own and not 0x80 <= own[0] < 0xC0:  # the bytes before can no longer become a character
            self._last.text += news[0]
            new.text, begun = news[1:], b""
        new.data = new.text.encode() if own is None or is_text(own) else own
        new.begun, self._last = len(begun), new
        return self._decided(new, waits, bool(news))

    def end(self) -> list[Spelt]:
        """Decides and returns the undecided tokens; no other token follows."""
        if self._run:
            self._end_run()
        elif self.undecided:
            self._last.text += self._spelling.text(self._window)[self._num_spelt :]
            self._last.data = self._last.data if self._incomplete else self._last.text.encode()
        decided, self.undecided = self.undecided, []
        return decided

    @property
    def ahead(self) -> str:
        """Text of the undecided tokens if no other token follows."""
        if self._run:
            return self._spelling.text(self._window)[self._num_spelt :]
        return "".join(spelt.text for spelt in self.undecided)

    def _decided(self, new: Spelt, waits: bool, news: bool) -> list[Spelt]:
        """Returns the tokens decided by ``new``: earlier ones unless it waits without text, itself unless it waits."""
        decided = list[Spelt]()
        if news or not waits:
            decided, self.undecided = self.undecided, []
        (self.undecided if waits else decided).append(new)
        return decided

    def _end_run(self) -> None:
        """Ends a run of byte tokens; the tokenizer's decoding tells whether all or none of them are characters."""
        text = self._spelling.text(self._window)
        decoded, run = text[self._num_spelt :], self._run
        run[-1].text += self._utf8.decode(b"", True)
        spelt = "".join(part.text for part in run)
        if decoded != spelt and len(decoded) == len(run):
            for part, letter in zip(run, decoded, strict=True):
                part.text = letter
        elif decoded != spelt and spelt.endswith(decoded):  # the tokenizer drops blanks at the beginning
            for part in run[: len(spelt) - len(decoded)]:
                part.text, part.data = "", b""
        elif decoded != spelt:
            for part in run:
                part.text, part.data = "", b""
            run[-1].text, run[-1].data = decoded, decoded.encode()
        self._num_spelt, self._run = len(text), []
        self._utf8.reset()
        self._forget(False)

    def _forget(self, waits: bool) -> None:
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._num_spelt = len(self._spelling.text(self._window)) - waits


class Pieces:
    """Turns tokens into text as they come; text that was returned never changes later.

    The pieces join to the tokenizer's decoding of all tokens, up to the first stop. The first stop is the one that ends
    first; if several end together, the longest.

    Args:
        tokenizer: spells the tokens; special tokens are omitted.
        stop: stop texts; the text ends before the first one that occurs.
        kept: special tokens that are spelt nevertheless.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | Spelling", stop: Sequence[str] = (), kept: Collection[int] = ()
    ) -> None:
        self._decoding = _Decoding(Spelling.of(tokenizer), kept)
        self._stops = Stops(stop)
        self._ahead = self._stops  # has read the undecided tokens, too
        self._held, self._letters = deque[Spelt](), 0  # tokens that may belong to a stop, and their letters
        self._ended = False

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now certain."""
        return "".join(spelt.text for spelt in self.spelt(tokens))

    def end(self) -> str:
        """Returns the remaining text; no tokens follow."""
        return "".join(spelt.text for spelt in self.rest())

    @property
    def ended(self) -> bool:
        """Whether a stop was found."""
        return self._ended

    def spelt(self, tokens: Sequence[int]) -> list[Spelt]:
        """Adds tokens and returns those, earlier ones included, whose text is now certain.

        Every token is returned once, in order, from here or from :meth:`rest`. Omitted tokens, and tokens after a stop,
        have no text. A token in which a stop begins has the text before the stop.
        """
        return [spelt for token in tokens for spelt in self._next(token)]

    def rest(self) -> list[Spelt]:
        """Returns the remaining tokens; no tokens follow."""
        ready = [*self._certain(self._decoding.end()), *self._held]
        self._held.clear()
        return ready

    def _next(self, token: int) -> Iterator[Spelt]:
        if self._ended:
            yield Spelt()
            return
        decided = self._decoding.add(token)
        yield from self._certain(decided)
        undecided = self._decoding.undecided
        if self._stops and undecided and not self._ended:
            if decided or len(undecided) == 1:
                self._ahead = self._stops.fork()
            news = "".join(spelt.text for spelt in (undecided if decided else undecided[-1:]))
            if self._ahead.find(news):
                if self._stops.fork().find(self._decoding.ahead):
                    yield from self._certain(self._decoding.end())  # the answer ends here: no token follows
                else:
                    self._ahead = Stops(())

    def _certain(self, decided: Sequence[Spelt]) -> Iterator[Spelt]:
        """Yields the held and the decided tokens that can no longer belong to a stop."""
        for spelt in decided:
            self._held.append(spelt)
            for letter in "" if self._ended else spelt.text:
                self._letters += 1
                if size := self._stops.add(letter):
                    self._letters, self._ended = self._letters - size, True
                    break
        if self._ended:
            self._cut()
        begun = 0 if self._ended else self._stops.begun
        while self._held and self._letters - self._reach() >= begun:
            spelt = self._held.popleft()
            self._letters -= len(spelt.text)
            yield spelt

    def _reach(self) -> int:
        """Returns the number of letters that contain bytes of the first held token."""
        others = [*islice(self._held, 1, 2), *self._decoding.undecided[:1]]
        return len(self._held[0].text) + (bool(others) and others[0].begun > 0)

    def _cut(self) -> None:
        """Cuts the held tokens to the letters before the stop."""
        letters = self._letters
        for spelt in self._held:
            if letters <= len(spelt.text):
                spelt.text = spelt.text[:letters]
                spelt.data = spelt.text.encode()[spelt.begun :]
            letters -= len(spelt.text)


__all__ = ["Pieces", "Spelling", "Spelt", "TokenSpelling", "is_text"]
