"""Service behind the endpoints: submits requests to an engine and streams its answers as text."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from arbordraft.decoding.detokenizing import TokenDecoder
from arbordraft.decoding.engine import Engine, EngineClosed, QueueFull
from arbordraft.decoding.lengths import LengthCheck, TextTooLong
from arbordraft.decoding.requests import Request
from arbordraft.decoding.settings import own_temperature
from arbordraft.decoding.streams import Stream
from arbordraft.grammars import GrammarError
from arbordraft.serving.api_request import ApiRequest
from arbordraft.serving.calls import ToolCallFormat, call_format
from arbordraft.serving.completions import CompletionRequest
from arbordraft.serving.deltas import AnswerDelta, AnswerDetokenizer
from arbordraft.serving.echoes import Echo, EchoDetokenizer
from arbordraft.serving.errors import ApiError, closing, failed, refused, wrong
from arbordraft.serving.metrics import Metrics, Watch
from arbordraft.serving.reasoning import ReasoningFormat, reasoning_format_of
from arbordraft.serving.validity import Checker
from arbordraft.utils.checks import check_instance, check_int

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Detokenizer = AnswerDetokenizer | EchoDetokenizer

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
        self.token_decoder = TokenDecoder(tokenizer)
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
        self._executor, self._long_executor = (
            ThreadPoolExecutor(1, f"arbordraft-{name}") for name in ("requests", "long-requests")
        )

    @property
    def problem(self) -> str | None:
        """Reason why the service cannot answer; ``None`` if it can."""
        if self.closing:
            return "shutting down"
        return None if self.engine.healthy else "one step after the other fails"

    async def close(self, seconds: float = 0.0, stop_waiting: Callable[[], bool] = lambda: False) -> None:
        """Refuses new requests, lets running answers end for a while, and then fails the rest.

        Args:
            seconds: time for running answers.
            stop_waiting: returns whether to fail the running answers at once.
        """
        self.closing = True
        end = time.monotonic() + seconds
        while (self.engine.waiting or self.engine.running) and time.monotonic() < end and not stop_waiting():
            await asyncio.sleep(_POLL)
        await asyncio.to_thread(self.engine.close)
        self._executor.shutdown(wait=False)
        self._long_executor.shutdown(wait=False)

    async def take(self, body: ApiRequest) -> "Call":
        """Submits a request to the engine.

        Raises:
            ApiError: if the request is refused.
        """
        watch = Watch(self.metrics)
        try:
            stream, detokenizer = await self._submitted(body)
        except BaseException:
            watch.ended("refused")
            raise
        watch.taken(sum(len(request.prompt) for request in stream.requests))
        return Call(stream, detokenizer, watch, Checker(body.checks))

    def check_model(self, name: str) -> None:
        """Raises ApiError unless the name is the model's."""
        if name != self.name:
            raise ApiError(404, f"there is no model {name}, only {self.name}", param="model", code="model_not_found")

    async def _submitted(self, body: ApiRequest) -> tuple[Stream, Detokenizer]:
        if self.closing:
            raise closing()
        if body.model is not None:
            self.check_model(body.model)
        executor = self._long_executor if _longer(body, _LONG) else self._executor
        return await asyncio.get_running_loop().run_in_executor(executor, self._submit, body)

    def _submit(self, body: ApiRequest) -> tuple[Stream, Detokenizer]:
        calls = self._calls if body.needs_call_format else None
        check = partial(self._check_length, most=self.engine.room(0))
        try:
            prompts = body.encode(self.tokenizer, calls, check)
            prediction = body.encode_prediction(self.tokenizer, check)
            reasoning = self._reasoning_format and body.reasoning_format(
                self._reasoning_format, prompts[0], self.token_decoder
            )
            requests = [self._request(body, prompt, calls, reasoning, prediction) for prompt in prompts]
            detokenizer = self._detokenizer(body, requests, calls, reasoning)
            return self.engine.submit(*requests), detokenizer
        except TextTooLong as error:
            raise ApiError(400, str(error), code="context_length_exceeded") from error
        except GrammarError as error:
            param = "tools" if body.functions else "response_format"
            raise wrong(param, f"{error}: simplify the schema", "grammar_failed") from error
        except (TypeError, ValueError, QueueFull, EngineClosed) as error:
            raise refused(error, type(body).model_fields) from error

    def _request(
        self,
        body: ApiRequest,
        prompt: list[int],
        calls: ToolCallFormat | None,
        reasoning: ReasoningFormat | None,
        prediction: Sequence[int],
    ) -> Request:
        room = self.engine.room(len(prompt))
        max_new_tokens = body.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = max(1, min(self.default_tokens, room))
        if max_new_tokens > room:
            raise ApiError(
                400,
                f"a prompt of {len(prompt)} tokens and {max_new_tokens} new ones are too long, at most "
                f"{len(prompt) + room} together fit: shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
            )
        return body.request(prompt, max_new_tokens, calls, reasoning, self.temperature, prediction)

    def _detokenizer(
        self,
        body: ApiRequest,
        requests: Sequence[Request],
        calls: ToolCallFormat | None,
        reasoning: ReasoningFormat | None,
    ) -> Detokenizer:
        stop, steps = tuple(requests[0].stop or ()), body.arbordraft.steps
        detokenizer = AnswerDetokenizer(self.token_decoder, stop, body.count, steps, calls, body.functions, reasoning)
        if not isinstance(body, CompletionRequest) or not body.echo:
            return detokenizer
        with_logprobs, begin = body.num_logprobs is not None, self.tokenizer.bos_token_id
        echoes = [
            Echo(self.token_decoder, request.prompt, given if isinstance(given, str) else None, with_logprobs, begin)
            for request, given in zip(requests, body.prompt, strict=True)
            for _ in range(request.n)
        ]
        return EchoDetokenizer(detokenizer, echoes)

    @cached_property
    def _calls(self) -> ToolCallFormat:
        """Format in which the model writes tool calls."""
        try:
            return call_format(self.tokenizer, self._ends)
        except ValueError as error:
            raise wrong("tools", str(error), "unsupported") from error

    @cached_property
    def _reasoning_format(self) -> ReasoningFormat | None:
        """Marks of the model's thoughts; ``None`` if it has none, or if thoughts stay in the text."""
        return reasoning_format_of(self.tokenizer, self._ends) if self.reasoning else None

    @property
    def _ends(self) -> list[int]:
        """Token ids that end an answer."""
        ends = [*self.engine.ends, self.tokenizer.eos_token_id]
        return [end for end in ends if end is not None]


class Call:
    """Request that the engine accepted.

    Args:
        stream: events of the engine.
        detokenizer: turns events into text.
        watch: counts events.
        checker: checks finished answers.
    """

    def __init__(self, stream: Stream, detokenizer: Detokenizer, watch: Watch, checker: Checker) -> None:
        self.stream, self.detokenizer, self.watch, self._checker = stream, detokenizer, watch, checker

    async def deltas(self, http: HttpRequest) -> AsyncGenerator[AnswerDelta, None]:
        """Yields the answers as they grow; cancels the request if the client disconnects or reading stops.

        Raises:
            HTTPException: if the answer fails.
        """
        watcher = asyncio.create_task(_cancel_when_gone(http, self.stream))
        outcome = "cancelled"
        try:
            async for event in self.stream:
                self.watch.observe(event)
                if (delta := self.detokenizer(event)) and not self.stream.cancelled:
                    yield await self._checker(delta)
            if self.stream.cancelled:
                raise ApiError(499, "the client has left", code="cancelled")
            outcome = "finished"
        except Exception as error:
            if not self.stream.cancelled:
                outcome = "failed"
            raise failed(error) from error
        finally:
            watcher.cancel()
            if not self.stream.done:
                self.stream.cancel()
            self.watch.ended(outcome)


async def _cancel_when_gone(http: HttpRequest, stream: Stream) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
    stream.cancel()


def _longer(body: BaseModel, most: int) -> bool:
    """Returns whether a request has more than ``most`` characters and token ids; stops counting there."""
    parts: list[Any] = [body]
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
