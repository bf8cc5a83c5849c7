"""Answers of /v1/responses: output items, complete or as events of a stream."""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openai import BaseModel
from openai.types import CompletionUsage
from starlette.exceptions import HTTPException

from arbordraft.serving.answers import ChatShape, Report, call_id, merged
from arbordraft.serving.api_request import ApiRequest, StreamOptions
from arbordraft.serving.chats import ChatRequest
from arbordraft.serving.deltas import AnswerDelta
from arbordraft.serving.errors import as_body
from arbordraft.serving.responses import ResponsesRequest
from arbordraft.serving.service import Service

Event = tuple[str, dict[str, Any]]  # type without the prefix "response.", and fields


class _Item(ABC):
    """Output item that grows while the answer streams.

    Args:
        prefix: prefix of the item's id.
        fields: fields that do not grow.
    """

    def __init__(self, prefix: str, **fields: Any) -> None:
        self._place: dict[str, Any] = {"item_id": f"{prefix}_{uuid.uuid4().hex}"}
        self._fields = {"id": self._place["item_id"], **fields, "status": "in_progress"}

    @property
    @abstractmethod
    def shown(self) -> dict[str, Any]:
        """Fields of the item so far."""

    @abstractmethod
    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Appends text, with log-probabilities of its tokens, and yields the events."""

    def begin(self) -> Iterator[Event]:
        """Yields the events that begin the item."""
        yield "output_item.added", {"item": self.shown}

    def end(self, status: str) -> Iterator[Event]:
        """Ends the item with a status and yields the events."""
        self._fields["status"] = status
        yield "output_item.done", {"item": self.shown}


class _Call(_Item):
    """Function call; its text is the arguments."""

    def __init__(self, name: str) -> None:
        super().__init__("fc", type="function_call", call_id=call_id(), name=name)
        self._arguments = ""

    @property
    def shown(self) -> dict[str, Any]:
        return {**self._fields, "arguments": self._arguments}

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        self._arguments += text
        yield "function_call_arguments.delta", {**self._place, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        done = {"name": self._fields["name"], "arguments": self._arguments}
        yield "function_call_arguments.done", {**self._place, **done}
        yield from super().end(status)


class _Text(_Item):
    """Item whose content is a single part of text.

    Args:
        prefix: prefix of the item's id.
        part: the part, still without text.
        fields: fields that do not grow.
    """

    def __init__(self, prefix: str, part: dict[str, Any], **fields: Any) -> None:
        super().__init__(prefix, **fields)
        self._place["content_index"] = 0
        self._part, self._begun = part, False

    @property
    def shown(self) -> dict[str, Any]:
        return {**self._fields, "content": [{**self._part}] if self._begun else []}

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        self._begun = True
        yield "content_part.added", {**self._place, "part": {**self._part}}

    def add(self, text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        self._part["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if "logprobs" in self._part:
            self._part["logprobs"] += logprobs
            fields["logprobs"] = list(logprobs)
        yield f"{self._part['type']}.delta", {**self._place, **fields}

    def end(self, status: str) -> Iterator[Event]:
        done: dict[str, Any] = {name: self._part[name] for name in ("text", "logprobs") if name in self._part}
        yield f"{self._part['type']}.done", {**self._place, **done}
        yield "content_part.done", {**self._place, "part": {**self._part}}
        yield from super().end(status)


class _ReasoningItem(_Text):
    """Thoughts before the answer."""

    def __init__(self) -> None:
        super().__init__("rs", {"type": "reasoning_text", "text": ""}, type="reasoning", summary=[])


class _Message(_Text):
    """Text of the answer."""

    def __init__(self) -> None:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        super().__init__("msg", part, type="message", role="assistant")


class ResponseShape(ChatShape):
    """Writes the answer to a request of /v1/responses.

    Args:
        service: service that answers.
        body: chat that the request was converted to.
        responses_body: the request.
    """

    prefix = "resp_"
    closing = ""  # the type of the last event marks the end

    def __init__(self, service: Service, body: ApiRequest, responses_body: ResponsesRequest) -> None:
        assert isinstance(body, ChatRequest)
        super().__init__(service, body)
        self._items: list[_Item] = []
        self._events, self._cut = 0, False
        self._known: list[dict[str, Any]] = []  # log-probabilities that no event has sent yet
        self._past = 0  # number of tokens before them
        format = responses_body.text.format.model_dump(by_alias=True, exclude_none=True, exclude_unset=True)
        tools = [{**tool.model_dump(), "strict": True} for tool in responses_body.tools]
        choice = body.tool_choice
        self._echo = {
            "object": "response",
            "background": False,
            "instructions": responses_body.instructions,
            "max_output_tokens": responses_body.max_output_tokens,
            "metadata": responses_body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": responses_body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": service.temperature if body.temperature is None else body.temperature,
            "text": {"format": {"type": responses_body.text.format.type, **format}},
            "tool_choice": {"type": "function", "name": choice.function.name} if choice.function else choice.type,
            "tools": tools,
            "top_logprobs": responses_body.top_logprobs or 0,
            "top_p": service.top_p if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    def response(self, answers: Sequence[AnswerDelta], report: Report) -> BaseModel:
        for answer in answers:
            for _ in [*self._added(answer), *self._ended()]:
                pass  # only the items are needed, not their events
        return BaseModel.construct(**self._response(self._outcome, report))

    def chunks(self, delta: AnswerDelta, figures: Mapping[str, Any]) -> Iterator[BaseModel]:
        if not self._events:
            yield self._event("created", {"response": self._response("in_progress")})
            yield self._event("in_progress", {"response": self._response("in_progress")})
        for kind, fields in self._added(delta):
            yield self._event(kind, fields)

    def end(self, report: Report, options: StreamOptions) -> Iterator[BaseModel]:
        for kind, fields in self._ended():
            yield self._event(kind, fields)
        yield self._event(self._outcome, {"response": self._response(self._outcome, report)})

    def event(self, chunk: BaseModel) -> str:
        return f"event: {chunk.type}\n{super().event(chunk)}"

    def error_event(self, error: HTTPException) -> str:
        error_body = as_body(error)["error"]
        failure = {"code": "server_error", "message": error_body["message"]}
        return self.event(self._event("failed", {"response": {**self._response("failed"), "error": failure}}))

    @property
    def _outcome(self) -> str:
        return "incomplete" if self._cut else "completed"

    def _added(self, delta: AnswerDelta) -> Iterator[Event]:
        """Yields the events of a new part of the answer."""
        if delta.reasoning:
            yield from self._more(_ReasoningItem, delta.reasoning)
        if self.logprobs:
            self._known += [known.to_dict() for known in self._logprobs(delta)]
            self._taken(delta.words[0])  # drops those of thoughts: reasoning items have no field for them
        if delta.text:
            yield from self._more(_Message, delta.text, self._taken(delta.words[1]))
        for part in merged(delta.calls):
            if part.name is not None:
                yield from self._next(_Call(part.name))
            if part.arguments:
                yield from self._items[-1].add(part.arguments)
        self._cut = delta.finish_reason == "length"

    def _taken(self, end: int) -> list[dict[str, Any]]:
        """Removes and returns the pending log-probabilities of tokens before ``end``."""
        count = max(0, end - self._past)
        taken, self._known = self._known[:count], self._known[count:]
        self._past += len(taken)
        return taken

    def _more(self, kind: type[_ReasoningItem | _Message], text: str, logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """Appends to the last item, or to a new one if the last is of another kind."""
        if not (self._items and isinstance(self._items[-1], kind)):
            yield from self._next(kind())
        yield from self._items[-1].add(text, logprobs)

    def _ended(self) -> Iterator[Event]:
        """Yields the events of the end; an answer without tokens becomes an empty message."""
        if not self._items:
            yield from self._next(_Message())
        if self._known and isinstance(self._items[-1], _Message):
            yield from self._items[-1].add("", self._known)
        yield from self._items[-1].end(self._outcome)

    def _next(self, item: _Item) -> Iterator[Event]:
        """Ends the last item and begins a new one."""
        if self._items:
            yield from self._items[-1].end("completed")
        self._items.append(item)
        yield from item.begin()

    def _response(self, status: str, report: Report | None = None) -> dict[str, Any]:
        created = self.head["created"]
        return {
            **{name: value for name, value in self.head.items() if name != "created"},
            **self._echo,
            "created_at": created,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": [item.shown for item in self._items],
            "status": status,
            "usage": None if report is None else _usage(report.usage),
            **({} if report is None else report.figures),
        }

    def _event(self, kind: str, fields: dict[str, Any]) -> BaseModel:
        place = {} if "response" in fields else {"output_index": len(self._items) - 1}
        number, self._events = self._events, self._events + 1
        return BaseModel.construct(type=f"response.{kind}", sequence_number=number, **place, **fields)


def _usage(usage: CompletionUsage) -> dict[str, Any]:
    """Returns token counts under the names of /v1/responses."""
    details = usage.completion_tokens_details.to_dict() if usage.completion_tokens_details else {}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0, **details},
        "total_tokens": usage.total_tokens,
    }


__all__ = ["ResponseShape"]
