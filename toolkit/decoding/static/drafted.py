"""Drafts and verifies in one run: lays both out, fills their table, reads their results.

Shapes: S samples that take part, N nodes of the topology down to the drafted levels, T rows of the step.
"""

import time
from functools import lru_cache
from typing import NamedTuple

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
from arbordraft.drafters.grow import Growth, warn_of_broken_rows
from arbordraft.drafters.network import DraftNetwork
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.sampling.laws import Fixed
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.trees.draft_tree import DraftTree, Ints, Proposal, Reals
from arbordraft.trees.forest import Forest
from arbordraft.trees.masks import SlicedCausalMask, stack_words
from arbordraft.trees.verdict import Verdict

_SHAPES = 64  # most cached layouts of complete trees, keyed by the levels of a batch's samples


class CompleteTrees(NamedTuple):
    """The rows of a step over all nodes down to given levels.

    Args:
        tree: the trees, whose tokens are still to be drafted.
        bucket: the shapes of their step.
        table: the step's table, without roots, noise and places in the cache.
    """

    tree: DraftTree
    bucket: Bucket
    table: Tensor


class DraftedSteps:
    """Drafts and verifies the trees of a batch in one run of fixed shapes, without the host in between.

    Args:
        static: runs such steps.
        mask: mask of the topology.
    """

    def __init__(self, static: StaticStepping, mask: SlicedCausalMask) -> None:
        self.static, self.mask = static, mask
        self._complete = lru_cache(_SHAPES)(self._complete_trees)

    def __call__(
        self, state: DecodeState, growth: Growth, noise: GumbelNoise | None, temperatures: list[float]
    ) -> tuple[DraftTree, StepResult] | None:
        """Drafts and verifies; returns ``None``, with nothing changed, if the host has to see the drafts first.

        Args:
            state: the batch. All its active samples need one kind of step, and drafts cannot change their texts. Their
                processors apply only a temperature to draft scores.
            growth: the trees, of which only roots exist.
            noise: shared noise of the step; ``None`` if all samples are greedy.
            temperatures: see :meth:`StaticStepping.__call__`.
        """
        static, cache, trees = self.static, state.cache, growth.whole
        if trees is None or (network := growth.drafter.network(growth.context)) is None:
            return None
        assert isinstance(cache, StaticCache)
        active = state.active
        levels = growth.limits.levels[[sample.number for sample in active]]
        if sum(static.topology.levels[level].stop for level in levels.tolist()) > static.buckets[-1]:
            return None
        complete = self._complete(tuple(levels.tolist()), state.most)
        layout = static.drafts.lay_out(growth.drafter, growth.state, growth.context, network, trees)
        depths = static.topology.depth_list
        rows = [[depths[node] for node in range(length)] for length in complete.tree.lengths]
        batch = cache.lay_out([sample.handle for sample in active], rows)
        nodes = static.topology.levels[layout.bucket.depth].stop
        prices = _prices(trees, layout.bucket.samples * (nodes - 1))
        bucket = DraftedBucket(layout.bucket, complete.bucket, nodes, trims=len(prices) > 0)
        pools = [*cache.layers(static.target.num_layers), *layout.pools]
        place = {sample: number for number, sample in enumerate(trees.slots)}
        places = np.array([place.get(sample.number, -1) for sample in active])
        begun = time.perf_counter()
        with static.recorder.turn(static.target.device):
            run = self._recording(network, bucket, state, cache.longest, layout.cache.longest, noise)

            def fill(table: Tensor, *, idle: bool = False) -> None:
                part, into = bucket.read(table), bucket.views(table)
                layout.fill(part["draft"], run.inputs)
                into.source[:] = -1
                into.prices[:] = prices
                if idle:
                    bucket.step.fill_idle(part["step"], static.topology, cache.dummy_start)
                    return
                step, tree = complete.bucket.views(part["step"].copy_(complete.table)), complete.tree
                step.tokens[step.roots[: len(active)]] = [sample.tokens[-1] for sample in active]
                step.tokens[tree.rows :] = step.tokens[0]
                complete.bucket.fill_places(step, tree, batch, cache.dummy_start)
                sources = (
                    None if noise is None else GumbelNoise([noise.sources[s.number] for s in active], noise.lengths)
                )
                complete.bucket.fill_noise(step, tree, sources, temperatures)
                into.source[: tree.rows] = _sources(tree, places, nodes)

            found, hidden = run(pools, fill, lambda table: fill(table, idle=True))
            if run.recorded:
                hidden = hidden.clone()  # the drafter may keep it; the next step overwrites this one
            numbers = found.cpu().numpy()
        state.stats.shift(time.perf_counter() - begun, "draft", "target")
        size = 2 * bucket.draft.samples * nodes
        drafts = numbers[:size].reshape(2, -1, nodes)
        if static.drafts.read(drafts, layout, growth.drafter, growth.state, growth.context):
            warn_of_broken_rows()
        tree = growth.forest.rows()
        count(state, tree, batch)
        said = numbers[size:].astype(np.int64).reshape(-1, 3)[: len(active)].tolist()
        failed = [sample.number for sample, (_, _, broken) in zip(active, said, strict=True) if broken]
        ends: dict[int, tuple[int, int]] = {}
        for sample, (end, token, broken) in zip(active, said, strict=True):
            if not broken:
                first, after = tree.offsets[sample.number : sample.number + 2]
                row = first + int(np.searchsorted(tree.node[first:after], complete.tree.node[end]))
                ends[sample.number] = row, token
        return tree, StepResult(Verdict.of(tree, ends), failed, hidden, complete.bucket.rows - complete.tree.rows)

    def _complete_trees(self, levels: tuple[int, ...], samples: int) -> CompleteTrees:
        topology = self.static.topology
        forest = Forest.of_roots(topology, [0] * len(levels), [Proposal(Fixed(1))] * len(levels))
        for slot, level in enumerate(levels):
            forest.token[slot, : topology.levels[level].stop] = 0
        tree = forest.rows()
        bucket, nodes = self.static.bucket(tree, samples), [range(length) for length in tree.lengths]
        table = torch.empty(bucket.size, dtype=torch.int64)
        words = stack_words([self.mask.select(own, own) for own in nodes])
        bucket.fill_trees(bucket.blank(table), tree, words)
        return CompleteTrees(tree, bucket, table)

    def _recording(
        self,
        network: DraftNetwork,
        bucket: DraftedBucket,
        state: DecodeState,
        longest: int,
        drafts_longest: int,
        noise: GumbelNoise | None,
    ) -> Recording:
        static, pipeline = self.static, state.active[0].pipeline
        kind = static.kind(longest, noise, pipeline)
        shared = noise is not None

        def make() -> tuple[DraftedStep, Tensor]:
            draft = DraftStep(network, static.topology, bucket.draft, shared=shared, longest=drafts_longest)
            step = static.step(bucket.step, kind, pipeline)
            return DraftedStep(draft, step, bucket, 2 * static.target.num_layers), inputs_of(network, bucket.draft)

        return static.recorder.recording((network, bucket, kind, drafts_longest), make)


def _sources(tree: DraftTree, places: Ints, nodes: int) -> Ints:
    """Returns ``[T]`` places of the rows' tokens among ``nodes`` drafts of each sample that drafts; -1 for roots."""
    return np.where(tree.node > 0, places[tree.slot] * nodes + tree.node, -1)


def _prices(trees: TreesToGrow, drafts: int) -> Reals:
    """Returns the tokens that 0 to ``drafts`` verified drafts must bring; none if all are verified."""
    verification, budget = trees.verification, trees.budget
    if verification is None and budget < 0:
        return np.zeros(0)
    counts = np.arange(drafts + 1)
    prices = -counts.astype(np.float64)  # so that drafts which are sure to be wrong are verified, too
    if verification is not None:
        prices = np.full(drafts + 1, np.inf)
        known = verification.seconds[: drafts + 1]
        prices[: len(known)] = verification.rate * known / verification.alike
    return np.where(counts > budget, np.inf, prices) if budget >= 0 else prices


__all__ = ["DraftedSteps"]
