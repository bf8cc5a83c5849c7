"""How layers rotate queries and keys, and how that becomes the rotation that the kernels know.

They turn pairs of channels that stand half of the rotated ones apart, as Llama does. Some models turn neighbours.

Shapes: T packed rows, R rotated channels of a head.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Rotation(NamedTuple):
    """How a layer rotates queries and keys.

    Args:
        channels: of a head, that turn, from the first one on.
        neighbours: whether two that stand side by side turn together, or two that stand half of these channels apart.
    """

    channels: int
    neighbours: bool

    def in_halves(self, rows: Tensor, dim: int) -> Tensor:
        """Rows of heads of ``dim`` channels, in which those that turn together stand half of them apart.

        Scores do not notice: they add up over the channels of queries and keys, which are put in the same order.
        """
        if not self.neighbours:
            return rows
        channels = torch.arange(dim)
        turning, rest = channels[: self.channels], channels[self.channels :]
        return rows.unflatten(0, (-1, dim))[:, torch.cat([turning[::2], turning[1::2], rest])].flatten(0, 1)


def rotations(tables: Any) -> list[Rotation | None]:
    """What a layer may do with the cosines and sines that it is given; some are given them and do not rotate."""
    if tables is None:
        return [None]
    if not (isinstance(tables, tuple) and len(tables) == 2 and all(table.ndim == 3 for table in tables)):
        return []  # angles of another kind
    return [*(Rotation(tables[0].shape[-1], neighbours) for neighbours in (False, True)), None]


def side_by_side(tables: tuple[Tensor, Tensor] | None) -> bool:
    """Whether the two numbers of a pair of channels are neighbours in both ``[1, T, R]``, not half of them apart."""
    return tables is not None and all(torch.equal(table[..., ::2], table[..., 1::2]) for table in tables)


def apart(tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Puts them half of them apart, as the kernels take them."""
    cosine, sine = (table.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for table in tables)
    return cosine, sine


class RotaryTables(NamedTuple):
    """Cosines and sines as a model made them, put as the kernels take them.

    Args:
        positions: ``[T]``.
        cosine: ``[T, R]``.
        sine: ``[T, R]``.
    """

    positions: Tensor
    cosine: Tensor
    sine: Tensor

    def made_by(self, model: nn.Module) -> tuple[Tensor, float] | None:
        """The ``[R / 2]`` frequencies among a model's buffers that give these, and their factor, if any do."""
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
    """A layer's ``[1, T, R]`` cosines and sines of ``[T]`` positions."""
    cosine, sine = apart(tables) if side_by_side(tables) else tables
    return RotaryTables(positions, cosine[0], sine[0])


__all__ = ["RotaryTables", "Rotation", "apart", "rotary_tables", "rotations", "side_by_side"]
