"""Fields of requests about the structure of an answer: JSON, and calls of tools."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from arbordraft.grammars import Grammar
from arbordraft.serving.errors import wrong
from arbordraft.serving.fields import CALL_HINTS, TOOL_HINTS, Fields, Text

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]

_OBJECT = {"type": "object"}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def grammar_of(schema: Mapping[str, Any], param: str, strict: bool = True) -> Grammar:
    """The grammar of a schema.

    Args:
        schema: a client's.
        param: the field that it came in.
        strict: refuse keywords that no grammar holds; else they are checked at the end.

    Raises:
        ApiError: if it is no schema, or one that can neither be enforced nor, unless ``strict``, be checked.
    """
    try:
        grammar = Grammar.json_schema(schema, strict=False)
        found = f"{', '.join(grammar.unheld)} cannot be held while text is written"
        if grammar.unheld and param.startswith("tools"):
            raise ValueError(f"{found}: leave it out")
        if grammar.unheld and grammar.runs_expressions:
            raise ValueError(
                f"{found}, nor checked, as the schema has patterns that the server would have to run: leave one of "
                "them out"
            )
        if grammar.unheld and strict:
            raise ValueError(f"{found}: leave it out, or have /v1/chat/completions check it: strict false")
    except (TypeError, ValueError) as error:
        raise wrong(param, str(error), "invalid_schema") from error
    return grammar


class JsonSchema(Fields):
    """A schema with a name; all that can be held is held, whether or not ``strict`` asks for it."""

    name: Name
    description: Text = ""
    content: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Fields):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("the type json_schema goes with the field json_schema, and no other type does")
        return self

    @property
    def content(self) -> Mapping[str, Any] | None:
        """The schema of the answer, if it is to be JSON."""
        if self.json_schema is not None:
            return self.json_schema.content
        return _OBJECT if self.type == "json_object" else None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the form; ``None`` for text.

        Raises:
            ApiError: see :func:`grammar_of`.
        """
        strict = self.json_schema is not None and self.json_schema.strict
        where = "response_format.json_schema.schema"
        return None if self.content is None else grammar_of(self.content, where, strict)


class Function(Fields):
    """A function that can be called; its arguments follow the schema whether or not ``strict`` asks for it."""

    name: Name
    description: Text = ""
    parameters: dict[str, Any] = _NO_ARGUMENTS
    strict: bool = True

    def arguments(self, param: str) -> dict[str, Any]:
        """The schema of its arguments: that of its parameters, narrowed to objects, which is all that a call can have.

        Raises:
            ApiError: if it is no schema, cannot be enforced, or admits no object.
        """
        grammar_of(self.parameters, param)
        narrowed = {**self.parameters, "type": "object"}
        kinds = self.parameters.get("type", "object")
        try:
            if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
                raise ValueError(f"its type is {kinds}")
            Grammar.json_schema(narrowed)
        except ValueError as error:
            reason = f"it admits no object, which the arguments of a call are ({error}): give it the type object"
            raise wrong(param, reason, "invalid_schema") from error
        return narrowed


class Tool(Fields):
    """A function that the model may ask to have called."""

    hints: ClassVar = TOOL_HINTS
    type: Literal["function"]
    function: Function

    def shown(self) -> dict[str, Any]:
        """The description that the model sees."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class FunctionName(Fields):
    """Names a function."""

    name: str


class ToolChoice(Fields):
    """Whether tools are called, and which: one of three words, or the name of a function."""

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


Arguments = Annotated[Text, AfterValidator(_object)]  # JSON text of an object; no text stands for an empty one


class CalledFunction(Fields):
    """A function with its arguments."""

    hints: ClassVar = CALL_HINTS
    name: Name
    arguments: Arguments


class ToolCall(Fields):
    """A call that the model made earlier."""

    hints: ClassVar = CALL_HINTS
    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def shown(self, quoted: bool) -> dict[str, Any]:
        """The call as chat templates read it, with arguments as text or as an object."""
        arguments = self.function.arguments if quoted else json.loads(self.function.arguments)
        return {"id": self.id, "type": "function", "function": {"name": self.function.name, "arguments": arguments}}


__all__ = ["Arguments", "Function", "Name", "ResponseFormat", "Tool", "ToolCall", "ToolChoice", "grammar_of"]
