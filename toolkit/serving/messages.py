"""Messages of a conversation, as clients write them and as chat templates read them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, field_validator, model_validator

from arbordraft.serving.fields import MESSAGE_HINTS, MESSAGE_NOTHING, PART_HINTS, Fields, Text
from arbordraft.serving.structure import ToolCall


class Part(Fields):
    """Part of a message: a text or a refusal."""

    hints: ClassVar = PART_HINTS
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _readable(cls, type: Any) -> Any:
        if type not in get_args(cls.model_fields["type"].annotation):
            raise ValueError(f"only text parts are supported, got {type}")
        return type

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kept_field, other = ("refusal", "text") if self.type == "refusal" else ("text", "refusal")
        if getattr(self, kept_field) is None or getattr(self, other) is not None:
            raise ValueError(f"a part of type {self.type} has the field {kept_field}, and not {other}")
        return self


def parts_of(content: Any) -> Any:
    """Returns the parts of a message's content; wraps a text in a list."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ValueError("a content is a text or a list of parts")
    return content


class Message(Fields):
    """Message: text, tool calls or a tool's result; several text parts are joined by line breaks."""

    hints: ClassVar = MESSAGE_HINTS
    nothing: ClassVar = MESSAGE_NOTHING
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Sequence[Part], BeforeValidator(parts_of)] = ()
    name: Text | None = None
    refusal: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None  # alias of ``reasoning_content``
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: Text | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "content" not in self.model_fields_set and self.role != "assistant":
            raise ValueError("content is missing: only messages of the role assistant may omit it")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are for the role assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id is required for the role tool, and not allowed for other roles")
        return self

    @property
    def text(self) -> str:
        """Text of the message; a refusal counts as text."""
        return "\n".join(part.text or part.refusal or "" for part in self.content) or self.refusal or ""

    def shown(self, names: Mapping[str, str], quoted: bool) -> dict[str, Any]:
        """Returns the message in the format of chat templates.

        Args:
            names: names of the called functions, by call id.
            quoted: whether the template takes arguments as JSON text.
        """
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name; chat templates do not know it
        shown: dict[str, Any] = {"role": role, "content": self.text}
        if self.name is not None:
            shown["name"] = self.name
        if text := self.reasoning_content or self.reasoning:
            shown["reasoning_content"] = text
        if self.tool_calls:
            shown["tool_calls"] = [call.shown(quoted) for call in self.tool_calls]
        if self.tool_call_id is not None:
            shown |= {"tool_call_id": self.tool_call_id, "name": names[self.tool_call_id]}
        return shown


__all__ = ["Message", "Part", "parts_of"]
