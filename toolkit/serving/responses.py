"""Requests of /v1/responses, and their conversion to chats."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi.exceptions import RequestValidationError
from openai.types.responses import ResponseIncludable
from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator

from arbordraft.serving.chats import ChatRequest
from arbordraft.serving.errors import ApiError, wrong
from arbordraft.serving.fields import MESSAGE_HINTS, REQUEST_HINTS, REQUEST_NOTHING, TOOL_HINTS, Fields, Text
from arbordraft.serving.messages import Part, parts_of
from arbordraft.serving.structure import Arguments, Function, Name

_LOGPROBS = "message.output_text.logprobs"
# Field names in a chat's errors, and the fields of /v1/responses that they came from.
_NAMES = (
    (r"\bresponse_format\.json_schema\.schema\b", "text.format.schema"),
    (r"\bresponse_format\b", "text.format"),
    (r"\bmax_tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\b(tools\.\d+)\.function\b", r"\1"),
)
# Required fields of each type of item, then its optional fields.
_NEEDED: Mapping[str, frozenset[str]] = {
    "message": frozenset({"role", "content"}),
    "function_call": frozenset({"call_id", "name", "arguments"}),
    "function_call_output": frozenset({"call_id", "output"}),
    "reasoning": frozenset(),
}
_FURTHER = {"reasoning": {"content", "summary"}}


class ItemPart(Part):
    """Part of an item: text, refusal or thoughts."""

    type: Literal["text", "input_text", "output_text", "refusal", "reasoning_text", "summary_text"]  # type: ignore[assignment]


Content = Annotated[Sequence[ItemPart], BeforeValidator(parts_of)]


class Item(Fields):
    """Item of a conversation: message, function call, its result, or thoughts of the model."""

    hints: ClassVar = MESSAGE_HINTS | {"id", "status", "phase", "encrypted_content"}
    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content = ()
    summary: Content = ()
    call_id: Text | None = None
    name: Name | None = None
    arguments: Arguments | None = None
    output: Content = ()

    @field_validator("type", mode="before")
    @classmethod
    def _known(cls, type: Any) -> Any:
        if type not in tuple(_NEEDED):
            raise ValueError(f"items of type {type} are not supported, only {', '.join(_NEEDED)}")
        return type

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        given, needed = self.model_fields_set - {"type"}, _NEEDED[self.type]
        if missing := needed - given:
            raise ValueError(f"{min(missing)} is missing, which an item of type {self.type} needs")
        if others := given - needed - _FURTHER.get(self.type, set()):
            raise ValueError(f"{min(others)} is no field of an item of type {self.type}: leave it out")
        return self


class FunctionTool(Function):
    """Function that the model may call."""

    hints: ClassVar = TOOL_HINTS
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _own(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") != "function":
            raise ValueError(f"tools of type {given.get('type')} are not supported, only functions")
        return given


class Format(Fields):
    """Format of an answer: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    description: Text = ""
    content: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "json_schema") != (self.content is not None) or (self.name is None) != (self.content is None):
            raise ValueError("name and schema go with the type json_schema, and with no other type")
        return self

    @property
    def asked(self) -> dict[str, Any]:
        """Format as a chat's ``response_format``."""
        if self.type != "json_schema":
            return {"type": self.type}
        given = self.model_dump(by_alias=True, exclude={"type"}, exclude_unset=True)
        return {"type": self.type, "json_schema": {**given, "strict": True}}  # responses have no field for a check


class TextOptions(Fields):
    """Options of the answer's text."""

    hints: ClassVar = frozenset({"verbosity"})
    format: Format = Format()


class Reasoning(Fields):
    """Reasoning effort, for chat templates that have this variable."""

    hints: ClassVar = frozenset({"context", "generate_summary", "mode", "summary"})
    effort: Text | None = None


def _choice(given: Any) -> Any:
    """Converts a choice of tools to the format of chats."""
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise ValueError(f"the type {given.get('type')} is not supported, only function")
    return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _OfChats(Fields):
    """Fields that a chat has under the same names; the chat checks their values."""

    model: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    stop: Any = None
    stop_token_ids: Any = None
    min_tokens: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    parallel_tool_calls: Any = None
    chat_template_kwargs: Any = None
    prediction: Any = None
    speculative: Any = None


class ResponsesRequest(_OfChats):
    """Request of /v1/responses; it is answered as a chat, and nothing is stored."""

    hints: ClassVar = (REQUEST_HINTS - {"metadata"}) | {"max_tool_calls", "stream_options"}
    nothing: ClassVar = {
        **REQUEST_NOTHING,
        "background": (False,),
        "context_management": ([],),
        "truncation": ("disabled",),
    }
    input: Annotated[Sequence[Item], BeforeValidator(_items), Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Sequence[FunctionTool] = ()
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = "auto"
    text: TextOptions = TextOptions()
    reasoning: Reasoning = Reasoning()
    include: Sequence[ResponseIncludable] = ()  # entries about other types of tools have no effect
    top_logprobs: int | None = Field(None, ge=0, le=20)
    metadata: dict[str, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and _LOGPROBS not in self.include:
            raise wrong("top_logprobs", f"set include to {[_LOGPROBS]} as well")
        calls = set[str | None]()
        for index, item in enumerate(self.input):
            if item.type == "function_call":
                calls.add(item.call_id)
            elif item.type == "function_call_output" and item.call_id not in calls:
                reason = f"no function_call before it has the call_id {item.call_id}: send that item, too"
                raise wrong(f"input.{index}.call_id", reason)
        return self

    def chat(self) -> ChatRequest:
        """Converts the request to a chat.

        Raises:
            RequestValidationError: if the chat refuses a value.
            ApiError: if the chat refuses a combination of values.
        """
        same = {name: value for name in _OfChats.model_fields if (value := getattr(self, name)) is not None}
        try:
            return ChatRequest.model_validate(
                {
                    **same,
                    "messages": self._messages(),
                    "max_tokens": self.max_output_tokens,
                    "tools": [
                        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
                        for tool in self.tools
                    ],
                    "tool_choice": self.tool_choice,
                    "response_format": self.text.format.asked,
                    "reasoning_effort": self.reasoning.effort,
                    "logprobs": _LOGPROBS in self.include,
                    "top_logprobs": self.top_logprobs,
                }
            )
        except ValidationError as error:
            found = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
            raise RequestValidationError(found) from error

    def _messages(self) -> list[dict[str, Any]]:
        """Converts items to messages; consecutive thoughts, text and calls of the model become one."""
        messages = list[dict[str, Any]]()
        for item in self.input:
            message = _message_of(item)
            last = messages[-1] if messages else {}
            going_on = last.get("role") == message["role"] == "assistant" and item.type != "reasoning"
            if going_on and item.type == "function_call":
                last.setdefault("tool_calls", []).extend(message["tool_calls"])
            elif going_on and not last.keys() & {"content", "tool_calls"}:
                last.update(message)
            else:
                messages.append(message)
        if self.instructions is not None:
            part = {"type": "text", "text": self.instructions}
            if messages[0]["role"] in ("system", "developer"):
                messages[0]["content"].insert(0, part)  # many chat templates allow only one message of that role
            else:
                messages.insert(0, {"role": "system", "content": [part]})
        return messages


def _message_of(item: Item) -> dict[str, Any]:
    """Converts one item to a message."""
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _texts(item.output)}
    if item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        return {"role": "assistant", "tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
    if item.type == "reasoning":
        return {"role": "assistant", "reasoning_content": "".join(part.text or "" for part in item.content)}
    return {"role": item.role, "content": _texts(item.content)}


def _texts(parts: Sequence[ItemPart]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part.text or part.refusal or ""} for part in parts]


def renamed(error: ApiError) -> ApiError:
    """Returns an error of the chat with the field names of /v1/responses."""
    message, param = error.detail, error.param
    for pattern, name in _NAMES:
        message, param = re.sub(pattern, name, message), param and re.sub(pattern, name, param)
    return ApiError(error.status_code, message, param=param, code=error.code, headers=error.headers)


__all__ = ["ResponsesRequest", "renamed"]
