"""A decoding step of fixed shapes that never asks the host: what CUDA graphs and compilers want.

Everything between an upload and a download is one module of tensors: the target's forward over all trees, verification,
the drawing of the next tokens, compaction of the cache. What is different from step to step stands in one table. Shapes
are those of a few buckets; rows that a step does not need belong to a sample of their own, the dummy, with pool rows of
its own.

Shapes: T rows of a bucket, S samples besides the dummy, N places for nodes with children, V vocabulary, F hidden states
side by side, P pool rows.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from arbordraft.attention import UnsupportedModel
from arbordraft.buckets import Bucket, bucket_sizes, fitting, power_of_two
from arbordraft.cache import RaggedKVCache
from arbordraft.coupling import Coupling
from arbordraft.drafters import Drafter
from arbordraft.kernels import choice
from arbordraft.kernels.kv_cache.operator import kv_append, kv_compact
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.ragged_tree_attention.operator import tree_attention
from arbordraft.kernels.verify import row_max_reference
from arbordraft.kernels.verify.tops import take_tops
from arbordraft.kernels.verify.tree import PackedTree, verify_tree, walk
from arbordraft.laws import DraftLaw
from arbordraft.observation import AttentionCall
from arbordraft.sampling import Noise, Warp
from arbordraft.target import RaggedModel
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree

_INSTEAD = "build the decoder with buckets=None"
_RECOMPILE_LIMIT = 128
Pools = Sequence[Tensor]  # keys and values of layer 0, of layer 1, ...: [P, Hkv, D] each
Call = Callable[[Tensor, Tensor, Pools], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class _StaticForward:
    """A forward whose batch is described by tensors alone; see :class:`~arbordraft.observation.Forward`."""

    pools: Pools
    layout: Tensor
    positions: Tensor
    slots: Tensor
    words: Tensor
    most_rows: int
    longest: int
    layers: dict[int, AttentionCall | None] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, call: AttentionCall) -> Tensor:
        keys, values = self.pools[2 * layer : 2 * layer + 2]
        kv_append(keys, values, key, value, self.slots)
        return tree_attention(
            query.contiguous(),
            keys,
            values,
            self.layout,
            self.positions,  # of the keys of all trees: those of the rows themselves
            self.positions,
            self.words,
            call.scale,
            call.window or 0,
            call.softcap or 0.0,
            call.sinks,
            self.most_rows,
            self.longest,
            0,
        )


@dataclass(frozen=True)
class StepKind:
    """What a step is made for besides its shapes; steps of one kind can share a graph.

    Args:
        sampled: verify by recursive rejection; else by what is most probable.
        lifted: see :class:`~arbordraft.Lifted`.
        replacement: whether draws may repeat a token.
        most_tops: certain tokens of a node that was drawn at random, at most.
        processors: what tells the request's processors from others.
        longest: about the longest prefix: how attention is split follows from it.
    """

    sampled: bool
    lifted: bool = False
    replacement: bool = False
    most_tops: int = 0
    processors: Hashable = ()
    longest: int = 0


class StaticStep(nn.Module):
    """The device's part of a step, in static shapes and without a question to the host.

    Args:
        target: the target; its attention must be hooked while this runs, see :meth:`RaggedModel.hooked`.
        bucket: the shapes.
        kind: what else is fixed.
        warp: the request's processors, which must look at the scores alone.
        most_rows: rows of a sample, the dummy aside, at most.
        hidden_layers: the target's hidden states that are wanted.
    """

    def __init__(
        self,
        target: RaggedModel,
        bucket: Bucket,
        kind: StepKind,
        warp: Warp,
        most_rows: int,
        hidden_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.target = target
        self.bucket = bucket
        self.kind = kind
        self.warp = warp
        self.most_rows = most_rows
        self.hidden: dict[int, Tensor | None] = dict.fromkeys(hidden_layers)

    def forward(self, table: Tensor, draft: Tensor, pools: Pools) -> tuple[Tensor, Tensor]:
        """One step.

        Args:
            table: what :meth:`Bucket.fill` wrote.
            draft: ``[N, V]`` draft rows, the tops of which are set to 0 in place; ``[0, V]`` if nothing is sampled.
            pools: the cache, to which rows are appended and in which the accepted ones move up.

        Returns:
            ``[S + 1, 3]`` int64: of every sample the row of the last accepted node, the token behind it, and whether
            its logits are no numbers. And ``[S + 1, depth + 1, F]`` hidden states of its root and the accepted nodes.
        """
        part = self.bucket.read(table)
        run = _StaticForward(
            pools, part["layout"], part["positions"], part["slots"], part["words"], self.most_rows, self.kind.longest
        )
        found = self.target.model(
            input_ids=part["tokens"][None], position_ids=part["positions"][None], use_cache=False, ragged=run
        )
        logits: Tensor = found.logits[0]
        highest, best = row_max_reference(logits)
        broken = highest.new_zeros(self.bucket.samples + 1, dtype=torch.int64)
        broken = broken.index_add(0, part["sample"], (~highest.isfinite()).to(torch.int64))

        scores = self.warp(logits, _no_path)
        if self.kind.sampled:
            tree = self._tree(part, draft)
            end, token = verify_tree(scores, draft, tree, part["accept"], part["final"], lifted=self.kind.lifted)
        else:
            tree = self._tree(part, None)
            if self.warp.processors:
                _, best = row_max_reference(scores)
            # A row without children is compared with nothing: -1 is no token.
            end = walk(tree, tree.tokens == best[tree.inner.clamp(min=0)][:, None])
            token = best[end]

        path = self._path(part, end)
        self._compact(part, path, pools)
        states = [states for states in self.hidden.values() if states is not None]
        hidden = torch.cat(states, dim=-1) if states else logits.new_empty(self.bucket.rows, 0)
        self.hidden.update(dict.fromkeys(self.hidden))  # nothing of a forward outlives it
        return torch.stack([end, token, broken], dim=1), hidden[path.clamp(min=0)]

    def _tree(self, part: Mapping[str, Tensor], draft: Tensor | None) -> PackedTree:
        children, draft_row = part["children"], part["draft_row"]
        tokens = torch.where(children < 0, -1, part["tokens"][children.clamp(min=0)])
        certain = torch.zeros_like(children, dtype=torch.bool)
        if draft is not None:
            tops = take_tops(draft, part["most_tops"], part["threshold"], self.kind.most_tops)[draft_row.clamp(min=0)]
            certain = (tokens[:, :, None] == tops[:, None, :]).any(dim=2)
        return PackedTree(
            roots=part["roots"],
            inner=part["inner"],
            levels=self.bucket.levels,
            draft_row=draft_row,
            children=children,
            tokens=tokens,
            certain=certain,
            parent=part["parent"],
            place=part["place"],
            order=part["order"],
            sample=part["sample"],
            replacement=self.kind.replacement,
        )

    def _path(self, part: Mapping[str, Tensor], end: Tensor) -> Tensor:
        """``[S + 1, depth + 1]`` rows from each root to where its path ends, -1 behind."""
        path = end.new_full((len(end), self.bucket.depth + 1), -1)
        row = end
        for _ in range(self.bucket.depth + 1):
            path.scatter_(1, part["depth"][row][:, None], row[:, None])
            above = part["above"][row]
            row = torch.where(above < 0, row, above)
        return path

    def _compact(self, part: Mapping[str, Tensor], path: Tensor, pools: Pools) -> None:
        """Moves the accepted rows up behind their roots; every other move is one of a sample's root to itself.

        A sample that does not take part has the dummy's committed row for a root, which nobody changes.
        """
        depth, samples = self.bucket.depth, self.bucket.samples
        if depth == 0:
            return
        home, numbers = part["home"][:, None], torch.arange(samples + 1, device=path.device)
        taking = part["sample"][part["roots"]] == numbers
        kept = (path[:, 1:] >= 0) & taking[:, None]
        steps = torch.arange(1, depth + 1, device=path.device)
        source = torch.where(kept, part["slots"][path[:, 1:].clamp(min=0)], home)
        destination = torch.where(kept, home + steps, home)
        first = torch.arange(0, depth * (samples + 2), depth, device=path.device)
        kv_compact(list(pools), source.flatten(), destination.flatten(), first)


def _no_path(row: int) -> Sequence[int]:
    raise AssertionError(f"processors were checked, yet one asks for the path of row {row}")


class StaticCache(RaggedKVCache):
    """A cache with the dummy in it, whose pools can be handed to a step.

    Args:
        max_tokens: as for :class:`~arbordraft.RaggedKVCache`; the dummy's rows count.
        rows: padding rows that there can be at a time.
    """

    def __init__(self, max_tokens: int | None, rows: int) -> None:
        super().__init__(max_tokens)
        self.dummy = self.open(1 + rows)

    @property
    def dummy_start(self) -> int:
        """The dummy's first pool row."""
        return self._slabs[self.dummy].start

    @property
    def longest(self) -> int:
        """Rows that the largest slab has, rounded up to a power of two: it changes rarely."""
        return power_of_two(max(slab.capacity for slab in self._slabs.values()))

    def layers(self, number: int) -> list[Tensor]:
        """The pools of so many layers: keys and values of the first, of the second and so on."""
        return [self.get_buffer(f"{kind}_{layer}") for layer in range(number) for kind in ("keys", "values")]


def _compiled(step: StaticStep, backend: str) -> Call:
    """The step through ``torch.compile``, in one piece."""
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)

    def call(table: Tensor, draft: Tensor, pools: Pools) -> tuple[Tensor, Tensor]:
        # The limit is one for all steps together, as they share their code; each of them is traced for good reason.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return compiled(table, draft, pools)

    return call


class _Runner:
    """A step with the buffers that it reads; on a GPU recorded as a CUDA graph.

    Args:
        step: the step.
        call: the same, as it shall be called.
        memory: what the graphs of a decoder share; ``None`` where nothing is recorded.
    """

    def __init__(self, step: StaticStep, call: Call, memory: Any) -> None:
        self.step, self._call, self._memory = step, call, memory
        device, bucket = step.target.device, step.bucket
        pinned = device.type == "cuda"
        self.host = torch.zeros(bucket.size, dtype=torch.int64, pin_memory=pinned)
        self.table = torch.zeros(bucket.size, dtype=torch.int64, device=device)
        drafts = bucket.nodes if step.kind.sampled else 0
        self.draft = torch.zeros(drafts, step.target.vocab_size, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded: tuple[int, ...] = ()
        self._kept: object = None

    def __call__(
        self, tree: DraftTree, batch: RaggedBatch, noise: Noise | None, cache: StaticCache
    ) -> tuple[Tensor, Tensor]:
        """Runs the step: an upload, the step, and what there is to download."""
        pools = cache.layers(self.step.target.num_layers)
        if self._memory is not None and self._recorded != tuple(pool.data_ptr() for pool in pools):
            self._record(cache, pools)
        drafts = self.step.bucket.fill(self.host, tree, batch, noise, cache.dummy_start)
        self.table.copy_(self.host, non_blocking=True)
        if drafts and self.step.kind.sampled:
            self.draft[: len(drafts)].copy_(torch.stack(drafts))
        if self._graph is None:
            return self._run(pools)
        self._graph.replay()
        result, hidden = self._out
        return result, hidden.clone()  # the drafter may keep it; the next step overwrites this one

    def _run(self, pools: Pools) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), self.step.target.hooked(hidden=self.step.hidden):
            return self._call(self.table, self.draft, pools)

    def _record(self, cache: StaticCache, pools: Pools) -> None:
        """Records the step on the pools as they lie now. What runs meanwhile are padding rows alone."""
        from arbordraft.kernels.kv_cache.triton import address_table

        nothing = RaggedBatch([], [], [], [], torch.empty(0), torch.empty(0))
        self.step.bucket.fill(self.host, DraftTree(()), nothing, None, cache.dummy_start)
        self.table.copy_(self.host)
        self._graph = None
        self._kept = address_table(list(pools))
        try:
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):  # compiles kernels and fills caches, which cannot be recorded
                for _ in range(2):
                    self._run(pools)
            torch.cuda.current_stream().wait_stream(beside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory):
                self._out = self._run(pools)
        except RuntimeError as failure:
            name = type(self.step.target.model).__name__
            raise UnsupportedModel(
                f"a step of {name} cannot be recorded as a CUDA graph ({failure}): {_INSTEAD}"
            ) from failure
        self._graph, self._recorded = graph, tuple(pool.data_ptr() for pool in pools)


class SampleEnd(NamedTuple):
    """Where the path of a sample ends.

    Args:
        row: which of the sample's rows the last accepted node is.
        token: the token behind it.
        sound: whether the sample's logits are numbers; else the others mean nothing.
    """

    row: int
    token: int
    sound: bool


class StaticStepping:
    """Runs the steps of a decoder in buckets.

    A step has the rows of the smallest bucket into which all trees of the batch fit; above the largest bucket, the next
    power of two. Its number of samples is that of the batch, rounded up to a power of two.

    Args:
        target: the target.
        drafter: proposes the trees.
        topology: the largest tree.
        coupling: judges them.
        buckets: numbers of rows.
        compiler: backend of ``torch.compile``, such as ``"inductor"``; by default the step runs as it is.

    Raises:
        ValueError: if the target has packed linears, or a bucket is not positive.
    """

    def __init__(
        self,
        target: RaggedModel,
        drafter: Drafter,
        topology: TreeTopology,
        coupling: Coupling,
        buckets: Sequence[int],
        compiler: str | None = None,
    ) -> None:
        if target.backend != "plain":
            raise ValueError(f"buckets need a target with linears='plain', this one has {target.backend!r}: {_INSTEAD}")
        self.target, self.topology, self.coupling = target, topology, coupling
        self.buckets = bucket_sizes(buckets)
        self.compiler = compiler
        self.hidden_layers = drafter.hidden_layers
        self._laws = [law for law in drafter.laws(coupling.law) if not law.deterministic]
        self._runners: dict[tuple[Bucket, StepKind], _Runner] = {}
        self._idle: StaticCache | None = None
        self._memory: Any = None
        self._weights: tuple[int, ...] = ()

    @property
    def shapes(self) -> list[Bucket]:
        """The shapes of all steps so far."""
        return sorted({bucket for bucket, _ in self._runners}, key=lambda bucket: (bucket.samples, bucket.rows))

    def reset(self) -> None:
        """Forgets what was recorded and compiled, and the idle cache; steps are made anew when they are needed.

        Weights that move (to another device or dtype) are noticed whenever a batch begins. What else changes in a model
        between two batches, an adapter that is switched on for instance, calls for this.
        """
        self._runners.clear()
        self._idle = None
        self._memory = torch.cuda.graph_pool_handle() if self.target.device.type == "cuda" else None

    def check(self, warp: Warp, greedy: bool) -> None:
        """Raises ValueError if a request asks for what only the host can do."""
        if asking := [type(one).__name__ for one in warp.processors if not warp.is_static(one)]:
            raise ValueError(f"{asking[0]} looks at more than the scores of a row, or asks the host: {_INSTEAD}")
        verifier = self.coupling.verifier
        if greedy:
            return
        if not verifier.rejects_in_turn:
            name = type(getattr(verifier, "rule", verifier)).__name__
            raise ValueError(f"{name} samples on the host, which RecursiveRejection need not: {_INSTEAD}")
        if any(type(law).tops_of is not DraftLaw.tops_of for law in self._laws):
            raise ValueError(f"a law that chooses its tops in a way of its own does so on the host: {_INSTEAD}")
        if len({law.replacement for law in self._laws}) > 1:
            raise ValueError(f"trees are drawn both with and without replacement: {_INSTEAD}")

    def open(self, batch: int, max_tokens: int | None) -> StaticCache:
        """A cache for so many samples; the last one again if it is idle, as graphs are recorded for its pools.

        Raises:
            CacheOverflow: if ``max_tokens`` does not even allow the dummy.
        """
        weights = tuple(tensor.data_ptr() for tensor in (*self.target.model.parameters(), *self.target.model.buffers()))
        if weights != self._weights:
            self.reset()
            self._weights = weights
        rows = fitting(self.buckets, batch * self.topology.num_nodes)
        cache, self._idle = self._idle, None
        fits = cache is not None and cache.capacity(cache.dummy) > rows and cache.max_tokens == max_tokens
        if cache is None or not fits:
            cache = StaticCache(max_tokens, rows)
            self.target.prefill({cache.dummy: [0]}, cache)
        return cache

    def close(self, cache: RaggedKVCache) -> None:
        """Keeps a cache without samples for the next batch."""
        assert isinstance(cache, StaticCache)
        self._idle = cache

    def __call__(
        self, tree: DraftTree, batch: RaggedBatch, noise: Noise | None, cache: RaggedKVCache, warp: Warp
    ) -> tuple[list[SampleEnd | None], Tensor, int]:
        """Runs one step.

        Args:
            tree: the drafts.
            batch: what ``cache.plan`` returned for them.
            noise: the uniforms of this step; ``None`` at temperature 0.
            cache: what :meth:`open` returned; :meth:`RaggedKVCache.advance` commits the accepted rows.
            warp: the request's processors.

        Returns:
            Of every sample where its path ends, ``None`` if it did not take part; ``[S + 1, depth + 1, F]`` hidden
            states of all samples' accepted rows; the number of rows, padding included.

        Raises:
            ValueError: if the chosen kernels cannot do without the host.
        """
        assert isinstance(cache, StaticCache)
        runner = self._runner(tree, cache, noise, warp)
        result, hidden = runner(tree, batch, noise, cache)
        ends: list[SampleEnd | None] = []
        first = 0
        for length, (row, token, broken) in zip(tree.lengths, result.tolist(), strict=False):
            ends.append(SampleEnd(row - first, token, not broken) if length else None)
            first += length
        return ends, hidden, runner.step.bucket.rows

    def _runner(self, tree: DraftTree, cache: StaticCache, noise: Noise | None, warp: Warp) -> _Runner:
        rows = fitting(self.buckets, sum(tree.lengths))
        bucket = Bucket.of(self.topology, rows, power_of_two(len(tree.samples)))
        kind = StepKind(noise is not None, processors=warp.constants, longest=cache.longest)
        if kind.sampled:
            kind = replace(
                kind,
                lifted=self.coupling.verifier.lifted,
                replacement=any(law.replacement for law in self._laws),
                most_tops=min(max((law.most_tops for law in self._laws), default=0), self.target.vocab_size),
            )
        if (bucket, kind) not in self._runners:
            most_rows = min(rows, self.topology.num_nodes)
            step = StaticStep(self.target, bucket, kind, warp, most_rows, self.hidden_layers)
            call = step if self.compiler is None else _compiled(step, self.compiler)
            self._runners[bucket, kind] = _Runner(step, call, self._memory)
        runner = self._runners[bucket, kind]
        if not choice.wants_triton("static_step", runner.table) and runner.table.is_cuda:
            raise ValueError(f"without Triton a step asks the host: use kernels 'auto' or 'triton', or {_INSTEAD}")
        return runner


__all__ = ["StaticCache", "StaticStep", "StaticStepping", "StepKind"]
