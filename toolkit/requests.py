"""What a user asks of an engine, and the answers as they come.

Shapes: V vocabulary.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from arbordraft.checks import each, positive, real, whole
from arbordraft.processors import Warp
from arbordraft.state import Emission, TokenLogprobs
from arbordraft.texts import Pieces, stops
from arbordraft.types import SampleTree, SampleVerdict

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how it is to be answered.

    Args:
        prompt: token ids, at least one.
        max_new_tokens: longest answer, in tokens.
        temperature: 0 decodes greedily, more samples.
        top_k: sample from this many most probable tokens; 0 for all.
        top_p: sample from the fewest tokens whose probabilities reach this sum, 0 to 1.
        min_p: sample from tokens whose probability is at least this share of the highest, 0 to 1.
        repetition_penalty: above 0; divides positive scores of tokens that occurred, multiplies negative ones.
        presence_penalty: taken off the score of every token that the answer has already.
        frequency_penalty: the same for every time that it has it.
        logit_bias: added to the scores of some tokens.
        processors: further logits processors of transformers, which see this sample's own tokens.
        stop: the answer ends with the first of these texts; they need the target's tokenizer.
        ends: token ids that end an answer; by default those of the model's ``generation_config``.
        seed: 0 to 2**64 - 1; answer i gets ``seed + i``. By default torch's generator gives some.
        n: number of answers.
        logprobs: log-probabilities of the answer's tokens by the model itself, and of as many of the most probable
            ones, 0 or more; ``None`` for none.
        priority: requests with a higher one are admitted first.

    Raises:
        TypeError: for values of another kind.
        ValueError: for values out of range.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    processors: "Sequence[LogitsProcessor]" = ()
    stop: str | Sequence[str] = ()
    ends: Sequence[int] | None = None
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "prompt": each("prompt", self.prompt, lambda name, token: whole(name, token, 0)),
            "max_new_tokens": whole("max_new_tokens", self.max_new_tokens, 1),
            "temperature": real("temperature", self.temperature, 0),
            "top_k": whole("top_k", self.top_k, 0),
            "top_p": real("top_p", self.top_p, 0, 1),
            "min_p": real("min_p", self.min_p, 0, 1),
            "repetition_penalty": positive("repetition_penalty", self.repetition_penalty),
            "presence_penalty": real("presence_penalty", self.presence_penalty),
            "frequency_penalty": real("frequency_penalty", self.frequency_penalty),
            "logit_bias": {whole("logit_bias", t, 0): real(f"logit_bias[{t}]", b) for t, b in self.logit_bias.items()},
            "stop": stops(self.stop),
            "n": whole("n", self.n, 1),
            "priority": whole("priority", self.priority),
        }
        if self.ends is not None:
            checked["ends"] = each("ends", self.ends, lambda name, token: whole(name, token, 0))
        if self.seed is not None:
            checked["seed"] = whole("seed", self.seed, 0, 2**64 - checked["n"])
        if self.logprobs is not None:
            checked["logprobs"] = whole("logprobs", self.logprobs, 0)
        if not checked["prompt"]:
            raise ValueError("the prompt is empty: there is nothing to go on from")
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the most probable tokens are wanted."""
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether all that happens to scores is what temperature, top-k, top-p and min-p do."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return not (penalties or self.logit_bias or self.processors)

    def warp(self) -> Warp:
        """Its processors, in the order in which transformers applies them.

        Raises:
            TypeError: if one of the user's is none.
            ValueError: if it cannot judge the nodes of a tree.
        """
        from transformers import (
            MinPLogitsWarper,
            RepetitionPenaltyLogitsProcessor,
            SequenceBiasLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        chain: list[Any] = []
        if self.logit_bias:
            chain.append(SequenceBiasLogitsProcessor({(token,): bias for token, bias in self.logit_bias.items()}))
        if self.repetition_penalty != 1:
            chain.append(RepetitionPenaltyLogitsProcessor(self.repetition_penalty))
        if self.presence_penalty or self.frequency_penalty:
            chain.append(CountPenalty(len(self.prompt), self.presence_penalty, self.frequency_penalty))
        chain += self.processors
        if not self.greedy:
            if self.temperature != 1:
                chain.append(TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                chain.append(TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                chain.append(TopPLogitsWarper(self.top_p))
            if self.min_p:
                chain.append(MinPLogitsWarper(self.min_p))
        return Warp(chain)


class CountPenalty:
    """Presence and frequency penalties as OpenAI defines them: of the answer's own tokens, by how often they occurred.

    Args:
        prompt: length of the prompt, which does not count.
        presence: taken off once.
        frequency: taken off for every time.
    """

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt :]
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Ends:
    """Ends an answer with certain tokens, or with a text.

    Args:
        tokens: each of them ends it.
        tokenizer: spells the answer.
        texts: so does each of these.
    """

    def __init__(
        self, tokens: Sequence[int], tokenizer: "PreTrainedTokenizerBase | None", texts: Sequence[str]
    ) -> None:
        self._tokens = frozenset(tokens)
        self._pieces = Pieces(tokenizer, texts) if texts and tokenizer is not None else None

    def __call__(self, token: int, path: Callable[[], Sequence[int]]) -> bool:
        if token in self._tokens:
            return True
        if self._pieces is None:
            return False
        self._pieces.add([token])
        return self._pieces.ended


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
    """

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Event(NamedTuple):
    """What is new of one answer.

    Args:
        index: of the answer.
        tokens: those that were committed; none in the event that says how it ended.
        logprobs: one per token, if they are wanted.
        tree: what was drafted in that step.
        verdict: what became of it.
        finish_reason: see :class:`Answer`.
    """

    index: int
    tokens: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    tree: SampleTree | None = None
    verdict: SampleVerdict | None = None
    finish_reason: str | None = None


class Stream:
    """The answers to a request while they come; to be iterated over, with ``for`` or ``async for``, by one reader.

    An error that ended an answer is raised where its next event is asked for.

    Args:
        request: what was asked.
        drive: takes a step of the engine if nobody else does; returns whether somebody else does.

    Attributes:
        answers: one per answer wanted.
    """

    def __init__(self, request: Request, drive: Callable[[], bool]) -> None:
        self.request = request
        self.answers = [Answer() for _ in range(request.n)]
        self._drive = drive
        self._events: deque[Event | Exception] = deque()
        self._news = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._cancelled = False
        self._failed = False

    @property
    def done(self) -> bool:
        """Whether all answers have ended, or one of them failed."""
        return self._failed or all(answer.finish_reason is not None for answer in self.answers)

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
                while self._events:
                    event = self._events.popleft()
                    if isinstance(event, Exception):
                        raise event
                    yield event
                if self.done:
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
            answer.drafted += len(gain.tree.tokens) - 1
            answer.accepted += min(len(gain.verdict.path), len(gain.tokens))
            self._put(Event(index, gain.tokens, gain.logprobs or (), gain.tree, gain.verdict))

        return take

    def end(self, index: int, reason: str) -> None:
        """Says how one of the answers has ended."""
        self.answers[index].finish_reason = reason
        self._put(Event(index, finish_reason=reason))

    def fail(self, error: Exception) -> None:
        """Says that the request cannot be answered to its end."""
        if not self._failed:
            self._failed = True
            self._put(error)

    def _put(self, event: Event | Exception) -> None:
        with self._news:
            self._events.append(event)
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


__all__ = ["Answer", "CountPenalty", "Ends", "Event", "Request", "Stream"]
