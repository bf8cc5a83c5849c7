"""How a problem of ragged tree attention is cut into tiles of rows and keys, and prefixes into splits."""

import math
from typing import NamedTuple

import torch

_NEVER_SPLIT = 256  # keys


class Tiling(NamedTuple):
    """How a problem is cut.

    Args:
        block_q: rows of a tile.
        block_m: rows times heads of a tile, a power of two.
        block_n: keys of a tile, a divisor of 64.
        splits: parts of the prefix.
        warps: of a program.
        stages: of the loop over the prefix.
    """

    block_q: int
    block_m: int
    block_n: int
    splits: int
    warps: int
    stages: int


def choose(
    rows: int,
    group: int,
    tiles: int,
    longest: int,
    processors: int,
    key_bytes: int,
    exact: bool = False,
    options: bool = False,
    hip: bool = False,
) -> Tiling:
    """The tiling for a batch.

    Args:
        rows: most rows of a sample.
        group: query heads per key head.
        tiles: number of (sample, key head) pairs.
        longest: longest prefix.
        processors: of the device.
        key_bytes: of one key and its value, sizes rounded up to powers of two.
        exact: for float32, of which a product takes three times the registers.
        options: with a window, a cap or sinks.
        hip: for an AMD GPU.

    Prefixes are split only if the tiles alone leave processors idle, and into no more parts than make the traffic of
    partial results, ``2 n G S / L`` of that of the keys, worth the time that busy processors save.
    """
    block_n = _block_n(key_bytes, exact)
    # Rows of wider heads do not fit into registers.
    most = 16 if exact else 32 if key_bytes > 512 else 64 if hip and options else 128
    block_m = max(16, min(most, next_power_of_2(rows * group)), next_power_of_2(group))
    warps = 4 if block_m <= 32 and key_bytes < 2048 else 8
    stages = 1 if hip else 2 if block_m > 32 or key_bytes > 512 or exact or options else 3
    block_q = block_m // group
    busy = tiles * -(-rows // block_q)
    splits = 1
    if longest > _NEVER_SPLIT and busy < 0.8 * processors:
        worth = math.sqrt(longest * processors / (2 * rows * group * busy))
        bound = min(processors / busy, worth, longest / block_n, 16)
        splits = 1 << max(0, int(math.log2(max(1.0, bound))))
    return Tiling(block_q, block_m, block_n, splits, warps, stages)


def row_tile(group: int, dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Constants of attention that is row-invariant: nothing but the model decides.

    Args:
        group: query heads per key head.
        dim: size of a head.
        value_dim: of its values.
        dtype: of all.
    """
    block_d, block_dv = (max(16, next_power_of_2(size)) for size in (dim, value_dim))
    key_bytes = (block_d + block_dv) * dtype.itemsize
    return {
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": max(16, next_power_of_2(group)),
        "BLOCK_N": _block_n(key_bytes, dtype == torch.float32),
        "num_warps": 4 if key_bytes < 2048 else 8,
        "num_stages": 3 if key_bytes <= 512 else 2 if key_bytes < 2048 else 1,
    }


def _block_n(key_bytes: int, exact: bool) -> int:
    """Keys of a tile: a stage of the loop takes 32 KB of shared memory at most, and less where products take more."""
    if exact:
        return 32 if key_bytes <= 512 else 16
    return min(64, max(16, 1 << (32768 // key_bytes).bit_length() - 1))


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a number from 1 on."""
    return 1 << (number - 1).bit_length()


__all__ = ["Tiling", "choose", "next_power_of_2", "row_tile"]
