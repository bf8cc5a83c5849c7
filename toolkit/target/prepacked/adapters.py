"""Checks whether adapters of PEFT act within layers, and merges them into copies of linears."""

import copy
import sys
from typing import Any

from torch import nn

from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.prepacked.gguf_blocks import in_memory
from arbordraft.target.prepacked.probing import TOLERANCE, Unrecognised, distance, noise, rows_of, tried

# Kinds whose output rows depend on more than the same row of a layer's input, by PEFT's name of the type.
_OUTSIDE = {
    "LILY": "its routers average over all tokens of a forward, so that a draft would change the tokens before it",
    "POLY": "PEFT's own forward hands the task_ids of each call to its layers",
    "SHADOW": "its second network keeps a cache of its own",
    "XLORA": "its classifier runs the whole model once more before each forward",
}


def unwrapped(model: Any) -> Any:
    """Returns a model without its PEFT wrapper; its layers keep their adapters.

    Raises:
        UnsupportedModel: if the wrapper computes something itself, such as learned prompts.
    """
    peft = sys.modules.get("peft")  # a wrapped model implies that it is imported
    if peft is None or not isinstance(model, (peft.PeftModel, peft.PeftMixedModel)):
        return model
    for name, config in model.peft_config.items():
        if config.is_prompt_learning:
            reason = "prompts that PEFT learned add positions without tokens before each text"
            raise _refused(name, config, reason)
        if _type_of(config) == "XLORA":  # its layers know LoRA only
            raise _refused(name, config, _OUTSIDE["XLORA"])
    return model.base_model.model


def check_adapters(model: Any) -> None:
    """Raises UnsupportedModel if an active adapter does not act within its layers, row by row.

    Args:
        model: a model of transformers, with or without adapters.
    """
    configs = getattr(model, "peft_config", None) or {}
    layers = [part for part in model.modules() if configs and not getattr(part, "disable_adapters", True)]
    active = {name for layer in layers for name in layer.active_adapters}
    for name, config in configs.items():
        if name not in active:
            continue
        if getattr(config, "alora_invocation_tokens", None):
            reason = "PEFT's own generate finds where aLoRA begins to act, by alora_invocation_tokens"
            raise _refused(name, config, reason)
        if getattr(config, "sample_at_inference", False):
            raise _refused(name, config, "sample_at_inference=True adds other noise in every forward")
        if (kind := _type_of(config)) in _OUTSIDE:
            raise _refused(name, config, _OUTSIDE[kind])
    for layer in layers:
        for hook in layer._forward_pre_hooks.values():
            if names := getattr(hook, "keywords", {}).get("adapter_names"):
                raise UnsupportedModel(
                    f"adapter_names={names} chooses an adapter for each text of a batch: choose one for all of them, "
                    "model.set_adapter(name), and decode the others in another batch"
                )


def _refused(name: str, config: Any, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"PEFT's adapter {name!r} ({_type_of(config)}) does not act within layers, row by row: {reason}. Decode with "
        "PEFT's own generate, with an adapter that does, such as LoRA, or without: model.disable_adapter_layers(), or "
        "model.get_base_model() where prompts were learned"
    )


def _type_of(config: Any) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def has_adapters(module: nn.Module | None) -> bool:
    """Returns whether a module is a layer with adapters that can be merged into it."""
    return hasattr(module, "base_layer") and hasattr(module, "merge")


def merged(module: Any) -> nn.Module:
    """Returns a new linear equal to a layer with its active adapters; the layer itself stays as it is.

    Sums are taken in float32 and rounded to the layer's type once.

    Raises:
        Unrecognised: if the layer with its adapters is no linear.
    """
    x = noise(3, module.in_features)
    try:
        wide: Any = copy.deepcopy(module).float()
        expected = tried(wide, x)
        linear = wide.get_base_layer()
        linear.weight = nn.Parameter(in_memory(linear.weight), requires_grad=False)  # a file cannot be written to
        if not (wide.merged or wide.disable_adapters):
            wide.merge()
    except Exception as reason:  # some adapters cannot be merged, and each kind says so in its own way
        raise Unrecognised(f"{type(module).__name__} cannot be merged: {reason}") from reason
    if rows_of(linear) is None or expected is None or not distance(linear(x), expected) < TOLERANCE:
        raise Unrecognised(f"{type(module).__name__} with its adapters is no linear")
    return linear.to(module.weight.dtype).requires_grad_(False)


__all__ = ["check_adapters", "has_adapters", "merged", "unwrapped"]
