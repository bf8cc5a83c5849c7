"""Runs drafts of fixed shapes: chooses their shapes, fills their tables, records them as CUDA graphs, reads the trees.

Shapes: S samples, C rows to catch up with of each, F hidden states side by side.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.decoding.static.bucket import power_of_two
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.decoding.static.recording import check_kernels, on, record
from arbordraft.decoding.static.step import Pools, compiled
from arbordraft.drafters.one_call import DraftNetwork, Missing, caught_up
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.topology import TreeTopology

_MOST_RUNNERS = 32  # each has buffers and perhaps a graph


class _Runner:
    """A draft with the buffers that it reads; on a GPU recorded as a CUDA graph.

    Args:
        step: the draft.
        compiler: backend of ``torch.compile``.
        memory: what the graphs of drafts share; ``None`` where nothing is recorded.
    """

    def __init__(self, step: DraftStep, compiler: str | None, memory: Any) -> None:
        network, bucket = step.network, step.bucket
        self.step, self._memory = step, memory
        self._call = step if compiler is None else compiled(step, compiler)
        self.host = torch.zeros(bucket.size, dtype=torch.int64, pin_memory=network.device.type == "cuda")
        self.table = torch.zeros(bucket.size, dtype=torch.int64, device=network.device)
        rows = bucket.samples * bucket.rows if network.states else 0
        self.states = torch.zeros(rows, network.states, dtype=network.dtype, device=network.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recorded: tuple[int, ...] = ()

    def __call__(self, pools: Pools) -> Tensor:
        """Runs what was written into ``host`` and ``states``."""
        self.table.copy_(self.host, non_blocking=True)
        places = tuple(pool.data_ptr() for pool in pools)
        if self._memory is not None and self._recorded != places:
            self._graph, self._out = record(lambda: self._run(pools), self._memory, f"a draft of {self.step.network}")
            self._recorded = places
        if self._graph is None:
            return self._run(pools)
        self._graph.replay()
        return self._out

    def _run(self, pools: Pools) -> Tensor:
        with torch.no_grad():
            return self._call(self.table, self.states, pools)


class StaticDrafts:
    """Grows the trees of a step in one run of fixed shapes: see :class:`~arbordraft.drafters.context.OneCallDrafts`.

    The number of samples is rounded up to a power of two, and as many levels run as some sample may have. The topology
    says all the rest.

    Args:
        topology: the trees' shape.
        compiler: backend of ``torch.compile``; by default drafts run as they are.
    """

    def __init__(self, topology: TreeTopology, compiler: str | None = None) -> None:
        self.topology, self.compiler = topology, compiler
        self.rows = topology.max_depth + 1  # as many as a step commits at most
        self._inner = [node for node, children in enumerate(topology.child_list) if node and children]
        self._runners: dict[tuple[object, ...], _Runner] = {}
        self._memory: Any = None
        self._lock = threading.Lock()

    @property
    def each(self) -> int:
        """Cache rows that a sample takes besides its committed ones, at most."""
        return self.rows + len(self._inner)

    def spare(self, batch: int) -> int:
        """Cache rows for the samples that a batch of up to so many lacks to a power of two, at most."""
        return max(0, power_of_two(batch) // 2 - 1) * self.each

    def reset(self, memory: Any) -> None:
        """Forgets what was recorded and compiled.

        Args:
            memory: what graphs share from now on; ``None`` where nothing is recorded.
        """
        with self._lock:
            self._runners.clear()
            self._memory = memory

    def __call__(
        self,
        network: DraftNetwork,
        cache: RaggedKVCache,
        missing: Mapping[int, Missing],
        growth: Growth,
        draws: Draws | None,
    ) -> Drafted:
        """See :class:`~arbordraft.drafters.context.OneCallDrafts`."""
        assert isinstance(cache, StaticCache)
        counts = [len(tokens) for tokens, _ in missing.values()]
        # Rows behind a sample's last one are written to as well.
        wanted = [max(count + len(self._inner), self.rows) for count in counts]
        places = cache.reserve(list(missing), wanted)
        pools = network.pools(cache, cache.dummy)
        samples = power_of_two(len(missing))
        spare = [cache.dummy_start + 1 + number * self.each for number in range(samples - len(missing))]
        with self._lock, on(network.device):  # the buffers of a draft serve one batch at a time
            runner = self._runner(network, samples, max(growth.levels), draws is not None, cache.longest)
            runner.step.bucket.fill(runner.host, list(missing.values()), places, growth, draws, spare)
            if network.states:
                states = [part for _, part in missing.values() if part is not None]
                runner.states[: sum(counts)].copy_(torch.cat(states))
            tokens, chances = runner(pools).tolist()
        caught_up(cache, missing)
        return self._drafted(tokens[: len(missing)], chances[: len(missing)], runner.step.bucket.depth)

    def _drafted(self, tokens: Sequence[Sequence[float]], chances: Sequence[Sequence[float]], depth: int) -> Drafted:
        found = [
            ([sample, node, int(token)], chances[sample][node])
            for sample, row in enumerate(tokens)
            for node, token in enumerate(row)
            if node and token >= 0
        ]
        nodes = self.topology.levels[depth].start  # above the last level, whose nodes were planted and not run
        fed = [[sample, node] for sample in range(len(tokens)) for node in self._inner if node < nodes]
        broken = int(sum(row[0] for row in chances))
        return Drafted([place for place, _ in found], [chance for _, chance in found], fed, broken)

    def _runner(self, network: DraftNetwork, samples: int, depth: int, shared: bool, longest: int) -> _Runner:
        bucket = DraftBucket(samples, self.rows, depth)
        key = (network, bucket, shared, longest)
        runner = self._runners.pop(key, None)
        if runner is None:
            step = DraftStep(network, self.topology, bucket, shared=shared, longest=longest)
            runner = _Runner(step, self.compiler, self._memory)
        self._runners[key] = runner  # at the end: the first one is the one least recently used
        if len(self._runners) > _MOST_RUNNERS:
            del self._runners[next(iter(self._runners))]
        check_kernels("static_draft", runner.table)
        return runner


__all__ = ["StaticDrafts"]
