"""Rotary embeddings of layers, and their conversion to the form that the kernels know.

Kernels rotate pairs of channels ``(i, i + R / 2)``, as Llama does. Some models rotate neighbours ``(2 i, 2 i + 1)``.

Shapes: T packed rows, R rotated channels of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """Rotation that a layer applies to queries and keys.

    Args:
        channels: number of rotated channels of a head, which are its first ones.
        neighbours: whether adjacent channels form a pair, instead of channels that are half of ``channels`` apart.
    """

    channels: int
    neighbours: bool

    def in_halves(self, rows: Tensor, dim: int) -> Tensor:
        """Reorders rows of heads of ``dim`` channels so that the channels of a pair are half of ``channels`` apart.

        Attention scores stay equal: they are sums over channels, and queries and keys are reordered alike.
        """
        if not self.neighbours:
            return rows
        channels = torch.arange(dim)
        rotary, rest = channels[: self.channels], channels[self.channels :]
        return rows.unflatten(0, (-1, dim))[:, torch.cat([rotary[::2], rotary[1::2], rest])].flatten(0, 1)


def rotations(tables: Any) -> list[Rotation | None]:
    """Returns the rotations that a layer given these cosines and sines may apply; ``None`` stands for no rotation."""
    if tables is None:
        return [None]
    if not (isinstance(tables, tuple) and len(tables) == 2 and all(table.ndim == 3 for table in tables)):
        return []  # not cosines and sines
    return [*(Rotation(tables[0].shape[-1], neighbours) for neighbours in (False, True)), None]


def side_by_side(tables: tuple[Tensor, Tensor] | None) -> bool:
    """Returns whether both ``[1, T, R]`` tables hold the two equal numbers of a pair next to each other."""
    return tables is not None and all(torch.equal(table[..., ::2], table[..., 1::2]) for table in tables)


def apart(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Moves the two numbers of a pair from next to each other to half of the channels apart, as kernels take them."""
    cosine, sine = (table.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for table in tables)
    return cosine, sine


class RotaryTables(NamedTuple):
    """Cosines and sines that a model made, in the order that the kernels take.

    Args:
        positions: ``[T]``.
        cosine: ``[T, R]``.
        sine: ``[T, R]``.
    """

    positions: Tensor
    cosine: Tensor
    sine: Tensor

    def made_by(self, model: nn.Module) -> tuple[Tensor, float] | None:
        """Finds the ``[R / 2]`` frequencies in a model's buffers that give these tables, and their factor."""
        for module in model.modules():
            for name, frequencies in module.named_buffers(recurse=False):
                if not name.endswith("inv_freq") or 2 * frequencies.numel() != self.cosine.shape[-1]:
                    continue
                factor = float(getattr(module, name.replace("inv_freq", "attention_scaling"), 1.0))
                angles = (self.positions[:, None] * frequencies.float()).repeat(1, 2)
                made = factor * torch.stack([angles.cos(), angles.sin()])
                near = 2 * factor * torch.finfo(self.cosine.dtype).eps
                if torch.allclose(made, torch.stack([self.cosine, self.sine]).float(), rtol=0, atol=near):
                    return frequencies.float().contiguous(), factor
        return None


def rotary_tables(positions: Tensor, tables: tuple[Tensor, Tensor]) -> RotaryTables:
    """Builds the tables of a layer from its ``[1, T, R]`` cosines and sines of ``[T]`` positions."""
    cosine, sine = apart(tables) if side_by_side(tables) else tables
    return RotaryTables(positions, cosine[0], sine[0])


__all__ = ["RotaryTables", "Rotation", "apart", "rotary_tables", "rotations", "side_by_side"]
