"""Moves rows of the KV pools in plain PyTorch.

Shapes: T new rows, M moved rows, P pool rows, H heads, D head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def append_reference(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.append`."""
    keys.index_copy_(0, slots, new_keys)
    values.index_copy_(0, slots, new_values)


def compact_reference(pools: Sequence[Tensor], source: Tensor, destination: Tensor, first: Tensor) -> None:
    """Moves rows of all pools, all at once.

    Args:
        pools: see :func:`arbordraft.kernels.kv_cache.compact`.
        source: ``[M]`` int64.
        destination: ``[M]`` int64.
        first: ``[B + 1]`` int64 index at which the moves of each sample begin, and the end of the last ones. Only
            kernels that move the rows of a sample one after the other need it.
    """
    for pool in pools:
        pool.index_copy_(0, destination, pool.index_select(0, source))


def move_rows_reference(pools: Sequence[Tensor], moves: Sequence[int]) -> None:
    """Moves rows of all pools; ``moves`` holds a source, its destination, the next source, ..."""
    source, destination = torch.tensor(moves).view(-1, 2).t()
    compact_reference(pools, source, destination, source[:0])
