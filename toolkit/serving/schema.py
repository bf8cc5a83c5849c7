"""What clients may ask: OpenAI's fields and some of ours; all others are refused by their names."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from arbordraft.grammars import Grammar
from arbordraft.requests import Request
from arbordraft.serving.calls import CallFormat
from arbordraft.serving.errors import ApiError
from arbordraft.serving.fields import Fields, Text
from arbordraft.serving.structure import Function, ResponseFormat, Tool, ToolCall, ToolChoice, grammar_of
from arbordraft.texts import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields that an engine's request has under the same names.
_SETTINGS = (
    *("n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


class StreamOptions(Fields):
    """What a stream holds besides the answers."""

    include_usage: bool = False


class Extension(Fields):
    """What only this server can tell.

    ``steps``: what was drafted in every step, and what became of it.
    """

    steps: bool = False


class Message(Fields):
    """What somebody said, called, or got from a tool; several parts of text are joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: Text | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
        if others := kinds - {"text"}:
            raise ValueError(f"only parts of type text can be read, got {', '.join(map(str, others))}")
        return "\n".join(str(part.get("text", "")) for part in content)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise ValueError("content is missing: only messages with tool_calls may go without")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls are for the role assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id is for the role tool, which cannot do without")
        return self

    def shown(self, names: Mapping[str, str], quoted: bool) -> dict[str, Any]:
        """The same for a chat template.

        Args:
            names: of the functions that were called, by the ids of the calls.
            quoted: whether the template takes arguments as text.
        """
        role = "system" if self.role == "developer" else self.role  # its newer name, which templates do not know
        shown: dict[str, Any] = {"role": role, "content": self.content}
        if self.tool_calls:
            shown["tool_calls"] = [call.shown(quoted) for call in self.tool_calls]
        if self.tool_call_id is not None:
            shown |= {"tool_call_id": self.tool_call_id, "name": names[self.tool_call_id]}
        return shown


class Question(Fields, ABC):
    """What both endpoints take; for ranges see :class:`~arbordraft.requests.Request`."""

    model: str | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = None
    stop: Text | Annotated[list[Text], Field(max_length=16)] = ()  # type: ignore[assignment]
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict, max_length=1024)
    max_tokens: int | None = Field(None, ge=1)
    # Not OpenAI's, but other servers have them under these names.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    arbordraft: Extension = Extension()

    @property
    def most(self) -> int | None:
        """Longest answer in tokens, if the client says."""
        return self.max_tokens

    @property
    @abstractmethod
    def others(self) -> int | None:
        """How many of the most probable tokens are wanted with their log-probabilities; ``None`` for none at all."""

    @property
    def calling(self) -> bool:
        """Whether it has to be known how the model writes calls."""
        return False

    @property
    def functions(self) -> dict[str, Function]:
        """What the answer may call, by name."""
        return {}

    @abstractmethod
    def encode(self, tokenizer: "PreTrainedTokenizerBase", calls: CallFormat | None) -> list[int]:
        """The token ids to continue.

        Args:
            tokenizer: of the model.
            calls: how it writes calls, if that has to be known.

        Raises:
            ValueError: if there are none, or the chat template refuses the messages.
        """

    def grammar(self, calls: CallFormat | None) -> Grammar | None:
        """What the answer may be, if not any text.

        Raises:
            ApiError: if a schema is none, or cannot be enforced.
        """
        return None

    def request(self, prompt: list[int], most: int, calls: CallFormat | None) -> Request:
        """The same for an engine.

        Raises:
            ValueError: for values out of range.
            ApiError: as :meth:`grammar`.
        """
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return Request(
            prompt=prompt,
            max_new_tokens=most,
            logprobs=self.others,
            ends=() if self.ignore_eos else None,
            grammar=self.grammar(calls),
            **settings,
        )


class ChatQuestion(Question):
    """What /v1/chat/completions takes."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    response_format: ResponseFormat = ResponseFormat()
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is for logprobs: set that to true", param="top_logprobs")
        names = [tool.function.name for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ApiError(400, f"tools: several have the name {min(twice)}", param="tools")
        chosen = self.tool_choice.function
        if chosen is not None and chosen.name not in names:
            raise ApiError(400, f"tool_choice: there is no {chosen.name} among the tools", param="tool_choice")
        if self.tool_choice.type == "required" and not names:
            raise ApiError(400, "tool_choice: there are no tools to call", param="tool_choice")
        if self.ignore_eos and (self.functions or self.response_format.content is not None):
            raise ApiError(400, "ignore_eos: with tools and JSON the model must be able to end", param="ignore_eos")
        known = {call.id for said in self.messages for call in said.tool_calls}
        for index, said in enumerate(self.messages):
            if said.tool_call_id is not None and said.tool_call_id not in known:
                where = f"messages.{index}.tool_call_id"
                raise ApiError(400, f"{where}: there is no call {said.tool_call_id}", param=where)
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def others(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def calling(self) -> bool:
        return bool(self.functions) or any(said.tool_calls for said in self.messages)

    @property
    def functions(self) -> dict[str, Function]:
        known = {tool.function.name: tool.function for tool in self.tools}
        if self.tool_choice.function is not None:
            return {name: known[name] for name in [self.tool_choice.function.name]}
        return {} if self.tool_choice.type == "none" else known

    def encode(self, tokenizer: "PreTrainedTokenizerBase", calls: CallFormat | None) -> list[int]:
        names = {call.id: call.function.name for said in self.messages for call in said.tool_calls}
        messages = [said.shown(names, calls is not None and calls.quoted) for said in self.messages]
        tools = [tool.shown() for tool in self.tools] if self.functions else []
        return encode(tokenizer, messages, tools=tools, raw=False, name="the conversation")

    def grammar(self, calls: CallFormat | None) -> Grammar | None:
        answer = self.response_format.grammar
        if not self.functions:
            return answer
        assert calls is not None
        for index, tool in enumerate(self.tools):
            grammar_of(tool.function.parameters, f"tools.{index}.function.parameters")
        try:
            text = calls.grammar(
                {name: function.parameters for name, function in self.functions.items()},
                required=self.tool_choice.type != "auto",
                parallel=self.parallel_tool_calls,
                answer=self.response_format.content,
            )
        except ValueError as error:
            raise ApiError(400, f"response_format: {error}", param="response_format", code="unsupported") from error
        return Grammar.lark(text)


class CompletionQuestion(Question):
    """What /v1/completions takes: one text, or its token ids."""

    prompt: Text | list[int] | list[Text] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt")
    @classmethod
    def _only_one(cls, prompt: Any) -> Any:
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return prompt
        if len(prompt) > 1:
            raise ValueError(f"one prompt at a time, got {len(prompt)}: send a request for each")
        return prompt[0]

    @property
    def others(self) -> int | None:
        return self.logprobs

    def encode(self, tokenizer: "PreTrainedTokenizerBase", calls: CallFormat | None) -> list[int]:
        if not isinstance(self.prompt, str):
            return list(self.prompt)  # type: ignore[arg-type]
        return encode(tokenizer, [{"role": "user", "content": self.prompt}], raw=True, name="the prompt")
