"""Inspects parts of a user's model and runs them on noise to identify their computation."""

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from arbordraft.target.model_view import ModelView, active_hooks
from arbordraft.target.prepacked.gguf_blocks import FileBlocks, in_memory

TOLERANCE = 1e-4  # relative to the output of a part, in float32


class Unrecognised(Exception):
    """A module is not of a kind that a kernel computes; the message says why."""


def noise(*sizes: int) -> Tensor:
    """Returns normal noise, the same at every call."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def tried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | None:
    """Returns the output of a part of a user's model; ``None`` if it rejects the arguments or returns no tensor."""
    try:
        with torch.no_grad():
            output = function(*args, **kwargs)
    except Exception:  # any error only means that the part is of another kind
        return None
    return output if isinstance(output, Tensor) else None


def distance(actual: Tensor, expected: Tensor) -> float:
    """Returns the root mean square distance, relative to ``expected``."""
    return ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def hooked(module: nn.Module) -> bool:
    """Returns whether the module or a part has hooks or a replaced forward, which a kernel would not call."""
    return any(own_hooks(part) or "forward" in vars(part) for part in module.modules())


def own_hooks(module: nn.Module) -> bool:
    """Returns whether the module itself has hooks."""
    return bool(active_hooks(module._forward_hooks) or active_hooks(module._forward_pre_hooks))


def is_gated(norm: nn.Module) -> bool:
    """Returns whether a norm may multiply its output by a gate, as those of recurrent layers do."""
    return "gate" in inspect.signature(type(norm).forward).parameters


def parts_named(module: nn.Module, kinds: Any) -> Any:
    """Returns the first of ``kinds``, names of input parts and of an output part, that the module has in full."""
    return next((kind for kind in kinds if all(hasattr(module, name) for name in (*kind[0], kind[1]))), None)


def plain(tensor: Any) -> TypeGuard[Tensor]:
    """Returns whether a tensor stores its numbers in memory or a file; subclasses of quantisers compute them."""
    known = type(tensor) in (Tensor, nn.Parameter, FileBlocks)
    return known and tensor.layout is torch.strided and not tensor.is_quantized


def rows_of(module: nn.Module | None) -> Tensor | None:
    """Returns the ``[O, I]`` weights of a plain linear, stored as such or transposed; ``None`` for other modules."""
    from transformers.pytorch_utils import Conv1D

    if module is None or type(module) not in (nn.Linear, Conv1D) or not all(map(plain, module.parameters())):
        return None
    weight = module._parameters.get("weight")  # another place means that something computes it
    return weight.T if weight is not None and type(module) is Conv1D else weight


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear with weights of any form, with or without adapters around it."""
    if isinstance(base := getattr(module, "base_layer", None), nn.Module):
        return is_linear(base)
    sized = isinstance(getattr(module, "in_features", None), int) and not any(map(is_linear, module.children()))
    return sized or rows_of(module) is not None


def kind_of(module: Any) -> str:
    """Names a module that is no plain linear, by its class and by that of its weights if these are a subclass."""
    weight = getattr(module, "weight", None)
    odd = isinstance(weight, Tensor) and not plain(weight)
    return type(module).__name__ + (f" with weights of {type(weight).__name__}" if odd else "")


def vocabulary(model: Any) -> int:
    """Returns the number of tokens for which a causal LM has logits."""
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    return int(weight.shape[0] if plain(weight) else head.out_features)  # quantised weights may be packed


def widened(module: nn.Module) -> Any:
    """Returns a float32 copy of a part of a model for tests.

    Its modules are new, and so are tensors of other types. All else is shared, float32 tensors included.

    Raises:
        Unrecognised: if its tensors are not torch's own kinds.
    """
    if not all(map(plain, (*module.parameters(), *module.buffers()))):
        raise Unrecognised(f"{type(module).__name__} has tensors of another kind")
    copy = ModelView(module).model
    for part in copy.modules():
        for table in ("_parameters", "_buffers"):
            vars(part)[table] = {name: _wide(tensor) for name, tensor in vars(part)[table].items()}
    return copy


def _wide(tensor: Tensor | None) -> Tensor | None:
    return in_memory(tensor).float() if tensor is not None and tensor.is_floating_point() else tensor
