"""Detokenizes tokens as they come: the text and the bytes of each one.

A token may be part of a character: some bytes of a byte-level tokenizer, or a SentencePiece byte token like ``<0xE6>``.
"""

from codecs import getincrementaldecoder, utf_8_decode
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from arbordraft.checkpoints.translation import BYTE_CHARS, BYTE_TOKEN
from arbordraft.decoding.stops import Stops

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNREADABLE = "\ufffd"  # replacement for bytes that are not a character
_MOST_KNOWN = 2**14  # size of the cache of token texts
_CONTEXT = 4  # preceding tokens that may affect the text of a token: a character has at most four bytes


class TokenText(NamedTuple):
    """Text and bytes of one token.

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


class TokenDecoder:
    """Decodes single tokens of a tokenizer, with a cache.

    Args:
        tokenizer: used only to decode, and for the names of tokens if it has names.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer
        self._cached = lru_cache(_MOST_KNOWN)(self._learn)

    @classmethod
    def of(cls, tokenizer: "PreTrainedTokenizerBase | TokenDecoder") -> "TokenDecoder":
        """Builds the decoder of a tokenizer; returns a :class:`TokenDecoder` as it is, so that its cache is shared."""
        return tokenizer if isinstance(tokenizer, TokenDecoder) else cls(tokenizer)

    def __getitem__(self, token: int) -> TokenText:
        return self._cached(token)

    def text(self, tokens: Sequence[int], *, skip: bool = False) -> str:
        """Decodes tokens and keeps blanks before punctuation; ``skip`` omits special tokens."""
        text: Any = self._tokenizer.decode(list(tokens), skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)

    def _learn(self, token: int) -> TokenText:
        first = self.text([token])
        text = self.text([token, token])[len(first) :]
        name_of: Any = getattr(self._tokenizer, "convert_ids_to_tokens", lambda token: "")
        name = name_of(token)
        if name is None or self.text([token], skip=True) != first:
            return TokenText(first, first, first.encode(), True, False)
        byte = _byte(name)
        if byte is not None and text == byte.decode(errors="replace"):
            return TokenText(text, first, byte, False, True)
        data = _data(name, text, first)
        if data is not None and not is_text(data):
            text = first  # two of them could make a character
        return TokenText(text, first, data, False, False)


def _byte(name: str | bytes) -> bytes | None:
    match = BYTE_TOKEN.fullmatch(name) if isinstance(name, str) else None
    return bytes([int(match[1], 16)]) if match else None


def _data(name: str | bytes, text: str, first: str) -> bytes | None:
    """Returns the bytes of a token: from its texts, else from its name, else ``None``."""
    if _UNREADABLE not in first:
        return text.encode()
    data = name if isinstance(name, bytes) else bytes(BYTE_CHARS[char] for char in name if char in BYTE_CHARS)
    if len(data) == len(name) and data.decode(errors="replace") == first:
        return data
    return text.encode() if isinstance(name, str) and _UNREADABLE in name else None


def is_text(data: bytes) -> bool:
    """Returns whether these bytes are whole characters in UTF-8."""
    return data.decode(errors="replace").encode() == data


@dataclass(slots=True)
class DecodedToken:
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
    """Detokenizes tokens in order: their texts join to the tokenizer's decoding of all of them.

    The tokenizer decodes each new token together with a few before it. The text of those before it is cut off.

    Args:
        token_decoder: decodes single tokens.
        kept: hidden tokens that are decoded nevertheless.

    Attributes:
        undecided: last tokens, if the next token may change their text. They have the text that they would have at
            the end, except a character that may still become whole.
    """

    def __init__(self, token_decoder: TokenDecoder, kept: Collection[int]) -> None:
        self.undecided: list[DecodedToken] = []
        self._token_decoder, self._kept = token_decoder, kept
        self._window: list[int] = []  # last decoded tokens, which are decoded with the next
        self._num_decoded = 0  # characters of the decoded window that belong to earlier tokens
        self._incomplete = b""  # first bytes of an incomplete character
        self._last = DecodedToken()  # token that these bytes come from
        self._run: list[DecodedToken] = []  # consecutive byte tokens
        self._utf8 = getincrementaldecoder("utf-8")("replace")  # decodes the run

    def add(self, token: int) -> list[DecodedToken]:
        """Adds a token; returns the tokens whose text is now decided, in order."""
        known = self._token_decoder[token]
        if known.hidden and token not in self._kept:
            return self._decide(DecodedToken(), waits=bool(self.undecided), new_text=False)
        if known.byte:
            assert known.data is not None
            started = len(self._utf8.getstate()[0])
            self._run.append(DecodedToken(self._utf8.decode(known.data), known.data, started))
            self._window.append(token)
            return self._decide(self._run[-1], waits=True, new_text=False)
        if self._run:
            self._end_run()
        self._window.append(token)
        text = self._token_decoder.text(self._window)
        begun, self._incomplete, own = self._incomplete, b"", known.data
        if own is None:
            waits = text.endswith(_UNREADABLE)
        else:
            self._incomplete = (begun + own)[utf_8_decode(begun + own, "replace", False)[1] :]
            waits = bool(self._incomplete)
        end = max(self._num_decoded, len(text) - waits)
        new_text, self._num_decoded = text[self._num_decoded : end], end
        self._forget(waits)
        new = DecodedToken(new_text)
        if begun and new_text and own and not 0x80 <= own[0] < 0xC0:  # the bytes before can become no character
            self._last.text += new_text[0]
            new.text, begun = new_text[1:], b""
        new.data = new.text.encode() if own is None or is_text(own) else own
        new.begun, self._last = len(begun), new
        return self._decide(new, waits, bool(new_text))

    def end(self) -> list[DecodedToken]:
        """Decides and returns the undecided tokens; no other token follows."""
        if self._run:
            self._end_run()
        elif self.undecided:
            self._last.text += self._token_decoder.text(self._window)[self._num_decoded :]
            self._last.data = self._last.data if self._incomplete else self._last.text.encode()
        decided, self.undecided = self.undecided, []
        return decided

    @property
    def ahead(self) -> str:
        """Text of the undecided tokens if no other token follows."""
        if self._run:
            return self._token_decoder.text(self._window)[self._num_decoded :]
        return "".join(part.text for part in self.undecided)

    def _decide(self, new: DecodedToken, waits: bool, new_text: bool) -> list[DecodedToken]:
        """Returns the tokens decided by ``new``: earlier ones unless it waits without text, itself unless it waits."""
        decided = list[DecodedToken]()
        if new_text or not waits:
            decided, self.undecided = self.undecided, []
        (self.undecided if waits else decided).append(new)
        return decided

    def _end_run(self) -> None:
        """Ends a run of byte tokens; the tokenizer's decoding tells whether all or none of them are characters."""
        text = self._token_decoder.text(self._window)
        decoded, run = text[self._num_decoded :], self._run
        run[-1].text += self._utf8.decode(b"", True)
        run_text = "".join(part.text for part in run)
        if decoded != run_text and len(decoded) == len(run):
            for part, char in zip(run, decoded, strict=True):
                part.text = char
        elif decoded != run_text and run_text.endswith(decoded):  # the tokenizer drops blanks at the beginning
            for part in run[: len(run_text) - len(decoded)]:
                part.text, part.data = "", b""
        elif decoded != run_text:
            for part in run:
                part.text, part.data = "", b""
            run[-1].text, run[-1].data = decoded, decoded.encode()
        self._num_decoded, self._run = len(text), []
        self._utf8.reset()
        self._forget(False)

    def _forget(self, waits: bool) -> None:
        if len(self._window) > 2 * _CONTEXT:
            self._window = self._window[-_CONTEXT:]
            self._num_decoded = len(self._token_decoder.text(self._window)) - waits


class IncrementalDetokenizer:
    """Turns tokens into text as they come; text that was returned never changes later.

    The returned texts join to the tokenizer's decoding of all tokens, up to the first stop. The first stop is the one
    that ends first; if several end together, the longest.

    Args:
        tokenizer: decodes the tokens; special tokens are omitted.
        stop: stop texts; the text ends before the first one that occurs.
        kept: special tokens that are decoded nevertheless.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | TokenDecoder", stop: Sequence[str] = (), kept: Collection[int] = ()
    ) -> None:
        self._decoding = _Decoding(TokenDecoder.of(tokenizer), kept)
        self._stops = Stops(stop)
        self._ahead = self._stops  # has read the undecided tokens, too
        self._held, self._num_chars = deque[DecodedToken](), 0  # tokens that may belong to a stop, and their characters
        self._ended = False

    def add(self, tokens: Sequence[int]) -> str:
        """Adds tokens and returns the text that is now certain."""
        return "".join(decoded.text for decoded in self.decode(tokens))

    def end(self) -> str:
        """Returns the remaining text; no tokens follow."""
        return "".join(decoded.text for decoded in self.flush())

    @property
    def ended(self) -> bool:
        """Whether a stop was found."""
        return self._ended

    def decode(self, tokens: Sequence[int]) -> list[DecodedToken]:
        """Adds tokens and returns those, earlier ones included, whose text is now certain.

        Every token is returned once, in order, from here or from :meth:`flush`. Omitted tokens, and tokens after a
        stop, have no text. A token in which a stop begins has the text before the stop.
        """
        return [decoded for token in tokens for decoded in self._next(token)]

    def flush(self) -> list[DecodedToken]:
        """Returns the remaining tokens; no tokens follow."""
        ready = [*self._certain(self._decoding.end()), *self._held]
        self._held.clear()
        return ready

    def _next(self, token: int) -> Iterator[DecodedToken]:
        if self._ended:
            yield DecodedToken()
            return
        decided = self._decoding.add(token)
        yield from self._certain(decided)
        undecided = self._decoding.undecided
        if self._stops and undecided and not self._ended:
            if decided or len(undecided) == 1:
                self._ahead = self._stops.fork()
            new_text = "".join(decoded.text for decoded in (undecided if decided else undecided[-1:]))
            if self._ahead.find(new_text):
                if self._stops.fork().find(self._decoding.ahead):
                    yield from self._certain(self._decoding.end())  # the answer ends here: no token follows
                else:
                    self._ahead = Stops(())

    def _certain(self, decided: Sequence[DecodedToken]) -> Iterator[DecodedToken]:
        """Yields the held and the decided tokens that can no longer belong to a stop."""
        for decoded in decided:
            self._held.append(decoded)
            for char in "" if self._ended else decoded.text:
                self._num_chars += 1
                if size := self._stops.add(char):
                    self._num_chars, self._ended = self._num_chars - size, True
                    break
        if self._ended:
            self._cut()
        begun = 0 if self._ended else self._stops.begun
        while self._held and self._num_chars - self._reach() >= begun:
            decoded = self._held.popleft()
            self._num_chars -= len(decoded.text)
            yield decoded

    def _reach(self) -> int:
        """Returns the number of characters that contain bytes of the first held token."""
        others = [*islice(self._held, 1, 2), *self._decoding.undecided[:1]]
        return len(self._held[0].text) + (bool(others) and others[0].begun > 0)

    def _cut(self) -> None:
        """Cuts the held tokens to the characters before the stop."""
        num_chars = self._num_chars
        for decoded in self._held:
            if num_chars <= len(decoded.text):
                decoded.text = decoded.text[:num_chars]
                decoded.data = decoded.text.encode()[decoded.begun :]
            num_chars -= len(decoded.text)


__all__ = ["DecodedToken", "IncrementalDetokenizer", "TokenDecoder", "TokenText", "is_text"]
