"""Drafts and verifies in one run: lays both out, fills their table, reads their results.

Shapes: S samples that take part, N nodes of the topology down to the drafted levels, T rows of the step.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from arbordraft.decoding.runner import count, lay_out
from arbordraft.decoding.state import DecodeState
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.draft import DraftStep
from arbordraft.decoding.static.drafted_step import DraftedBucket, DraftedStep
from arbordraft.decoding.static.drafting import inputs_of
from arbordraft.decoding.static.recording import Recording
from arbordraft.decoding.static.runner import StaticStepping, StepResult
from arbordraft.drafters.grow import Growth
from arbordraft.drafters.network import DraftNetwork
from arbordraft.drafters.one_call import warn_of_broken_rows
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.sampling.noise import GumbelNoise
from arbordraft.trees.draft_tree import DraftTree, Ints, Reals
from arbordraft.trees.forest import Forest
from arbordraft.trees.masks import SlicedCausalMask


class DraftedSteps:
    """Drafts and verifies the trees of a batch in one run of fixed shapes, without the host in between.

    Args:
        static: runs such steps.
        mask: mask of the topology.
    """

    def __init__(self, static: StaticStepping, mask: SlicedCausalMask) -> None:
        self.static, self.mask = static, mask

    def __call__(
        self, state: DecodeState, growth: Growth, noise: GumbelNoise | None, temperatures: list[float]
    ) -> tuple[DraftTree, StepResult] | None:
        """Drafts and verifies; returns ``None``, with nothing changed, if the host has to see the drafts first.

        Args:
            state: the batch. All its active samples need one kind of step, and drafts cannot change their texts.
            growth: the trees, of which only roots exist.
            noise: shared noise of the step; ``None`` if all temperatures are 0.
            temperatures: see :meth:`StaticStepping.__call__`.
        """
        static, cache, trees, stage, forest = self.static, state.cache, growth.whole, growth.first, growth.first.forest
        if trees is None or (network := stage.drafter.network(stage.context)) is None:
            return None
        assert isinstance(cache, StaticCache)
        complete = _complete_trees(forest, stage.limits.levels)
        if complete.rows > static.buckets[-1]:
            return None
        # A drafter may draft in the target's cache, in which no sample may move once places are known.
        living, lengths = complete.living, complete.lengths
        cache.reserve([state[number].handle for number in living], [lengths[number] for number in living])
        layout = static.drafts.lay_out(stage.drafter, stage.state, stage.context, network, trees)
        batch = lay_out(state, complete, self.mask, causal=False)
        nodes = static.topology.levels[layout.bucket.depth].stop
        prices = _prices(trees, layout.bucket.samples * (nodes - 1))
        places, memory = cache.state_places(batch), cache.memory()
        step = static.bucket(complete, state.most, cache.layout())
        bucket = DraftedBucket(layout.bucket, step, nodes, trims=len(prices) > 0)
        both = memory._replace(rows=[*memory.rows, *layout.pools])
        with state.stats.phase("target", within="draft"), static.recorder.turn(static.target.device):
            run = self._recording(network, bucket, state, cache, layout.cache.longest, noise)

            def fill(table: Tensor, *, idle: bool = False) -> None:
                part, into = bucket.read(table), bucket.views(table)
                layout.fill(part["draft"], run.inputs)
                into.source[:] = -1
                into.prices[:] = prices
                if idle:
                    bucket.step.fill_idle(part["step"], static.topology, cache.dummy_start, places)
                    return
                bucket.step.fill(part["step"], complete, batch, noise, cache.dummy_start, temperatures, places)
                into.source[: complete.rows] = _sources(complete, trees.slots, nodes)

            found, hidden = run(both, fill, lambda table: fill(table, idle=True))
            if run.recorded:
                hidden = hidden.clone()  # the drafter may keep it; the next step overwrites this one
            numbers = found.cpu().numpy()
        drafts, said = np.split(numbers, [2 * bucket.draft.samples * nodes])
        if static.drafts.read(drafts.reshape(2, -1, nodes), layout, stage.drafter, stage.state, stage.context):
            warn_of_broken_rows()
        tree = forest.rows()
        count(state, tree, batch)
        row_of = np.zeros(forest.token.shape, dtype=np.int64)
        row_of[tree.owner, tree.node] = np.arange(tree.rows)
        result = said.astype(np.int64).reshape(-1, 3)
        result[:, 0] = row_of[complete.owner[result[:, 0]], complete.node[result[:, 0]]]
        done = StepResult.of(tree, result.tolist(), hidden, bucket.step.rows - complete.rows)
        cache.computed(batch, [len(done.verdict.paths[number]) for number in living])
        return tree, done

    def _recording(
        self,
        network: DraftNetwork,
        bucket: DraftedBucket,
        state: DecodeState,
        cache: StaticCache,
        drafts_longest: int,
        noise: GumbelNoise | None,
    ) -> Recording:
        static, pipeline = self.static, state.active[0].pipeline
        kind, layout = static.kind(cache.longest, noise, pipeline), cache.layout()
        shared = noise is not None

        def make() -> tuple[DraftedStep, Tensor]:
            draft = DraftStep(network, static.topology, bucket.draft, shared=shared, longest=drafts_longest)
            step = static.step(bucket.step, kind, pipeline, layout)
            return DraftedStep(draft, step, bucket, 2 * len(layout.layers)), inputs_of(network, bucket.draft)

        return static.recorder.recording((network, bucket, kind, drafts_longest), make)


def _complete_trees(forest: Forest, levels: Ints) -> DraftTree:
    """Returns trees of all nodes down to each sample's number of levels; the drafts' tokens have no meaning."""
    present = forest.topology.depth_array <= levels[:, None]
    return replace(forest, token=np.where(present, forest.token[:, :1], -1)).rows()


def _sources(tree: DraftTree, slots: Sequence[int], nodes: int) -> Ints:
    """Returns ``[T]`` places of the rows' tokens among ``nodes`` drafts of every sample of ``slots``; -1 for roots."""
    place = np.zeros(len(tree), dtype=np.int64)
    place[slots] = np.arange(len(slots))
    return np.where(tree.node > 0, place[tree.owner] * nodes + tree.node, -1)


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
