"""Weights of 4 bits in groups of 32 inputs, laid out for a GPU: 16 outputs make a panel, which is read front to back.

The codes and scales are those of :mod:`arbordraft.kernels.prepacked_linear.blocks`; only their order differs.

Shapes: O outputs, padded to P panels of 16, I inputs, G groups of 32, padded to an even number.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.prepacked_linear.blocks import BLOCKS, GROUP, LANES, inputs_of
from arbordraft.kernels.prepacked_linear.groups import quantize_groups

KINDS = ("INT4", "MXFP4")
UNITS = 2 * LANES * 4  # bytes of a panel's float32 units
FIELDS = 2 * LANES  # bytes of a group's scales and minima
CODES = LANES * GROUP // 2  # bytes of a group's codes
_ROWS = 4096  # outputs that are rounded at a time, to bound the memory this takes


def pack_panels(raw: Tensor, kind: str) -> Tensor:
    """Lays rows of blocks out in panels, on their device; changes no weight.

    A panel has three parts. First come the units of its outputs' scales and of their minima, ``[2][16]`` float32. Then,
    for every two groups, ``[16][4]`` bytes: scale and minimum of the first group, and of the second. Last come the
    codes of every two groups, ``[16][16]`` numbers of 16 bits. Number j holds the inputs j, j + 16, j + 32 and j + 48,
    the first in its lowest bits.

    Args:
        raw: ``[O, bytes]`` uint8 rows of blocks.
        kind: ``"INT4"`` or ``"MXFP4"``, which has no units and no minima; their places are 0.

    Returns:
        ``[P, bytes]`` uint8.

    Raises:
        ValueError: for another kind, or rows that are no whole blocks of this kind.
    """
    if kind not in KINDS:
        raise ValueError(f"panels hold blocks of {' or '.join(KINDS)}, not of {kind!r}")
    inputs_of([raw], [kind])
    known = BLOCKS[kind]
    row, blocks = known.split(F.pad(raw, (0, 0, 0, -len(raw) % LANES)))
    codes, fields = known.parse(blocks)
    units = F.pad(row, (0, UNITS // LANES - row.shape[1])).unflatten(0, (-1, LANES)).unflatten(2, (2, 4))
    odd = codes.shape[1] % 2
    fields = F.pad(fields, (0, 2 - fields.shape[2], 0, odd)).unflatten(0, (-1, LANES)).unflatten(2, (-1, 2))
    codes = F.pad(codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4, (0, 0, 0, odd)).unflatten(0, (-1, LANES))
    codes = codes.unflatten(2, (-1, 2)).transpose(3, 4)  # the bytes of two groups alternate
    parts = units.transpose(1, 2), fields.transpose(1, 2), codes.transpose(1, 2)
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def round_to_panels(weight: Tensor) -> Tensor:
    """Rounds an ``[O, I]`` matrix to INT4 as :func:`quantize_groups` does, and returns its panels, on its device."""
    parts = weight.detach().split(_ROWS)
    return torch.cat([pack_panels(quantize_groups(part, 4), "INT4") for part in parts])


def restore_panels(panels: Tensor, kind: str, outputs: int, inputs: int) -> Tensor:
    """Returns the ``[O, I]`` float32 weights of ``[P, bytes]`` panels."""
    known, groups = BLOCKS[kind], groups_of(panels)
    units, fields, codes = panels.split([UNITS, groups * FIELDS, groups * CODES], dim=1)
    row = units.unflatten(1, (2, LANES, 4)).transpose(1, 2).flatten(2).flatten(0, 1)[:, : sum(known.row_widths)]
    fields = fields.unflatten(1, (-1, LANES, 4)).transpose(1, 2).flatten(2).unflatten(2, (groups, 2)).flatten(0, 1)
    codes = codes.unflatten(1, (-1, LANES, GROUP // 2, 2)).permute(0, 2, 1, 4, 3).flatten(2, 3).flatten(0, 1)
    nibbles = torch.cat([codes & 15, codes >> 4], dim=-1)
    return known.numbers(nibbles, fields[..., : sum(known.widths)], row)[:outputs, :inputs].contiguous()


def groups_of(panels: Tensor) -> int:
    """Returns the number of groups in each row of panels."""
    return (panels.shape[1] - UNITS) // (FIELDS + CODES)


__all__ = ["CODES", "FIELDS", "KINDS", "UNITS", "groups_of", "pack_panels", "restore_panels", "round_to_panels"]
