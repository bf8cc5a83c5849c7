"""Fields of requests: what is unknown is refused by its name."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from arbordraft.serving.errors import ApiError

_LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key", "metadata"})  # do not change the answer
# Values of what is not supported that ask for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}


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


__all__ = ["Fields", "Text"]
