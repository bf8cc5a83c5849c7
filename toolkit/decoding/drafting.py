"""Plans the trees of a step, or builds lone roots if nothing is to be drafted.

Shapes: B samples, V vocabulary.
"""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from arbordraft.deciders.decisions import Situation
from arbordraft.decoding.assemble import AssembledParts
from arbordraft.decoding.state import DecodeState, Sample
from arbordraft.drafters.base import Lookup
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.grow import Growth
from arbordraft.drafters.stage import DeviceDrafts
from arbordraft.sampling.laws import Fixed
from arbordraft.sampling.noise import GumbelNoise, Noise, SharedSource
from arbordraft.trees.draft_tree import DraftTree, Proposal

Candidates = Callable[
    [DecodeState, Sequence[Sample], Noise | GumbelNoise | None], Sequence[tuple[Sequence[int], Tensor] | None]
]
"""Called with the batch, its active samples and the noise. Returns, by sample, the children of its root and the ``[V]``
row that they were drawn from."""


class Drafting:
    """Drafts trees with the drafter, within the limits that the decider sets.

    Args:
        parts: the decoder's parts.
        expected_batch: see :class:`~arbordraft.SpeculativeDecoder`.
        candidates: chooses the children of the roots; by default the drafter does. With ``candidates`` the text depends
            on the drafts. So only the decider may shorten them, and no token is emitted after the drafted levels.
    """

    def __init__(
        self,
        parts: AssembledParts,
        expected_batch: int = 1,
        candidates: Candidates | None = None,
    ) -> None:
        self.parts, self.expected_batch = parts, expected_batch
        self.candidates = candidates
        self._shared, self._certain_law = parts.coupling.verifier.shared, Fixed(parts.coupling.law.k)
        self._nothing = Proposal(self._certain_law)
        self._plain = parts.drafter.max_levels == 0 and not parts.drafter.certain

    def __call__(
        self,
        state: DecodeState,
        active: Sequence[Sample],
        noise: Noise | GumbelNoise | None,
        device: DeviceDrafts | None = None,
    ) -> DraftTree | Growth:
        """Plans the trees of a step; returns lone roots if nothing is to be drafted.

        Args:
            state: the batch.
            active: the samples that take part.
            noise: noise of the step; ``None`` if all active samples have temperature 0.
            device: grows whole trees on a device, for batches whose caches have fixed shapes.
        """
        decider = self.parts.decider
        forced = self.candidates is not None or any(sample.path_state for sample in active)
        idle = not forced and (
            self._plain
            or all(self.waits(state, sample) for sample in active)
            or all(decider.rests(one.memory) for one in active)
            or (self._pathwise(active) and decider.pauses(len(active)))
        )
        if idle or all(sample.max_drafts == 0 for sample in active):
            return self._roots(state, active)
        return Growth(self._context(state, active, noise), decider, self.parts.drafter.stages(state.drafts), device)

    def reads(self, state: DecodeState, prompts: Sequence[int]) -> list[int]:
        """Returns the samples whose prompts drafters read with the target, since drafts promise to pay for that.

        Of other samples, a drafter reads the prompt when it first drafts. Its drafts are the same.

        Args:
            state: the batch.
            prompts: numbers of samples whose prompts the target has just read, or a part of them.
        """
        samples = [sample for sample in state.samples if sample is not None]
        if not self._pathwise(samples) or self.candidates is not None:
            return list(prompts)
        depth, nodes = self.parts.topology.max_depth, self.parts.topology.num_nodes - 1
        context, found = self._context(state, samples, None), set[int]()
        for drafter, own in self.parts.drafter.stages(state.drafts):
            if isinstance(drafter, Lookup):
                continue
            lag = drafter.lag(own, context)
            situation = Situation(
                max_depth=[depth] * len(samples),
                memory=[None] * len(samples),
                source=type(drafter).__name__,
                acceptance=drafter.acceptance,
                lag=[lag[sample.number] for sample in samples] if lag else (),
                remaining=[sample.budget for sample in samples],
                informative=drafter.informative,
                drafts=len(samples) * nodes,
                pathwise=True,
            )
            worth = self.parts.decider.worth_reading(situation)
            found.update(sample.number for sample, pays in zip(samples, worth, strict=True) if pays)
        return [number for number in prompts if number in found]

    def _pathwise(self, samples: Sequence[Sample]) -> bool:
        """Returns whether no sample's text depends on its drafts."""
        return self._shared or not any(sample.pipeline.temperature for sample in samples)

    def waits(self, state: DecodeState, sample: Sample) -> bool:
        """Returns whether a sample drafts nothing, so that waiting prompts are read sooner; its text stays the same."""
        return state.prefilling and self.candidates is None and (self._shared or not sample.pipeline.temperature)

    def _roots(self, state: DecodeState, active: Sequence[Sample]) -> DraftTree:
        """Builds trees of roots alone, without drafts."""
        tokens: list[int | None] = [None] * len(state.samples)
        for sample in active:
            tokens[sample.number] = sample.tokens[-1]
        return DraftTree.roots(self.parts.topology, tokens, self._nothing)

    def _context(
        self,
        state: DecodeState,
        active: Sequence[Sample],
        noise: Noise | GumbelNoise | None,
    ) -> DraftContext:
        """Builds the inputs of the drafter for this step."""
        target, _, topology, coupling, _ = self.parts
        candidates = None if self.candidates is None else self.candidates(state, active, noise)
        max_depth: list[int | None] = [None] * len(state.samples)
        for sample in active:
            # The last token of a verdict is never a draft, so a tree needs at most budget - 1 levels.
            max_depth[sample.number] = sample.budget - (candidates is None)
        return DraftContext(
            samples=state.samples,
            max_depth=max_depth,
            topology=topology,
            law=coupling.law,
            certain_law=self._certain_law,
            shared=self._shared,
            noise=noise,
            expected_batch=self.expected_batch,
            candidates=candidates,
            vocab_size=target.vocab_size,
            fixed_batch=state.fixed_batch,
            resting=candidates is None and state.prefilling,
        )


def noise_of(state: DecodeState, active: Sequence[Sample], nodes: int, *, shared: bool) -> Noise | GumbelNoise | None:
    """Draws the noise of a step from the samples' seeds; returns ``None`` if all temperatures are 0.

    Args:
        state: the batch.
        active: the samples that take part.
        nodes: number of nodes of the topology.
        shared: whether target and drafter share their noise.
    """
    drawing = [sample for sample in active if sample.pipeline.temperature]
    if not drawing:
        return None
    count = len(state.samples)
    if shared:
        lengths = [len(sample.tokens) if sample else 0 for sample in state.samples]
        sources: list[SharedSource | None] = [None] * count
        for sample in drawing:
            sample.shared.forget(len(sample.tokens))
            sources[sample.number] = sample.shared
        return GumbelNoise(sources, lengths)
    drawn: list[npt.NDArray[np.float64] | None] = [None] * count
    for sample in drawing:
        drawn[sample.number] = sample.uniforms(nodes)
    return Noise.of(drawn, nodes)


__all__ = ["Candidates", "Drafting", "noise_of"]
