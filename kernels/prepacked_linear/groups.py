"""Numbers in groups of 32 inputs: weights rounded to blocks of 8 or 4 bits, and rows rounded to 8 bits.

Shapes: O outputs, I inputs, T rows, G = ceil(I / 32) groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.prepacked_linear.blocks import GROUP


def quantize_groups(weight: Tensor, bits: int) -> Tensor:
    """Rounds ``[O, I]`` to the nearest codes of 8 bits (symmetric) or 4 bits (from a group's minimum to its maximum).

    Scales and minima of 4-bit codes are rounded to bytes, in units of 1/255 of an output's largest scale and minimum.
    Minima are at most 0.

    Returns:
        ``[O, bytes]`` uint8 rows of Q8_0 blocks for 8 bits, of INT4 blocks for 4 bits; inputs are padded with zeros.

    Raises:
        ValueError: if weights are too large for float16 scales of 8 bits, infinite or NaN.
    """
    groups = _grouped(weight.detach().float())
    if not groups.isfinite().all():
        raise ValueError(f"weights that are no finite numbers cannot be kept in groups of {bits} bits")
    if bits == 8:
        scale = (groups.abs().amax(dim=-1, keepdim=True) / 127).half()
        if not scale.isfinite().all():
            raise ValueError(f"weights of up to {weight.detach().abs().max():.1e} cannot be kept in groups of 8 bits")
        codes = _nearest(groups, scale, 127).to(torch.int8)
        return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten(1)
    least, most = groups.aminmax(dim=-1)
    minimum, lowest = _in_bytes(least.clamp_max(0) + 0.0)  # no negative zeros
    least = minimum * lowest
    scale, largest = _in_bytes(((most - least) / 15).clamp_min(0))
    codes = _nearest(groups - least[..., None], (scale * largest)[..., None], 15).clamp_min(0).byte()
    scales = torch.stack([scale.byte(), minimum.byte()], dim=-1)
    blocks = torch.cat([scales, codes[..., :16] | codes[..., 16:] << 4], dim=-1)
    return torch.cat([torch.cat([largest, lowest], dim=1).view(torch.uint8), blocks.flatten(1)], dim=1)


def float_blocks(weight: Tensor) -> tuple[Tensor, str]:
    """Returns the ``[O, bytes]`` uint8 rows of an ``[O, I]`` float32 or bfloat16 matrix, and their kind."""
    return weight.detach().contiguous().view(torch.uint8), "F32" if weight.dtype == torch.float32 else "BF16"


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises rows to ``[T, G, 32]`` codes of -127..127 (as float64) and ``[T, G]`` float32 scales."""
    groups = _grouped(x.float())
    most = groups.abs().amax(dim=-1, keepdim=True)
    steps = torch.where(most > 1e-30, torch.full_like(most, 127) / most, 0.0)  # not by a reciprocal, as 127 / most
    return (groups * steps).round().double(), (most / 127)[..., 0]


def _grouped(x: Tensor) -> Tensor:
    """Reshapes ``[..., I]`` to ``[..., G, 32]``, padded with zeros."""
    return F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))


def _in_bytes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Factors ``[O, G]`` numbers of one sign into ``[O, G]`` integers of 0..255 and an ``[O, 1]`` unit."""
    largest = x.gather(1, x.abs().argmax(dim=1, keepdim=True)) / 255
    return (x / torch.where(largest == 0, 1.0, largest)).round(), largest


def _nearest(groups: Tensor, scale: Tensor, most: int) -> Tensor:
    wide = scale.float()
    return (groups / torch.where(wide > 0, wide, 1.0)).round().clamp(-most, most)
