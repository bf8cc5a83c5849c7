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
    """Where a draft reads and writes, and what it reads.

    Args:
        bucket: its shapes.
        pools: of the drafter's cache.
        missing: what that lacks, by sample.
        places: first pool row and committed rows of each.
        spare: first pool rows for samples that there are none of.
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

    The number of samples is rounded up to a power of two, and as many levels run as some sample may have. The topology
    says all the rest.

    Args:
        topology: the trees' shape.
        recorder: keeps and records them; by default one of their own, which records nothing.
    """

    def __init__(self, topology: TreeTopology, recorder: Recorder | None = None) -> None:
        self.topology, self.recorder = topology, recorder or Recorder()
        self.rows = topology.max_depth + 1  # as many as a step commits at most
        self._bucket = functools.cache(DraftBucket)
        self._inner = [node for level in topology.inner[1:] for node in level]

    @property
    def alone(self) -> "StaticDrafts":
        """Itself."""
        return self

    @property
    def each(self) -> int:
        """Cache rows that a sample takes besides its committed ones, at most."""
        return self.rows + len(self._inner)

    def spare(self, batch: int) -> int:
        """Cache rows for the samples that a batch of up to so many lacks to a power of two, at most."""
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
        """See :class:`~arbordraft.drafters.context.OneCallDrafts`."""
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
        """Finds room in the drafter's cache; see :meth:`__call__`."""
        counts = [len(tokens) for tokens, _ in missing.values()]
        # Rows behind a sample's last one are written to as well.
        wanted = [max(count + len(self._inner), self.rows) for count in counts]
        places = cache.reserve(list(missing), wanted)
        network.pools(cache, cache.dummy)
        cache.settle()  # before something is recorded on them
        pools = network.pools(cache, cache.dummy)
        bucket = self._bucket(power_of_two(len(missing)), self.rows, max(growth.levels))
        spare = [cache.dummy_start + 1 + number * self.each for number in range(bucket.samples - len(missing))]
        return DraftLayout(bucket, pools, list(missing.values()), places, spare, growth, draws)

    def drafted(self, found: Reals, bucket: DraftBucket, *, trimmed: bool = False) -> Drafted:
        """Reads what :meth:`DraftStep.forward` returned of S samples that draft: ``[2, S, N]``."""
        tokens, chances = found[0].astype(np.int64), found[1]
        samples, nodes = np.nonzero(tokens[:, 1:] >= 0)
        places = samples, nodes + 1
        # Those of the last level were planted and not run.
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
    """Room for the states of the target that a draft reads."""
    rows = bucket.samples * bucket.rows if network.states else 0
    return torch.zeros(rows, network.states, dtype=network.dtype, device=network.device)


__all__ = ["DraftLayout", "StaticDrafts", "inputs_of"]
