"""Writing to a KV cache as operators of torch: what ``torch.compile`` sees of the Triton kernels.

Shapes: T new rows, M moves, B samples, P pool rows, H heads, D head size.
"""

import torch
from torch import Tensor

from arbordraft.kernels.choice import interpreted
from arbordraft.kernels.kv_cache.reference import append_reference, compact_reference


@torch.library.custom_op("arbordraft::kv_append", mutates_args=("keys", "values"))
def kv_append(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.append`; without a GPU or the interpreter, by the reference."""
    if keys.is_cuda or interpreted():
        from arbordraft.kernels.kv_cache.triton import launch_append

        launch_append(keys, values, new_keys, new_values, slots)
    else:
        append_reference(keys, values, new_keys, new_values, slots)


@torch.library.custom_op("arbordraft::kv_compact", mutates_args=("pools",))
def kv_compact(pools: list[Tensor], source: Tensor, destination: Tensor, first: Tensor) -> None:
    """See :func:`arbordraft.kernels.kv_cache.compact`; without a GPU or the interpreter, by the reference."""
    if source.is_cuda or interpreted():
        from arbordraft.kernels.kv_cache.triton import launch_compact

        launch_compact(pools, source, destination, first)
    else:
        compact_reference(pools, source, destination)


@kv_append.register_fake
def _(*_: object) -> None:
    return None


@kv_compact.register_fake
def _(*_: object) -> None:
    return None
