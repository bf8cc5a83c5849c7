"""Graphs of decisions: learned deciders, and verification at one node."""

import torch

from arbordraft import TopTail
from arbordraft.deciders import LearnedDecider
from arbordraft.exports.onnx import networks
from arbordraft.exports.onnx.cases import Inputs, Shape
from arbordraft.exports.onnx.plans import GraphSpec
from arbordraft.onnx.graph import MODEL

VERIFICATION = "verification.onnx"


def decider(decider: LearnedDecider) -> GraphSpec:
    """Specifies the graph of a learned decider."""
    size, top = decider.hidden_size, decider.top_k

    def example(shape: Shape, generator: torch.Generator) -> Inputs:
        rows = shape.batch * shape.rows
        depths = torch.randint(8, (rows, 1), generator=generator).float()
        greedy = torch.randint(2, (rows, 1), generator=generator).float()
        inputs = {"places": torch.cat([depths, -depths * torch.rand(rows, 1, generator=generator), greedy], dim=1)}
        probs = torch.rand(rows, top, generator=generator).sort(descending=True).values
        inputs["statistics"] = torch.cat([probs.sum(1, keepdim=True), probs], dim=1) if top else torch.zeros(rows, 0)
        if size:
            inputs["hidden_states"] = torch.randn(rows, size, generator=generator)
        return inputs

    names = ("places", "statistics", "hidden_states")[: 3 if size else 2]
    return GraphSpec(
        file=MODEL,
        network=networks.DeciderNetwork(decider),
        outputs=["chances"],
        axes={name: {0: "rows"} for name in names},
        example=example,
        about={"kind": "decider", "hidden_size": size, "top_k": top, "threshold": decider.threshold},
        quantizable=False,
    )


def verification(tops: int, tails: int) -> GraphSpec:
    """Specifies the graph of the verdict at a node whose children were drawn by ``TopTail(tops, tails)``.

    Raises:
        ValueError: if there is no tail, or a negative number of tops.
    """
    law = TopTail(tops, tails)
    vocabulary, rows = 37, {0: "rows", 1: "vocab_size"}

    def nodes(shape: Shape, generator: torch.Generator) -> Inputs:
        logits = 3 * torch.randn(shape.batch * shape.rows, vocabulary, generator=generator)
        draft = (logits + 2 * torch.randn(logits.shape, generator=generator)).softmax(dim=-1)
        uniforms = torch.rand(len(draft), law.k, generator=generator).tolist()
        drawn = [law.draw(row, numbers) for row, numbers in zip(draft, uniforms, strict=True)]
        decisions = torch.rand(len(draft), law.k + 1, generator=generator, dtype=torch.float64)
        return {"logits": logits, "draft_probs": draft, "draft_tokens": torch.tensor(drawn), "uniforms": decisions}

    return GraphSpec(
        file=VERIFICATION,
        network=networks.NodeVerification(tops, tails),
        outputs=["accepted", "token"],
        axes={"logits": rows, "draft_probs": rows, "draft_tokens": {0: "rows"}, "uniforms": {0: "rows"}},
        example=nodes,
        about={"kind": "verification", "tops": tops, "tails": tails},
        quantizable=False,
    )
