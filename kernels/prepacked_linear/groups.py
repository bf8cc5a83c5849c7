"""Weights in groups of 32 inputs with a scale each: Q8_0 and Q4_1 of GGUF, and Q4_1 with smaller scales.

Shapes: O outputs, I inputs, G = ceil(I / 32) groups, B = ceil(O / 16) blocks of outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 16
GROUP = 32
_CENTRE = 128  # the code that means 0 in 8 bits
_FACTORS = 4  # groups whose scales and minima in bytes take the space of an output's two factors


@dataclass(frozen=True)
class Groups:
    """A matrix of codes; a weight is ``scale * code + minimum``, or ``scale * (code - 128)`` without a minimum.

    Args:
        codes: ``[O, I]`` uint8, below 16 if there are minima.
        scale: ``[O, G]`` float16, or uint8 with factors.
        minimum: ``[O, G]`` for 4-bit codes, of the type of the scales; ``None`` for 8-bit codes.
        factors: ``[O, 2]`` float32 factors of an output's scales and minima, if these are bytes.
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor | None
    factors: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self.minimum is None else 4

    def dense(self) -> Tensor:
        """Returns the ``[O, I]`` weights in float32."""
        codes, (scale, minimum) = _grouped(self.codes.float()), self.wide()
        scale = scale[..., None]
        values = (codes - _CENTRE) * scale if minimum is None else codes * scale + minimum[..., None]
        return values.flatten(1)[:, : self.codes.shape[1]].contiguous()

    def wide(self) -> tuple[Tensor, Tensor | None]:
        """Returns ``[O, G]`` float32 scales and minima."""
        scale, minimum = self.scale.float(), None if self.minimum is None else self.minimum.float()
        if self.factors is None or minimum is None:
            return scale, minimum
        return scale * self.factors[:, :1], minimum * self.factors[:, 1:]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Groups":
        """Applies ``function``, which reorders or selects rows, to codes, scales, minima and factors."""
        rest = [None if part is None else function(part) for part in (self.minimum, self.factors)]
        return Groups(function(self.codes), function(self.scale), *rest)

    def prepack(self) -> tuple[Tensor, Tensor]:
        """Returns codes and scales in the layout of the kernels, padded to 16 outputs and 32 inputs.

        Returns:
            Codes, ``[B, G, 8, 16, 4]`` uint8 for 8 bits and ``[B, G, 4, 16, 4]`` uint8 for 4 bits. The low and high
            half of a byte are then inputs 0..15 and 16..31 of their group. Scales, ``[B, G, 16]`` float16 for 8 bits.
            For 4 bits scales and minima, ``[B, G, 2, 16]`` float16 or ``[B, 4 + G, 2, 16]`` uint8. The latter begin
            with the bits of the ``[2, 16]`` factors.
        """
        rows = -len(self.codes) % LANES
        codes = F.pad(_grouped(self.codes), (0, 0, 0, 0, 0, rows)).unflatten(0, (-1, LANES)).unflatten(-1, (8, 4))
        quads = codes.permute(0, 2, 3, 1, 4)
        scales = [self.scale] if self.minimum is None else [self.scale, self.minimum]
        halves = [F.pad(half, (0, 0, 0, rows)).unflatten(0, (-1, LANES)).transpose(1, 2) for half in scales]
        if self.minimum is None:
            return quads.contiguous(), halves[0].contiguous()
        packed = torch.stack(halves, dim=2)
        if self.factors is not None:
            factors = F.pad(self.factors, (0, 0, 0, rows)).unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
            packed = torch.cat([factors.view(torch.uint8).view(-1, _FACTORS, 2, LANES), packed], dim=1)
        return (quads[:, :, :4] | quads[:, :, 4:] << 4).contiguous(), packed

    @classmethod
    def restore(cls, codes: Tensor, scales: Tensor, outputs: int, inputs: int) -> "Groups":
        """Returns the ``[O, I]`` matrix that was prepacked."""
        four = codes.shape[2] == 4
        quads = torch.cat([codes & 15, codes >> 4], dim=2) if four else codes
        factors = None
        if four and scales.dtype == torch.uint8:
            bits, scales = scales.split([_FACTORS, codes.shape[1]], dim=1)
            factors = bits.flatten(1).contiguous().view(torch.float32).unflatten(1, (2, LANES)).transpose(1, 2)
            factors = factors.flatten(0, 1)[:outputs]
        dense = quads.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:outputs, :inputs].contiguous()
        halves = [half.transpose(1, 2).flatten(0, 1)[:outputs] for half in (scales.unbind(2) if four else [scales])]
        return cls(dense, halves[0], halves[1] if four else None, factors)


def quantize_groups(weight: Tensor, bits: int) -> Groups:
    """Rounds ``[O, I]`` to the nearest codes of 8 bits (symmetric) or 4 bits (from a group's minimum to its maximum).

    Scales and minima of 4-bit codes are rounded to bytes, in units of 1/255 of an output's largest scale and minimum.
    Minima are at most 0.

    Raises:
        ValueError: if weights are too large for float16 scales of 8 bits, infinite or NaN.
    """
    groups = _grouped(weight.detach().float())
    if not groups.isfinite().all():
        raise ValueError(f"weights that are no finite numbers cannot be kept in groups of {bits} bits")
    if bits == 8:
        scale = (groups.abs().amax(dim=-1) / 127).half()
        if not scale.isfinite().all():
            raise ValueError(f"weights of up to {weight.detach().abs().max():.1e} cannot be kept in groups of 8 bits")
        found = Groups(_nearest(groups, scale, 127) + _CENTRE, scale, None)
    else:
        least, most = groups.aminmax(dim=-1)
        minimum, lowest = _in_bytes(least.clamp_max(0))
        least = minimum * lowest
        scale, largest = _in_bytes(((most - least) / 15).clamp_min(0))
        codes = _nearest(groups - least[..., None], scale * largest, 15).clamp_min(0)
        found = Groups(codes, scale.byte(), minimum.byte(), torch.cat([largest, lowest], dim=1))
    return replace(found, codes=found.codes.byte().flatten(1)[:, : weight.shape[1]].contiguous())


def concatenate(groups: Sequence[Groups]) -> Groups:
    """Concatenates matrices of the same bits along the rows."""
    first = groups[0]
    minima = [part.minimum for part in groups if part.minimum is not None]
    factors = [part.factors for part in groups if part.factors is not None]
    return Groups(
        torch.cat([part.codes for part in groups]),
        torch.cat([part.scale for part in groups]),
        None if first.minimum is None else torch.cat(minima),
        None if first.factors is None else torch.cat(factors),
    )


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows to ``[T, G, 32]`` codes of -127..127 (as float64) and ``[T, G]`` float32 scales."""
    groups = _grouped(x.float())
    most = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0.0)  # not by a reciprocal, as 127 / most
    return (groups * steps).round().double(), (most / 127)[..., 0]


def multiply_groups(x: Tensor, codes: Tensor, scales: Tensor, outputs: int) -> Tensor:
    """Multiplies ``[T, I]`` with prepacked weights to ``[T, O]`` float64; rows are in 8 bits, all else is exact."""
    weight = Groups.restore(codes, scales, outputs, GROUP * codes.shape[1])
    rows, steps = quantize_rows(F.pad(x, (0, weight.codes.shape[1] - x.shape[-1])))
    return (rows * steps.double()[..., None]).flatten(1) @ weight.dense().double().T


def _grouped(x: Tensor) -> Tensor:
    """Reshapes ``[..., I]`` to ``[..., G, 32]``, padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Factors ``[O, G]`` numbers of one sign into ``[O, G]`` integers of 0..255 and an ``[O, 1]`` unit."""
    largest = x.gather(1, x.abs().argmax(dim=1, keepdim=True)) / 255
    return (x / torch.where(largest == 0, 1.0, largest)).round(), largest


def _nearest(groups: Tensor, scale: Tensor, most: int) -> Tensor:
    wide = scale.float()[..., None]
    return (groups / torch.where(wide > 0, wide, 1.0)).round().clamp(-most, most)
