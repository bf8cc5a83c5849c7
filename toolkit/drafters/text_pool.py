"""Finished texts in which lookups find what may come next, shared by all samples of a decoder or an engine."""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from arbordraft.utils.checks import check_int
from arbordraft.utils.files import new_file

_BYTES = 160  # of a token, with its place in the index
_END = -1  # behind every text: no suffix runs on into the one before
_MOST_MATCHES, _MOST_PLACES = 32, 1024  # older places of a frequent n-gram say little


class TextPool:
    """Texts that have ended, prompts and answers, the least useful of which make room for new ones.

    With greedy decoding and shared noise no draft changes a text: what others have said only makes answers faster.
    Samples whose text depends on what is drafted look into their own text alone.

    Any number of threads may read and add.

    Args:
        max_bytes: bound of its memory, roughly; at least 64 KiB.
        shortest: shortest suffix that is looked up, in tokens; 1 to 16.

    Raises:
        TypeError: if an argument is no whole number.
        ValueError: if one is out of range.

    Source: SuffixDecoding (Oliaro et al., arXiv:2411.04975), with an index of n-grams in place of its suffix tree.

    Examples:
        >>> pool = TextPool()
        >>> pool.add([5, 6, 7, 8, 9])
        >>> pool.matches((1, 5, 6, 7))
        [(3, 8, 1)]
    """

    def __init__(self, max_bytes: int = 1 << 26, shortest: int = 3) -> None:
        self.max_bytes = check_int("max_bytes", max_bytes, 1 << 16)
        self.shortest = check_int("shortest", shortest, 1, 16)
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}  # by text, when something of it was last right; texts by age
        self._known: dict[int, int] = {}  # texts by what their tokens hash to
        self._clock = self._number = 0
        self._clear()

    def __len__(self) -> int:
        """Texts in it."""
        return len(self._used)

    @property
    def nbytes(self) -> int:
        """About how much memory it takes."""
        return _BYTES * len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Takes in a text, once; of one that is longer than half of all it may hold, the end."""
        most = self.max_bytes // _BYTES // 2
        tokens = list(tokens[-most:])
        if len(tokens) <= self.shortest:
            return
        with self._lock:
            if (known := self._known.get(hash(tuple(tokens)))) in self._used:
                self._clock += 1
                self._used[known] = self._clock
                return
            if self.nbytes + _BYTES * len(tokens) > self.max_bytes:
                self._make_room(most)
            self._append(tokens)

    def matches(self, suffix: Sequence[int]) -> list[tuple[int, int, int]]:
        """How many tokens of a suffix stand at a place, what follows there, and in which text; the latest place first.

        Older places than the latest ones at which all of it stands are left out.
        """
        size, longest = self.shortest, len(suffix)
        found: list[tuple[int, int, int]] = []
        if longest < size:
            return found
        with self._lock:
            tokens, before, starts, numbers = self._tokens, self._before, self._starts, self._numbers
            end = self._last.get(tuple(suffix[-size:]), -1)
        whole = 0
        while end >= 0 and whole < _MOST_MATCHES and len(found) < _MOST_PLACES:
            reach = size
            while reach < longest and reach <= end and tokens[end - reach] == suffix[-1 - reach]:
                reach += 1
            whole += reach == longest
            found.append((reach, tokens[end + 1], numbers[bisect_right(starts, end) - 1]))
            end = before[end]
        return found

    def praise(self, text: int) -> None:
        """Is told that something of a text was right."""
        with self._lock:
            if text in self._used:
                self._clock += 1
                self._used[text] = self._clock

    def texts(self) -> list[list[int]]:
        """Their tokens, those that were useful last at the end."""
        with self._lock:
            return [self._text(number) for number in sorted(self._used, key=self._used.__getitem__)]

    def save(self, path: str | Path) -> None:
        """Writes safetensors; the file appears only when it is complete."""
        held = self.texts()
        tensors = {
            "tokens": torch.tensor([token for text in held for token in text], dtype=torch.int64),
            "lengths": torch.tensor([len(text) for text in held], dtype=torch.int64),
        }
        with new_file(path) as staging:
            save_file(tensors, staging, metadata={"shortest": str(self.shortest)})

    @classmethod
    def load(cls, path: str | Path, max_bytes: int = 1 << 26) -> "TextPool":
        """Reads what :meth:`save` wrote; of more than fits, what was useful last.

        Raises:
            ValueError: if it is something else.
        """
        try:
            with safe_open(path, "pt") as file:
                shortest = int((file.metadata() or {})["shortest"])
            tensors = load_file(path)
            lengths: list[int] = tensors["lengths"].tolist()
            texts = tensors["tokens"].split(lengths)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} holds no pool of texts: {error}") from error
        pool = cls(max_bytes, shortest)
        pool.extend(text.tolist() for text in texts)
        return pool

    def extend(self, texts: Iterable[Sequence[int]]) -> None:
        """Takes in several."""
        for text in texts:
            self.add(text)

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._before: list[int] = []  # by place, the one before at which the same n-gram ends
        self._last: dict[tuple[int, ...], int] = {}
        self._starts: list[int] = []  # of texts, ascending
        self._numbers: list[int] = []  # of texts, beside

    def _append(self, tokens: list[int], number: int | None = None) -> None:
        size, start = self.shortest, len(self._tokens)
        if number is None:
            self._number += 1
            self._clock += 1
            number = self._number
            self._used[number] = self._clock
            self._known[hash(tuple(tokens))] = number
        # Readers let go of the lock: they find a place once all that it leads to is there, and lists only grow.
        self._tokens += [*tokens, _END]
        self._before += [-1] * (len(tokens) + 1)
        self._starts.append(start)
        self._numbers.append(number)
        last, before, held = self._last, self._before, self._tokens
        for end in range(start + size - 1, start + len(tokens) - 1):
            gram = tuple(held[end - size + 1 : end + 1])
            before[end] = last.get(gram, -1)
            last[gram] = end

    def _text(self, number: int) -> list[int]:
        place = self._numbers.index(number)
        start = self._starts[place]
        return self._tokens[start : self._tokens.index(_END, start)]

    def _make_room(self, tokens: int) -> None:
        """Keeps what was right last, about so many tokens of it."""
        kept: list[tuple[int, list[int]]] = []
        room = tokens
        for number in sorted(self._used, key=self._used.__getitem__, reverse=True):
            text = self._text(number)
            if (room := room - len(text) - 1) < 0:
                break
            kept.append((number, text))
        self._used = {number: self._used[number] for number, _ in kept}
        self._known = {key: number for key, number in self._known.items() if number in self._used}
        self._clear()
        for number, text in reversed(kept):
            self._append(text, number)


__all__ = ["TextPool"]
