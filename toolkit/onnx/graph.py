"""Runs exported graphs with onnxruntime: alone, or on the packed rows of a ragged batch.

Shapes: B samples, T packed rows, n the most rows of one sample, P the most keys behind one sample's rows, L layers,
Hkv heads, C head size.
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

MODEL, FUSE = "model.onnx", "fuse.onnx"  # of an EAGLE head, the second graph makes the input of the first
MARKOV = "markov.onnx"  # of a block head, what a node's own token adds to its logits
PREFIX = "arbordraft."  # of our entries among a file's metadata
FORMAT = 1  # of these entries and of what the graphs take and give
PAST, PRESENT = "past_key_values.{}.{}", "present.{}.{}"
HIDDEN = torch.finfo(torch.float32).min  # added to a score that must not count


class Graph:
    """A graph of a file that ``arbordraft export onnx`` wrote.

    Args:
        path: the file.

    Raises:
        ImportError: if onnxruntime is not installed.
        ValueError: if the file is missing, damaged, or none of ours.
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
            # No other provider: what was compared with the original before it was written ran on this one.
            self._session = runtime.InferenceSession(str(self.path), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a class of its own for every cause
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
        """What it computes."""
        return str(self.about.get("kind"))

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Its outputs by name."""
        feed = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in inputs.items()}
        arrays = self._session.run(None, feed)
        return {name: torch.from_numpy(array) for name, array in zip(self.outputs, arrays, strict=True)}


class RaggedGraph:
    """A graph with keys and values of its own, run on the packed rows of a ragged batch.

    Such graphs take batches ``[B, n]`` with a past ``[B, Hkv, P, C]``. Where samples differ in length, both are filled
    up and the mask hides what was added.

    Args:
        graph: takes ``attention_mask`` ``[B, 1, n, P + n]``, ``position_ids`` ``[B, n]``, ``past_key_values.*`` and
            anything else ``[B, n, ...]``.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._layers = sum(name.startswith("past_key_values") for name in graph.inputs) // 2

    def __call__(self, inputs: Mapping[str, Tensor], batch: RaggedBatch, cache: RaggedKVCache) -> dict[str, Tensor]:
        """Writes the rows' keys and values into the cache and returns the other outputs.

        Args:
            inputs: ``[T, ...]`` by name; ``position_ids`` and ``attention_mask`` follow from the batch.
            batch: what ``cache.lay_out`` returned for these rows.
            cache: the graph's own.

        Returns:
            ``[T, ...]`` by name.
        """
        most = max(batch.rows)
        places = torch.cat([torch.arange(rows) + sample * most for sample, rows in enumerate(batch.rows)])

        def spread(packed: Tensor) -> Tensor:
            wide = packed.new_zeros(len(batch.rows) * most, *packed.shape[1:])
            wide[places] = packed
            return wide.unflatten(0, (-1, most))

        behind = [
            past + len(tree) - rows
            for past, tree, rows in zip(batch.past, batch.tree_positions, batch.rows, strict=True)
        ]
        feed = {name: spread(tensor) for name, tensor in inputs.items()}
        feed["position_ids"] = spread(batch.positions)
        feed["attention_mask"] = _mask(batch, behind, most)
        feed |= self._past(batch, behind, cache)
        outputs = self.graph.run(feed)
        for layer in range(self._layers):
            keys, values = (
                outputs.pop(PRESENT.format(layer, part))[:, :, -most:].transpose(1, 2).flatten(0, 1)[places]
                for part in ("key", "value")
            )
            cache.write(layer, keys, values, batch.slots)
        return {name: tensor.flatten(0, 1)[places] for name, tensor in outputs.items()}

    def _past(self, batch: RaggedBatch, behind: Sequence[int], cache: RaggedKVCache) -> dict[str, Tensor]:
        """``[B, Hkv, P, C]`` keys and values behind the rows of every layer."""
        columns = torch.arange(max(behind))
        starts, lengths = torch.tensor(list(batch.starts)), torch.tensor(behind)
        slots = starts[:, None] + torch.where(columns < lengths[:, None], columns, 0)
        feed: dict[str, Tensor] = {}
        for layer in range(self._layers):
            names = [PAST.format(layer, part) for part in ("key", "value")]
            if len(columns):
                pools = cache.pools(layer, (), torch.empty(0))
                feed |= {name: pool[slots].transpose(1, 2) for name, pool in zip(names, pools, strict=True)}
            else:  # the first run makes the pools: it knows how large keys and values are
                sizes = (self.graph.inputs[name] for name in names)
                empty = (torch.empty(len(behind), heads, 0, size) for _, heads, _, size in sizes)
                feed |= dict(zip(names, empty, strict=True))
        return feed


def _mask(batch: RaggedBatch, behind: Sequence[int], most: int) -> Tensor:
    """``[B, 1, n, P + n]``: 0 where a row sees a key."""
    past = max(behind)
    mask = torch.full((len(batch.rows), 1, most, past + most), HIDDEN)
    taking_part = [sample for sample, rows in enumerate(batch.rows) if rows]
    for sample, span in zip(taking_part, batch.spans(dense=True), strict=True):
        before, rows = behind[sample], span.rows
        seen = torch.zeros(rows, span.length) if span.bias is None else span.bias.clamp(min=HIDDEN)
        mask[sample, 0, :rows, :before] = seen[:, :before]
        mask[sample, 0, :rows, past : past + rows] = seen[:, before:]
    return mask
