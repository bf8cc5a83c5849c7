"""Writing to the pools of a ragged KV cache and closing the gaps that rejected tokens leave."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from arbordraft.kernels import choice, native
from arbordraft.kernels.kv_cache.operator import kv_append, kv_compact
from arbordraft.kernels.kv_cache.reference import append_reference, compact_reference


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Writes new rows to the pools of one layer, in place.

    Args:
        keys: ``[P, H, D]`` pool.
        values: ``[P, H, Dv]`` pool.
        new_keys: ``[T, H, D]``.
        new_values: ``[T, H, Dv]``.
        slots: ``[T]`` int64 pool rows to write to, all different.
    """
    if choice.wants_triton("kv_append", keys):
        kv_append(keys, values, new_keys, new_values, slots)
    else:
        append_reference(keys, values, new_keys, new_values, slots)


def compact(pools: Sequence[Tensor], moves: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Moves rows of all pools, in place.

    Args:
        pools: ``[P, ...]`` each, contiguous, of one dtype.
        moves: by sample, pool rows ``(source, destination)``: towards the front, and both ascending, so that a row may
            be moved to where another one has left.
    """
    flat = [move for sample in moves for move in sample]
    if not flat:
        return
    device = pools[0].device
    triton = choice.wants_triton("kv_compact", pools[0])
    if not triton and device.type == "cpu" and choice.wants_native() and native.load():
        torch.ops.arbordraft.move_rows(pools, list(chain.from_iterable(flat)))  # of all layers in one call
        return
    source, destination = torch.tensor(flat, dtype=torch.int64, device=device).t().contiguous()
    if triton:
        first = torch.tensor([0, *accumulate(map(len, moves))], dtype=torch.int64, device=device)
        kv_compact(list(pools), source, destination, first)
    else:
        compact_reference(pools, source, destination)


__all__ = ["append", "append_reference", "compact", "compact_reference"]
