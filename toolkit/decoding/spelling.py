"""How tokens are spelt: the text and the bytes of each one, as they come.

A token may be a part of a character: bytes of byte-level tokenizers, or byte tokens ``<0xE6>`` of SentencePiece.
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

_UNREADABLE = "\ufffd"  # stands in a text for bytes that are no character
_MOST_KNOWN = 2**14  # tokens that are remembered
_CONTEXT = 4  # tokens before a new one that may decide how it is spelt: a character has at most four bytes


class TokenSpelling(NamedTuple):
    """How one token is spelt.

    Args:
        text: behind other tokens; bytes that are no whole character show as U+FFFD.
        first: at the beginning of a text, where SentencePiece drops a blank.
        data: its bytes behind other tokens; ``None`` if it is a part of a character and the tokenizer does not tell.
        hidden: left out of texts, as special tokens are.
        byte: one of SentencePiece's byte tokens. Whether these are characters depends on all that follow each other.
    """

    text: str
    first: str
    data: bytes | None
    hidden: bool
    byte: bool


class Spelling:
    """How the tokens of a tokenizer are spelt, each by itself.

    Args:
        tokenizer: only asked to decode, and for the names of tokens if it has any.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._known = lru_cache(_MOST_KNOWN)(self._learn)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase | Spelling") -> "Spelling":
        """That of a tokenizer, unless it is one already; sharing one shares what it remembers."""
        return tokenizer if isinstance(tokenizer, Spelling) else cls(tokenizer)

    def __getitem__(self, token: int) -> TokenSpelling:
        return self._known(token)

    def text(self, tokens: Sequence[int], *, skip: bool = False) -> str:
        """The tokenizer's decoding, in which blanks before punctuation stay; ``skip`` leaves special tokens out."""
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
    """The bytes of a token by its name, if the texts do not tell them."""
    if _UNREADABLE not in first:
        return text.encode()
    data = name if isinstance(name, bytes) else bytes(LETTERS[letter] for letter in name if letter in LETTERS)
    if len(data) == len(name) and data.decode(errors="replace") == first:
        return data
    return text.encode() if isinstance(name, str) and _UNREADABLE in name else None


def is_text(data: bytes) -> bool:
    """Whether these bytes are whole characters in UTF-8."""
    return data.decode(errors="replace").encode() == data


@dataclass(slots=True)
class Spelt:
    """What a token adds to the text that it stands in.

    Args:
        text: the characters that end with it; of bytes that are none, U+FFFD.
        data: its bytes. Those of all tokens join to the UTF-8 of the text, but for bytes that are no character, which
            the text cannot show.
        begun: bytes of its first character that the tokens before it brought.
    """

    text: str = ""
    data: bytes = b""
    begun: int = 0


class _Decoding:
    """Spells tokens in order: their texts join to the tokenizer's decoding of all of them.

    The tokenizer decodes each new token behind a few others, and the text of those is taken off.

    Args:
        spelling: of the tokenizer.
        kept: hidden tokens that are spelt all the same.

    Attributes:
        undecided: the last tokens, if the next one may decide how they are spelt; with the text that they have if none
            follows, but for a character that may become whole.
    """

    def __init__(self, spelling: Spelling, kept: Collection[int]) -> None:
        self.undecided: list[Spelt] = []
        self._spelling, self._kept = spelling, kept
        self._window: list[int] = []  # the last tokens that are spelt
        self._told = 0  # letters of its decoding that tokens have
        self._begun = b""  # the first bytes of a character
        self._last = Spelt()  # what brought them
        self._run: list[Spelt] = []  # byte tokens that follow each other
        self._utf8 = getincrementaldecoder("utf-8")("replace")  # reads these

    def add(self, token: int) -> list[Spelt]:
        """The tokens that are decided now, in order."""
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
        begun, self._begun, own = self._begun, b"", known.data
        if own is None:
            waits = text.endswith(_UNREADABLE)
        else:
            self._begun = (begun + own)[utf_8_decode(begun + own, "replace", False)[1] :]
            waits = bool(self._begun)
        end = max(self._told, len(text) - waits)
        news, self._told = text[self._told : end], end
        self._forget(waits)
        new = Spelt(news)
        if begun and news and own and not 0x80 <= own[0] < 0xC0:  # they do not become a character any more
            self._last.text += news[0]
            new.text, begun = news[1:], b""
        new.data = new.text.encode() if own is None or is_text(own) else own
        new.begun, self._last = len(begun), new
        return self._decided(new, waits, bool(news))

    def end(self) -> list[Spelt]:
        """The undecided tokens, if no other follows."""
        if self._run:
            self._end_run()
        elif self.undecided:
            self._last.text += self._spelling.text(self._window)[self._told :]
            self._last.data = self._last.data if self._begun else self._last.text.encode()
        decided, self.undecided = self.undecided, []
        return decided

    @property
    def ahead(self) -> str:
        """The text of the undecided tokens if no other follows."""
        if self._run:
            return self._spelling.text(self._window)[self._told :]
        return "".join(spelt.text for spelt in self.undecided)

    def _decided(self, new: Spelt, waits: bool, news: bool) -> list[Spelt]:
        """What the new token decides: all before it if it has text, and itself unless it waits for the next."""
        decided = list[Spelt]()
        if news or not waits:
            decided, self.undecided = self.undecided, []
        (self.undecided if waits else decided).append(new)
        return decided

    def _end_run(self) -> None:
        """Byte tokens are no longer followed by others: all of them are characters, or the tokenizer says none is."""
        text = self._spelling.text(self._window)
        told, run = text[self._told :], self._run
        run[-1].text += self._utf8.decode(b"", True)
        spelt = "".join(part.text for part in run)
        if told != spelt and len(told) == len(run):
            for part, letter in zip(run, told, strict=True):
                part.text = letter
        elif told != spelt and spelt.endswith(told):  # blanks at the beginning are dropped
            for part in run[: len(spelt) - len(told)]:
                part.text, part.data = "", b""
        elif told != spelt:
            for part in run:
                part.text, part.data = "", b""
            run[-1].text, run[-1].data = told, told.encode()
        self._told, self._run = len(text), []
        self._utf8.reset()
        self._forget(False)

    def _forget(self, waits: bool) -> None:
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._told = len(self._spelling.text(self._window)) - waits


class Pieces:
    """Turns tokens into text as they come, so that what was said never changes later.

    The pieces join to the tokenizer's decoding of all tokens, up to the first stop: the one that ends first, and of
    several that end together the longest.

    Args:
        tokenizer: special tokens are left out.
        stop: the text ends before the first of these.
        kept: special tokens that are spelt all the same.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | Spelling", stop: Sequence[str] = (), kept: Collection[int] = ()
    ) -> None:
        self._decoding = _Decoding(Spelling.of(tokenizer), kept)
        self._stops = Stops(stop)
        self._ahead = self._stops  # has read what is undecided, too
        self._held, self._letters = deque[Spelt](), 0  # tokens that may belong to a stop, and the letters they have
        self._ended = False

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        return "".join(spelt.text for spelt in self.spelt(tokens))

    def end(self) -> str:
        """What is left when no tokens follow."""
        return "".join(spelt.text for spelt in self.rest())

    @property
    def ended(self) -> bool:
        """Whether a stop has come."""
        return self._ended

    def spelt(self, tokens: Sequence[int]) -> list[Spelt]:
        """The text that these tokens make certain, by the tokens that it is of, which may have been added before.

        Every token comes once, in order, from here or from :meth:`rest`. One that is left out, or that follows a stop,
        adds nothing; one in which a stop begins adds what is before it.
        """
        return [spelt for token in tokens for spelt in self._next(token)]

    def rest(self) -> list[Spelt]:
        """The tokens that are left when none follows."""
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
                    yield from self._certain(self._decoding.end())  # here the answer ends, so that none follows
                else:
                    self._ahead = Stops(())

    def _certain(self, decided: Sequence[Spelt]) -> Iterator[Spelt]:
        """Of the tokens that were held back, and these, those that belong to no stop, whatever follows."""
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
        """Letters of which the first token that is held back has bytes."""
        others = [*islice(self._held, 1, 2), *self._decoding.undecided[:1]]
        return len(self._held[0].text) + (bool(others) and others[0].begun > 0)

    def _cut(self) -> None:
        """Takes off the tokens that are held back all but the letters before the stop."""
        letters = self._letters
        for spelt in self._held:
            if letters <= len(spelt.text):
                spelt.text = spelt.text[:letters]
                spelt.data = spelt.text.encode()[spelt.begun :]
            letters -= len(spelt.text)


__all__ = ["Pieces", "Spelling", "Spelt", "TokenSpelling", "is_text"]
