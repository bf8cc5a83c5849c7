"""Answers as they come.

Shapes: none; tokens are lists.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from arbordraft.decoding.requests import Request
from arbordraft.decoding.state import Emission, TokenLogprobs
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict


@dataclass
class Answer:
    """One answer, as far as it has come.

    Args:
        tokens: its token ids, the one that ended it included.
        finish_reason: ``stop`` if a token or a text ended it, ``length`` if there was no more budget, ``cancelled``;
            ``None`` as long as it goes on.
        forwards: target forwards that it took part in.
        drafted: tokens that were drafted for it.
        accepted: how many of them were accepted.
        logprobs: one per token, if they were wanted.
        prompt_logprobs: one per token of the prompt behind the first, if they were wanted.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Event(NamedTuple):
    """What is new of one answer.

    Args:
        answer: its number, from 0.
        tokens: those that were committed; none in an event of the prompt, and in the one that says how it ended.
        logprobs: one per token, if they are wanted.
        prompt_logprobs: of the next tokens of the prompt, if they are wanted; the first one has none.
        tree: what was drafted in that step.
        verdict: what became of it.
        finish_reason: see :class:`Answer`.
    """

    answer: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    tree: SampleTree | None = None
    verdict: SampleVerdict | None = None
    finish_reason: str | None = None


class Stream:
    """The answers to some requests while they come; to be iterated over, with ``for`` or ``async for``, by one reader.

    An error that ended an answer is raised where its next event is asked for.

    Args:
        requests: at least one.
        drive: takes a step of the engine if nobody else does; returns whether somebody else does.

    Attributes:
        request: the first of them.
        answers: one per answer wanted, request by request.
    """

    def __init__(self, requests: Sequence[Request], drive: Callable[[], bool]) -> None:
        self.requests, self.request = tuple(requests), requests[0]
        self.answers = [Answer() for request in requests for _ in range(request.n)]
        self._drive = drive
        self._events: deque[Event | Exception] = deque()
        self._news = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._open: set[int | None] = set(range(len(self.answers)))  # those that have not ended
        self._cancelled = False
        self._failed = False

    @property
    def done(self) -> bool:
        """Whether all answers have ended, or one of them failed."""
        return self._failed or not self._open

    @property
    def unwanted(self) -> bool:
        """Whether what still runs of it is of no use: it was cancelled, or one of its answers failed."""
        return self._cancelled or self._failed

    @property
    def cancelled(self) -> bool:
        """Whether somebody has asked for the end."""
        return self._cancelled

    def cancel(self) -> None:
        """Ends all answers before the next step; what has come stays."""
        self._cancelled = True

    def result(self) -> list[Answer]:
        """Waits for the end; raises what ended it early."""
        for _ in self:
            pass
        return self.answers

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._news:
                if self._events:
                    event = self._events.popleft()
                elif self.done:
                    return
                else:
                    event = None
            if event is None:
                if self._drive():
                    with self._news:
                        self._news.wait_for(lambda: self._events or self.done, timeout=1.0)
                continue
            if isinstance(event, Exception):
                raise event
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        arrived, driven = asyncio.Event(), False
        with self._news:
            self._waiting.append((asyncio.get_running_loop(), arrived))
        try:
            while True:
                arrived.clear()
                done = self.done  # before the events are read: what ends later is read in the next round
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, Exception):
                        raise event
                    yield event
                if done:
                    return
                if driven or (driven := await asyncio.to_thread(self._drive)):
                    await arrived.wait()
        finally:
            with self._news:
                self._waiting.clear()

    def told(self, index: int) -> Callable[[Emission], None]:
        """What takes what one of the answers gains."""

        def take(gain: Emission) -> None:
            answer = self.answers[index]
            answer.tokens += gain.tokens
            answer.logprobs += gain.logprobs or ()
            answer.forwards += 1
            answer.drafted += len(gain.tree.rows) - 1
            answer.accepted += min(len(gain.verdict.path) - 1, len(gain.tokens))
            self._put(Event(index, gain.tokens, gain.logprobs or (), tree=gain.tree, verdict=gain.verdict))

        return take

    def scored(self, index: int) -> Callable[[Sequence[TokenLogprobs]], None]:
        """What takes the log-probabilities of the prompt of one of the answers."""

        def take(found: Sequence[TokenLogprobs]) -> None:
            self.answers[index].prompt_logprobs += found
            self._put(Event(index, prompt_logprobs=found))

        return take

    def end(self, index: int, reason: str) -> None:
        """Says how one of the answers has ended."""
        self.answers[index].finish_reason = reason
        self._put(Event(index, finish_reason=reason), ended=index)

    def fail(self, error: Exception) -> None:
        """Says that the request cannot be answered to its end."""
        if not self._failed:
            self._put(error)

    def _put(self, event: Event | Exception, ended: int | None = None) -> None:
        with self._news:  # the last event is there when the stream is done
            self._events.append(event)
            self._open.discard(ended)
            self._failed = self._failed or isinstance(event, Exception)
            self._news.notify_all()
            waiting = list(self._waiting)
        for loop, arrived in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.set)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.done:
            self.cancel()


__all__ = ["Answer", "Event", "Stream"]
