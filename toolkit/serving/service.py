"""Service behind the endpoints: submits requests to an engine and streams its answers as text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from arbordraft.decoding.engine import Engine, EngineClosed, QueueFull
from arbordraft.decoding.lengths import LengthCheck, TextTooLong
from arbordraft.decoding.requests import Request
from arbordraft.decoding.settings import own_temperature
from arbordraft.decoding.spelling import Spelling
from arbordraft.decoding.streams import Stream
from arbordraft.grammars import GrammarError
from arbordraft.serving.calls import CallFormat, call_format
from arbordraft.serving.completions import CompletionQuestion
from arbordraft.serving.echoes import Echo, Echoing
from arbordraft.serving.errors import ApiError, closing, failed, refused, wrong
from arbordraft.serving.metrics import Metrics, Watch
from arbordraft.serving.pieces import Piece, Speller
from arbordraft.serving.question import Question
from arbordraft.serving.thinking import Thinking, thinking_of
from arbordraft.serving.validity import Checker
from arbordraft.utils.checks import check_instance, check_int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Spells = Speller | Echoing

_POLL = 0.05  # seconds between two checks for running answers
_LONG = 2**14  # characters and token ids above which a request counts as long


class Service:
    """Answers requests with an engine.

    Args:
        engine: engine that decodes, in its own thread.
        name: model name for clients.
        default_tokens: longest answer to a request without a limit, or as many tokens as fit.
        reasoning: whether to separate thoughts from answers; grammars then begin after the thoughts.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the target has no tokenizer, or a value is out of range.
    """

    def __init__(self, engine: Engine, name: str, default_tokens: int = 1024, *, reasoning: bool = True) -> None:
        self.engine = check_instance("engine", engine, Engine)
        self.name = check_instance("name", name, str)
        self.default_tokens = check_int("default_tokens", default_tokens, 1)
        tokenizer = engine.decoder.target.tokenizer
        if tokenizer is None:
            raise ValueError("a server needs a tokenizer: build the target as RaggedModel(model, tokenizer)")
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.spelling = Spelling(tokenizer)
        own = engine.own_settings  # defaults of requests; OpenAI's own are 1
        recommended = own_temperature(own)
        self.temperature = 1.0 if recommended is None else recommended
        self.top_p = 1.0 if own.top_p is None else own.top_p
        self.reasoning = check_instance("reasoning", reasoning, bool)
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self.exactness = engine.decoder.coupling.exactness.value
        self.closing = False
        tokenizer("a")  # applies its default settings: no later call changes them, so threads may share it
        self._check_length = LengthCheck(tokenizer)
        # Requests are prepared in order, off the event loop; short ones do not wait for long ones.
        self._desk, self._long_desk = (ThreadPoolExecutor(1, f"arbordraft-{name}") for name in ("desk", "long-desk"))

    @property
    def problem(self) -> str | None:
        """Reason why the service cannot answer; ``None`` if it can."""
        if self.closing:
            return "shutting down"
        return None if self.engine.healthy else "one step after the other fails"

    async def close(self, seconds: float = 0.0, hurry: Callable[[], bool] = lambda: False) -> None:
        """Refuses new requests, lets running answers end for a while, and then fails the rest.

        Args:
            seconds: time for running answers.
            hurry: returns whether to stop waiting.
        """
        self.closing = True
        end = time.monotonic() + seconds
        while (self.engine.waiting or self.engine.living) and time.monotonic() < end and not hurry():
            await asyncio.sleep(_POLL)
        await asyncio.to_thread(self.engine.close)
        self._desk.shutdown(wait=False)
        self._long_desk.shutdown(wait=False)

    async def take(self, question: Question) -> "Call":
        """Submits a request to the engine.

        Raises:
            ApiError: if the request is refused.
        """
        watch = Watch(self.metrics)
        try:
            stream, speller = await self._submitted(question)
        except BaseException:
            watch.ended("refused")
            raise
        watch.taken(sum(len(request.prompt) for request in stream.requests))
        return Call(stream, speller, watch, Checker(question.checks))

    def check_model(self, name: str) -> None:
        """Raises ApiError unless the name is the model's."""
        if name != self.name:
            raise ApiError(404, f"there is no model {name}, only {self.name}", param="model", code="model_not_found")

    async def _submitted(self, question: Question) -> tuple[Stream, Spells]:
        if self.closing:
            raise closing()
        if question.model is not None:
            self.check_model(question.model)
        desk = self._long_desk if _longer(question, _LONG) else self._desk
        return await asyncio.get_running_loop().run_in_executor(desk, self._submit, question)

    def _submit(self, question: Question) -> tuple[Stream, Spells]:
        calls = self._calls if question.calling else None
        try:
            prompts = question.encode(self.tokenizer, calls, partial(self._check_length, most=self.engine.room(0)))
            thinking = self._thinking and question.thoughts(self._thinking, prompts[0], self.spelling)
            requests = [self._request(question, prompt, calls, thinking) for prompt in prompts]
            speller = self._speller(question, requests, calls, thinking)
            return self.engine.submit(*requests), speller
        except TextTooLong as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except GrammarError as error:
            param = "tools" if question.functions else "response_format"
            raise wrong(param, f"{error}: simplify the schema", "grammar_failed") from error
        except (TypeError, ValueError, QueueFull, EngineClosed) as error:
            raise refused(error, type(question).model_fields) from error

    def _request(
        self, question: Question, prompt: list[int], calls: CallFormat | None, thinking: Thinking | None
    ) -> Request:
        room = self.engine.room(len(prompt))
        most = max(1, min(self.default_tokens, room)) if question.most is None else question.most
        if most > room:
            raise ApiError(
                400,
                f"a prompt of {len(prompt)} tokens and {most} new ones are too long, at most {len(prompt) + room} "
                "together fit: shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
            )
        return question.request(prompt, most, calls, thinking, self.temperature)

    def _speller(
        self, question: Question, requests: Sequence[Request], calls: CallFormat | None, thinking: Thinking | None
    ) -> Spells:
        stop, steps = tuple(requests[0].stop or ()), question.arbordraft.steps
        speller = Speller(self.spelling, stop, question.count, steps, calls, question.functions, thinking)
        if not isinstance(question, CompletionQuestion) or not question.echo:
            return speller
        scored, begin = question.others is not None, self.tokenizer.bos_token_id
        echoes = [
            Echo(self.spelling, request.prompt, given if isinstance(given, str) else None, scored, begin)
            for request, given in zip(requests, question.prompt, strict=True)
            for _ in range(request.n)
        ]
        return Echoing(speller, echoes)

    @cached_property
    def _calls(self) -> CallFormat:
        """Format in which the model writes tool calls."""
        try:
            return call_format(self.tokenizer, self._ends)
        except ValueError as error:
            raise wrong("tools", str(error), "unsupported") from error

    @cached_property
    def _thinking(self) -> Thinking | None:
        """Marks of the model's thoughts; ``None`` if it has none, or if thoughts stay in the text."""
        return thinking_of(self.tokenizer, self._ends) if self.reasoning else None

    @property
    def _ends(self) -> list[int]:
        """Token ids that end an answer."""
        ends = [*self.engine.ends, self.tokenizer.eos_token_id]
        return [end for end in ends if end is not None]


class Call:
    """Request that the engine accepted.

    Args:
        stream: events of the engine.
        speller: turns events into text.
        watch: counts events.
        checker: checks finished answers.
    """

    def __init__(self, stream: Stream, speller: Spells, watch: Watch, checker: Checker) -> None:
        self.stream, self.speller, self.watch, self._checker = stream, speller, watch, checker

    async def pieces(self, http: HttpRequest) -> AsyncGenerator[Piece, None]:
        """Yields the pieces of the answers; cancels the request if the client disconnects or reading stops.

        Raises:
            HTTPException: if the answer fails.
        """
        follower = asyncio.create_task(_cancel_when_gone(http, self.stream))
        outcome = "cancelled"
        try:
            async for event in self.stream:
                self.watch.saw(event)
                if (piece := self.speller(event)) and not self.stream.cancelled:
                    yield await self._checker(piece)
            if self.stream.cancelled:
                raise ApiError(499, "the client has left", code="cancelled")
            outcome = "finished"
        except Exception as error:
            if not self.stream.cancelled:
                outcome = "failed"
            raise failed(error) from error
        finally:
            follower.cancel()
            if not self.stream.done:
                self.stream.cancel()
            self.watch.ended(outcome)


async def _cancel_when_gone(http: HttpRequest, stream: Stream) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


def _longer(question: BaseModel, most: int) -> bool:
    """Returns whether a request has more than ``most`` characters and token ids; stops counting there."""
    parts: list[Any] = [question]
    while parts and most >= 0:
        part = parts.pop()
        if isinstance(part, str):
            most -= len(part)
        elif isinstance(part, BaseModel):
            parts += vars(part).values()
        elif isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple):
            most -= len(part)
            parts += part
    return most < 0
