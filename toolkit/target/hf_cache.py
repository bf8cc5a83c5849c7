"""The cache that a model of transformers keeps for itself, under its name since transformers 5.24 and before."""

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel
    from transformers.utils.generic import ModelOutput

CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(model: "PreTrainedModel") -> str:
    """The name under which a model's ``forward`` takes its cache: remote code may keep to the older one."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def returned_cache(outputs: "ModelOutput") -> "Cache | None":
    """The cache among a model's outputs, if it returned one."""
    return next((outputs[name] for name in CACHE_NAMES if name in outputs.keys()), None)  # noqa: SIM118
