"""An exported decider, run by onnxruntime.

Shapes: R draft rows, V vocabulary, H hidden size of the drafter, K highest probabilities of a row.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from arbordraft.deciders.learned import RowSurvival
from arbordraft.onnx.graph import MODEL, Graph


class OnnxDecider(RowSurvival):
    """Decides like the :class:`~arbordraft.deciders.LearnedDecider` that was exported.

    Args:
        graph: exported network of the decider.
        threshold: least chance of survival; by default the exported decider's.

    Raises:
        ValueError: if the graph's weights are damaged.
    """

    def __init__(self, graph: Graph, threshold: float | None = None) -> None:
        about = graph.about
        super().__init__(about["threshold"] if threshold is None else threshold, about["hidden_size"], about["top_k"])
        self.graph = graph
        statistics = torch.ones(1, (1 + self.top_k) * (self.top_k > 0))
        chances = self.chances(torch.zeros(1, 3), statistics, torch.ones(1, self.hidden_size))
        if not chances.isfinite().all():
            raise ValueError(f"{graph.path} predicts NaN or infinity: its weights are damaged; export it again")

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], threshold: float | None = None) -> "OnnxDecider":
        """Loads a decider that ``arbordraft export onnx`` wrote.

        Args:
            path: folder of the decider.
            threshold: least chance of survival; by default the exported decider's.

        Raises:
            ImportError: if onnxruntime is not installed.
            ValueError: if the folder holds no decider, or a damaged one.
        """
        graph = Graph(Path(path) / MODEL)
        if graph.kind != "decider":
            raise ValueError(f"{path} holds a graph of the kind {graph.kind!r}, which is no decider")
        return cls(graph, threshold)

    def chances(self, places: Tensor, statistics: Tensor, hidden: Tensor | None) -> Tensor:
        inputs = {"places": places, "statistics": statistics.float()}
        if hidden is not None:
            inputs["hidden_states"] = hidden.float()
        return self.graph.run({name: inputs[name] for name in self.graph.inputs})["chances"]
