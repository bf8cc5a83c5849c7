"""Attention of ragged draft trees to a ragged KV cache, in one call for the whole batch."""

from torch import Tensor

from arbordraft.kernels.ragged_tree_attention.batch import RaggedBatch
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

    Returns:
        ``[T, Hq, Dv]``.
    """
    return ragged_tree_attention_reference(
        query, keys, values, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
    )


__all__ = ["RaggedBatch", "ragged_tree_attention", "ragged_tree_attention_reference"]
