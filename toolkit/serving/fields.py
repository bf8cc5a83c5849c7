"""Checks request fields: ignores hints and values without effect, refuses unknown fields by name."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

# Hints of a request: they may change its cost, storage or latency, never its answer.
REQUEST_HINTS = frozenset(
    (
        *("metadata", "safety_identifier", "service_tier", "store", "user"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_prompt", "cache_salt"),
        *("priority", "request_id", "verbosity"),
    )
)
# Fields that are not supported, or have a default of their own, with their values without effect.
REQUEST_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "seed": (-1,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stream_reasoning": (True,),
    "suffix": ("",),
    "top_k": (-1,),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "web_search_options": ({},),
}
# Fields that servers and client libraries add to messages; clients send them back.
MESSAGE_HINTS = frozenset(
    (
        *("annotations", "cache_control", "parsed", "prompt_cache_breakpoint", "provider_specific_fields"),
        *("reasoning_details", "thinking_blocks"),
    )
)
MESSAGE_NOTHING: Mapping[str, tuple[Any, ...]] = {"images": ([],)}
PART_HINTS = frozenset(("annotations", "cache_control", "logprobs", "prompt_cache_breakpoint"))
CALL_HINTS = frozenset(("cache_control", "index", "parsed_arguments", "provider_specific_fields"))
TOOL_HINTS = frozenset(("cache_control",))
STREAM_HINTS = frozenset(("include_obfuscation",))


def encodable(text: Any) -> Any:
    """Returns the value; raises ValueError for a text with an unpaired surrogate."""
    if isinstance(text, str) and not text.isprintable() and any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("half of a surrogate pair is no text")
    return text


Text = Annotated[str, BeforeValidator(encodable)]


class Fields(BaseModel):
    """Base of request models: hints and values without effect count as absent, other unknown fields are refused.

    ``null`` has no effect in any field.

    Attributes:
        hints: fields that take any value and never affect the answer.
        nothing: values without effect, by field.
    """

    model_config = ConfigDict(extra="forbid")
    hints: ClassVar[frozenset[str]] = frozenset()
    nothing: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _asked(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {
            name: value
            for name, value in given.items()
            if value is not None and name not in cls.hints and value not in cls.nothing.get(name, ())
        }


__all__ = [
    *("CALL_HINTS", "MESSAGE_HINTS", "MESSAGE_NOTHING", "PART_HINTS", "REQUEST_HINTS", "REQUEST_NOTHING"),
    *("STREAM_HINTS", "TOOL_HINTS", "Fields", "Text", "encodable"),
]
