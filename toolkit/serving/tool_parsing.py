"""Separates tool calls from text in an answer that is still streaming."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from arbordraft.serving.calls import ToolCallFormat


@dataclass(frozen=True)
class ToolCallDelta:
    """New part of one tool call; ``+`` joins two parts.

    Args:
        index: number of the call in its answer.
        arguments: next characters of the arguments' JSON text.
        name: name of the function, in the call's first delta only.
    """

    index: int
    arguments: str = ""
    name: str | None = None

    def __add__(self, later: "ToolCallDelta") -> "ToolCallDelta":
        return ToolCallDelta(self.index, self.arguments + later.arguments, self.name)


def begun(text: str, mark: str) -> int:
    """Counts the characters at the end of a text that may begin a mark."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


class ToolCallParser:
    """Reads one answer that follows the grammar of a format: text, then tool calls.

    Args:
        format: format of the calls.
        names: names of the functions that may be called.

    Attributes:
        called: whether the answer has calls, all of them complete.
    """

    def __init__(self, format: ToolCallFormat, names: Collection[str]) -> None:
        head = f"(?P<name>{'|'.join(map(re.escape, names))}){format.pattern(format.middle)}"
        self._format = format
        self._first = re.compile(format.pattern(format.opening) + head)
        self._further = re.compile(format.pattern(format.separator) + head) if format.separator is not None else None
        self._held, self._breaks = "", 0  # line breaks before ``_held``: they belong to the call if one follows
        self._calls, self._only_words = 0, False
        self._inside, self._depth, self._quoted, self._escaped = False, 0, False, False  # state within arguments

    @property
    def called(self) -> bool:
        return self._calls > 0 and not self._inside

    def add(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """Adds text; returns the words and the parts of calls that are now certain."""
        self._held += text
        words, deltas = "", list[ToolCallDelta]()
        if not self._calls:
            words, match = self._begun()
            if match:
                deltas.append(self._next(match))
        while self._calls:
            if self._inside and (fragment := self._fragment()):
                deltas.append(ToolCallDelta(self._calls - 1, fragment))
            match = None if self._inside or self._further is None else self._further.match(self._held)
            if not match:
                break
            deltas.append(self._next(match))
        return words, tuple(deltas)

    def end(self) -> str:
        """Returns the remaining words; an incomplete opening is kept as it is."""
        return "" if self._calls else "\n" * self._breaks + self._held

    def _begun(self) -> tuple[str, re.Match[str] | None]:
        """Returns the words before a possible first call, and the match of its opening if that is complete."""
        anywhere = self._format.anywhere
        match = None if self._only_words else (self._first.search if anywhere else self._first.match)(self._held)
        place = len(self._held) if self._only_words else match.start() if match else self._opening_at()
        words, self._held = self._held[:place], self._held[place:]
        if anywhere:
            breaks = len(words) - len(words := words.rstrip("\n"))
            if words:
                words, self._breaks = "\n" * self._breaks + words, 0
            self._breaks += breaks
        self._only_words = self._only_words or (bool(words) and not anywhere)
        return words, match

    def _opening_at(self) -> int:
        """Returns the place of the opening, or of an incomplete opening at the end."""
        opening, held = self._format.opening, self._held
        if not self._format.anywhere:
            return 0 if held.startswith(opening) or opening.startswith(held) else len(held)
        if (place := held.find(opening)) >= 0:
            return place
        return len(held) - begun(held, opening)

    def _next(self, match: re.Match[str]) -> ToolCallDelta:
        self._held, self._inside = match.string[match.end() :], True
        self._calls += 1
        return ToolCallDelta(self._calls - 1, name=match["name"])

    def _fragment(self) -> str:
        """Removes and returns text of the arguments, up to the brace that closes them."""
        end = len(self._held)
        for place, char in enumerate(self._held, 1):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._quoted = True
            else:
                self._depth += (char in "{[") - (char in "}]")
                if char == "}" and not self._depth:
                    self._inside, end = False, place
                    break
        fragment, self._held = self._held[:end], self._held[end:]
        return fragment


__all__ = ["ToolCallDelta", "ToolCallParser", "begun"]
