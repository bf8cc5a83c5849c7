"""A decoding step of fixed shapes that never asks the host, as CUDA graphs and compilers require.

Everything between an upload and a download is one module of tensors. It runs the target's forward over all trees,
verifies, draws the next tokens and compacts the cache. Values that change from step to step are in one table. Shapes
are those of a few buckets. Rows that a step does not need belong to an extra sample, the dummy, with its own pool rows.

Shapes: T rows of a bucket, S samples besides the dummy, N places for nodes with children. V vocabulary, F hidden states
side by side, P pool rows.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arbordraft.decoding.static.bucket import Bucket
from arbordraft.decoding.static.cache import Memory, MemoryLayout
from arbordraft.decoding.static.states import StepStates
from arbordraft.kernels.accepted_paths import accepted_paths, matching_ends
from arbordraft.kernels.fused_layers import rotate_append
from arbordraft.kernels.fused_linear import project_rotate_append
from arbordraft.kernels.gumbel import gumbel_argmax
from arbordraft.kernels.kv_cache import append, compact_rows
from arbordraft.kernels.ragged_tree_attention import attend
from arbordraft.kernels.ragged_tree_attention.batch import arrivals
from arbordraft.kernels.recurrent_tree import Scan
from arbordraft.kernels.verify import log_sum_exp, row_max_reference, score_rows, take_tops
from arbordraft.kernels.verify.tree import verify_tree
from arbordraft.sampling.processors import LogitsPipeline, truncated
from arbordraft.target.attention import Attending, AttentionCall, Projection, Tables
from arbordraft.target.model import RaggedModel
from arbordraft.target.states import Key


@dataclass
class StaticForward(Attending):
    """A forward whose batch is described only by tensors.

    Args:
        pools: pools of keys and of values, by layer.
        layout: see :attr:`RaggedBatch.layout`.
        region: positions of the keys of all trees.
        positions: ``[T]``.
        slots: ``[T]``.
        words: ``[T, W]``; ``None`` for causal order.
        most_rows: greatest number of rows of a sample.
        longest: approximate greatest number of committed keys of a sample.
        row_invariant: give every row the same bits as if it ran alone.
        arrivals: see :attr:`RaggedBatch.arrivals`; forwards one after another may share them.
        states: the rows in recurrent layers, if there are any.
    """

    pools: Mapping[int, tuple[Tensor, Tensor]]
    layout: Tensor
    region: Tensor
    positions: Tensor
    slots: Tensor
    words: Tensor | None
    most_rows: int
    longest: int
    row_invariant: bool = False
    arrivals: Tensor | None = None
    states: StepStates | None = None

    def __post_init__(self) -> None:
        if self.arrivals is None:  # one launch for all layers
            self.arrivals = arrivals(self.positions)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall, tables: Tables | None = None
    ) -> Tensor:
        keys, values = self.pools[layer]
        if tables is None:
            append(keys, values, key, value, self.slots)
        else:
            query = rotate_append(query, key, value, *tables, keys, values, self.slots)
        return self._attended(layer, query, call)

    def project_and_attend(self, layer: int, projection: Projection, call: AttentionCall, tables: Tables) -> Tensor:
        keys, values = self.pools[layer]
        return self._attended(layer, project_rotate_append(*projection, *tables, keys, values, self.slots), call)

    def convolve(self, key: Key, inputs: Tensor, weight: Tensor, bias: Tensor | None, *, activate: bool) -> Tensor:
        if self.states is None:
            return super().convolve(key, inputs, weight, bias, activate=activate)
        return self.states.convolve(key, inputs, weight, bias, activate=activate)

    def scan(self, key: Key, rows: Scan) -> Tensor:
        return super().scan(key, rows) if self.states is None else self.states.scan(key, rows)

    def _attended(self, layer: int, query: Tensor, call: AttentionCall) -> Tensor:
        # Always an operator, since the reference reads the layout's numbers; the C++ kernel supports few head sizes.
        run = attend.default if query.is_cuda else attend.portable
        keys, values = self.pools[layer]
        return run(
            query.contiguous(),
            keys,
            values,
            self.layout,
            self.region,
            self.positions,
            self.words,
            call.scale,
            call.window or 0,
            call.softcap or 0.0,
            call.sinks,
            self.most_rows,
            self.longest,
            self.row_invariant,
            self.arrivals,
        )


def by_layer(pools: Sequence[Tensor], layers: Iterable[int] | None = None) -> dict[int, tuple[Tensor, Tensor]]:
    """Returns pools of keys and of values, given in turn, by layer; by default those of layers 0, 1, ..."""
    pairs = list(zip(pools[::2], pools[1::2], strict=True))
    return dict(zip(range(len(pairs)) if layers is None else layers, pairs, strict=True))


@dataclass(frozen=True)
class StepKind:
    """Fixed properties of a step besides its shapes; steps of one kind can share a graph.

    Args:
        sampled: verify by recursive rejection, which keeps the most probable tokens of samples of temperature 0;
            otherwise keep the target's own tokens.
        shared: draw these tokens with the noise that the drafter shares, for samples of a temperature above 0;
            otherwise take the most probable ones.
        lifted: see :class:`~arbordraft.Lifted`.
        replacement: whether draws may repeat a token.
        most_tops: greatest number of certain tokens of a node that was drawn at random.
        processors: identifies the request's processors. Empty if they only divide the scores by temperatures, which
            the table holds.
        longest: approximate longest prefix. It determines the number of attention splits, a dimension of the kernels
            that a graph launches. It is rounded to powers of eight, so few texts see more than two values. If every
            graph had splits for the longest possible text, short texts would combine empty ones in each layer.
    """

    sampled: bool
    shared: bool = False
    lifted: bool = False
    replacement: bool = False
    most_tops: int = 0
    processors: Hashable = ()
    longest: int = 0


class StaticStep(nn.Module):
    """The device's part of a step, in static shapes and without asking the host.

    Args:
        target: the target.
        bucket: the shapes.
        kind: the other fixed properties.
        pipeline: the request's processors, which must read only the scores.
        layout: layout of the target's memory.
        most_rows: greatest number of rows of a sample other than the dummy.
        hidden_layers: layers of the target whose hidden states are returned.
    """

    operator = "static_step"

    def __init__(
        self,
        target: RaggedModel,
        bucket: Bucket,
        kind: StepKind,
        pipeline: LogitsPipeline,
        layout: MemoryLayout,
        most_rows: int,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.target = target
        self.network = target.network()
        self.bucket = bucket
        self.kind = kind
        self.pipeline = pipeline
        self.layout = layout
        self.most_rows = most_rows
        self.row_invariant = target.row_invariant
        self.hidden_layers = tuple(hidden_layers)
        self.title = f"a step of {type(target.model).__name__}"

    def forward(self, table: Tensor, draft: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Runs one step.

        Args:
            table: the table that :meth:`Bucket.fill` wrote.
            draft: ``[N, V]`` draft rows, whose tops are set to 0 in place; ``[0, V]`` if nothing is sampled.
            memory: memory of the cache. Rows are appended, and accepted rows move up. States after accepted paths are
                written to their slots.

        Returns:
            ``[S + 1, 3]`` int64, by sample: the row of the last accepted node, the token after it, and the number of
            rows whose logits are not numbers. And ``[S + 1, depth + 1, F]`` hidden states of roots and accepted nodes.
        """
        return self.run(self.bucket.read(table), draft, memory)

    def run(
        self, part: Mapping[str, Tensor], draft: Tensor, memory: Memory, inputs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs one step, given the parts of the table; see :meth:`forward`.

        Args:
            inputs: ``[T]`` tokens that the target reads, if some tokens of the table are -1; those rows hold no node.
        """
        tokens, states = part["tokens"], None
        if self.layout.states is not None:
            states = StepStates(self.layout.states, memory.states, part, self.bucket.scratch)
        run = StaticForward(
            by_layer(memory.rows, self.layout.layers),
            part["layout"],
            part["positions"],  # the keys of all trees are those of the rows themselves
            part["positions"],
            part["slots"],
            part["words"],
            self.most_rows,
            self.kind.longest,
            self.row_invariant,
            states=states,
            hidden=dict.fromkeys(self.hidden_layers),
        )
        output = self.network(
            input_ids=(tokens if inputs is None else inputs)[None],
            position_ids=part["positions"][None],
            use_cache=False,
            ragged=run,
        )
        logits: Tensor = output.logits[0]
        drawn = self.kind.sampled or self.kind.shared
        best, broken, scores, lse = score_rows(
            logits, tokens, part["sample"], part["temperature"], divide=drawn and not self.kind.processors
        )
        if self.kind.sampled:
            tops = take_tops(draft, part["most_tops"], part["threshold"], self.kind.most_tops)
            tree = self.bucket.unpack(part, tops, self.kind.replacement)
            if self.kind.processors:
                scores = self.pipeline(logits, _no_path)
                lse = log_sum_exp(scores)
            lifted, counters = self.kind.lifted, run.arrivals
            accept, final = part["accept"], part["final"]
            end, token = verify_tree(scores, lse, draft, tree, accept, final, lifted=lifted, counters=counters)
        else:
            if self.kind.shared:
                best = self._drawn(part, logits, scores)
            elif self.kind.processors:
                _, best = row_max_reference(self.pipeline(logits, _no_path))
            end, token = matching_ends(tokens, best, part["parent"], part["roots"], self.bucket.depth)

        depth, slots, home = self.bucket.depth, part["slots"], part["home"]
        path, source, destination = accepted_paths(
            end, part["parent"], part["depth"], slots, home, part["sample"], part["roots"], depth
        )
        if states is not None:
            states.advance(path)
        if depth and memory.rows:
            # A sample that does not take part has the dummy's committed row as its root, which never changes.
            first = torch.arange(0, depth * (len(end) + 1), depth, device=end.device)
            compact_rows(list(memory.rows), source, destination, first)
        features = [one for one in run.hidden.values() if one is not None]
        hidden = torch.cat(features, dim=-1) if features else logits.new_empty(self.bucket.rows, 0)
        return torch.stack([end, token, broken], dim=1), hidden[path.clamp(min=0)]

    def _drawn(self, part: Mapping[str, Tensor], logits: Tensor, scores: Tensor) -> Tensor:
        """Returns the target's token after every row, ``[T]``; arbitrary where logits are not numbers."""
        lowest = None
        if self.kind.processors:
            scores, processor = self.pipeline.trimmed(logits, _no_path)
            scores, lowest = truncated(processor, scores)
        return gumbel_argmax(scores, part["seeds"], part["positions"] + 1, 1.0, lowest).clamp(min=0)


def _no_path(row: int) -> Sequence[int]:
    raise AssertionError(f"processors were checked, yet one asks for the path of row {row}")


__all__ = ["StaticForward", "StaticStep", "StepKind", "by_layer"]
