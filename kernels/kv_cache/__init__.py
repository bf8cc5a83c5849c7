"""Writes to the pools of a ragged KV cache and closes the gaps that rejected tokens leave."""

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.kernels.dispatch import Operator
from arbordraft.kernels.kv_cache.reference import append_reference, compact_reference, move_rows_reference
from arbordraft.kernels.transfer import upload


def _nothing(*_: object) -> None:
    return None


append_rows = Operator(
    "kv_append(Tensor(a!) keys, Tensor(b!) values, Tensor new_keys, Tensor new_values, Tensor slots) -> ()",
    append_reference,
    _nothing,
    triton="arbordraft.kernels.kv_cache.triton:launch_append",
)
compact_rows = Operator(  # takes the moves as tensors on the device
    "kv_compact(Tensor(a!)[] pools, Tensor source, Tensor destination, Tensor first) -> ()",
    compact_reference,
    _nothing,
    triton="arbordraft.kernels.kv_cache.triton:launch_compact",
)
move_rows = Operator(  # takes the moves as integers of the host, on a CPU
    "move_rows(Tensor(a!)[] pools, int[] moves) -> ()", move_rows_reference, _nothing, native=True
)


def append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Writes new rows to the pools of one layer, in place.

    Args:
        keys: ``[P, H, D]`` pool, contiguous.
        values: ``[P, H, Dv]`` pool, contiguous.
        new_keys: ``[T, H, D]``.
        new_values: ``[T, H, Dv]``.
        slots: ``[T]`` int64 pool rows to write to, all different.

    Raises:
        ValueError: if Triton runs and a pool is not contiguous; so does :func:`compact`.
    """
    append_rows.pick(keys)(keys, values, new_keys, new_values, slots)


def compact(pools: Sequence[Tensor], moves: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Moves rows of all pools, in place.

    Args:
        pools: ``[P, ...]`` each, contiguous, of one dtype.
        moves: by sample, pool rows ``(source, destination)``. Destinations are below their sources, and both ascend, so
            a row may move to a place that another row has left.
    """
    flat = [move for sample in moves for move in sample]
    if not flat:
        return
    if pools[0].is_cpu and not choice.triton_chosen(pools[0]):
        return move_rows(pools, list(chain.from_iterable(flat)))
    source, destination = zip(*flat, strict=True)
    parts = (torch.tensor(part) for part in (source, destination, (0, *accumulate(map(len, moves)))))
    compact_rows(list(pools), *upload(pools[0].device, *parts))


__all__ = ["append", "append_reference", "append_rows", "compact", "compact_reference", "compact_rows", "move_rows"]
