"""How a problem of ragged tree attention is cut into tiles of rows and keys, and prefixes into splits."""

import math
from typing import NamedTuple

_NEVER_SPLIT = 256  # keys


class Tiling(NamedTuple):
    """How a problem is cut.

    Args:
        block_q: rows of a tile.
        block_m: rows times heads of a tile, a power of two.
        block_n: keys of a tile, a divisor of 64.
        splits: parts of the prefix.
        split_tiles: tiles of a split, 0 if they are shared out evenly.
        warps: of a program.
        stages: of the loop over the prefix.
    """

    block_q: int
    block_m: int
    block_n: int
    splits: int
    split_tiles: int
    warps: int
    stages: int


def choose(
    rows: int,
    group: int,
    tiles: int,
    longest: int,
    processors: int,
    key_bytes: int,
    split_size: int = 0,
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
        split_size: keys of a split, a multiple of 64, for results that do not depend on what shares the batch; 0 lets
            the number of splits follow the work.
        exact: for float32, of which a product takes three times the registers.
        options: with a window, a cap or sinks.
        hip: for an AMD GPU.

    Prefixes are split only if the tiles alone leave processors idle, and into no more parts than make the traffic of
    partial results, ``2 n G S / L`` of that of the keys, worth the time that busy processors save.
    """
    # A stage of the loop takes 32 KB of shared memory at most; rows of wider heads do not fit into registers.
    block_n = min(64, max(16, 1 << (32768 // key_bytes).bit_length() - 1))
    most = 16 if exact else 32 if key_bytes > 512 else 64 if hip and options else 128
    if exact:
        block_n = 32 if key_bytes <= 512 else 16
    # Rows of a split size get the same tile in every batch: other tiles may round otherwise.
    wanted = 64 if split_size else 1 << (rows * group - 1).bit_length()
    block_m = max(16, min(most, wanted), 1 << (group - 1).bit_length())
    warps = 4 if block_m <= 32 and key_bytes < 2048 else 8
    stages = 1 if hip else 2 if block_m > 32 or key_bytes > 512 or exact or options else 3
    block_q = block_m // group
    if split_size:
        splits = max(1, -(-longest // split_size))
        return Tiling(block_q, block_m, block_n, 1 << (splits - 1).bit_length(), split_size // block_n, warps, stages)
    busy = tiles * -(-rows // block_q)
    splits = 1
    if longest > _NEVER_SPLIT and busy < 0.8 * processors:
        worth = math.sqrt(longest * processors / (2 * rows * group * busy))
        bound = min(processors / busy, worth, longest / block_n, 16)
        splits = 1 << max(0, int(math.log2(max(1.0, bound))))
    return Tiling(block_q, block_m, block_n, splits, 0, warps, stages)


__all__ = ["Tiling", "choose"]
