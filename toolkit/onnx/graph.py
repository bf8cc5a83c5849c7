"""Runs exported graphs with onnxruntime: alone, or on the packed rows of a ragged batch.

Shapes: B samples, T packed rows, n most rows of a sample, P most keys before a sample's rows, L layers, Hkv heads,
C head size.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache

MODEL, FUSE = "model.onnx", "fuse.onnx"  # of an EAGLE head; FUSE makes the input of MODEL
MARKOV = "markov.onnx"  # of a block head: the term that a node's own token adds to its logits
PREFIX = "arbordraft."  # prefix of our entries in a file's metadata
FORMAT = 1  # version of these entries and of the graphs' inputs and outputs
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
HIDDEN = torch.finfo(torch.float32).min  # added to the score of a hidden key


class Graph:
    """Graph from a file that ``arbordraft export onnx`` wrote.

    Args:
        path: the file.

    Raises:
        ImportError: if onnxruntime is not installed.
        ValueError: if the file is missing, damaged, or of another format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            import onnxruntime as runtime
        except ImportError as error:
            raise ImportError("exported graphs are run by onnxruntime: pip install 'arbordraft[onnx]'") from error
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        if not self.path.is_file():
            raise ValueError(f"{self.path} is missing: write the folder again with 'arbordraft export onnx'")
        try:
            # No other provider: the export compared the graph with the original on this one.
            self._session = runtime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has its own class for every cause
            raise ValueError(f"{self.path} cannot be read as a graph: {str(error).splitlines()[0]}") from error
        entries = self._session.get_modelmeta().custom_metadata_map.items()
        try:
            ours = {name: json.loads(value) for name, value in entries if name.startswith(PREFIX)}
        except ValueError as error:
            raise ValueError(f"{self.path} has damaged settings ({error}): export it again") from error
        self.about: dict[str, Any] = {name.removeprefix(PREFIX): value for name, value in ours.items()}
        if self.about.get("format") != FORMAT:
            raise ValueError(
                f"{self.path} is of format {self.about.get('format', 'unknown')}, not {FORMAT}: write it with "
                "'arbordraft export onnx' of this version"
            )
        self.inputs: dict[str, Sequence[Any]] = {node.name: node.shape for node in self._session.get_inputs()}
        self.outputs: list[str] = [node.name for node in self._session.get_outputs()]

    @property
    def kind(self) -> str:
        """Kind of network that the graph computes, such as ``decider`` or ``causal-lm``."""
        return str(self.about.get("kind"))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Runs the graph on named inputs and returns its outputs by name."""
        feed = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in inputs.items()}
        arrays = self._session.run(None, feed)
        return {name: torch.from_numpy(array) for name, array in zip(self.outputs, arrays, strict=True)}


class RaggedGraph:
    """Runs a graph that has its own keys and values on the packed rows of a ragged batch.

    Such graphs take batches ``[B, n]`` with a past ``[B, Hkv, P, C]``. Where samples differ in length, both are padded
    and the mask hides the padding.

    Args:
        graph: takes ``attention_mask`` ``[B, 1, n, P + n]``, ``position_ids`` ``[B, n]``, ``past_key_values.*`` and
            anything else ``[B, n, ...]``.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._layers = sum(name.startswith("past_key_values") for name in graph.inputs) // 2

    def __call__(self, inputs: Mapping[str, Tensor], batch: RaggedBatch, cache: RaggedKVCache) -> dict[str, Tensor]:
        """Runs the graph, writes the rows' keys and values into the cache, and returns the other outputs.

        Args:
            inputs: ``[T, ...]`` by name; ``position_ids`` and ``attention_mask`` follow from the batch.
            batch: result of ``cache.lay_out`` for these rows.
            cache: cache of the graph's own keys and values.

        Returns:
            ``[T, ...]`` by name.
        """
        most = max(batch.rows)
        places = torch.cat([torch.arange(rows) + sample * most for sample, rows in enumerate(batch.rows)])

        def spread(packed: Tensor) -> Tensor:
            wide = packed.new_zeros(len(batch.rows) * most, *packed.shape[1:])
            wide[places] = packed
            return wide.unflatten(0, (-1, most))

        past_lengths = [
            past + len(tree) - rows
            for past, tree, rows in zip(batch.past, batch.tree_positions, batch.rows, strict=True)
        ]
        feed = {name: spread(tensor) for name, tensor in inputs.items()}
        feed["position_ids"] = spread(batch.positions)
        feed["attention_mask"] = _mask(batch, past_lengths, most)
        feed |= self._past(batch, past_lengths, cache)
        outputs = self.graph.run(feed)
        for layer in range(self._layers):
            keys, values = (
                outputs.pop(PRESENT.format(layer, part))[:, :, -most:].transpose(1, 2).flatten(0, 1)[places]
                for part in ("key", "value")
            )
            cache.write(layer, keys, values, batch.slots)
        return {name: tensor.flatten(0, 1)[places] for name, tensor in outputs.items()}

    def _past(self, batch: RaggedBatch, past_lengths: Sequence[int], cache: RaggedKVCache) -> dict[str, Tensor]:
        """Returns ``[B, Hkv, P, C]`` keys and values before the rows, for every layer."""
        columns = torch.arange(max(past_lengths))
        starts, lengths = torch.tensor(list(batch.starts)), torch.tensor(past_lengths)
        slots = starts[:, None] + torch.where(columns < lengths[:, None], columns, 0)
        feed: dict[str, Tensor] = {}
        for layer in range(self._layers):
            names = [PAST.format(layer, part) for part in ("key", "value")]
            if len(columns):
                pools = cache.pools(layer, (), torch.empty(0))
                feed |= {name: pool[slots].transpose(1, 2) for name, pool in zip(names, pools, strict=True)}
            else:  # no pools before the first run: the graph's inputs tell the sizes
                sizes = (self.graph.inputs[name] for name in names)
                empty = (torch.empty(len(past_lengths), heads, 0, size) for _, heads, _, size in sizes)
                feed |= dict(zip(names, empty, strict=True))
        return feed


def _mask(batch: RaggedBatch, past_lengths: Sequence[int], most: int) -> Tensor:
    """Returns the mask ``[B, 1, n, P + n]``: 0 where a row sees a key."""
    past = max(past_lengths)
    mask = torch.full((len(batch.rows), 1, most, past + most), HIDDEN)
    taking_part = [sample for sample, rows in enumerate(batch.rows) if rows]
    for sample, span in zip(taking_part, batch.spans(dense=True), strict=True):
        before, rows = past_lengths[sample], span.rows
        seen = torch.zeros(rows, span.length) if span.bias is None else span.bias.clamp(min=HIDDEN)
        mask[sample, 0, :rows, :before] = seen[:, :before]
        mask[sample, 0, :rows, past : past + rows] = seen[:, before:]
    return mask
