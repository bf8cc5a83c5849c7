"""A pool of finished texts for lookups, shared by all samples of a decoder or an engine."""

import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from arbordraft.utils.checks import check_int
from arbordraft.utils.files import new_file

_BYTES = 160  # memory of a token and its place in the index
_END = -1  # ends every text, so that no match runs on into the previous one
_MOST_MATCHES, _MOST_PLACES = 32, 1024  # older places of a frequent n-gram say little


class TextPool:
    """Texts that have ended, prompts and answers; the least useful ones make room for new ones.

    With greedy decoding and shared noise no draft changes a text, so texts of others only make answers faster.
    Samples whose text depends on drafts look up only their own text.

    Any number of threads may read and add.

    Args:
        max_bytes: approximate bound of its memory; at least 64 KiB.
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
        self._used: dict[int, int] = {}  # by text, oldest first: the clock when it was last added or right
        self._known: dict[int, int] = {}  # texts by the hash of their tokens
        self._clock = self._number = 0
        self._clear()

    def __len__(self) -> int:
        """Returns the number of texts."""
        return len(self._used)

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return _BYTES * len(self._tokens)

    def add(self, tokens: Sequence[int]) -> None:
        """Adds a text unless it is known; a text longer than half of the bound is cut to its end."""
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
        """Returns the length of each match with a suffix, its next token and its text; the latest match comes first.

        The search ends after a bounded number of matches of the whole suffix, or of places.
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
        """Records that a draft from a text was right."""
        with self._lock:
            if text in self._used:
                self._clock += 1
                self._used[text] = self._clock

    def texts(self) -> list[list[int]]:
        """Returns the tokens of all texts, those that were useful last at the end."""
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
        """Reads a file of :meth:`save`; if not all texts fit, keeps those that were useful last.

        Raises:
            ValueError: if the file holds no pool.
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
        """Adds several texts."""
        for text in texts:
            self.add(text)

    def _clear(self) -> None:
        self._tokens: list[int] = []
        self._before: list[int] = []  # by place, the previous one at which the same n-gram ends
        self._last: dict[tuple[int, ...], int] = {}
        self._starts: list[int] = []  # of texts, ascending
        self._numbers: list[int] = []  # of texts, in the order of their starts

    def _append(self, tokens: list[int], number: int | None = None) -> None:
        size, start = self.shortest, len(self._tokens)
        if number is None:
            self._number += 1
            self._clock += 1
            number = self._number
            self._used[number] = self._clock
            self._known[hash(tuple(tokens))] = number
        # Readers search without the lock: lists only grow, and a place is found only once all that it leads to exists.
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
        """Keeps the texts that were useful last, up to ``tokens`` tokens."""
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
