"""Writes to the pools of a ragged KV cache and closes its gaps, in Triton.

Shapes: T new rows, M moves, B samples, N pools, P pool rows, E numbers of a row.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 2  # warps of 32 or 64 threads, each of which moves 16 bytes at a time


@triton.jit
def append_rows(
    KEYS, VALUES, NEW_KEYS, NEW_VALUES, SLOTS, stride_k, stride_v, KEY_SIZE: tl.constexpr, VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one part of one row of keys and values per program."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(SLOTS + row)
    key = tl.load(NEW_KEYS + row * stride_k + e, mask=e < KEY_SIZE)
    tl.store(KEYS + slot * KEY_SIZE + e, key, mask=e < KEY_SIZE)
    value = tl.load(NEW_VALUES + row * stride_v + e, mask=e < VALUE_SIZE)
    tl.store(VALUES + slot * VALUE_SIZE + e, value, mask=e < VALUE_SIZE)


@triton.jit
def compact_rows(
    LIKE, POOLS, SIZES, SOURCE, DESTINATION, FIRST, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Makes all moves of one sample in order, within one part of the rows of one pool, per program.

    Rows move towards the front and in order, so no row is overwritten before it is read. A thread reads and writes the
    same columns throughout, so it never waits for another thread.
    """
    sample = tl.program_id(0)
    pool = tl.program_id(1)
    size = tl.load(SIZES + pool)
    e = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(POOLS + pool).to(LIKE.dtype)
    if ALIGNED:  # the compiler knows nothing about numbers from memory
        size = tl.multiple_of(size, 8)
        base = tl.multiple_of(base, 16)
    for move in range(tl.load(FIRST + sample), tl.load(FIRST + sample + 1)):
        row = tl.load(base + tl.load(SOURCE + move) * size + e, mask=e < size)
        tl.store(base + tl.load(DESTINATION + move) * size + e, row, mask=e < size)


def launch_append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.append`."""
    _check_pools([keys, values])
    if not len(slots):
        return
    new_keys, new_values = new_keys.flatten(1), new_values.flatten(1)  # copies if heads are not contiguous
    sizes = new_keys.shape[1], new_values.shape[1]
    append_rows[(len(slots), triton.cdiv(max(sizes), _BLOCK))](
        keys,
        values,
        new_keys,
        new_values,
        slots.contiguous(),
        new_keys.stride(0),
        new_values.stride(0),
        KEY_SIZE=sizes[0],
        VALUE_SIZE=sizes[1],
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


def launch_compact(pools: list[Tensor], source: Tensor, destination: Tensor, first: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.compact`."""
    _check_pools(pools)
    sizes = tuple(pool[0].numel() for pool in pools)
    addresses = tuple(pool.data_ptr() for pool in pools)
    aligned = not any(size % 8 for size in sizes) and not any(address % 16 for address in addresses)
    table = _table(addresses, sizes, source.device)
    moves = (part.contiguous() for part in (source, destination, first))
    compact_rows[(len(first) - 1, len(pools), triton.cdiv(max(sizes), _BLOCK))](
        pools[0], table[0], table[1], *moves, ALIGNED=aligned, BLOCK=_BLOCK, num_warps=_WARPS
    )


def _check_pools(pools: list[Tensor]) -> None:
    """Raises ValueError for pools with gaps between rows, as kernels take rows to follow one another."""
    if not all(pool.is_contiguous() for pool in pools):
        raise ValueError("pools of keys and values must be contiguous: they are written in place, row by row")


def address_table(pools: list[Tensor]) -> Tensor:
    """Returns the table of compaction; a recording of launches needs it made before and kept as long as itself."""
    return _table(tuple(pool.data_ptr() for pool in pools), tuple(pool[0].numel() for pool in pools), pools[0].device)


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns addresses and sizes on the device, so one launch serves all layers and no step waits for a copy."""
    return torch.tensor([addresses, sizes], dtype=torch.int64, device=device)
