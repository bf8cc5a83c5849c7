"""Executors of a step: forward, verification and, on a device, compaction of accepted rows.

Shapes: T packed rows, V vocabulary, F hidden states side by side.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from arbordraft.decoding.judging import Judge, finite_rows
from arbordraft.decoding.runner import TargetRunner, count, lay_out
from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.drafted import DraftedSteps
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.drafters.grow import Growth
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.verdict import Verdict


class Judged(NamedTuple):
    """Result of a step.

    Args:
        verdict: covers all samples except those that failed in this step.
        hidden: maps a sample and the first n rows of its path to their ``[n, F]`` hidden states.
        keep: commits rows of the cache.
        logits: ``[T, V]``; ``None`` if they stay on the device.
    """

    verdict: Verdict
    hidden: Callable[[int, Sequence[int]], Tensor]
    keep: Callable[[Mapping[int, Sequence[int]]], None]
    logits: Tensor | None = None


Planned = Callable[[], DraftTree | Growth]
"""Plans the trees of a step; returns lone roots if nothing is to be drafted."""


class Executor(Protocol):
    """Runs the steps of a batch: grows trees, runs the target over them and verifies them."""

    def __call__(
        self, state: DecodeState, plan: Planned, noise: Noise | GumbelNoise | None
    ) -> tuple[DraftTree, Judged]:
        """Runs a step.

        Args:
            state: the batch; samples with NaN or infinite logits fail.
            plan: plans the trees.
            noise: noise of the step; ``None`` if all samples have temperature 0.
        """


class EagerExecutor:
    """Runs steps eagerly, without padding: one forward, then verification.

    Args:
        runner: runs the target.
        judge: verifies the drafts.
    """

    def __init__(self, runner: TargetRunner, judge: Judge) -> None:
        self.runner, self.judge = runner, judge

    def __call__(
        self, state: DecodeState, plan: Planned, noise: Noise | GumbelNoise | None
    ) -> tuple[DraftTree, Judged]:
        with state.stats.phase("draft"):
            planned = plan()
            tree = planned.grown() if isinstance(planned, Growth) else planned
        with state.stats.phase("target"):
            logits, hidden = self.runner(state, tree)
        with state.stats.phase("verify"):
            sound, best = finite_rows(state, tree, logits)
            verdict = self.judge(state, tree, logits, best, noise, sound)
        return tree, Judged(verdict, lambda _, rows: _picked(hidden, rows), state.cache.commit, logits)


class RecordedExecutor:
    """Runs steps of fixed shapes, on a GPU as a recorded graph.

    One call does forward, verification and compaction. It also drafts, unless the host has to see the drafts first.

    Args:
        static: runs the steps.
        mask: mask of the topology.
    """

    def __init__(self, static: StaticStepping, mask: SlicedCausalMask) -> None:
        self.static, self.mask = static, mask
        self._drafted = DraftedSteps(static, mask)

    def kinds(self, samples: Sequence[Sample]) -> dict[Hashable, list[Sample]]:
        """Groups samples that can share one recorded step: temperature is a column of its table."""
        kinds: dict[Hashable, list[Sample]] = {}
        for sample in samples:
            pipeline = sample.pipeline
            kind = () if pipeline.only_divides else (pipeline.temperature == 0, pipeline.constants)
            kinds.setdefault(kind, []).append(sample)
        return kinds

    def _in_one_run(
        self, state: DecodeState, growth: Growth, noise: Noise | GumbelNoise | None
    ) -> tuple[DraftTree, Judged] | None:
        """Drafts and verifies in one run; returns ``None``, with nothing changed, if the host has to see the drafts."""
        active = state.active
        on_host = any(sample.path_state for sample in active) or isinstance(noise, Noise)
        if on_host or len(self.kinds(active)) != 1:
            return None
        assert not isinstance(noise, Noise)
        temperatures = [sample.pipeline.temperature for sample in active]
        if (found := self._drafted(state, growth, noise, temperatures)) is None:
            return None
        tree, result = found
        state.stats.count_padding(result.padding)
        state.give_up(result.failed)
        slots = {sample.number: slot for slot, sample in enumerate(active)}
        hidden = result.hidden
        return tree, Judged(
            result.verdict, lambda sample, rows: hidden[slots[sample], : len(rows)], state.cache.advance
        )

    def __call__(
        self, state: DecodeState, plan: Planned, noise: Noise | GumbelNoise | None
    ) -> tuple[DraftTree, Judged]:
        with state.stats.phase("draft"):
            tree = plan()
            if isinstance(tree, Growth):
                if (done := self._in_one_run(state, tree, noise)) is not None:
                    return done
                tree = tree.grown()
        return tree, self._verified(state, tree, noise)

    def _verified(self, state: DecodeState, tree: DraftTree, noise: Noise | GumbelNoise | None) -> Judged:
        assert isinstance(state.cache, StaticCache)
        verdicts: list[Verdict] = []
        hidden: dict[int, Tensor] = {}
        with state.stats.phase("target"):
            for samples in self.kinds([state[number] for number in tree.living]).values():
                part = tree.take([sample.number for sample in samples])
                batch = lay_out(state, part, self.mask, causal=False)
                count(state, part, batch)
                temperatures = [sample.pipeline.temperature for sample in samples]
                drawn, pipeline = noise if any(temperatures) else None, samples[0].pipeline
                result = self.static(part, batch, drawn, state.cache, pipeline, temperatures, state.most)
                state.stats.count_padding(result.padding)
                state.give_up(result.failed)
                verdicts.append(_shifted(result.verdict, part, tree))
                hidden |= zip(part.living, result.hidden, strict=False)
        # By sample, `hidden` has only the rows of the accepted path, root included.
        return Judged(Verdict.joined(verdicts), lambda sample, rows: hidden[sample][: len(rows)], state.cache.advance)


def _shifted(verdict: Verdict, part: DraftTree, whole: DraftTree) -> Verdict:
    """Converts a verdict about part of a batch to rows of the whole batch."""
    if part is whole:
        return verdict
    firsts = zip(part.offsets, whole.offsets, strict=True)
    shifts = [there - here for here, there in firsts]
    paths = [[row + shift for row in path] for path, shift in zip(verdict.paths, shifts, strict=False)]
    return Verdict(paths, verdict.tokens, verdict.recovered)


def _picked(rows: Tensor, path: Sequence[int]) -> Tensor:
    """Selects the rows of a path; consecutive rows, the usual case, are not copied."""
    first, last = path[0], path[-1]
    if last - first == len(path) - 1:
        return rows[first : last + 1]
    return torch.stack([rows[row] for row in path])  # an index tensor would have to be uploaded, which is slower


__all__ = ["EagerExecutor", "Executor", "Judged", "RecordedExecutor"]
