"""Moving rows of the KV pools in plain PyTorch.

Shapes: T new rows, M moved rows, P pool rows, H heads, D head size.
"""

from collections.abc import Iterable

from torch import Tensor


def append_reference(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.append`."""
    keys.index_copy_(0, slots, new_keys)
    values.index_copy_(0, slots, new_values)


def compact_reference(pools: Iterable[Tensor], source: Tensor, destination: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.compact`."""
    for pool in pools:
        pool.index_copy_(0, destination, pool.index_select(0, source))
