"""Request fields that chats and completions share; unknown fields are refused by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, NonNegativeInt, StrictBool, StrictInt, model_validator

from arbordraft.decoding.detokenizing import TokenDecoder
from arbordraft.decoding.requests import Request
from arbordraft.grammars import Grammar
from arbordraft.serving.calls import ToolCallFormat
from arbordraft.serving.errors import wrong
from arbordraft.serving.fields import PART_HINTS, REQUEST_HINTS, REQUEST_NOTHING, STREAM_HINTS, Fields, Text
from arbordraft.serving.messages import parts_of
from arbordraft.serving.reasoning import ReasoningFormat
from arbordraft.serving.structure import Function, ResponseFormat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Fields that an engine's request has under the same names.
_SETTINGS = (
    *("n", "seed", "stop", "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
# Fields that conflict with a grammar, and the reasons.
_NOT_WITH_FORMS = {
    "ignore_eos": "with tools and JSON the model must be able to end",
    "min_tokens": "tools and JSON say where an answer ends",
    "stop_token_ids": "tools and JSON say where an answer ends",
    "continue_final_message": "with tools and JSON a request cannot begin the answer",
    "echo": "the prompt before the answer would make its text no JSON",
}
_MOST_ENDS = 1024
_MOST_STOPS, _LONGEST_STOP = 16, 4096  # number, and characters of each


class StreamOptions(Fields):
    """Options of a stream.

    ``include_usage`` adds a last chunk with token counts; ``continuous_usage_stats`` adds the counts so far to every
    chunk.
    """

    hints: ClassVar = STREAM_HINTS
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculative(Fields):
    """Bound on the drafts of a request.

    ``enabled`` false drafts nothing; ``max_drafts`` is the greatest number of drafts per step.
    """

    enabled: StrictBool = True
    max_drafts: StrictInt | None = Field(None, ge=0)

    @property
    def most(self) -> int | None:
        """Most drafts per step; ``None`` for any number."""
        return self.max_drafts if self.enabled else 0


class PredictionPart(Fields):
    """Part of a prediction."""

    hints: ClassVar = PART_HINTS
    type: Literal["text"]
    text: Text


class Prediction(Fields):
    """Text that the answer is expected to contain, such as a file before it is edited."""

    type: Literal["content"]
    content: Annotated[Sequence[PredictionPart], BeforeValidator(parts_of)]

    @property
    def text(self) -> str:
        """The predicted text; parts are joined by line breaks, as those of messages are."""
        return "\n".join(part.text for part in self.content)


class Extension(Fields):
    """Options that only this server has.

    ``steps`` returns the drafts and the verdict of every step.
    """

    steps: bool = False


def _listed(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


def _short(stop: str) -> str:
    if len(stop) > _LONGEST_STOP:
        raise ValueError(f"at most {_LONGEST_STOP} characters, got {len(stop)}")
    return stop


class ApiRequest(Fields, ABC):
    """Fields of chats and completions; :class:`~arbordraft.decoding.requests.Request` states ranges and defaults."""

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
    response_format: ResponseFormat = ResponseFormat()
    prediction: Prediction | None = None
    # Not part of OpenAI's protocol; other servers have them under these names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: int | None = Field(None, ge=0)
    stop_token_ids: Annotated[Sequence[NonNegativeInt], Field(max_length=_MOST_ENDS)] = ()
    speculative: Speculative = Speculative()
    arbordraft: Extension = Extension()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.min_tokens and self.stop:
            raise wrong("min_tokens", "it cannot be combined with stop: leave one of the two out")
        if self.best_of not in (None, self.n):
            reason = f"all answers that are made are returned: leave it out, or set it to n, {self.n}"
            raise wrong("best_of", reason)
        for name, reason in _NOT_WITH_FORMS.items() if self.has_grammar else ():
            if getattr(self, name, None):
                raise wrong(name, reason)
        return self

    @property
    def has_grammar(self) -> bool:
        """Whether the answer follows a grammar."""
        return self.response_format.content is not None

    @property
    def max_new_tokens(self) -> int | None:
        """Longest answer in tokens; ``None`` if the client sets no limit."""
        return self.max_tokens

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token; ``None`` for no log-probabilities at all."""

    @property
    def needs_call_format(self) -> bool:
        """Whether the format of the model's tool calls is needed."""
        return False

    @property
    def functions(self) -> dict[str, Function]:
        """Functions that the answer may call, by name."""
        return {}

    @property
    def count(self) -> int:
        """Number of answers."""
        return self.n

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Number of alternatives per prompt token, as :attr:`num_logprobs`."""
        return None

    @abstractmethod
    def encode(
        self, tokenizer: "PreTrainedTokenizerBase", calls: ToolCallFormat | None, check: Callable[[str], object]
    ) -> list[list[int]]:
        """Returns the token ids of each prompt; each prompt is answered ``n`` times.

        Args:
            tokenizer: tokenizer of the model.
            calls: format of the model's tool calls, if :attr:`needs_call_format`.
            check: is called with the text before it is tokenised, and may refuse it.

        Raises:
            ValueError: if there are no token ids, or the chat template refuses the messages.
        """

    def encode_prediction(self, tokenizer: "PreTrainedTokenizerBase", check: Callable[[str], object]) -> Sequence[int]:
        """Returns the token ids of the prediction, none without one; arguments as in :meth:`encode`."""
        if self.prediction is None:
            return ()
        check(text := self.prediction.text)
        tokens: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def reasoning_format(
        self, reasoning: ReasoningFormat, prompt: list[int], token_decoder: TokenDecoder
    ) -> ReasoningFormat | None:
        """Returns the marks that separate thoughts from the answer; ``None`` if they stay in it.

        Args:
            reasoning: marks of the model's thoughts.
            prompt: token ids.
            token_decoder: spelling of the tokenizer's tokens.
        """
        return None

    @property
    def checks(self) -> Grammar | None:
        """Grammar that checks finished answers; ``None`` if the grammar enforces the whole schema."""
        form = self.response_format.json_schema
        answer = None if form is None or form.strict else self.response_format.grammar
        return answer if answer is not None and answer.unenforced else None

    def grammar(self, calls: ToolCallFormat | None, reasoning: ReasoningFormat | None) -> Grammar | None:
        """Builds the grammar of the answer; ``None`` allows any text.

        Args:
            calls: format of the model's tool calls, if :attr:`needs_call_format`.
            reasoning: marks of the answer's thoughts, if it may have some.

        Raises:
            ApiError: if a schema is invalid, or cannot be enforced.
        """
        return self.response_format.grammar

    def request(
        self,
        prompt: list[int],
        max_new_tokens: int,
        calls: ToolCallFormat | None,
        reasoning: ReasoningFormat | None,
        temperature: float,
        prediction: Sequence[int],
    ) -> Request:
        """Builds the engine's request for one prompt.

        Args:
            prompt: token ids.
            max_new_tokens: longest answer, in tokens.
            calls: format of the model's tool calls, if :attr:`needs_call_format`.
            reasoning: marks of the answer's thoughts, if it may have some.
            temperature: temperature of requests that set none.
            prediction: token ids of the predicted answer.

        Raises:
            ValueError: if a value is out of range.
            ApiError: see :meth:`grammar`.
        """
        if (self.min_tokens or 0) > max_new_tokens:
            raise wrong("min_tokens", f"at most the longest answer, {max_new_tokens} tokens, got {self.min_tokens}")
        settings = {name: getattr(self, name) for name in _SETTINGS}
        if self.temperature is None:
            settings["temperature"] = temperature
        return Request(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            logprobs=self.num_logprobs,
            prompt_logprobs=self.num_prompt_logprobs,
            ends=() if self.ignore_eos else None,
            min_new_tokens=self.min_tokens,
            grammar=self.grammar(calls, reasoning),
            max_drafts=self.speculative.most,
            prediction=prediction,
            **settings,
        )


__all__ = ["ApiRequest", "Extension", "StreamOptions"]
