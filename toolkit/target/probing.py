"""How parts of somebody's model are looked at, and tried on noise, to find out what they compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.target.view import heard

TOLERANCE = 1e-4  # relative to what a part computes, in float32


class Unrecognised(Exception):
    """A module is not of the kind that a kernel computes; says why."""


def noise(*sizes: int) -> Tensor:
    """The same at every call."""
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))


def tried(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor | None:
    """What a part of somebody's model returns; ``None`` if it does not take such arguments or returns no tensor."""
    try:
        with torch.no_grad():
            output = function(*args, **kwargs)
    except Exception:  # it could be any, and only means that this part is of another kind
        return None
    return output if isinstance(output, Tensor) else None


def distance(actual: Tensor, expected: Tensor) -> float:
    """Relative, in the mean square."""
    return ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to the module or a part of it, or has replaced a forward: nobody would be called."""
    return any(
        heard(part._forward_hooks) or heard(part._forward_pre_hooks) or "forward" in vars(part)
        for part in module.modules()
    )


def parts_named(module: nn.Module, kinds: Any) -> Any:
    """The first of the kinds, names of readers and the name of what leads back, of which a module has all parts."""
    return next((kind for kind in kinds if all(hasattr(module, name) for name in (*kind[0], kind[1]))), None)


def rows_of(module: nn.Module | None) -> Tensor | None:
    """The ``[O, I]`` weights of a plain linear, be they kept like that or transposed; ``None`` for other modules."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return module.weight
    return module.weight.T if type(module) is Conv1D else None
