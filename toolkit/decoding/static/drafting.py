"""Runs drafts of fixed shapes: chooses their shapes, fills their tables, reads the trees.

Shapes: S samples, C rows to catch up with of each, F hidden states side by side, N nodes of the topology.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from arbordraft.decoding.static.bucket import power_of_two
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.decoding.static.recording import Pools, Recorder, Recording
from arbordraft.drafters.model_drafter import DraftNetwork, Missing, caught_up
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import Reals
from arbordraft.trees.topology import TreeTopology


class DraftLayout(NamedTuple):
    """Inputs of a draft, and its places in the drafter's cache.

    Args:
        bucket: shapes of the draft.
        pools: pools of the drafter's cache.
        missing: tokens that this cache lacks, by sample.
        places: first pool row and number of committed rows of each sample.
        spare: first pool rows for the unused samples of the bucket.
        growth: how far trees go on.
        draws: how tokens are drawn.
    """

    bucket: DraftBucket
    pools: Pools
    missing: Sequence[Missing]
    places: Sequence[tuple[int, int]]
    spare: Sequence[int]
    growth: Growth
    draws: Draws | None

    def fill(self, table: Tensor, inputs: Tensor) -> None:
        """Writes the table on the host, and the target's states on the device."""
        self.bucket.fill(table, self.missing, self.places, self.growth, self.draws, self.spare)
        if states := [part for _, part in self.missing if part is not None]:
            inputs[: sum(map(len, states))].copy_(torch.cat(states))


class StaticDrafts:
    """Grows the trees of a step in one run of fixed shapes: see :class:`~arbordraft.drafters.context.OneCallDrafts`.

    The number of samples is rounded up to a power of two. The number of levels is the greatest that a sample may have.
    The topology determines all other shapes.

    Args:
        topology: the trees' shape.
        recorder: keeps and records the runs; by default a separate recorder, which records nothing.
    """

    def __init__(self, topology: TreeTopology, recorder: Recorder | None = None) -> None:
        self.topology, self.recorder = topology, recorder or Recorder()
        self.rows = topology.max_depth + 1  # the most that a step commits
        self._bucket = functools.cache(DraftBucket)
        self._inner = [node for level in topology.inner[1:] for node in level]

    @property
    def alone(self) -> "StaticDrafts":
        """This object, which always drafts without the target's step."""
        return self

    @property
    def each(self) -> int:
        """Greatest number of cache rows that a sample takes besides its committed ones."""
        return self.rows + len(self._inner)

    def spare(self, batch: int) -> int:
        """Returns the most cache rows that pad a batch of up to ``batch`` samples to a power of two."""
        return max(0, power_of_two(batch) // 2 - 1) * self.each

    def __call__(
        self,
        network: DraftNetwork,
        cache: RaggedKVCache,
        samples: Sequence[int],
        missing: Mapping[int, Missing],
        growth: Growth,
        draws: Draws | None,
    ) -> Drafted:
        """Grows the trees; see :class:`~arbordraft.drafters.context.OneCallDrafts`."""
        assert isinstance(cache, StaticCache)
        layout = self.lay_out(network, cache, missing, growth, draws)
        with self.recorder.turn(network.device):
            run = self._recording(network, layout.bucket, draws is not None, cache.longest)
            found = run(layout.pools, lambda table: layout.fill(table, run.inputs)).cpu().numpy()
        caught_up(cache, missing)
        return self.drafted(found[:, : len(missing)], layout.bucket)

    def lay_out(
        self,
        network: DraftNetwork,
        cache: StaticCache,
        missing: Mapping[int, Missing],
        growth: Growth,
        draws: Draws | None,
    ) -> DraftLayout:
        """Reserves room in the drafter's cache for a draft; see :meth:`__call__`."""
        counts = [len(tokens) for tokens, _ in missing.values()]
        # Rows after a sample's last one are written to as well.
        wanted = [max(count + len(self._inner), self.rows) for count in counts]
        places = cache.reserve(list(missing), wanted)
        network.pools(cache, cache.dummy)
        cache.settle()  # before a graph is recorded on the pools
        pools = network.pools(cache, cache.dummy)
        bucket = self._bucket(power_of_two(len(missing)), self.rows, max(growth.levels))
        spare = [cache.dummy_start + 1 + number * self.each for number in range(bucket.samples - len(missing))]
        return DraftLayout(bucket, pools, list(missing.values()), places, spare, growth, draws)

    def drafted(self, found: Reals, bucket: DraftBucket, *, trimmed: bool = False) -> Drafted:
        """Reads the ``[2, S, N]`` result of :meth:`DraftStep.forward` for S samples that draft."""
        tokens, chances = found[0].astype(np.int64), found[1]
        samples, nodes = np.nonzero(tokens[:, 1:] >= 0)
        places = samples, nodes + 1
        # Nodes of the last level were added but did not run.
        fed = [node for node in self._inner if node < self.topology.levels[bucket.depth].start]
        return Drafted(
            samples.tolist(),
            places[1].tolist(),
            tokens[places].tolist(),
            chances[places].tolist(),
            [(sample, node) for sample in range(len(tokens)) for node in fed],
            int(chances[:, 0].sum()),
            trimmed,
        )

    def _recording(self, network: DraftNetwork, bucket: DraftBucket, shared: bool, longest: int) -> Recording:
        def make() -> tuple[DraftStep, Tensor]:
            step = DraftStep(network, self.topology, bucket, shared=shared, longest=longest)
            return step, inputs_of(network, bucket)

        return self.recorder.recording((network, bucket, shared, longest), make)


def inputs_of(network: DraftNetwork, bucket: DraftBucket) -> Tensor:
    """Returns a buffer for the target's states that a draft reads."""
    rows = bucket.samples * bucket.rows if network.states else 0
    return torch.zeros(rows, network.states, dtype=network.dtype, device=network.device)


__all__ = ["DraftLayout", "StaticDrafts", "inputs_of"]
