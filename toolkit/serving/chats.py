"""Requests of /v1/chat/completions."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from arbordraft.decoding.detokenizing import TokenDecoder
from arbordraft.decoding.text import encode
from arbordraft.grammars import Grammar
from arbordraft.serving.api_request import ApiRequest
from arbordraft.serving.calls import ToolCallFormat, embedded
from arbordraft.serving.errors import ApiError, wrong
from arbordraft.serving.fields import Text
from arbordraft.serving.messages import Message
from arbordraft.serving.reasoning import ReasoningFormat
from arbordraft.serving.structure import Function, Tool, ToolChoice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LAST_WORDS = 32  # last tokens of a prompt that show whether it begins thoughts


class ChatRequest(ApiRequest):
    """Request of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True

    # Options of the chat template.
    add_generation_prompt: bool | None = None  # by default true, unless an answer is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Text | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: set logprobs to true", param="top_logprobs")
        names = [tool.function.name for tool in self.tools]
        if twice := {name for name in names if names.count(name) > 1}:
            raise wrong("tools", f"several have the name {min(twice)}")
        chosen = self.tool_choice.function
        if chosen is not None and chosen.name not in names:
            raise wrong("tool_choice", f"there is no {chosen.name} among the tools")
        if self.tool_choice.type == "required" and not names:
            raise wrong("tool_choice", "there are no tools to call")
        if self.continue_final_message:
            self._check_begun()
        known = {call.id for message in self.messages for call in message.tool_calls}
        for index, message in enumerate(self.messages):
            if message.tool_call_id is not None and message.tool_call_id not in known:
                raise wrong(f"messages.{index}.tool_call_id", f"there is no call {message.tool_call_id}")
        return self

    def _check_begun(self) -> None:
        """Raises ApiError unless the last message can begin the answer."""
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            reason = "only words of the role assistant can be continued: leave continue_final_message out"
            raise wrong(f"messages.{len(self.messages) - 1}", reason)
        if self.add_generation_prompt:
            reason = "no turn begins where continue_final_message continues one: set one of the two to false"
            raise wrong("add_generation_prompt", reason)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        silent = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {**effort, **silent, **self.chat_template_kwargs}

    @property
    def has_grammar(self) -> bool:
        return super().has_grammar or (bool(self.tools) and self.tool_choice.type != "none")

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def needs_call_format(self) -> bool:
        return bool(self.functions) or any(message.tool_calls for message in self.messages)

    @property
    def functions(self) -> dict[str, Function]:
        known = {tool.function.name: tool.function for tool in self.tools}
        if self.tool_choice.function is not None:
            return {name: known[name] for name in [self.tool_choice.function.name]}
        return {} if self.tool_choice.type == "none" else known

    def encode(
        self, tokenizer: "PreTrainedTokenizerBase", calls: ToolCallFormat | None, check: Callable[[str], object]
    ) -> list[list[int]]:
        names = {call.id: call.function.name for message in self.messages for call in message.tool_calls}
        messages = [message.shown(names, calls is not None and calls.quoted) for message in self.messages]
        tools = [tool.shown() for tool in self.tools] if self.functions else []
        others = {"messages", *signature(tokenizer.apply_chat_template).parameters}
        for name in sorted(others & self.chat_template_kwargs.keys()):
            where = f"chat_template_kwargs.{name}"
            raise ApiError(400, f"{where} is no variable of chat templates: leave it out", param=where)
        prompt = encode(
            tokenizer,
            messages,
            raw=False,
            name="the conversation",
            tools=tools,
            turn=self.add_generation_prompt is not False,
            begun=self.continue_final_message,
            variables=self.variables,
            check=check,
        )
        return [prompt]

    def reasoning_format(
        self, reasoning: ReasoningFormat, prompt: list[int], token_decoder: TokenDecoder
    ) -> ReasoningFormat | None:
        message = self.messages[-1].text if self.continue_final_message else ""
        return reasoning.for_prompt(token_decoder.text(prompt[-_LAST_WORDS:]), message)

    def grammar(self, calls: ToolCallFormat | None, reasoning: ReasoningFormat | None) -> Grammar | None:
        answer, schema = self.response_format.grammar, self.response_format.content
        if self.functions:
            assert calls is not None
            text = self._calling(calls if reasoning is None else calls.without(reasoning.opening, reasoning.closing))
        elif schema is not None and reasoning is not None:
            text = f"start: %json {embedded(schema)}"
        else:
            return answer
        # Free words may be cut anywhere; calls that are required and JSON must be complete.
        bounded = not self.functions or self.tool_choice.type != "auto" or schema is not None
        return Grammar.lark(text if reasoning is None else reasoning.grammar(text), bounded=bounded)

    def _calling(self, calls: ToolCallFormat) -> str:
        """Builds the grammar of an answer that may call tools, in llguidance's dialect of Lark."""
        arguments = {
            tool.function.name: tool.function.arguments(f"tools.{index}.function.parameters")
            for index, tool in enumerate(self.tools)
        }
        try:
            return calls.grammar(
                {name: arguments[name] for name in self.functions},
                required=self.tool_choice.type != "auto",
                parallel=self.parallel_tool_calls,
                answer=self.response_format.content,
            )
        except ValueError as error:
            raise wrong("response_format", str(error), "unsupported") from error


__all__ = ["ChatRequest"]
