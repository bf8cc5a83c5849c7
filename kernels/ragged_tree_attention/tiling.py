"""Chooses the tiles of rows and keys of ragged tree attention, and the splits of prefixes."""

import math
from typing import NamedTuple

import torch

_NEVER_SPLIT = 256  # keys
_MOST_SPLITS = 32
SPAN = 256  # keys of a segment of a row, in row-invariant attention
WHOLE = 2**30  # a segment that holds all keys


class Tiling(NamedTuple):
    """Sizes of tiles and number of splits.

    Args:
        block_q: rows of a tile.
        block_m: rows times heads of a tile, a power of two.
        block_n: keys of a tile, a divisor of 64.
        splits: parts of the prefix.
        warps: warps of a program.
        stages: pipeline stages of the loop over the prefix.
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
    """Returns the tiling for a batch.

    Args:
        rows: largest number of rows of a sample.
        group: query heads per key head.
        tiles: number of (sample, key head) pairs.
        longest: longest prefix.
        processors: processors of the device.
        key_bytes: bytes of one key and its value, with sizes rounded up to powers of two.
        exact: whether numbers are float32, whose products take three times the registers.
        options: whether there is a window, a cap or sinks.
        hip: whether the GPU is one of AMD.

    Prefixes are split only if the tiles alone leave processors idle. The program that combines the parts of a tile
    reads all of them, as each program reads its keys. The number of parts is limited so that reading both takes least.
    """
    block_n = _block_n(key_bytes, exact)
    # Rows of wider heads do not fit into registers.
    most = 16 if exact else 32 if key_bytes > 512 or (hip and options) else 128
    block_m = max(16, min(most, next_power_of_2(rows * group)), next_power_of_2(group))
    warps = 4 if block_m <= 32 and key_bytes < 2048 else 8
    stages = 1 if hip else 2 if block_m > 32 or key_bytes > 512 or exact or options else 3
    block_q = block_m // group
    busy = tiles * -(-rows // block_q)
    splits = 1
    if longest > _NEVER_SPLIT and busy < 0.8 * processors:
        lanes = min(rows * group, block_m)
        worth = math.sqrt(longest * (2 if exact else 1) / lanes)
        bound = min(processors / busy, worth, longest / block_n, _MOST_SPLITS)
        splits = 1 << max(0, int(math.log2(max(1.0, bound))))
    return Tiling(block_q, block_m, block_n, splits, warps, stages)


def row_tile(group: int, dim: int, value_dim: int, dtype: torch.dtype) -> dict[str, int]:
    """Returns constants of row-invariant attention, which depend on the model alone.

    Args:
        group: query heads per key head.
        dim: size of a head.
        value_dim: size of a head's values.
        dtype: dtype of queries, keys and values.
    """
    block_d, block_dv = (max(16, next_power_of_2(size)) for size in (dim, value_dim))
    key_bytes = (block_d + block_dv) * dtype.itemsize
    return {
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": max(16, next_power_of_2(group)),
        "BLOCK_N": _block_n(key_bytes, dtype == torch.float32),
        "SPAN": SPAN if key_bytes < 2048 else WHOLE,
        "num_warps": 4 if key_bytes < 512 else 8,
        "num_stages": 3 if key_bytes <= 512 else 2 if key_bytes < 2048 else 1,
    }


def processors(device: torch.device) -> int:
    """Returns the number of processors of a device; 8 for a CPU, whose interpreter then meets every kind of launch."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8


def _block_n(key_bytes: int, exact: bool) -> int:
    """Returns the keys of a tile: a stage takes at most 32 KB of shared memory, less if products take more."""
    if exact:
        return 32 if key_bytes <= 512 else 16
    return min(64, max(16, 1 << (32768 // key_bytes).bit_length() - 1))


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of two that is at least ``number``, which is 1 or more."""
    return 1 << (number - 1).bit_length()


__all__ = ["SPAN", "WHOLE", "Tiling", "choose", "next_power_of_2", "processors", "row_tile"]
