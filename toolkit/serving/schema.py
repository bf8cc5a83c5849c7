"""What clients may ask: OpenAI's fields and some of ours; all others are refused by their names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, PlainValidator, model_validator

from arbordraft.grammars import Grammar
from arbordraft.requests import Request
from arbordraft.serving.calls import CallFormat, embedded
from arbordraft.serving.errors import ApiError
from arbordraft.serving.fields import REQUEST_HINTS, REQUEST_NOTHING, STREAM_HINTS, Fields, Text, spelt
from arbordraft.serving.messages import Message
from arbordraft.serving.structure import Function, ResponseFormat, Tool, ToolChoice
from arbordraft.serving.thinking import Thinking
from arbordraft.spelling import Spelling
from arbordraft.texts import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields that an engine's request has under the same names.
_SETTINGS = (
    *("n", "seed", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_MOST_ENDS = 1024
_MOST_ANSWERS = 2048  # to a list of prompts
_LAST_WORDS = 32  # tokens of a prompt, which show whether it begins thoughts
_MOST_STOPS, _LONGEST_STOP = 16, 4096  # and characters of each
# What cannot be had where a grammar holds the answer.
_NOT_WITH_FORMS = {
    "ignore_eos": "with tools and JSON the model must be able to end",
    "min_tokens": "tools and JSON say where an answer ends",
    "stop_token_ids": "tools and JSON say where an answer ends",
    "continue_final_message": "with tools and JSON an answer cannot be begun by you",
}


class StreamOptions(Fields):
    """What a stream holds besides the answers.

    ``include_usage``: what it has cost, in a last chunk; ``continuous_usage_stats``: so far, in every chunk.
    """

    hints: ClassVar = STREAM_HINTS
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Extension(Fields):
    """What only this server can tell.

    ``steps``: what was drafted in every step, and what became of it.
    """

    steps: bool = False


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _short(stop: str) -> str:
    if len(stop) > _LONGEST_STOP:
        raise ValueError(f"at most {_LONGEST_STOP} characters, got {len(stop)}")
    return stop


class Question(Fields, ABC):
    """What both endpoints take; for ranges, and what is left open, see :class:`~arbordraft.requests.Request`."""

    hints: ClassVar = REQUEST_HINTS
    nothing: ClassVar = REQUEST_NOTHING
    model: Text | None = None
    n: int = Field(1, ge=1, le=128)
    best_of: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    seed: int | None = None
    stop: Annotated[
        Sequence[Annotated[Text, AfterValidator(_short)]] | None,
        BeforeValidator(_listed),
        Field(max_length=_MOST_STOPS),
    ] = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = Field(default_factory=dict, max_length=1024)
    max_tokens: int | None = Field(None, ge=1)
    # Not OpenAI's, but other servers have them under these names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[Sequence[NonNegativeInt], Field(max_length=_MOST_ENDS)] = ()
    arbordraft: Extension = Extension()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_tokens and self.stop:
            raise ApiError(400, "min_tokens: a stop ends an answer: ask for one of the two", param="min_tokens")
        if self.best_of not in (None, self.n):
            reason = f"all answers that are made are returned: leave it out, or set it to n, {self.n}"
            raise ApiError(400, f"best_of: {reason}", param="best_of")
        return self

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

    @property
    def count(self) -> int:
        """How many answers are wanted."""
        return self.n

    @property
    def scored(self) -> int | None:
        """As :attr:`others`, for the tokens of the prompt."""
        return None

    @abstractmethod
    def encode(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        calls: CallFormat | None,
        check: Callable[[str], object] = lambda text: None,
    ) -> list[list[int]]:
        """The token ids to continue, prompt by prompt; each is answered ``n`` times.

        Args:
            tokenizer: of the model.
            calls: how it writes calls, if that has to be known.
            check: sees the text before it is tokenised, and may refuse it.

        Raises:
            ValueError: if there are none, or the chat template refuses the messages.
        """

    def thoughts(self, thinking: Thinking, prompt: list[int], spelling: Spelling) -> Thinking | None:
        """How the answer's thoughts are told from it; ``None`` if they are not.

        Args:
            thinking: how the model marks thoughts.
            prompt: token ids.
            spelling: of these.
        """
        return None

    @property
    def checks(self) -> Grammar | None:
        """What finished answers are checked by; ``None`` if their grammar holds all that is asked."""
        return None

    def grammar(self, calls: CallFormat | None, thinking: Thinking | None) -> Grammar | None:
        """What the answer may be, if not any text.

        Args:
            calls: how the model writes calls, if that has to be known.
            thinking: how the answer's thoughts are marked, if it may have some.

        Raises:
            ApiError: if a schema is none, or cannot be enforced.
        """
        return None

    def request(
        self, prompt: list[int], most: int, calls: CallFormat | None, thinking: Thinking | None, temperature: float
    ) -> Request:
        """The same for an engine.

        Args:
            prompt: token ids.
            most: longest answer.
            calls: how the model writes calls, if that has to be known.
            thinking: how the answer's thoughts are marked, if it may have some.
            temperature: of those who name none.

        Raises:
            ValueError: for values out of range.
            ApiError: as :meth:`grammar`.
        """
        if (self.min_tokens or 0) > most:
            reason = f"at most as many as the answer may have, {most}, got {self.min_tokens}"
            raise ApiError(400, f"min_tokens: {reason}", param="min_tokens")
        settings = {name: getattr(self, name) for name in _SETTINGS}
        if self.temperature is None:
            settings["temperature"] = temperature
        return Request(
            prompt=prompt,
            max_new_tokens=most,
            logprobs=self.others,
            prompt_logprobs=self.scored,
            ends=() if self.ignore_eos else None,
            min_new_tokens=self.min_tokens,
            grammar=self.grammar(calls, thinking),
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

    # How the chat template writes the prompt.
    add_generation_prompt: bool | None = None  # by default, unless an answer is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: Text | None = None

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
        if self.functions or self.response_format.content is not None:
            for name, reason in _NOT_WITH_FORMS.items():
                if getattr(self, name):
                    raise ApiError(400, f"{name}: {reason}", param=name)
        if self.continue_final_message:
            self._check_begun()
        known = {call.id for said in self.messages for call in said.tool_calls}
        for index, said in enumerate(self.messages):
            if said.tool_call_id is not None and said.tool_call_id not in known:
                where = f"messages.{index}.tool_call_id"
                raise ApiError(400, f"{where}: there is no call {said.tool_call_id}", param=where)
        return self

    def _check_begun(self) -> None:
        """Whether the last message is the beginning of an answer."""
        last, where = self.messages[-1], f"messages.{len(self.messages) - 1}"
        if last.role != "assistant" or last.tool_calls:
            reason = "only words of the role assistant can be continued: leave continue_final_message out"
            raise ApiError(400, f"{where}: {reason}", param=where)
        if self.add_generation_prompt:
            reason = "no turn begins where continue_final_message continues one: set one of the two to false"
            raise ApiError(400, f"add_generation_prompt: {reason}", param="add_generation_prompt")

    @property
    def variables(self) -> dict[str, Any]:
        """What the chat template is told besides the messages."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        silent = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return {**effort, **silent, **self.chat_template_kwargs}

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

    def encode(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        calls: CallFormat | None,
        check: Callable[[str], object] = lambda text: None,
    ) -> list[list[int]]:
        names = {call.id: call.function.name for said in self.messages for call in said.tool_calls}
        messages = [said.shown(names, calls is not None and calls.quoted) for said in self.messages]
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

    def thoughts(self, thinking: Thinking, prompt: list[int], spelling: Spelling) -> Thinking | None:
        said = self.messages[-1].text if self.continue_final_message else ""
        return thinking.behind(spelling.text(prompt[-_LAST_WORDS:]), said)

    @property
    def checks(self) -> Grammar | None:
        form = self.response_format.json_schema
        answer = None if form is None or form.strict else self.response_format.grammar
        return answer if answer is not None and answer.unheld else None

    def grammar(self, calls: CallFormat | None, thinking: Thinking | None) -> Grammar | None:
        answer, schema = self.response_format.grammar, self.response_format.content
        if self.functions:
            assert calls is not None
            text = self._calling(calls if thinking is None else calls.without(thinking.opening, thinking.closing))
        elif schema is not None and thinking is not None:
            text = f"start: %json {embedded(schema)}"
        else:
            return answer
        return Grammar.lark(text if thinking is None else thinking.grammar(text))

    def _calling(self, calls: CallFormat) -> str:
        """The grammar of an answer that may call, in llguidance's dialect of Lark."""
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
            raise ApiError(400, f"response_format: {error}", param="response_format", code="unsupported") from error


def _each(prompt: Any) -> Any:
    """The prompts: one, or a list of them."""
    several = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    prompts = prompt if several else [prompt]
    for number, one in enumerate(prompts):
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise ValueError("a prompt is a text or a list of token ids")
        if several and not one:
            raise ValueError(f"entry {number} is empty: there is nothing to go on from")
        spelt(one)
    return prompts


def _counted(logprobs: Any) -> Any:
    """How many: 0 brings those of the answer alone, unlike ``false``."""
    if logprobs is True:
        raise ValueError("it is the number of alternatives, 0 to 20")
    return None if logprobs is False else logprobs


class CompletionQuestion(Question):
    """What /v1/completions takes: texts, or their token ids."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_each)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_counted)] = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _asking(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 is for prompts that echo shows: set it to 1 or more", param="max_tokens")
        if self.count > _MOST_ANSWERS:
            reason = f"{len(self.prompt)} prompts with {self.n} answers each, at most {_MOST_ANSWERS} answers in all"
            raise ApiError(400, f"prompt: {reason}: send several requests", param="prompt")
        return self

    @property
    def count(self) -> int:
        return self.n * len(self.prompt)

    @property
    def others(self) -> int | None:
        return self.logprobs

    @property
    def scored(self) -> int | None:
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            return self.logprobs or 0
        return None

    def encode(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        calls: CallFormat | None,
        check: Callable[[str], object] = lambda text: None,
    ) -> list[list[int]]:
        return [
            encode(tokenizer, [{"role": "user", "content": prompt}], raw=True, name="the prompt", check=check)
            if isinstance(prompt, str)
            else prompt
            for prompt in self.prompt
        ]
