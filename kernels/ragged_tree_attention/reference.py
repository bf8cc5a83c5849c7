"""Ragged tree attention in plain PyTorch: the truth for every other implementation, and the CPU path.

Shapes: T packed rows, n rows of one sample, L keys of one sample, P pool rows. Hq query heads, Hkv key heads,
G = Hq / Hkv, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.ragged_tree_attention.batch import RaggedBatch


def ragged_tree_attention_reference(
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
    """See :func:`arbordraft.kernels.ragged_tree_attention.ragged_tree_attention`."""
    heads = keys.shape[1]
    group = query.shape[1] // heads
    query = query.unflatten(1, (heads, group))
    keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
    fused = softcap is None and sinks is None
    outputs: list[Tensor] = []
    for span in batch.spans(window, group if fused else 1, query.dtype, dense=not fused):
        q = query[span.row : span.row + span.rows]
        k, v = keys.narrow(2, span.start, span.length), values.narrow(2, span.start, span.length)
        if span.rows == 1 and fused:  # decoding without drafts: the overhead of extra views would count
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=span.bias, scale=scale))
            continue
        q = q.permute(1, 2, 0, 3)
        if not fused:
            out = _attend_explicitly(q, k[0], v[0], span.bias, scale, softcap, sinks)
        elif span.causal:
            q = q.flatten(0, 1)[None]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=group > 1)
        else:
            # The heads of a group are stacked as rows: keys are read once for all of them.
            out = F.scaled_dot_product_attention(
                q.reshape(1, heads, -1, q.shape[3]), k, v, attn_mask=span.bias, scale=scale
            )
        outputs.append(out.view(heads, group, span.rows, -1).permute(2, 0, 1, 3))
    return torch.cat(outputs).flatten(1, 2)


def attention_by_layout(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: Tensor,
    region: Tensor | None,
    positions: Tensor,
    words: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    most_rows: int,
    longest: int,
    row_invariant: bool,
    arrivals: Tensor | None,
) -> Tensor:
    """Computes ragged tree attention for a batch given as tensors, as operators take it.

    Args:
        query: ``[T, Hq, D]``.
        keys: ``[P, Hkv, D]``.
        values: ``[P, Hkv, Dv]``.
        layout: see :attr:`RaggedBatch.layout`.
        region: see :attr:`RaggedBatch.region`; may be ``None`` without a window.
        positions: ``[T]`` int64.
        words: ``[T, W]`` int64, ``None`` for causal order.
        scale: factor of the scores.
        window: sliding window, 0 for none.
        softcap: bound of the scores, 0 for none.
        sinks: ``[Hq]``.
        most_rows: upper bound of the rows of a sample; it sets the size of tiles on a GPU.
        longest: approximate maximum of the committed keys of a sample; it sets the number of splits on a GPU.
        row_invariant: whether a GPU gives every row the bits that it has alone; this needs ``region``.
        arrivals: see :attr:`RaggedBatch.arrivals`; without it, a launch on a GPU makes counters of its own.
    """
    batch = RaggedBatch.from_layout(layout, region, positions, words)
    return ragged_tree_attention_reference(
        query, keys, values, batch, scale=scale, window=window or None, softcap=softcap or None, sinks=sinks
    )


def _attend_explicitly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attends ``[Hkv, G, n, D]`` to ``[Hkv, L, D]`` with capped scores or sinks, which PyTorch lacks."""
    wide = torch.promote_types(query.dtype, torch.float32)  # the fused attention accumulates in it
    scores = torch.einsum("hgnd,hld->hgnl", query.to(wide), keys.to(wide)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    if sinks is not None:  # one more logit per head that takes probability and has no value
        sink = sinks.to(wide).view(*query.shape[:2], 1, 1).expand(-1, -1, query.shape[2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    return torch.einsum("hgnl,hld->hgnd", weights, values.to(wide)).to(values.dtype)
