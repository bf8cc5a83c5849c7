"""Checks whole answers against schema keywords that no grammar enforces."""

import asyncio
from dataclasses import replace

from arbordraft.grammars import Grammar
from arbordraft.serving.deltas import AnswerDelta


class Checker:
    """Checks the answers to one request when they have ended, unless they call tools.

    Args:
        grammar: grammar with the schema; ``None`` checks nothing.
    """

    def __init__(self, grammar: Grammar | None) -> None:
        self._grammar = grammar
        self._texts: dict[int, str] = {}

    async def __call__(self, delta: AnswerDelta) -> AnswerDelta:
        """Returns the delta; adds the check of the whole answer to the last one."""
        if self._grammar is None:
            return delta
        text = self._texts[delta.index] = self._texts.get(delta.index, "") + delta.text
        if delta.finish_reason in (None, "tool_calls"):
            return delta
        # In a thread: some schemas take long, and other streams must not wait.
        return replace(delta, check=await asyncio.to_thread(self._grammar.check, text))


__all__ = ["Checker"]
