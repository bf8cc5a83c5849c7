"""Runs drafts of fixed shapes: chooses their shapes, fills their tables, reads the trees.

Shapes: S samples, C rows to catch up with of each, F hidden states side by side, N nodes of the topology.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arbordraft.decoding.static.bucket import power_of_two
from arbordraft.decoding.static.cache import Memory, StaticCache
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.decoding.static.recording import Recorder, Recording
from arbordraft.drafters import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.feeding import Missing
from arbordraft.drafters.model_drafter import ModelDrafter
from arbordraft.drafters.network import DraftNetwork
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.kernels.draft_tree import reference as rule
from arbordraft.trees.draft_tree import Reals
from arbordraft.trees.topology import TreeTopology


class DraftLayout(NamedTuple):
    """Inputs of a draft, and its places in the drafter's cache.

    Args:
        bucket: shapes of the draft.
        pools: pools of rows of the drafter's cache.
        cache: the drafter's cache.
        missing: tokens that this cache lacks, by handle.
        places: first pool row and number of committed rows of each sample.
        spare: first pool rows for the unused samples of the bucket.
        trees: the trees, and how far they go on.
    """

    bucket: DraftBucket
    pools: Sequence[Tensor]
    cache: StaticCache
    missing: Mapping[int, Missing]
    places: Sequence[tuple[int, int]]
    spare: Sequence[int]
    trees: TreesToGrow

    def fill(self, table: Tensor, inputs: Tensor) -> None:
        """Writes the table on the host, and the target's states on the device."""
        missing = list(self.missing.values())
        self.bucket.fill(table, missing, self.places, self.trees, self.spare)
        if states := [part for _, part in missing if part is not None]:
            inputs[: sum(map(len, states))].copy_(torch.cat(states))


class StaticDrafts:
    """Grows the trees of a step in one run of fixed shapes: see :data:`~arbordraft.drafters.stage.DeviceDrafts`.

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
    def each(self) -> int:
        """Greatest number of cache rows that a sample takes besides its committed ones."""
        return self.rows + len(self._inner)

    def spare(self, batch: int) -> int:
        """Returns the most cache rows that pad a batch of up to ``batch`` samples to a power of two."""
        return max(0, power_of_two(batch) // 2 - 1) * self.each

    def __call__(
        self, drafter: Drafter, state: Any, context: DraftContext, network: DraftNetwork, trees: TreesToGrow
    ) -> int:
        """Grows the trees; see :data:`~arbordraft.drafters.stage.DeviceDrafts`."""
        layout = self.lay_out(drafter, state, context, network, trees)
        with self.recorder.turn(network.device):
            run = self._recording(network, layout.bucket, trees.draws is not None, layout.cache.longest)
            found = run(Memory(layout.pools), lambda table: layout.fill(table, run.inputs)).cpu().numpy()
        return self.read(found, layout, drafter, state, context)

    def lay_out(
        self, drafter: Drafter, state: Any, context: DraftContext, network: DraftNetwork, trees: TreesToGrow
    ) -> DraftLayout:
        """Reads all but the last committed tokens, and reserves room in the drafter's cache for a draft."""
        assert isinstance(drafter, ModelDrafter)
        missing = {state.handles[sample]: drafter.missing(state, context, sample) for sample in trees.slots}
        rows = drafter.most_missing(self.rows)
        missing, cache = drafter.all_but_last(state, missing, rows), state.cache
        assert isinstance(cache, StaticCache)
        counts = [len(tokens) for tokens, _ in missing.values()]
        # Rows after a sample's last one are written to as well.
        wanted = [max(count + len(self._inner), rows) for count in counts]
        places = cache.reserve(list(missing), wanted)
        network.pools(cache, cache.dummy)
        cache.settle()  # before a graph is recorded on the pools
        pools = network.pools(cache, cache.dummy)
        levels = int(trees.limits.levels[trees.slots].max())
        bucket = self._bucket(power_of_two(len(missing)), rows, levels)
        spare = [cache.dummy_start + 1 + number * self.each for number in range(bucket.samples - len(missing))]
        return DraftLayout(bucket, pools, cache, missing, places, spare, trees)

    def read(self, found: Reals, layout: DraftLayout, drafter: Drafter, state: Any, context: DraftContext) -> int:
        """Reads the ``[2, S, N]`` result of :meth:`DraftStep.forward` into the trees; returns the broken rows."""
        assert isinstance(drafter, ModelDrafter)
        drafter.caught_up(state, layout.missing)
        trees, slots, nodes = layout.trees.trees, layout.trees.slots, found.shape[2]
        tokens, chances = found[:, : len(slots)]
        trees.token[slots, 1:nodes] = tokens[:, 1:]
        trees.chance[slots, 1:nodes] = chances[:, 1:]
        rule.reached(trees, layout.trees.limits, self.topology.tree_levels[: layout.bucket.depth], slots)
        fed = np.full(trees.token.shape, -1)
        # Nodes of the last level were added but did not run.
        inner = [node for node in self._inner if node < self.topology.levels[layout.bucket.depth].start]
        fed[np.ix_(slots, inner)] = np.arange(len(inner))
        drafter.record_fed(state, context, layout.trees, fed)
        return int(chances[:, 0].sum())

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
