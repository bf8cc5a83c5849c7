"""Lets a model's linears read a copy of their weights in 4 bits, on a GPU.

The forwards here run :mod:`arbordraft.kernels.grouped_linear` in place of the linears of recognised attentions and
gated MLPs, and of the head. Linears that read the same rows are one product. With the norms, rotations and attention of
:mod:`arbordraft.target.fused_modules`, a layer takes eight launches.

Shapes: I inputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.kernels.grouped_linear import grouped_linear, interleave, round_to_panels
from arbordraft.kernels.prepacked_linear.blocks import LANES
from arbordraft.target.attention import Attending, AttentionCall
from arbordraft.target.fused_linears import Attend, Products, Run
from arbordraft.target.fused_modules import Recognised


class GroupedCopy:
    """A copy in 4 bits of the weights of linears that read the same rows.

    Args:
        linears: the linears, whose outputs follow one another.
        activation: name of a gated activation; there are then two linears, a gate and its input.
    """

    def __init__(self, linears: Sequence[nn.Linear], activation: str | None = None) -> None:
        weights, biases = ([getattr(module, name) for module in linears] for name in ("weight", "bias"))
        join: Any = interleave if activation else lambda *parts: torch.cat(parts)
        self.panels = round_to_panels(join(*weights) if len(weights) > 1 else weights[0])
        self.bias = None if biases[0] is None else join(*biases).detach() if len(biases) > 1 else biases[0]
        self.outputs, self.activation = sum(map(len, weights)), activation
        self.original_bytes = sum(weight.nbytes for weight in weights)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps ``[..., I]`` to the outputs of all linears, or to those of the gated activation."""
        return grouped_linear(x, self.panels, self.bias, outputs=self.outputs, activation=self.activation)


class GroupedCopies(Products):
    """Products with copies of the weights in 4 bits.

    Attributes:
        copies: the copies made so far.
    """

    def __init__(self) -> None:
        self.copies: list[GroupedCopy] = []

    def attention(
        self, attention: Any, call: AttentionCall, linears: list[Any], found: Recognised
    ) -> tuple[Attend, Run] | None:
        projected = self._copied(linears[:3])

        def attend(ragged: Attending, layer: int, rows: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
            heads = projected(rows).unflatten(1, (-1, call.dim))
            query, key, value = heads.split([call.heads, call.kv_heads, call.kv_heads], dim=1)
            norms = (attention._modules.get(f"{name}_norm") for name in "qk")
            query, key = (part if norm is None else norm(part) for part, norm in zip((query, key), norms, strict=True))
            return ragged.attend(layer, query, key, value, call, tables)

        return attend, self.linear(linears[3])

    def mlp(self, linears: list[Any], activation: str) -> Run | None:
        if len(linears[0].weight) % LANES:
            return None
        gated, down = self._copied(linears[:2], activation), self.linear(linears[2])
        return lambda x: down(gated(x))

    def linear(self, module: Any) -> Run:
        return self._copied([module])

    def _copied(self, linears: list[Any], activation: str | None = None) -> GroupedCopy:
        self.copies.append(GroupedCopy(linears, activation))
        return self.copies[-1]


__all__ = ["GroupedCopies", "GroupedCopy"]
