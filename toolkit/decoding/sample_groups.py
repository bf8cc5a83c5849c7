"""Sample groups: samples of a batch that are drafted for and judged in the same way.

Shapes: T packed rows, N nodes of the topology.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict


class SampleGroup(NamedTuple):
    """Some samples of a batch, and their noise in this step; ``None`` if they are greedy."""

    samples: Sequence[Sample]
    noise: Noise | GumbelNoise | None


def group_samples(state: DecodeState, nodes: int, *, shared: bool, static: bool) -> list[SampleGroup]:
    """The active samples, each with its like.

    Args:
        state: the batch.
        nodes: N.
        shared: whether target and drafter share their noise.
        static: whether steps have fixed shapes, which are compiled for their processors.
    """
    alike: dict[Any, list[Sample]] = {}
    for sample in state.active:
        if static:
            kind: Any = static_kind(sample, shared)
        elif shared:
            kind = draft_temperature(sample, shared) is None  # whether drafting calls processors
        else:
            kind = sample.greedy, draft_temperature(sample, shared) is None
        alike.setdefault(kind, []).append(sample)
    return [SampleGroup(samples, _noise(state, samples, nodes, shared)) for samples in alike.values()]


def static_kind(sample: Sample, shared: bool) -> tuple[bool, Hashable]:
    """What samples of a step of fixed shapes have in common; temperatures of shared noise go up with its table."""
    divides = shared and not sample.greedy and sample.pipeline.temperature is not None
    return sample.greedy, () if divides else sample.pipeline.constants


def draft_temperature(sample: Sample, shared: bool) -> float | None:
    """What draft scores are divided by, if that is all that processors do; 0 where nothing is drawn."""
    if sample.greedy:
        return 0.0 if sample.pipeline.temperature == 1 else None
    return sample.pipeline.untruncated_temperature if shared else sample.pipeline.temperature


def _noise(state: DecodeState, group: Sequence[Sample], nodes: int, shared: bool) -> Noise | GumbelNoise | None:
    """By the samples' own seeds."""
    if all(sample.greedy for sample in group):
        return None
    if shared:
        lengths = [len(sample.tokens) if sample else 0 for sample in state.samples]
        sources = [None] * len(lengths)
        for sample in group:
            if not sample.greedy:
                sample.shared.forget(len(sample.tokens))
                sources[sample.number] = sample.shared  # type: ignore[call-overload]
        return GumbelNoise(sources, lengths)
    drawn = [None] * len(state.samples)
    for sample in group:
        drawn[sample.number] = sample.uniforms(nodes)  # type: ignore[call-overload]
    return Noise.of(drawn, nodes)


def joined(trees: Sequence[DraftTree]) -> DraftTree:
    """The trees of several sample groups as those of one batch."""
    if len(trees) == 1:
        return trees[0]
    return DraftTree(
        tuple(next(filter(None, own), None) for own in zip(*(tree.samples for tree in trees), strict=True))
    )


def verdicts_of(
    groups: Sequence[SampleGroup],
    tree: DraftTree,
    judge: Callable[[DraftTree, Tensor | slice, Noise | GumbelNoise | None], Verdict],
) -> Verdict:
    """The verdicts of a batch whose sample groups are judged one by one.

    Args:
        groups: all of them.
        tree: the drafts of the batch.
        judge: given the drafts of a sample group, which of the T packed rows are theirs, and its noise, says the
            verdicts.
    """
    if len(groups) == 1:
        return judge(tree, slice(None), groups[0].noise)
    owner = [number for number, _, _ in tree.rows()]
    verdicts: list[SampleVerdict | None] = [None] * len(tree.samples)
    for samples, noise in groups:
        numbers = {sample.number for sample in samples}
        part = DraftTree(tuple(one if number in numbers else None for number, one in enumerate(tree.samples)))
        rows = torch.tensor([row for row, number in enumerate(owner) if number in numbers], dtype=torch.int64)
        verdict = judge(part, rows, noise)
        for number in numbers:
            verdicts[number] = verdict.samples[number]
    return Verdict(tuple(verdicts))


__all__ = ["SampleGroup", "draft_temperature", "group_samples", "joined", "static_kind", "verdicts_of"]
