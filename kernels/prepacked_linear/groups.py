"""Weights in groups of 32 inputs, each with a scale of its own: what GGUF calls Q8_0 and Q4_1.

Shapes: O outputs, I inputs, G = ceil(I / 32) groups, B = ceil(O / 16) blocks of outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
GROUP = 32
_CENTRE = 128  # the code that means 0 in 8 bits


@dataclass(frozen=True)
class Groups:
    """A matrix of codes; a weight is ``scale * code + minimum``, or ``scale * (code - 128)`` without a minimum.

    Args:
        codes: ``[O, I]`` uint8, below 16 if there are minima.
        scale: ``[O, G]`` float16.
        minimum: ``[O, G]`` float16 of 4-bit codes; 8-bit ones have none.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.minimum is None else 4

    def dense(self) -> Tensor:
        """``[O, I]`` float32."""
        codes, scale = _grouped(self.codes.float()), self.scale.float()[..., None]
        values = (codes - _CENTRE) * scale if self.minimum is None else codes * scale + self.minimum.float()[..., None]
        return values.flatten(1)[:, : self.codes.shape[1]].contiguous()

    def map(self, function: Callable[[Tensor], Tensor]) -> "Groups":
        """The same rows in another order, or other rows: ``function`` of codes, scales and minima alike."""
        minimum = None if self.minimum is None else function(self.minimum)
        return Groups(function(self.codes), function(self.scale), minimum)

    def prepack(self) -> tuple[Tensor, Tensor]:
        """What the kernels read, padded to 16 outputs and 32 inputs.

        Returns:
            ``[B, G, 8, 16, 4]`` uint8 and ``[B, G, 16]`` float16 for 8 bits; for 4 bits ``[B, G, 4, 16, 4]``, whose low
            and high halves are inputs 0..15 and 16..31 of their group, and ``[B, G, 2, 16]``, scales and minima.
        """
        rows = -len(self.codes) % LANES
        codes = F.pad(_grouped(self.codes), (0, 0, 0, 0, 0, rows)).unflatten(0, (-1, LANES)).unflatten(-1, (8, 4))
        quads = codes.permute(0, 2, 3, 1, 4)
        scales = [self.scale] if self.minimum is None else [self.scale, self.minimum]
        halves = [F.pad(half, (0, 0, 0, rows)).unflatten(0, (-1, LANES)).transpose(1, 2) for half in scales]
        if self.minimum is None:
            return quads.contiguous(), halves[0].contiguous()
        return (quads[:, :, :4] | quads[:, :, 4:] << 4).contiguous(), torch.stack(halves, dim=2)

    @classmethod
    def restore(cls, codes: Tensor, scales: Tensor, outputs: int, inputs: int) -> "Groups":
        """The ``[O, I]`` matrix that was prepacked."""
        four = codes.shape[2] == 4
        quads = torch.cat([codes & 15, codes >> 4], dim=2) if four else codes
        dense = quads.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()
        halves = [half.transpose(1, 2).flatten(0, 1)[:outputs] for half in (scales.unbind(2) if four else [scales])]
        return cls(dense, halves[0], halves[1] if four else None)


def quantize_groups(weight: Tensor, bits: int) -> Groups:
    """``[O, I]`` to the nearest codes of 8 bits (symmetric) or 4 bits (from the least to the largest of a group).

    Raises:
        ValueError: if weights are too large for float16 scales, or NaN.
    """
    groups = _grouped(weight.detach().float())
    if bits == 8:
        scale = (groups.abs().amax(dim=-1) / 127).half()
        codes = _nearest(groups, scale, 127) + _CENTRE
        found = Groups(codes.to(torch.uint8), scale, None)
    else:
        least, most = groups.aminmax(dim=-1)
        minimum, scale = least.half(), ((most - least) / 15).half()
        codes = _nearest(groups - minimum.float()[..., None], scale, 15).clamp_min(0)
        found = Groups(codes.to(torch.uint8), scale, minimum)
    if not all(half.isfinite().all() for half in (scale, *([] if found.minimum is None else [found.minimum]))):
        raise ValueError(f"weights of up to {weight.detach().abs().max():.1e} cannot be kept in groups of {bits} bits")
    return Groups(found.codes.flatten(1)[:, : weight.shape[1]].contiguous(), scale, found.minimum)


def concatenate(groups: Sequence[Groups]) -> Groups:
    """Several matrices below each other, all of the same bits."""
    first = groups[0]
    minima = [part.minimum for part in groups if part.minimum is not None]
    return Groups(
        torch.cat([part.codes for part in groups]),
        torch.cat([part.scale for part in groups]),
        None if first.minimum is None else torch.cat(minima),
    )


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels multiply: ``[T, G, 32]`` codes of -127..127 (as float64) and ``[T, G]`` float32 scales."""
    groups = _grouped(x.float())
    most = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0.0)  # not by a reciprocal, as 127 / most
    return (groups * steps).round().double(), (most / 127)[..., 0]


def multiply_groups(x: Tensor, codes: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """``[T, I]`` times prepacked weights, ``[T, O]`` float64: the rows in 8 bits, everything else exact."""
    weight = Groups.restore(codes, scales, outputs, GROUP * codes.shape[1])
    rows, steps = quantize_rows(F.pad(x, (0, weight.codes.shape[1] - x.shape[-1])))
    return (rows * steps.double()[..., None]).flatten(1) @ weight.dense().double().T


def _grouped(x: Tensor) -> Tensor:
    """``[..., I]`` to ``[..., G, 32]``, padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _nearest(groups: Tensor, scale: Tensor, most: int) -> Tensor:
    wide = scale.float()[..., None]
    return (groups / torch.where(wide > 0, wide, 1.0)).round().clamp(-most, most)
