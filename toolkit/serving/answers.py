"""Answers in OpenAI's formats: complete, or as chunks of a stream."""

import json
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from string import ascii_letters, digits
from typing import Any, Literal, NamedTuple

from openai import BaseModel
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage, chat_completion
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall
from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCallFunction as DeltaFunction
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion_message_function_tool_call import Function as MessageFunction
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob, TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionTokensDetails
from starlette.exceptions import HTTPException

from arbordraft.decoding.detokenizing import is_text
from arbordraft.decoding.metrics import AnswerStats
from arbordraft.decoding.streams import Stream
from arbordraft.serving.api_request import ApiRequest, StreamOptions
from arbordraft.serving.deltas import AnswerDelta, DecodedLogprob
from arbordraft.serving.errors import as_body
from arbordraft.serving.service import Service
from arbordraft.serving.tool_parsing import ToolCallDelta


class Report(NamedTuple):
    """Tokens, drafts and times of a request, for the end of its answer.

    Args:
        usage: numbers of tokens, in OpenAI's format.
        figures: ``metrics`` with the names of vLLM, and ``timings`` with those of llama.cpp's server.
    """

    usage: CompletionUsage
    figures: dict[str, Any]


class Shape(ABC):
    """Writes the answers to one request.

    Args:
        service: service that answers.
        body: the request.
    """

    prefix: str  # of response ids
    closing = "data: [DONE]\n\n"  # ends a stream without errors

    def __init__(self, service: Service, body: ApiRequest) -> None:
        self.logprobs = body.num_logprobs is not None
        self.calling = bool(body.functions)
        self.head: dict[str, Any] = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.name,
            "system_fingerprint": f"arbordraft-{version('arbordraft')}-{service.exactness}",
        }

    @abstractmethod
    def response(self, answers: Sequence[AnswerDelta], report: Report) -> BaseModel:
        """Builds the response with all answers."""

    @abstractmethod
    def chunks(self, delta: AnswerDelta, figures: Mapping[str, Any]) -> Iterator[BaseModel]:
        """Yields a new part of an answer as chunks of a stream.

        Args:
            delta: the new part.
            figures: see :class:`Report`; only if this part ends the last answer, and no chunk with the usage follows.
        """

    @abstractmethod
    def last(self, report: Report) -> BaseModel:
        """Builds the last chunk of a stream that reports its usage; it has no answers."""

    def end(self, report: Report, options: StreamOptions) -> Iterator[BaseModel]:
        """Yields the last chunks of a stream."""
        if options.include_usage:
            yield self.last(report)

    def event(self, chunk: BaseModel) -> str:
        """Formats a chunk as a server-sent event."""
        return f"data: {written(chunk)}\n\n"

    def error_event(self, error: HTTPException) -> str:
        """Formats the event that ends a stream after an error."""
        return f"data: {json.dumps(as_body(error), ensure_ascii=False)}\n\n"


def written(answer: BaseModel) -> str:
    """Serialises an answer as JSON."""
    return str(answer.model_dump_json(exclude_unset=True))


class ChatShape(Shape):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl-"

    def __init__(self, service: Service, body: ApiRequest) -> None:
        super().__init__(service, body)
        self._begun = 0

    def response(self, answers: Sequence[AnswerDelta], report: Report) -> BaseModel:
        choices = [
            chat_completion.Choice(
                index=answer.index,
                message=_message(answer),
                finish_reason=answer.finish_reason,
                logprobs=chat_completion.ChoiceLogprobs(content=self._logprobs(answer)) if self.logprobs else None,
                **_extension(answer),
            )
            for answer in answers
        ]
        content = {"choices": choices, "usage": report.usage, **report.figures}
        return ChatCompletion(object="chat.completion", **content, **self.head)

    def chunks(self, delta: AnswerDelta, figures: Mapping[str, Any]) -> Iterator[BaseModel]:
        while self._begun < delta.index:  # clients number answers in the order of their first chunks
            yield self._choice_chunk(AnswerDelta(self._begun))
        yield self._choice_chunk(delta, **figures)

    def _choice_chunk(self, delta: AnswerDelta, **figures: Any) -> BaseModel:
        role = {"role": "assistant"} if delta.index == self._begun else {}
        self._begun = max(self._begun, delta.index + 1)
        choice = ChunkChoice(
            index=delta.index,
            delta=ChoiceDelta(**role, **self._delta(delta)),
            finish_reason=delta.finish_reason,
            logprobs=ChunkLogprobs(content=self._logprobs(delta)) if self.logprobs else None,
            **_extension(delta),
        )
        return self._chunk(choices=[choice], **figures)

    def last(self, report: Report) -> BaseModel:
        return self._chunk(choices=[], usage=report.usage, **report.figures)

    def _chunk(self, **content: Any) -> BaseModel:
        return ChatCompletionChunk(object="chat.completion.chunk", **self.head, **content)

    def _delta(self, delta: AnswerDelta) -> dict[str, Any]:
        """Returns new thoughts, text and calls; leaves out an empty text beside thoughts, or if the answer may call."""
        fields: dict[str, Any] = {} if (self.calling or delta.reasoning) and not delta.text else {"content": delta.text}
        fields |= _reasoning(delta)
        return (
            {**fields, "tool_calls": [_tool_call_delta(call) for call in merged(delta.calls)]}
            if delta.calls
            else fields
        )

    def _logprobs(self, delta: AnswerDelta) -> list[ChatCompletionTokenLogprob]:
        return [
            ChatCompletionTokenLogprob(**_of(known), top_logprobs=[TopLogprob(**_of(other)) for other in known.others])
            for known in delta.logprobs
        ]


def _of(known: DecodedLogprob) -> dict[str, Any]:
    data = None if known.data is None else list(known.data)
    return {"token": known.text, "bytes": data, "logprob": known.logprob}


class _TextLogprobs(Logprobs):
    """OpenAI's type, with ``None`` for the first token of a prompt, which has no log-probability."""

    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _TextChoice(CompletionChoice):
    """OpenAI's type, with ``None`` as the finish reason of chunks before the last."""

    finish_reason: Literal["stop", "length"] | None = None
    logprobs: _TextLogprobs | None = None


class _Text(Completion):
    choices: list[_TextChoice]


class TextShape(Shape):
    """Answers of /v1/completions."""

    prefix = "cmpl-"

    def __init__(self, service: Service, body: ApiRequest) -> None:
        super().__init__(service, body)
        self._offsets: dict[int, int] = {}

    def response(self, answers: Sequence[AnswerDelta], report: Report) -> BaseModel:
        choices = [self._choice(answer) for answer in answers]
        return self._completion(choices=choices, usage=report.usage, **report.figures)

    def chunks(self, delta: AnswerDelta, figures: Mapping[str, Any]) -> Iterator[BaseModel]:
        yield self._completion(choices=[self._choice(delta)], **figures)

    def last(self, report: Report) -> BaseModel:
        return self._completion(choices=[], usage=report.usage, **report.figures)

    def _completion(self, **content: Any) -> BaseModel:
        return _Text(object="text_completion", **self.head, **content)

    def _choice(self, delta: AnswerDelta) -> "_TextChoice":
        return _TextChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            logprobs=self._logprobs(delta) if self.logprobs else None,
            **_extension(delta),
        )

    def _logprobs(self, delta: AnswerDelta) -> _TextLogprobs:
        offsets, offset = [], self._offsets.get(delta.index, 0)
        for known in delta.logprobs:
            offsets.append(offset)
            offset += len(known.text)
        self._offsets[delta.index] = offset
        return _TextLogprobs(
            tokens=[known.text for known in delta.logprobs],
            token_logprobs=[known.logprob for known in delta.logprobs],
            top_logprobs=[None if known.logprob is None else _by_text(known.others) for known in delta.logprobs],
            text_offset=offsets,
        )


def _by_text(others: Sequence[DecodedLogprob]) -> dict[str, float]:
    """Maps texts to log-probabilities, equal texts to the highest; names parts of characters by their bytes."""
    found: dict[str, float] = {}
    for text, data, logprob, _ in others:
        part = data is not None and "\ufffd" in text and not is_text(data)
        if logprob is not None:
            found.setdefault(f"bytes:{repr(data)[2:-1]}" if part else text, logprob)
    return found


def report_of(stream: Stream, reasoning: int) -> Report:
    """Reports the tokens, drafts and times of a request so far; figures of several answers are summed.

    Args:
        stream: the engine's stream, with requests and answers.
        reasoning: number of tokens of thoughts.
    """
    prompt = sum(len(request.prompt) for request in stream.requests)
    stats = sum((answer.stats for answer in stream.answers), AnswerStats())
    details = CompletionTokensDetails(
        reasoning_tokens=reasoning,
        accepted_prediction_tokens=stats.accepted_prediction,
        rejected_prediction_tokens=stats.rejected_prediction,
        drafted_tokens=stats.drafted,
        target_forwards=stats.forwards,
    )
    usage = CompletionUsage(
        prompt_tokens=prompt,
        completion_tokens=stats.emitted,
        total_tokens=prompt + stats.emitted,
        completion_tokens_details=details,
    )
    return Report(
        usage, {"metrics": {"speculative_decoding": stats.speculative_decoding()}, "timings": stats.timings()}
    )


def _message(answer: AnswerDelta) -> ChatCompletionMessage:
    if not answer.calls:
        return ChatCompletionMessage(role="assistant", content=answer.text, **_reasoning(answer))
    calls = [
        ChatCompletionMessageFunctionToolCall(
            id=call_id(), type="function", function=MessageFunction(name=call.name or "", arguments=call.arguments)
        )
        for call in merged(answer.calls)
    ]
    return ChatCompletionMessage(role="assistant", content=answer.text or None, tool_calls=calls, **_reasoning(answer))


def _reasoning(delta: AnswerDelta) -> dict[str, Any]:
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {}


def merged(deltas: Sequence[ToolCallDelta]) -> list[ToolCallDelta]:
    """Merges deltas to one per call: clients lose a second one in the same chunk."""
    calls = dict[int, ToolCallDelta]()
    for delta in deltas:
        calls[delta.index] = calls[delta.index] + delta if delta.index in calls else delta
    return list(calls.values())


def _tool_call_delta(delta: ToolCallDelta) -> ChoiceDeltaToolCall:
    function = DeltaFunction(arguments=delta.arguments)
    if delta.name is None:
        return ChoiceDeltaToolCall(index=delta.index, function=function)
    function = DeltaFunction(name=delta.name, arguments=delta.arguments)
    return ChoiceDeltaToolCall(index=delta.index, id=call_id(), type="function", function=function)


def call_id() -> str:
    """Draws an id of nine letters and digits, the only form that some chat templates accept."""
    return "".join(secrets.choice(ascii_letters + digits) for _ in range(9))


def _extension(delta: AnswerDelta) -> dict[str, Any]:
    """Returns fields of an answer that extend OpenAI's protocol."""
    shown: dict[str, Any] = {"steps": list(delta.steps)} if delta.steps else {}
    if delta.check is not None:
        keywords, valid, reason = delta.check
        shown["schema"] = {"checked": list(keywords), "valid": valid, "reason": reason}
    return {"arbordraft": shown} if shown else {}
