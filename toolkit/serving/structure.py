"""Request fields for the structure of an answer: JSON and tool calls."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from arbordraft.grammars import Grammar
from arbordraft.serving.errors import wrong
from arbordraft.serving.fields import CALL_HINTS, TOOL_HINTS, Fields, Text

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(schema: Mapping[str, Any], param: str, strict: bool = True) -> Grammar:
    """Builds the grammar of a schema.

    Args:
        schema: JSON Schema of a client.
        param: request field that holds the schema.
        strict: refuse keywords that no grammar enforces; else finished answers are checked against them.

    Raises:
        ApiError: if the schema is invalid, or has keywords that can be neither enforced nor checked. Schemas of tools
            and ``strict`` ones are never checked.
    """
    try:
        grammar = Grammar.json_schema(schema, strict=False)
        found = f"{', '.join(grammar.unenforced)} cannot be held while text is written"
        if grammar.unenforced and param.startswith("tools"):
            raise ValueError(f"{found}: leave it out")
        if grammar.unenforced and grammar.runs_expressions:
            raise ValueError(
                f"{found}, nor checked, as the schema has patterns that the server would have to run: leave one of "
                "them out"
            )
        if grammar.unenforced and strict:
            raise ValueError(f"{found}: leave it out, or have it checked: strict false, not in /v1/responses")
    except (TypeError, ValueError) as error:
        raise wrong(param, str(error), "invalid_schema") from error
    return grammar


class JsonSchema(Fields):
    """Schema with a name; with or without ``strict``, a grammar enforces every keyword that it can."""

    name: Name
    description: Text = ""
    content: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Fields):
    """Format of an answer: text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema goes with the field json_schema, and no other type does")
        return self

    @property
    def content(self) -> Mapping[str, Any] | None:
        """Schema of a JSON answer; ``None`` for text."""
        if self.json_schema is not None:
            return self.json_schema.content
        return _OBJECT if self.type == "json_object" else None

    @cached_property  # a completion asks once per prompt
    def grammar(self) -> Grammar | None:
        """Grammar of the format; ``None`` for text.

        Raises:
            ApiError: see :func:`grammar_of`.
        """
        strict = self.json_schema is not None and self.json_schema.strict
        where = "response_format.json_schema.schema"
        return None if self.content is None else grammar_of(self.content, where, strict)


class Function(Fields):
    """Function that can be called; its arguments follow the schema, with or without ``strict``."""

    name: Name
    description: Text = ""
    parameters: dict[str, Any] = _NO_ARGUMENTS
    strict: bool = True

    def arguments(self, param: str) -> dict[str, Any]:
        """Returns the schema of the arguments: that of the parameters, narrowed to objects.

        Raises:
            ApiError: if the schema is invalid, cannot be enforced, or admits no object.
        """
        grammar_of(self.parameters, param)
        narrowed = {**self.parameters, "type": "object"}
        kinds = self.parameters.get("type", "object")
        try:
            if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
                raise ValueError(f"its type is {kinds}")
            Grammar.json_schema(narrowed)
        except ValueError as error:
            reason = f"it admits no object, but arguments of calls are objects ({error}): give it the type object"
            raise wrong(param, reason, "invalid_schema") from error
        return narrowed


class Tool(Fields):
    """Tool: a function that the model may call."""

    hints: ClassVar = TOOL_HINTS
    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """Returns the description that the model sees."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class FunctionName(Fields):
    """Name of a function."""

    name: str


class ToolChoice(Fields):
    """Choice of tools: ``none``, ``auto``, ``required``, or the name of a function."""

    type: Literal["none", "auto", "required", "function"] = "auto"
    function: FunctionName | None = None

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        return {"type": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "function") != (self.function is not None):
            raise ValueError("the type function goes with the field function, and no other type does")
        return self


def _object(arguments: str) -> str:
    if not arguments.strip():
        return "{}"
    try:
        if not isinstance(json.loads(arguments), dict):
            raise ValueError("it is another value")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"arguments are the JSON text of an object, and this is not one: {error}") from error
    return arguments


Arguments = Annotated[Text, AfterValidator(_object)]  # JSON text of an object; an empty text means ``{}``


class CalledFunction(Fields):
    """Name and arguments of a called function."""

    hints: ClassVar = CALL_HINTS
    name: Name
    arguments: Arguments


class ToolCall(Fields):
    """Call that the model made in an earlier turn."""

    hints: ClassVar = CALL_HINTS
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def shown(self, quoted: bool) -> dict[str, Any]:
        """Returns the call in the format of chat templates, with arguments as text or as an object."""
        arguments = self.function.arguments if quoted else json.loads(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


__all__ = ["Arguments", "Function", "Name", "ResponseFormat", "Tool", "ToolCall", "ToolChoice", "grammar_of"]
