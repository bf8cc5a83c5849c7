"""Extracts linears and norms from a user's modules, and records every weight it used.

Shapes: I inputs and O outputs of a linear.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.kernels.decoder_layers import Matrix, Norm
from arbordraft.kernels.decoder_layers.norms import apply_norm_reference
from arbordraft.kernels.prepacked_linear import Allocate, pack_rows
from arbordraft.target.prepacked.adapters import has_adapters, merged
from arbordraft.target.prepacked.gguf_blocks import blocks_of, check_readable
from arbordraft.target.prepacked.probing import (
    TOLERANCE,
    Unrecognised,
    distance,
    hooked,
    is_gated,
    kind_of,
    noise,
    plain,
    rows_of,
    tried,
    widened,
)


class Linear(NamedTuple):
    """``[O, I]`` weight and ``[O]`` bias of a linear, and its module: a merged copy if it has adapters.

    Products with the weight are multiplied by ``[O]`` float32 factors, if there are any; then the bias is added.
    """

    weight: Tensor
    bias: Tensor | None
    module: Any
    factors: Tensor | None = None

    def times(self, outputs: Tensor | float, inputs: float = 1.0) -> "Linear":
        """Returns it with factors of its outputs, one or ``[O]``, and a factor of its inputs."""
        factors = torch.as_tensor(outputs, dtype=torch.float32).expand(len(self.weight))
        if inputs == 1 and bool((factors == 1).all()):
            return self
        bias = None if self.bias is None else factors * self.bias.detach()
        return self._replace(bias=bias, factors=inputs * factors)


class WeightCollector:
    """Copies weights from modules and records every tensor it used.

    Args:
        weights: bits of the matrices that it packs, see :func:`~arbordraft.kernels.prepacked_linear.pack_rows`.
            ``"file"`` keeps blocks of a file as they are and the weights of all other matrices in their own type.
        empty: allocates packed weights.
    """

    def __init__(self, weights: str | None = None, empty: Allocate = torch.empty) -> None:
        self.sources: list[Tensor] = []
        self.adapted = 0  # linears into whose copies adapters were merged
        self.weights, self._empty = weights, empty

    def take(self, others: "WeightCollector") -> None:
        """Adds the records of another collector to its own."""
        self.sources += others.sources
        self.adapted += others.adapted

    def linear(self, owner: nn.Module, name: str) -> Linear:
        """Returns a linear of ``owner`` without hooks; if it has adapters, merges them into a copy."""
        module: Any = getattr(owner, name, None)
        adapted = has_adapters(module)
        base = module.get_base_layer() if adapted else module
        if rows_of(base) is None:
            raise Unrecognised(f"{name} is {f'{type(module).__name__} around ' if adapted else ''}{kind_of(base)}")
        if hooked(module):
            raise Unrecognised(f"{name} has hooks")
        if module.weight.dtype not in (torch.float32, torch.bfloat16) or not module.weight.is_cpu:
            raise Unrecognised(f"{name} is {module.weight.dtype} on {module.weight.device}")
        for part in module.modules():
            self.remember(part)
        if adapted:
            self.adapted += 1
            module = merged(module)
        weight = rows_of(module)
        assert weight is not None
        return Linear(weight, module.bias, module)

    def linears(self, owner: nn.Module, *names: str) -> list[Linear]:
        """Returns several linears, all of them with a bias or all without."""
        linears = [self.linear(owner, name) for name in names]
        if len({linear.bias is None for linear in linears}) > 1:
            raise Unrecognised(f"only some of {', '.join(names)} have a bias")
        return linears

    def norm(self, owner: nn.Module, name: str) -> tuple[Norm, float]:
        """Returns an RMS norm or LayerNorm and its epsilon, identified by its output on noise."""
        module = getattr(owner, name)
        weight, bias = module._parameters.get("weight"), getattr(module, "bias", None)
        epsilon = next((getattr(module, key) for key in ("variance_epsilon", "eps") if hasattr(module, key)), None)
        own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        unknown = own != {id(tensor) for tensor in (weight, bias) if tensor is not None}
        if unknown or not plain(weight) or weight.ndim != 1 or epsilon is None or hooked(module) or is_gated(module):
            raise Unrecognised(f"{name} is {type(module).__name__}")
        # Small enough to reveal epsilon, and large enough to reveal a bound.
        sizes = torch.tensor([[0.003], [0.02], [1.0], [100.0]])
        x = noise(4, len(weight)) * sizes
        expected = tried(widened(module), x)
        wide = _wide_copy(weight)
        offset = torch.zeros_like(wide) if bias is None else _wide_copy(bias)
        for found in (Norm(wide), Norm(1 + wide), Norm(wide, offset)):
            if expected is not None and distance(apply_norm_reference(x, found, epsilon), expected) < TOLERANCE:
                self.remember(module)
                return found, epsilon
        raise Unrecognised(f"{name} ({type(module).__name__}) is neither an RMS norm nor a LayerNorm")

    def matrix(self, linears: Sequence[Linear], order: Callable[[Tensor], Tensor] = lambda rows: rows) -> Matrix:
        """Concatenates the rows of several linears, reorders them with ``order`` and packs them."""
        biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
        bias = order(torch.cat(biases)).float().contiguous() if biases else None
        packed = self.rows([linear.weight for linear in linears], order)
        scale = packed.scale
        if any(linear.factors is not None for linear in linears):
            given = [torch.ones(len(y.weight)) if y.factors is None else y.factors for y in linears]
            factors = order(torch.cat(given)).contiguous()
            scale = factors if scale is None else factors * scale
        return replace(packed, scale=scale, bias=bias)

    def rows(self, weights: Sequence[Tensor], order: Callable[[Tensor], Tensor] = lambda rows: rows) -> Matrix:
        """Concatenates the rows of several ``[..., I]`` weights, reorders them with ``order`` and packs them.

        Rows are read where they lie, in memory or in a file, and written to their place among packed weights.

        Raises:
            ValueError: if blocks of a file are to stay as they are, and kernels do not read these.
        """
        if self.weights == "file":
            for weight in weights:
                check_readable(weight)
        raws, kinds, rows = zip(*map(blocks_of, weights), strict=True)
        first = torch.tensor([0, *(len(raw) for raw in raws)]).cumsum(0)
        places = torch.cat([each + start for each, start in zip(rows, first, strict=False)])
        return Matrix(*pack_rows(raws, kinds, self.weights, weights[0].dtype, order(places), empty=self._empty))

    def remember(self, module: nn.Module) -> None:
        """Records a module's own parameters."""
        self.sources += [tensor for tensor in module._parameters.values() if tensor is not None]


def _wide_copy(tensor: Tensor) -> Tensor:
    """Returns a copy in float32, which does not follow later changes."""
    return tensor.detach().to(torch.float32, copy=True).contiguous()
