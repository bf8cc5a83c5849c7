"""Access to transformers' own KV cache, whose argument has another name since transformers 5.24."""

import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel
    from transformers.utils.generic import ModelOutput

CACHE_NAMES = ("cache", "past_key_values")


def cache_argument(model: "PreTrainedModel") -> str:
    """Returns the name under which a model's ``forward`` takes its cache: remote code may keep the older one."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def returned_cache(outputs: "ModelOutput") -> "Cache | None":
    """Returns the cache among a model's outputs, or ``None`` if it returned none."""
    return next((outputs[name] for name in CACHE_NAMES if name in outputs.keys()), None)  # noqa: SIM118


def empty_cache(model: "PreTrainedModel") -> "Cache":
    """Returns a cache for a model's layers."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def holds_tokens(cache: "Cache") -> bool:
    """Returns whether a cache holds keys or states of tokens; caches without attention layers have no length."""
    layers = getattr(cache, "layers", None)
    if layers is None:
        return cache.get_seq_length() > 0
    return any(
        any(getattr(layer, "has_previous_state", {}).values())
        or (hasattr(layer, "get_seq_length") and layer.get_seq_length() > 0)
        for layer in layers
    )
