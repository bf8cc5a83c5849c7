"""Runs drafts with the target's step behind them: lays both out, fills their table, reads what came of it.

Shapes: S samples that draft, N nodes of the topology down to the drafted levels, B samples of the batch, T rows of the
step, F hidden states side by side.
"""

import time
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from arbordraft.decoding.runner import count, lay_out
from arbordraft.decoding.state import DecodeState
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
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict


class StepAhead:
    """Grows the trees of one step and does the step: see :class:`~arbordraft.drafters.context.OneCallDrafts`.

    It drafts alone where the rows of whole trees are too many, or the host has to say what is kept.

    Args:
        static: does such steps.
        state: the batch, all of whose active samples have texts that do not depend on what is drafted, want the same
            of a step, and are told to drafters in numbers.
        mask: the topology's.
        noise: shared noise of the step; ``None`` if all samples are greedy.
        temperatures: see :meth:`StaticStepping.__call__`.
    """

    def __init__(
        self,
        static: StaticStepping,
        state: DecodeState,
        mask: SlicedCausalMask,
        noise: GumbelNoise | None,
        temperatures: Sequence[float],
    ) -> None:
        self.static, self.state, self.mask = static, state, mask
        self.noise, self.temperatures = noise, temperatures
        self.rows = static.drafts.rows
        self._found: tuple[list[list[int]], Tensor] | None = None
        self._whole: DraftTree | None = None
        self._batch: RaggedBatch | None = None

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
        static, own = self.static, self.state.cache
        assert isinstance(own, StaticCache)
        assert isinstance(cache, StaticCache)
        whole = whole_trees(static.topology, self.state, dict(zip(samples, growth.levels, strict=True)))
        if growth.keep is None or whole.rows > static.buckets[-1]:
            return static.drafts(network, cache, samples, missing, growth, draws)
        batch = lay_out(self.state, whole, self.mask, causal=False)
        layout = static.drafts.lay_out(network, cache, missing, growth, draws)
        nodes = static.topology.levels[layout.bucket.depth].stop
        bucket = DraftedBucket(layout.bucket, static.bucket(whole), nodes)
        pools = [*own.layers(static.target.num_layers), *layout.pools]
        begun = time.perf_counter()
        with static.recorder.turn(static.target.device):
            run = self._recording(network, bucket, own.longest, cache.longest)

            def fill(table: Tensor, *, idle: bool = False) -> None:
                part = bucket.read(table)
                layout.fill(part["draft"], run.inputs)
                part["prices"].fill_(torch.inf)
                prices = growth.keep or ()
                part["prices"][: len(prices)] = torch.tensor(prices[: len(part["prices"])], dtype=torch.float64)
                part["source"].fill_(-1)
                if idle:
                    bucket.step.fill_idle(part["step"], static.topology, own.dummy_start)
                    return
                bucket.step.fill(part["step"], whole, batch, self.noise, own.dummy_start, self.temperatures)
                part["source"][: whole.rows] = torch.from_numpy(sources(whole, samples, nodes))

            found, hidden = run(pools, fill, lambda table: fill(table, idle=True))
            if run.recorded:
                hidden = hidden.clone()  # the drafter may keep it; the next step overwrites this one
            numbers = found.cpu().numpy()
        self.state.stats.shift(time.perf_counter() - begun, "draft", "target")
        size = 2 * bucket.draft.samples * nodes
        self._found = numbers[size:].astype(np.int64).reshape(-1, 3).tolist(), hidden
        self._whole, self._batch = whole, batch
        caught_up(cache, missing)
        drafts = numbers[:size].reshape(2, -1, nodes)[:, : len(samples)]
        return static.drafts.drafted(drafts, bucket.draft, trimmed=True)

    def result(self, tree: DraftTree) -> StepResult | None:
        """What the step came to with the trees that were grown of it; ``None`` if it is still to be done."""
        if self._found is None or self._whole is None or self._batch is None:
            return None
        said, hidden = self._found
        count(self.state, tree, self._batch)
        whole, node = self._whole, tree.node.tolist()
        failed = [sample for sample in tree.living if said[sample][2]]
        ends: dict[int, tuple[int, int]] = {}
        for sample in tree.living:
            end, token, broken = said[sample]
            if not broken:
                begin, after = tree.offsets[sample : sample + 2]
                ends[sample] = node.index(int(whole.node[end]), begin, after), token
        return StepResult(Verdict.of(tree, ends), failed, hidden, self.static.bucket(whole).rows - whole.rows)

    def _recording(self, network: DraftNetwork, bucket: DraftedBucket, longest: int, drafts_longest: int) -> Recording:
        static, pipeline = self.static, self.state.active[0].pipeline
        kind = static.kind(longest, self.noise, pipeline)
        shared = self.noise is not None

        def make() -> tuple[DraftedStep, Tensor]:
            draft = DraftStep(network, static.topology, bucket.draft, shared=shared, longest=drafts_longest)
            step = static.step(bucket.step, kind, pipeline)
            return DraftedStep(draft, step, bucket, 2 * static.target.num_layers), inputs_of(network, bucket.draft)

        return static.recorder.recording((network, bucket, kind, drafts_longest), make)


def whole_trees(topology: TreeTopology, state: DecodeState, levels: Mapping[int, int]) -> DraftTree:
    """Trees of all nodes down to some levels, by sample, whose tokens are still to be drafted."""
    proposal, ends = Proposal(Fixed(1)), [level.stop for level in topology.levels]
    active = {sample.number for sample in state.active}
    lengths = [ends[levels.get(number, 0)] * (number in active) for number in range(len(state.samples))]
    offsets = np.cumsum([0, *lengths])
    node = np.concatenate([np.arange(length) for length in lengths])
    first = offsets[:-1].repeat(lengths)
    parent = np.array(topology.parent_list)[node]
    token = np.zeros(len(node), dtype=np.int64)
    token[offsets[sorted(active)]] = [state[number].tokens[-1] for number in sorted(active)]
    return DraftTree(
        topology,
        [proposal if number in active else None for number in range(len(lengths))],
        offsets.tolist(),
        token,
        node,
        np.where(parent < 0, -1, parent + first),
        np.array(topology.depth_list)[node],
        chance=np.zeros(len(node)),
        certain=np.zeros(len(node), dtype=np.bool_),
        draft_row=np.full(len(node), -1),
    )


def sources(whole: DraftTree, samples: Sequence[int], nodes: int) -> Ints:
    """Where the token of every row stands among the drafts; -1 for roots."""
    place = np.zeros(len(whole), dtype=np.int64)
    place[list(samples)] = np.arange(len(samples))
    return np.where(whole.node > 0, place[whole.owner] * nodes + whole.node, -1)


__all__ = ["StepAhead", "sources", "whole_trees"]
