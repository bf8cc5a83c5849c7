"""Attention of ragged draft trees to a ragged KV cache, in one call for the whole batch."""

import torch
from torch import Tensor

from arbordraft.kernels import choice, native
from arbordraft.kernels.ragged_tree_attention.batch import RaggedBatch
from arbordraft.kernels.ragged_tree_attention.operator import tree_attention
from arbordraft.kernels.ragged_tree_attention.reference import ragged_tree_attention_reference


def ragged_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    use_native: bool = False,
    split_size: int = 0,
) -> Tensor:
    """Attends the packed rows of all samples, each to its own committed keys and to its ancestors.

    Args:
        query: ``[T, Hq, D]``.
        keys: ``[P, Hkv, D]`` pool that already holds the keys of these rows; ``Hkv`` divides ``Hq``.
        values: ``[P, Hkv, Dv]``.
        batch: rows, slabs and ancestor words.
        scale: factor of the scores.
        window: sliding window in tokens.
        softcap: bound of the scores, ``softcap * tanh(scores / softcap)``.
        sinks: ``[Hq]`` logits of attention sinks.
        use_native: use the C++ kernel where it is built and knows dtype and head sizes. Its rows do not depend on each
            other's number, so that a tree node gets the bits that plain decoding will give its token.
        split_size: keys of a split of the Triton kernel, a multiple of 64: a row's bits then do not depend on what
            shares its batch. With 0 the number of splits follows the work.

    Returns:
        ``[T, Hq, Dv]``.
    """
    if choice.wants_triton("ragged_tree_attention", query):
        return tree_attention(
            query.contiguous(),
            keys,
            values,
            batch.layout,
            batch.region,
            batch.positions,
            batch.words,
            scale,
            window or 0,
            softcap or 0.0,
            sinks,
            max(batch.rows, default=0),
            max(batch.past, default=0),
            split_size,
        )
    sizes = (query.shape[2], values.shape[2])
    known = query.dtype in (torch.float32, torch.bfloat16) and not any(size % 16 for size in sizes)
    if use_native and choice.wants_native() and known and query.is_cpu and native.load():
        return torch.ops.arbordraft.ragged_tree_attention(
            query.contiguous(),
            keys,
            values,
            batch.samples,
            batch.positions,
            None if batch.words is None else batch.words.contiguous(),
            batch.region if window else None,
            scale,
            window or 0,
            softcap or 0.0,
            None if sinks is None else sinks.float().contiguous(),
        )
    return ragged_tree_attention_reference(
        query, keys, values, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


__all__ = ["RaggedBatch", "ragged_tree_attention", "ragged_tree_attention_reference"]
