"""Requests of /v1/completions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from arbordraft.decoding.text import encode
from arbordraft.serving.api_request import ApiRequest
from arbordraft.serving.calls import ToolCallFormat
from arbordraft.serving.errors import wrong
from arbordraft.serving.fields import encodable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_ANSWERS = 2048  # answers to one request with a list of prompts


def _each(prompt: Any) -> Any:
    """Returns the list of prompts; wraps a single prompt in a list."""
    several = isinstance(prompt, list) and prompt and all(isinstance(one, str | list) for one in prompt)
    prompts = prompt if several else [prompt]
    for number, one in enumerate(prompts):
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(token) is int for token in one)):
            raise ValueError("a prompt is a text or a list of token ids")
        if several and not one:
            raise ValueError(f"entry {number} is empty: there is nothing to go on from")
        encodable(one)
    return prompts


def _counted(logprobs: Any) -> Any:
    """Returns the number of alternatives; ``None`` for ``false``. 0 asks for the answer's own tokens only."""
    if logprobs is True:
        raise ValueError("it is the number of alternatives, 0 to 20")
    return None if logprobs is False else logprobs


class CompletionRequest(ApiRequest):
    """Request of /v1/completions; prompts are texts or token ids."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_each)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_counted)] = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _asking(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise wrong("max_tokens", "0 needs echo: set echo to true, or max_tokens to 1 or more")
        if self.count > _MOST_ANSWERS:
            reason = f"{len(self.prompt)} prompts with {self.n} answers each, at most {_MOST_ANSWERS} answers in all"
            raise wrong("prompt", f"{reason}: send several requests")
        return self

    @property
    def count(self) -> int:
        return self.n * len(self.prompt)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.echo and (self.logprobs is not None or self.max_tokens == 0):
            return self.logprobs or 0
        return None

    def encode(
        self, tokenizer: "PreTrainedTokenizerBase", calls: ToolCallFormat | None, check: Callable[[str], object]
    ) -> list[list[int]]:
        return [
            encode(tokenizer, [{"role": "user", "content": prompt}], raw=True, name="the prompt", check=check)
            if isinstance(prompt, str)
            else prompt
            for prompt in self.prompt
        ]


__all__ = ["CompletionRequest"]
