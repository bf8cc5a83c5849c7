"""The graph that draws tokens with the noise that target and drafter share.

Shapes: R rows, V vocabulary.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from arbordraft.exports.onnx import arrays
from arbordraft.exports.onnx.cases import Inputs, Shape
from arbordraft.exports.onnx.plans import GraphSpec
from arbordraft.kernels.gumbel import reference

DRAW = "draw.onnx"
_PLACES = "rows or 1"


class Draw(nn.Module):
    """Samples rows by a seed and a position: the reference of the graph."""

    def forward(self, logits: Tensor, seed: Tensor, position: Tensor, temperature: Tensor) -> list[Tensor]:
        """Draws a token from every row.

        Args:
            logits: ``[R, V]`` float32, processed, without NaN.
            seed: ``[R]`` int64, of which all 64 bits count; or ``[1]`` for all rows.
            position: ``[R]`` int64 positions of the tokens to draw, 0 to 2**32 - 1; or ``[1]`` for all rows. Nodes of
                one depth share a position, and their noise is then made once.
            temperature: float32, above 0.

        Returns:
            ``[R]`` int64, the first token with the highest score, -1 if no logit is above -inf. Also ``[R, V]`` float64
            scores: logits divided by the temperature, plus noise. A drafter drafts its highest as children.
        """
        token = reference.gumbel_argmax_reference(logits, seed, position, temperature.item(), None)
        noise = reference.gumbel_reference(seed, position, logits.shape[1])
        return [token, (logits / temperature).double() + noise]


def draw_graph(opset: int) -> Any:
    """Builds an ``onnx.ModelProto`` of :class:`Draw` by running the definition of the noise on tensors of a graph."""
    graph = arrays.GraphBuilder()
    logits = graph.input("logits", np.float32, ["rows", "vocab_size"])
    seed, position = (graph.input(name, np.int64, [_PLACES]).astype(np.uint64) for name in ("seed", "position"))
    temperature = graph.input("temperature", np.float32, []).reshape(1)  # runtimes would take one for every column
    vocabulary = logits.shape[1]
    counters = arrays.arange(reference.counters_for(vocabulary), np.uint64)
    words = reference.words_of(seed, position, counters, arrays)
    upper, lower = (arrays.columns(part, vocabulary).astype(np.float64) for part in words)
    scores = (logits / temperature).astype(np.float64) + reference.gumbel_of(upper, lower, arrays)
    token, highest = arrays.first_maximum(scores)
    outputs = {
        "token": (arrays.where(highest == -np.inf, -1, token), ["rows"]),
        "scores": (scores, ["rows", "vocab_size"]),
    }
    return graph.model(outputs, opset)


def draw() -> GraphSpec:
    """Specifies the graph that samples with shared noise."""

    def rows(shape: Shape, generator: torch.Generator) -> Inputs:
        count, vocabulary = shape.batch * shape.rows, 64 * shape.past + shape.rows  # groups of words, the last partial
        logits = 3 * torch.randn(count, vocabulary, generator=generator)
        logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
        logits[count // 2] = -torch.inf if count > 1 else 1e30  # no token to draw; or equal scores
        places = 1 if shape.rows == 1 else count
        seed = torch.randint(-(2**63), 2**63 - 1, (places,), generator=generator)
        position = torch.randint(2**32, (places,), generator=generator)
        seed[0], position[0] = -1, 2**32 - 1
        return {"logits": logits, "seed": seed, "position": position, "temperature": torch.tensor(0.7)}

    return GraphSpec(
        file=DRAW,
        network=Draw(),
        outputs=["token", "scores"],
        axes={
            "logits": {0: "rows", 1: "vocab_size"},
            "seed": {0: _PLACES},
            "position": {0: _PLACES},
            "temperature": {},
        },
        example=rows,
        about={"kind": "draw"},
        quantizable=False,
        build=draw_graph,
    )
