"""Attention of ragged draft trees over a ragged KV cache, in one call for the whole batch."""

from torch import Tensor

from arbordraft.kernels.dispatch import NATIVE, Operator
from arbordraft.kernels.ragged_tree_attention.batch import RaggedBatch
from arbordraft.kernels.ragged_tree_attention.reference import attention_by_layout, ragged_tree_attention_reference

attend = Operator(
    "ragged_tree_attention(Tensor query, Tensor keys, Tensor values, Tensor layout, Tensor? region, Tensor positions, "
    "Tensor? words, float scale, int window, float softcap, Tensor? sinks, int most_rows, int longest, "
    "bool row_invariant, Tensor(a!)? arrivals) -> Tensor",
    attention_by_layout,
    lambda query, keys, values, *_: query.new_empty(query.shape[0], query.shape[1], values.shape[2]),
    triton="arbordraft.kernels.ragged_tree_attention.triton:launch",
    native=True,
    native_takes=NATIVE,
)


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
    row_invariant: bool = False,
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
        use_native: use the C++ kernel if it is built and supports dtype and head sizes. A row's bits do not depend on
            the other rows, so a tree node gets the bits that plain decoding will give its token.
        row_invariant: compute row by row in Triton too, so that a tree node gets the bits that plain decoding will give
            its token.

    Returns:
        ``[T, Hq, Dv]``.
    """
    fits = query.shape[2] % 16 == 0 and values.shape[2] % 16 == 0
    run = attend.pick(query, native=use_native and fits)
    if run is attend.reference:  # not by tensors: the batch keeps the masks that layers share
        return ragged_tree_attention_reference(
            query, keys, values, batch, scale=scale, window=window, softcap=softcap, sinks=sinks
        )
    return run(
        query.contiguous(),
        keys,
        values,
        batch.layout,
        batch.region if window or row_invariant else None,
        batch.positions,
        None if batch.words is None else batch.words.contiguous(),
        scale,
        window or 0,
        softcap or 0.0,
        sinks,
        batch.most_rows,
        batch.longest,
        row_invariant,
        batch.arrivals,
    )


__all__ = ["RaggedBatch", "attend", "ragged_tree_attention", "ragged_tree_attention_reference"]
