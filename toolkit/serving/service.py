"""The service behind the endpoints: an engine that is asked for text."""

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

_POLL = 0.05  # seconds between two looks at what still runs
_LONG = 2**14  # characters and token ids of a question that is a long one


class Service:
    """Answers questions by an engine.

    Args:
        engine: does the work, in a thread of its own.
        name: of the model, for clients.
        default_tokens: longest answer to a question that does not say, less where there is no room for it.
        reasoning: tell the thoughts of answers from the rest, and let grammars begin behind them.

    Raises:
        TypeError: for arguments of another kind.
        ValueError: without a tokenizer, or for values out of range.
    """

    def __init__(self, engine: Engine, name: str, default_tokens: int = 1024, *, reasoning: bool = True) -> None:
        self.engine = check_instance("engine", engine, Engine)
        self.name = check_instance("name", name, str)
        self.default_tokens = check_int("default_tokens", default_tokens, 1)
        tokenizer = engine.decoder.target.tokenizer
        if tokenizer is None:
            raise ValueError("a server speaks text: build the target as RaggedModel(model, tokenizer)")
        self.tokenizer: PreTrainedTokenizerBase = tokenizer
        self.spelling = Spelling(tokenizer)
        own = engine.own_settings  # for clients who say nothing; OpenAI's defaults are 1
        recommended = own_temperature(own)
        self.temperature = 1.0 if recommended is None else recommended
        self.top_p = 1.0 if own.top_p is None else own.top_p
        self.reasoning = check_instance("reasoning", reasoning, bool)
        self.metrics = Metrics(engine)
        self.created = int(time.time())
        self.exactness = engine.decoder.coupling.exactness.value
        self.closing = False
        tokenizer("a")  # sets it to its defaults: later nothing changes it, and several threads may use it
        self._check_length = LengthCheck(tokenizer)
        # Questions are taken in their order beside the event loop; short ones do not wait for long ones.
        self._desk, self._long_desk = (ThreadPoolExecutor(1, f"arbordraft-{name}") for name in ("desk", "long-desk"))

    @property
    def problem(self) -> str | None:
        """The reason for which it cannot answer, if there is one."""
        if self.closing:
            return "shutting down"
        return None if self.engine.healthy else "one step after the other fails"

    async def close(self, seconds: float = 0.0, hurry: Callable[[], bool] = lambda: False) -> None:
        """Takes no more requests, lets running answers end for some time, and then ends them with an error.

        Args:
            seconds: how long.
            hurry: whether not to wait any longer.
        """
        self.closing = True
        end = time.monotonic() + seconds
        while (self.engine.waiting or self.engine.living) and time.monotonic() < end and not hurry():
            await asyncio.sleep(_POLL)
        await asyncio.to_thread(self.engine.close)
        self._desk.shutdown(wait=False)
        self._long_desk.shutdown(wait=False)

    async def take(self, question: Question) -> "Call":
        """Asks the engine.

        Raises:
            ApiError: if the question is not taken.
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
        """Raises ApiError for a name that is not the model's."""
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
        """The format in which the model writes calls."""
        try:
            return call_format(self.tokenizer, self._ends)
        except ValueError as error:
            raise wrong("tools", str(error), "unsupported") from error

    @cached_property
    def _thinking(self) -> Thinking | None:
        """The marks of the model's thoughts, if thoughts are told from the rest."""
        return thinking_of(self.tokenizer, self._ends) if self.reasoning else None

    @property
    def _ends(self) -> list[int]:
        """Token ids that end an answer."""
        ends = [*self.engine.ends, self.tokenizer.eos_token_id]
        return [end for end in ends if end is not None]


class Call:
    """A question that was taken.

    Args:
        stream: the engine's events.
        speller: spells them.
        watch: counts them.
        checker: checks finished answers.
    """

    def __init__(self, stream: Stream, speller: Spells, watch: Watch, checker: Checker) -> None:
        self.stream, self.speller, self.watch, self._checker = stream, speller, watch, checker

    async def pieces(self, http: HttpRequest) -> AsyncGenerator[Piece, None]:
        """Streams the pieces of the answers. If the client leaves, or reading stops, the engine stops at once.

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
    """Whether a question has more characters and token ids; looks no further than that."""
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
