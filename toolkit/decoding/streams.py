"""Streams of answers.

Shapes: none; tokens are lists.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from arbordraft.decoding.metrics import AnswerStats
from arbordraft.decoding.requests import Request
from arbordraft.decoding.state import Emission, TokenLogprobs
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict


@dataclass
class Answer:
    """One answer, as far as it is decoded.

    Args:
        tokens: token ids, including the one that ended the answer.
        finish_reason: ``stop`` if a token or a text ended it, ``length`` if its budget was used up, or ``cancelled``;
            ``None`` while it is being decoded.
        stats: its counts and times.
        logprobs: one per token, if requested.
        prompt_logprobs: one per prompt token after the first, if requested.
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stats: AnswerStats = field(default_factory=AnswerStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class Event(NamedTuple):
    """News of one answer: tokens of a step, log-probabilities of prompt tokens, or the end.

    Args:
        answer: number of the answer, from 0.
        tokens: newly committed tokens; empty in events with prompt log-probabilities and in the last event.
        logprobs: one per token, if requested.
        prompt_logprobs: one per prompt token that was read, if requested; the first prompt token has none.
        tree: draft tree of the step.
        verdict: verdict about the tree.
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
    """Events of the answers to some requests, for one reader, who iterates with ``for`` or ``async for``.

    If an answer fails, iteration raises its error in place of the next event.

    Args:
        requests: at least one request.
        advance: takes a step of the engine if no thread does so; returns whether a thread does.

    Attributes:
        request: the first request.
        answers: the answers, request by request.
    """

    def __init__(self, requests: Sequence[Request], advance: Callable[[], bool]) -> None:
        self.requests, self.request = tuple(requests), requests[0]
        self.answers = [Answer() for request in requests for _ in range(request.n)]
        self._advance = advance
        self._events: deque[Event | Exception] = deque()
        self._changed = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._open: set[int | None] = set(range(len(self.answers)))  # answers that have not ended
        self._cancelled = False
        self._failed = False

    @property
    def done(self) -> bool:
        """Whether all answers have ended, or one of them failed."""
        return self._failed or not self._open

    @property
    def aborted(self) -> bool:
        """Whether its running answers are no longer needed: it was cancelled, or an answer failed."""
        return self._cancelled or self._failed

    @property
    def cancelled(self) -> bool:
        """Whether :meth:`cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Ends all answers before the next step; their tokens so far are kept."""
        self._cancelled = True

    def result(self) -> list[Answer]:
        """Waits until all answers have ended and returns them; raises the error if one failed."""
        for _ in self:
            pass
        return self.answers

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._changed:
                if self._events:
                    event = self._events.popleft()
                elif self.done:
                    return
                else:
                    event = None
            if event is None:
                if self._advance():
                    with self._changed:
                        self._changed.wait_for(lambda: self._events or self.done, timeout=1.0)
                continue
            if isinstance(event, Exception):
                raise event
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        arrived, has_thread = asyncio.Event(), False
        with self._changed:
            self._waiting.append((asyncio.get_running_loop(), arrived))
        try:
            while True:
                arrived.clear()
                done = self.done  # read before the events: an answer that ends later is read in the next round
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, Exception):
                        raise event
                    yield event
                if done:
                    return
                if has_thread or (has_thread := await asyncio.to_thread(self._advance)):
                    await arrived.wait()
        finally:
            with self._changed:
                self._waiting.clear()

    def on_tokens(self, index: int) -> Callable[[Emission], None]:
        """Creates the callback that receives the tokens of one answer."""

        def take(emission: Emission) -> None:
            answer = self.answers[index]
            answer.tokens += emission.tokens
            answer.logprobs += emission.logprobs or ()
            self._put(
                Event(index, emission.tokens, emission.logprobs or (), tree=emission.tree, verdict=emission.verdict)
            )

        return take

    def on_prompt_logprobs(self, index: int) -> Callable[[Sequence[TokenLogprobs]], None]:
        """Creates the callback that receives the prompt log-probabilities of one answer."""

        def take(found: Sequence[TokenLogprobs]) -> None:
            self.answers[index].prompt_logprobs += found
            self._put(Event(index, prompt_logprobs=found))

        return take

    def end(self, index: int, reason: str) -> None:
        """Ends one answer with a finish reason."""
        self.answers[index].finish_reason = reason
        self._put(Event(index, finish_reason=reason), ended=index)

    def fail(self, error: Exception) -> None:
        """Ends the stream with an error."""
        if not self._failed:
            self._put(error)

    def _put(self, event: Event | Exception, ended: int | None = None) -> None:
        with self._changed:  # one lock, so that a stream that is done has its last event
            self._events.append(event)
            self._open.discard(ended)
            self._failed = self._failed or isinstance(event, Exception)
            self._changed.notify_all()
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
