"""Runs drafts with the target's step after them: lays both out, fills their table, reads their results.

Shapes: S samples that draft, N nodes of the topology down to the drafted levels. B samples of the batch, T rows of the
step, F hidden states side by side.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.decoding.runner import count
from arbordraft.decoding.state import DecodeState
from arbordraft.decoding.static.bucket import Bucket
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.draft import DraftStep
from arbordraft.decoding.static.drafted_step import DraftedBucket, DraftedStep
from arbordraft.decoding.static.drafting import inputs_of
from arbordraft.decoding.static.recording import Recording
from arbordraft.decoding.static.runner import StaticStepping, StepResult
from arbordraft.drafters.model_drafter import DraftNetwork, Missing, caught_up
from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.sampling.laws import Fixed
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree, Ints, Proposal
from arbordraft.trees.masks import SlicedCausalMask, stack_words
from arbordraft.trees.verdict import Verdict


@dataclass(frozen=True, eq=False)
class WholeTrees:
    """Trees of all nodes down to given levels, with the parts of a step's table that they determine.

    Args:
        tree: the trees, whose tokens are still to be drafted.
        depths: by sample that takes part, the depths of its nodes.
        bucket: the shapes of their step.
        table: the step's table, without roots, noise and places in the cache.
    """

    tree: DraftTree
    depths: Sequence[Sequence[int]]
    bucket: Bucket
    table: Tensor

    @classmethod
    def of(cls, static: StaticStepping, mask: SlicedCausalMask, levels: tuple[int | None, ...]) -> Self:
        """Builds the trees down to these levels, by sample; ``None`` for a sample that takes no part."""
        topology = static.topology
        lengths = [0 if level is None else topology.levels[level].stop for level in levels]
        offsets = np.cumsum([0, *lengths])
        node = np.concatenate([np.arange(length) for length in lengths])
        parent = np.array(topology.parent_list)[node]
        tree = DraftTree(
            topology,
            [None if level is None else Proposal(Fixed(1)) for level in levels],
            offsets.tolist(),
            token=np.zeros(len(node), dtype=np.int64),
            node=node,
            parent=np.where(parent < 0, -1, parent + offsets[:-1].repeat(lengths)),
            depth=np.array(topology.depth_list)[node],
            chance=np.zeros(len(node)),
            certain=np.zeros(len(node), dtype=np.bool_),
            draft_row=np.full(len(node), -1),
        )
        bucket, known = static.bucket(tree), [range(lengths[number]) for number in tree.living]
        table = torch.empty(bucket.size, dtype=torch.int64)
        bucket.fill_trees(bucket.blank(table), tree, stack_words([mask.select(nodes, nodes) for nodes in known]))
        return cls(tree, [[topology.depth_list[node] for node in nodes] for nodes in known], bucket, table)

    def sources(self, samples: Sequence[int], nodes: int) -> Ints:
        """Returns ``[T]`` places of the rows' tokens among ``nodes`` drafts of each of these samples; -1 for roots."""
        place = np.zeros(len(self.tree), dtype=np.int64)
        place[list(samples)] = np.arange(len(samples))
        return np.where(self.tree.node > 0, place[self.tree.owner] * nodes + self.tree.node, -1)


class _Found(NamedTuple):
    """The results of a run.

    Args:
        whole: the trees whose nodes were its rows.
        batch: layout of these rows.
        said: integers by sample, see :meth:`StaticStep.forward`.
        hidden: hidden states, see :meth:`StaticStep.forward`.
        tokens: verified tokens, by sample and node.
    """

    whole: WholeTrees
    batch: RaggedBatch
    said: list[list[int]]
    hidden: Tensor
    tokens: dict[tuple[int, int], int]


class StepAhead:
    """Grows the trees of one step and runs the step: see :class:`~arbordraft.drafters.context.OneCallDrafts`.

    If whole trees have too many rows, or the host has to decide which drafts are kept, it only drafts.

    Args:
        static: runs such steps.
        state: the batch. All its active samples need one kind of step, and drafts cannot change their texts. Their
            processors apply only a temperature to draft scores.
        whole: returns the trees of all nodes down to given levels, by sample.
        noise: shared noise of the step; ``None`` if all samples are greedy.
        temperatures: see :meth:`StaticStepping.__call__`.
        seats: see :meth:`~arbordraft.decoding.state.DecodeState.seats`; noise and temperatures follow this order.
    """

    def __init__(
        self,
        static: StaticStepping,
        state: DecodeState,
        whole: Callable[[tuple[int | None, ...]], WholeTrees],
        noise: GumbelNoise | None,
        temperatures: Sequence[float],
        seats: Sequence[int],
    ) -> None:
        self.static, self.state, self.whole = static, state, whole
        self.seats, self.places = seats, {number: place for place, number in enumerate(seats)}
        self.noise, self.temperatures = noise, temperatures
        self.rows, self.alone = static.drafts.rows, static.drafts
        self._found: _Found | None = None

    def __call__(
        self,
        network: DraftNetwork,
        cache: RaggedKVCache,
        samples: Sequence[int],
        missing: Mapping[int, Missing],
        growth: Growth,
        draws: Draws | None,
    ) -> Drafted:
        """Drafts, and runs the step if it can; see :class:`~arbordraft.drafters.context.OneCallDrafts`."""
        static, own = self.static, self.state.cache
        assert isinstance(own, StaticCache)
        assert isinstance(cache, StaticCache)
        levels: list[int | None] = [None] * len(self.seats)
        for sample in (active := self.state.active):
            levels[self.places[sample.number]] = 0
        for number, level in zip(samples, growth.levels, strict=True):
            levels[self.places[number]] = level
        rows = sum(static.topology.levels[level].stop for level in levels if level is not None)
        if growth.keep is None or rows > static.buckets[-1]:
            return static.drafts(network, cache, samples, missing, growth, draws)
        whole = self.whole(tuple(levels))
        batch = own.lay_out([sample.handle for sample in active], whole.depths)
        layout = static.drafts.lay_out(network, cache, missing, growth, draws)
        nodes = static.topology.levels[layout.bucket.depth].stop
        prices = growth.keep(layout.bucket.samples * (nodes - 1))
        bucket = DraftedBucket(layout.bucket, whole.bucket, nodes, trims=len(prices) > 0)
        pools = [*own.layers(static.target.num_layers), *layout.pools]
        begun = time.perf_counter()
        with static.recorder.turn(static.target.device):
            run = self._recording(network, bucket, own.longest, cache.longest)

            def fill(table: Tensor, *, idle: bool = False) -> None:
                part, into = bucket.read(table), bucket.views(table)
                layout.fill(part["draft"], run.inputs)
                into.source[:] = -1
                into.prices[:] = prices
                if idle:
                    bucket.step.fill_idle(part["step"], static.topology, own.dummy_start)
                else:
                    self._fill(part["step"], whole, batch, own.dummy_start)
                    into.source[:rows] = whole.sources([self.places[number] for number in samples], nodes)

            found, hidden = run(pools, fill, lambda table: fill(table, idle=True))
            if run.recorded:
                hidden = hidden.clone()  # the drafter may keep it; the next step overwrites this one
            numbers = found.cpu().numpy()
        self.state.stats.shift(time.perf_counter() - begun, "draft", "target")
        size = 2 * bucket.draft.samples * nodes
        said = numbers[size:].astype(np.int64).reshape(-1, 3).tolist()
        caught_up(cache, missing)
        drafts = numbers[:size].reshape(2, -1, nodes)[:, : len(samples)]
        drafted = static.drafts.drafted(drafts, bucket.draft, trimmed=True)
        owners = [samples[place] for place in drafted.samples]
        tokens = dict(zip(zip(owners, drafted.nodes, strict=True), drafted.tokens, strict=True))
        self._found = _Found(whole, batch, said, hidden, tokens)
        return drafted

    def result(self, tree: DraftTree) -> StepResult | None:
        """Returns the result of the step for the trees grown from its drafts; ``None`` if the step is still to be run.

        It is still to be run if this object ran no step, or if its drafts were changed.
        """
        if self._found is None:
            return None
        whole, batch, said, hidden, tokens = self._found
        node = tree.node.tolist()
        rows = zip(tree.owner.tolist(), node, tree.token.tolist(), strict=True)
        if {(sample, number): token for sample, number, token in rows if number} != tokens:
            self.state.cache.drop([sample.handle for sample in self.state.active])
            return None
        count(self.state, tree, batch)
        failed = [sample for sample in tree.living if said[self.places[sample]][2]]
        ends: dict[int, tuple[int, int]] = {}
        for sample in tree.living:
            end, token, broken = said[self.places[sample]]
            if not broken:
                begin, after = tree.offsets[sample : sample + 2]
                ends[sample] = node.index(int(whole.tree.node[end]), begin, after), token
        return StepResult(Verdict.of(tree, ends), failed, hidden, whole.bucket.rows - whole.tree.rows)

    def _fill(self, table: Tensor, whole: WholeTrees, batch: RaggedBatch, dummy: int) -> None:
        """Writes the step's own table."""
        table.copy_(whole.table)
        into, tree = whole.bucket.views(table), whole.tree
        into.tokens[into.roots[tree.living]] = [self.state[self.seats[place]].tokens[-1] for place in tree.living]
        into.tokens[tree.rows :] = into.tokens[0]
        whole.bucket.fill_places(into, tree, batch, dummy)
        whole.bucket.fill_noise(into, tree, self.noise, self.temperatures)

    def _recording(self, network: DraftNetwork, bucket: DraftedBucket, longest: int, drafts_longest: int) -> Recording:
        static, pipeline = self.static, self.state.active[0].pipeline
        kind = static.kind(longest, self.noise, pipeline)
        shared = self.noise is not None

        def make() -> tuple[DraftedStep, Tensor]:
            draft = DraftStep(network, static.topology, bucket.draft, shared=shared, longest=drafts_longest)
            step = static.step(bucket.step, kind, pipeline)
            return DraftedStep(draft, step, bucket, 2 * static.target.num_layers), inputs_of(network, bucket.draft)

        return static.recorder.recording((network, bucket, kind, drafts_longest), make)


__all__ = ["StepAhead", "WholeTrees"]
