"""The next token of every row: score changes, temperature, truncation and draw, in plain PyTorch.

Shapes: R rows, T rows of logits, V vocabulary, n changes.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.gumbel import gumbel_argmax


def next_tokens_reference(
    logits: Tensor,
    rows: Sequence[int],
    seeds: Sequence[int],
    positions: Sequence[int],
    temperatures: Sequence[float],
    kept: Sequence[float],
    changes: Tensor,
    bounds: Sequence[int],
) -> Tensor:
    """See :func:`arbordraft.kernels.next_tokens.next_tokens`."""
    found = logits.new_empty(len(rows), dtype=torch.int64)
    for place, row in enumerate(rows):
        scores = changed(logits[row].float(), changes[bounds[place] : bounds[place + 1]])
        if temperatures[place] == 0:
            found[place] = scores.argmax()
            continue
        top_k, top_p, min_p = kept[3 * place : 3 * place + 3]
        scores = truncated(scores / torch.tensor(temperatures[place]), int(top_k), top_p, min_p)
        key = torch.tensor([[seeds[place]], [positions[place]]])
        found[place] = gumbel_argmax(scores[None], key[0], key[1])[0]
    return found


def changed(scores: Tensor, changes: Tensor) -> Tensor:
    """Returns ``[V]`` float32 scores after ``[n, 3]`` changes, one after the other, in float32."""
    scores = scores.clone()
    values = scores.numpy()
    for token, factor, bias in zip(*changes.numpy().T.astype(np.float32), strict=True):
        if token < len(values):
            score = values[int(token)]
            values[int(token)] = (score * factor if score < 0 else score / factor) + bias
    return scores


def truncated(scores: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Returns ``[V]`` scores of which top-k, then top-p, then min-p ban the others; 0, 1 and 0 keep all."""
    if top_k > 0:
        scores = scores.masked_fill(scores < scores.topk(min(top_k, len(scores))).values[-1], -torch.inf)
    if top_p < 1:
        ascending, order = scores.sort()
        removed = ascending.softmax(dim=0).cumsum(dim=0) <= 1 - top_p
        removed[-1] = False
        scores = scores.masked_fill(removed.new_empty(len(scores)).scatter(0, order, removed), -torch.inf)
    if min_p > 0:
        chances = scores.softmax(dim=0)
        scores = scores.masked_fill(chances < min_p * chances.max(), -torch.inf)
    return scores
