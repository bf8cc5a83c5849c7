"""Ragged tree attention in plain PyTorch: the truth for every other implementation, and the CPU path.

Shapes: T packed rows, n rows of one sample, L keys of one sample, P pool rows, Hq query heads, Hkv key heads,
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
    out = query.new_empty(query.shape[0], query.shape[1], values.shape[2])
    row = 0
    for sample, (rows, start, past) in enumerate(zip(batch.rows, batch.starts, batch.past, strict=True)):
        q = query[row : row + rows].transpose(0, 1)
        group = q.shape[0] // keys.shape[1]
        fused = softcap is None and sinks is None
        prompt = fused and batch.is_prompt(sample, window)
        first, bias = (0, None) if prompt else batch.bias(sample, window, group if fused else 1, query.dtype)
        span = slice(start + first, start + past + len(batch.tree_positions[sample]))
        k, v = keys[span].transpose(0, 1), values[span].transpose(0, 1)
        if prompt:
            found = F.scaled_dot_product_attention(
                q[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=group > 1
            )[0]
        elif fused:
            found = _attend(q, k, v, bias, scale)
        else:
            found = _attend_explicitly(q, k, v, bias, scale, softcap, sinks)
        out[row : row + rows] = found.transpose(0, 1)
        row += rows
    return out


def _attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """``[Hq, n, D]`` attending to ``[Hkv, L, D]``; the heads of a group are stacked as rows, so keys are read once."""
    heads, rows, size = query.shape
    stacked = query.reshape(1, keys.shape[0], heads // keys.shape[0] * rows, size)
    out = F.scaled_dot_product_attention(stacked, keys[None], values[None], attn_mask=bias, scale=scale)
    return out.reshape(heads, rows, values.shape[-1])


def _attend_explicitly(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The same with capped scores or attention sinks, which PyTorch's fused attention does not offer."""
    heads, rows, size = query.shape
    group = heads // keys.shape[0]
    wide = torch.promote_types(query.dtype, torch.float32)  # as the fused one accumulates
    stacked = query.reshape(keys.shape[0], group, rows, size).to(wide)
    scores = torch.einsum("hgnd,hld->hgnl", stacked, keys.to(wide)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores += bias
    if sinks is not None:  # one more logit per head that takes probability and gives nothing
        sink = sinks.to(wide).reshape(-1, group, 1, 1).expand(-1, -1, rows, 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[1]]
    out = torch.einsum("hgnl,hld->hgnd", weights, values.to(wide))
    return out.reshape(heads, rows, values.shape[-1]).to(values.dtype)
