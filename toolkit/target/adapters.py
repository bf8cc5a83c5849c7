"""Adapters that hang on linears, as PEFT has them: LoRA and its kin."""

import copy
from typing import Any

from torch import nn

from arbordraft.target.file_blocks import in_memory
from arbordraft.target.probing import TOLERANCE, Unrecognised, distance, noise, rows_of, tried


def unwrapped(model: Any) -> Any:
    """A model without the wrapper that PEFT has put around it; its layers keep their adapters.

    Raises:
        ValueError: if the wrapper computes something itself, as with prompts that were learned.
    """
    if not hasattr(model, "get_base_model"):
        return model
    if learned := [name for name, config in model.peft_config.items() if config.is_prompt_learning]:
        raise ValueError(
            f"{', '.join(learned)}: prompts that PEFT learned put positions before each text that no token stands for; "
            "only adapters that hang on layers can be decoded with"
        )
    return model.get_base_model()


def has_adapters(module: nn.Module | None) -> bool:
    """Whether a module is a layer with adapters that can be merged into it."""
    return hasattr(module, "base_layer") and hasattr(module, "merge")


def merged(module: Any) -> nn.Module:
    """The linear that a layer amounts to together with its active adapters; the layer itself stays as it is.

    Sums are taken in float32 and rounded to the layer's type once.

    Raises:
        Unrecognised: if that is no linear.
    """
    wide: Any = copy.deepcopy(module).float()
    x = noise(3, module.in_features)
    expected = tried(wide, x)
    try:
        linear = wide.get_base_layer()
        linear.weight = nn.Parameter(in_memory(linear.weight), requires_grad=False)  # nothing is added to a file
        if not (wide.merged or wide.disable_adapters):
            wide.merge()
    except Exception as reason:  # some adapters cannot be merged, and each kind says so in its own way
        raise Unrecognised(f"{type(module).__name__} cannot be merged: {reason}") from reason
    if rows_of(linear) is None or expected is None or not distance(linear(x), expected) < TOLERANCE:
        raise Unrecognised(f"{type(module).__name__} with its adapters is no linear")
    return linear.to(module.weight.dtype).requires_grad_(False)


__all__ = ["has_adapters", "merged", "unwrapped"]
