"""How parts of somebody's model are tried on noise, to find out what they compute."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.kernels.prepacked_linear import ACTIVATIONS
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


def activation_of(mlp: nn.Module) -> str:
    """The name of an MLP's activation.

    Raises:
        Unrecognised: if it is none that the kernels know.
    """
    function = getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))
    # Far out too: some activations are others with a bound.
    points = torch.cat([torch.linspace(-8, 8, 129), torch.tensor([-1e4, -100.0, -20.0, 20.0, 100.0, 1e4])])
    curve = None if function is None else tried(function, points)
    for name, known in ACTIVATIONS.items():
        if curve is not None and torch.allclose(known(points), curve, atol=1e-6):
            return name
    raise Unrecognised(f"the activation of {type(mlp).__name__} is unknown")


def hooked(module: nn.Module) -> bool:
    """Whether somebody listens to the module or a part of it, or has replaced a forward: nobody would be called."""
    return any(
        heard(part._forward_hooks) or heard(part._forward_pre_hooks) or "forward" in vars(part)
        for part in module.modules()
    )
