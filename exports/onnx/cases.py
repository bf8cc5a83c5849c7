"""Inputs to trace graphs with and to compare them on.

Shapes: B samples, n rows of each, P keys before them, Hkv heads, C head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arbordraft.onnx.graph import HIDDEN, PAST

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of an example: B, n and P."""

    batch: int
    rows: int
    past: int


SHAPES = (
    Shape(1, 1, 0),
    Shape(1, 1, 7),
    Shape(1, 5, 0),
    Shape(2, 6, 5),
    Shape(3, 1, 4),
    Shape(2, 9, 17),
    Shape(4, 3, 1),
)


def trees(shape: Shape, vocabulary: int, generator: torch.Generator) -> Inputs:
    """Builds random trees after pasts, of which every sample sees another part."""
    batch, rows, past = shape.batch, shape.rows, shape.past
    seen = torch.zeros(batch, rows, past + rows, dtype=torch.bool)
    positions = torch.zeros(batch, rows, dtype=torch.int64)
    for sample in range(batch):
        known = max(past - sample, min(past, 1))
        seen[sample, :, :known] = True
        positions[sample] += known
        for row in range(rows):
            if row:
                parent = int(torch.randint(row, (), generator=generator))
                seen[sample, row] = seen[sample, parent]
                positions[sample, row] = positions[sample, parent] + 1
            seen[sample, row, past + row] = True
    return {
        "input_ids": torch.randint(vocabulary, (batch, rows), generator=generator),
        "attention_mask": torch.where(seen, 0.0, HIDDEN)[:, None],
        "position_ids": positions,
    }


def padded(shape: Shape, generator: torch.Generator) -> Inputs:
    """Builds the mask and the positions of chains after pasts that are padded on the left."""
    kept = torch.ones(shape.batch, shape.past + shape.rows, dtype=torch.int64)
    for sample in range(shape.batch):
        kept[sample, : min(sample, shape.past)] = 0
    positions = (kept.cumsum(dim=1) - 1)[:, shape.past :]
    return {"attention_mask": kept, "position_ids": positions}


def chain(texts: Sequence[Sequence[int]] | Tensor, *, causal: bool = False) -> Inputs:
    """Builds inputs of texts of one length from their first token on, with either kind of mask."""
    tokens = torch.as_tensor(texts)
    batch, rows = tokens.shape
    tree = torch.full((rows, rows), HIDDEN).triu(1).expand(batch, 1, -1, -1)
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens) if causal else tree,
        "position_ids": torch.arange(rows).expand(batch, -1),
    }


def past_of(shape: Shape, sizes: Sequence[tuple[int, ...]], generator: torch.Generator) -> Inputs:
    """Draws ``[B, Hkv, P, C]`` random keys and values of layers with these heads and sizes."""
    past = {}
    for layer, (heads, *widths) in enumerate(sizes):
        for part, width in zip(("key", "value"), widths, strict=True):
            random = torch.randn(shape.batch, heads, shape.past, width, generator=generator)
            past[PAST.format(layer, part)] = random
    return past
