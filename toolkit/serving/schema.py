"""What clients may ask: OpenAI's fields and some of ours; all others are refused by their names."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from arbordraft.requests import Request
from arbordraft.serving.errors import ApiError
from arbordraft.texts import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})  # do not change the answer
# Values of what is not supported that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_calls": ([],),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
# Fields that an engine's request has under the same names.
_SETTINGS = (
    *("n", "seed", "stop", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def _spelt(text: str) -> str:
    if not text.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("half of a surrogate pair is no text")
    return text


Text = Annotated[str, AfterValidator(_spelt)]


class Fields(BaseModel):
    """Fields whose ``null`` is as good as nothing; what else is given is an error."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _without_others(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if name not in _LABELS and value not in _NOTHING.get(name, ()):
                raise ApiError(400, f"{name} is not supported: leave it out", param=name, code="unsupported")
        return self


class StreamOptions(Fields):
    """What a stream holds besides the answers."""

    include_usage: bool = False


class Extension(Fields):
    """What only this server can tell.

    ``steps``: what was drafted in every step, and what became of it.
    """

    steps: bool = False


class Message(Fields):
    """What somebody said; several parts of text are joined by line breaks."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in content}
        if others := kinds - {"text"}:
            raise ValueError(f"only parts of type text can be read, got {', '.join(map(str, others))}")
        return "\n".join(str(part.get("text", "")) for part in content)


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

    @abstractmethod
    def encode(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        """The token ids to continue.

        Raises:
            ValueError: if there are none, or the chat template refuses the messages.
        """

    def request(self, prompt: list[int], most: int) -> Request:
        """The same for an engine.

        Raises:
            ValueError: for values out of range.
        """
        settings = {name: getattr(self, name) for name in _SETTINGS}
        ends = () if self.ignore_eos else None
        return Request(prompt=prompt, max_new_tokens=most, logprobs=self.others, ends=ends, **settings)


class ChatQuestion(Question):
    """What /v1/chat/completions takes."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs is for logprobs: set that to true", param="top_logprobs")
        return self

    @property
    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def others(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    def encode(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        roles = {"developer": "system"}  # its newer name, which templates do not know
        messages = [{"role": roles.get(said.role, said.role), "content": said.content} for said in self.messages]
        return encode(tokenizer, messages, raw=False, name="the conversation")


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

    def encode(self, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
        if not isinstance(self.prompt, str):
            return list(self.prompt)  # type: ignore[arg-type]
        return encode(tokenizer, [{"role": "user", "content": self.prompt}], raw=True, name="the prompt")
