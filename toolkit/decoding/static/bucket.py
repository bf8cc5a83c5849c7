"""The static shapes of a step, and the table of its inputs that change from step to step.

Shapes: T rows of a bucket, S samples (and one more, the dummy, that owns the padding rows). N places for nodes with
children, K children, W ancestor words.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from arbordraft.decoding.static.states import StatePlaces
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.kernels.recurrent_tree.paths import NOWHERE, PREVIOUS, Paths
from arbordraft.sampling.laws import Fixed
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import WORD_BITS, TreeTopology
from arbordraft.utils.checks import check_int, check_sequence
from arbordraft.verifiers.packed import TreeTable

MOST_ROWS = 2**16  # no device could hold the logits of more


@dataclass(frozen=True)
class Bucket(TreeTable):
    """The shapes of one step.

    Args:
        rows: T.
        samples: S.
        levels: number of places for nodes with children, by depth; at least one place.
        children: K, at least 1.
        words: W.
        depth: greatest number of tokens that a step can accept.
        width: width of convolutions, W; 0 without recurrent layers.
        scratch: states that rows of a step leave for later ones, at most.
    """

    reals: ClassVar[frozenset[str]] = TreeTable.reals | {"temperature"}

    words: int
    depth: int
    width: int = 0
    scratch: int = 0

    @classmethod
    def of(cls, topology: TreeTopology, rows: int, samples: int, width: int = 0) -> "Bucket":
        """Returns the smallest bucket for trees of a topology, ``rows`` rows and ``samples`` samples.

        Args:
            topology: the largest tree.
            rows: T.
            samples: S.
            width: width of convolutions; 0 without recurrent layers.
        """
        most = [_most_inner(depth, len(inner), rows, samples) for depth, inner in enumerate(topology.inner)]
        levels = tuple(number for number in most if number)
        return cls(
            rows=rows,
            samples=samples,
            levels=levels or (1,),
            children=topology.width,
            words=-(-topology.num_nodes // WORD_BITS),
            depth=len(levels),
            width=width,
            scratch=min(rows, samples * _scratch(topology)) if width else 0,
        )

    @property
    def owners(self) -> int:
        """Number of samples, the dummy included, which comes last."""
        return self.samples + 1

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """The parts of any table of trees, and further parts that a step needs.

        - By row: its position, its pool row, the row of its parent (-1 for none), its depth, its sample's seed, and its
          ancestor words.
        - By sample: the pool row of its root, and its temperature.
        - ``layout`` is that of :class:`RaggedBatch`.
        - With recurrent layers, by row: the states that it reads and writes, and the inputs before it; see
          :class:`~arbordraft.kernels.recurrent_tree.Paths`. By sample: the slots of its state, and of that after the
          accepted path, -1 for none.
        """
        by_row, by_sample = (("read", "write"), ("committed", "ahead")) if self.width else ((), ())
        return {
            **super().fields,
            **dict.fromkeys(("positions", "slots", "parent", "depth", "seeds"), (self.rows,)),
            **dict.fromkeys(("home", "temperature"), (self.owners,)),
            "words": (self.rows, self.words),
            "layout": (4, self.samples + 2),
            **dict.fromkeys(by_row, (self.rows,)),
            **dict.fromkeys(by_sample, (self.owners,)),
            **({"history": (self.rows, self.width - 1)} if self.width else {}),
        }

    def fill(
        self,
        table: Tensor,
        tree: DraftTree,
        batch: RaggedBatch,
        noise: Noise | GumbelNoise | None,
        dummy: int,
        temperatures: Sequence[float] = (),
        states: StatePlaces | None = None,
    ) -> list[int]:
        """Writes a step into a table on the host.

        Args:
            table: ``[size]`` int64.
            tree: the drafts.
            batch: the plan of their forward, on the host.
            noise: noise of this step; ``None`` if all temperatures are 0.
            dummy: first pool row of the dummy, which is committed. There must be room for T more rows after it.
            temperatures: temperatures of the samples that take part; 0 draws nothing.
            states: slots of the states of the samples that take part, if there are recurrent layers.

        Returns:
            The tree's rows whose children were drawn at random, in the order of the table's draft rows.
        """
        into = self.blank(table)
        self.write(into, tree)
        count, samples = tree.rows, len(tree.living)
        into.parent[:count], into.parent[count:] = tree.parent, -1
        into.depth[:count] = tree.depth
        into.sample[count:] = self.samples
        if count:
            into.tokens[count:] = into.tokens[0]  # not 0: without a mask, models warn about padding tokens
        if batch.words is not None:
            into.words[:count, : batch.words.shape[1]] = batch.words.cpu().numpy()
        into.positions[:count], into.positions[count:] = batch.positions.numpy(), 1
        into.slots[:count], into.slots[count:] = batch.slots.numpy(), dummy + 1 + np.arange(self.rows - count)
        # First rows, first pool rows, committed keys and first keys of the tree; padding rows see one key and no tree.
        roots = into.roots[:samples]
        into.layout[0], into.layout[3], into.layout[0, -1] = count, count, self.rows
        into.layout[:, :samples] = roots, batch.starts, batch.past, roots
        into.layout[1:3, self.samples] = dummy, 1
        into.home[:] = dummy
        into.home[:samples] = into.slots[roots]
        if states is not None:
            self._fill_states(into, tree, states)
        return self.fill_noise(into, tree, noise, temperatures)

    def _fill_states(self, into: SimpleNamespace, tree: DraftTree, states: StatePlaces) -> None:
        count, samples = tree.rows, len(tree.living)
        paths = Paths(tree.parent.tolist(), [tree.lengths[number] for number in tree.living], states.committed)
        schedule = paths.schedule()
        assert schedule.scratch <= self.scratch
        into.read[:count], into.read[count:] = schedule.read.numpy(), PREVIOUS
        into.write[:count], into.write[count:] = schedule.write.numpy(), NOWHERE
        first = states.dummy * (self.width - 1)
        into.history[:count] = paths.history(self.width).numpy()
        into.history[count:] = -1 - first - np.arange(self.width - 1)
        into.committed[:samples], into.committed[samples:] = states.committed, states.dummy
        into.ahead[:samples], into.ahead[samples:] = states.ahead, NOWHERE

    def fill_noise(
        self,
        into: SimpleNamespace,
        tree: DraftTree,
        noise: Noise | GumbelNoise | None,
        temperatures: Sequence[float],
    ) -> list[int]:
        """Writes temperatures, and inner nodes with uniforms or seeds of shared noise; see :meth:`fill`."""
        into.temperature[: len(temperatures)] = temperatures
        if isinstance(noise, Noise):
            return self.write_draws(into, tree, noise)
        if noise is not None:
            seeds = np.array([noise.seed_of(sample) for sample in tree.living], dtype=np.int64)
            into.seeds[: tree.rows] = seeds[tree.slot]
        return []

    def fill_idle(self, table: Tensor, topology: TreeTopology, dummy: int, states: StatePlaces | None = None) -> None:
        """Writes a step that has only padding rows."""
        tree = DraftTree.of(topology, Fixed(1), [None] * self.samples)
        batch = RaggedBatch([], [], [], [], torch.empty(0), torch.empty(0))
        nothing = None if states is None else StatePlaces([], [], states.dummy)
        self.fill(table, tree, batch, None, dummy, states=nothing)


def bucket_sizes(buckets: Sequence[int]) -> tuple[int, ...]:
    """Checks and sorts numbers of rows: at most 64 of them, each from 1 to 65,536.

    Raises:
        TypeError: if a number is not a whole number.
        ValueError: if there is none, or one is out of range.
    """
    rows = check_sequence("buckets", buckets, partial(check_int, least=1, most=MOST_ROWS), 64)
    if not rows:
        raise ValueError("buckets must hold at least one number of rows, such as (8, 16, 32, 64)")
    return tuple(sorted(set(rows)))


def bucket_for(buckets: Sequence[int], rows: int) -> int:
    """Returns the smallest bucket for this many rows; above the largest, the next power of two."""
    return next((bucket for bucket in buckets if bucket >= rows), power_of_two(rows))


def power_of_two(number: int) -> int:
    """Returns the smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


@functools.cache
def _scratch(topology: TreeTopology) -> int:
    """Returns the most states that a tree's rows leave for later rows: those of the whole tree."""
    return Paths(topology.parent_list, [topology.num_nodes], [0]).schedule().scratch


def _most_inner(depth: int, inner: int, rows: int, samples: int) -> int:
    """Returns how many of a topology's ``inner`` nodes with children at a depth all samples together can have.

    Each such node needs a child. Each sample that has such nodes also needs at least one node at every smaller depth.
    """
    number = min(samples * inner, rows // 2)
    while number and 2 * number + depth * -(-number // inner) > rows:
        number -= 1
    return number


__all__ = ["Bucket", "bucket_for", "bucket_sizes", "power_of_two"]
