"""Checks of whole answers, for keywords of their schemas that no grammar holds."""

import asyncio
from dataclasses import replace

from arbordraft.grammars import Grammar
from arbordraft.serving.pieces import Piece


class Checker:
    """Checks the answers to one request when they have ended, unless they call tools.

    Args:
        grammar: knows the schema; ``None`` checks nothing.
    """

    def __init__(self, grammar: Grammar | None) -> None:
        self._grammar = grammar
        self._texts: dict[int, str] = {}

    async def __call__(self, piece: Piece) -> Piece:
        """The next piece of an answer: the last one with the check of all of them."""
        if self._grammar is None:
            return piece
        text = self._texts[piece.index] = self._texts.get(piece.index, "") + piece.text
        if piece.finish_reason in (None, "tool_calls"):
            return piece
        # In a thread: some schemas take long, and no other stream is to wait for them.
        return replace(piece, check=await asyncio.to_thread(self._grammar.check, text))


__all__ = ["Checker"]
