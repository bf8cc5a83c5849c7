"""Writing to the pools of a ragged KV cache and closing the gaps that rejected tokens leave."""

from collections.abc import Iterable

from torch import Tensor

from arbordraft.kernels.kv_cache.reference import append_reference, compact_reference


def append(pool: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes ``rows`` ``[T, H, D]`` to the rows ``slots`` ``[T]`` (unique) of ``pool`` ``[P, H, D]``, in place."""
    append_reference(pool, rows, slots)


def compact(pools: Iterable[Tensor], source: Tensor, destination: Tensor) -> None:
    """Moves the rows ``source`` ``[M]`` of every pool to ``destination`` ``[M]``, in place.

    All rows are read before any is written, so source and destination may overlap.
    """
    compact_reference(pools, source, destination)


__all__ = ["append", "append_reference", "compact", "compact_reference"]
