"""Ragged tree attention as an operator of torch, which ``torch.compile`` and ``torch.export`` take as a whole."""

import torch
from torch import Tensor

from arbordraft.kernels.choice import interpreted
from arbordraft.kernels.ragged_tree_attention.batch import RaggedBatch
from arbordraft.kernels.ragged_tree_attention.reference import ragged_tree_attention_reference


@torch.library.custom_op("arbordraft::tree_attention", mutates_args=())
def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Tensor,
    region: Tensor,
    positions: Tensor,
    words: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    most_rows: int,
    longest: int,
    split_size: int,
) -> Tensor:
    """Ragged tree attention with tensors only; without a GPU or the interpreter, by the reference.

    Args:
        query: ``[T, Hq, D]``.
        keys: ``[P, Hkv, D]``.
        values: ``[P, Hkv, Dv]``.
        layout: see :attr:`RaggedBatch.layout`.
        region: see :attr:`RaggedBatch.region`.
        positions: ``[T]`` int64.
        words: ``[T, W]`` int64, ``None`` for causal order.
        scale: factor of the scores.
        window: sliding window, 0 for none.
        softcap: bound of the scores, 0 for none.
        sinks: ``[Hq]``.
        most_rows: at least the rows of any sample: the size of tiles follows from it.
        longest: about the most committed keys of any sample: the number of splits follows from it.
        split_size: keys of a split, a multiple of 64; 0 lets their number follow the work.
    """
    if query.is_cuda or interpreted():
        from arbordraft.kernels.ragged_tree_attention.triton import launch

        return launch(
            query,
            keys,
            values,
            layout,
            region,
            positions,
            words,
            scale,
            window,
            softcap,
            sinks,
            most_rows,
            longest,
            split_size,
        )
    batch = RaggedBatch.from_layout(layout, region, positions, words)
    return ragged_tree_attention_reference(
        query, keys, values, batch, scale=scale, window=window or None, softcap=softcap or None, sinks=sinks
    )


@tree_attention.register_fake
def _(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return query.new_empty(query.shape[0], query.shape[1], values.shape[2])


__all__ = ["tree_attention"]
