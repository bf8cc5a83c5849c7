"""What is proposed in a step: the drafter is told about the step, unless nothing is to be drafted.

Shapes: B samples, V vocabulary.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from arbordraft.deciders.decisions import Plan, Situation
from arbordraft.decoding.assemble import AssembledParts
from arbordraft.decoding.processing import draft_scores
from arbordraft.decoding.sample_groups import SampleGroup, draft_temperature
from arbordraft.decoding.state import DecodeState
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.drafters.context import DraftContext, OneCallDrafts
from arbordraft.drafters.none import roots
from arbordraft.sampling.laws import Fixed
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask

Candidates = Callable[[DecodeState, SampleGroup], Sequence[tuple[Sequence[int], Tensor] | None]]
"""Of a batch and a sample group: by sample, children of its root, with the ``[V]`` row that they were drawn from."""


class Drafting:
    """Has the drafter propose trees, as far as the decider lets it.

    Args:
        parts: those of the decoder.
        mask: the topology's.
        expected_batch: see :class:`~arbordraft.SpeculativeDecoder`.
        static: grows whole trees in fixed shapes, for batches whose caches are made for that.
        candidates: gives roots their children; by default the drafter does. What is drafted then changes the text, so
            that nothing but the decider may shorten it, and nothing is emitted behind the drafted levels.
    """

    def __init__(
        self,
        parts: AssembledParts,
        mask: SlicedCausalMask,
        expected_batch: int = 1,
        static: OneCallDrafts | None = None,
        candidates: Candidates | None = None,
    ) -> None:
        self.parts, self.mask, self.expected_batch = parts, mask, expected_batch
        self.static, self.candidates = static, candidates

    def __call__(self, state: DecodeState, group: SampleGroup) -> DraftTree:
        """The trees of a sample group; ``None`` for all other samples."""
        context, drafter, decider = self.context(state, group), self.parts.drafter, self.parts.decider
        resting = self.waits(state, group.noise is None) or all(decider.rests(one.memory) for one in group.samples)
        forced = context.candidates is not None or any(sample.path_state for sample in group.samples)
        if resting and not forced:
            return roots(context)
        return drafter.propose(state.drafts, drafter.within(context))

    def waits(self, state: DecodeState, greedy: bool) -> bool:
        """Whether a step drafts nothing, as prompts wait for its end, where that changes no text."""
        return state.prefilling and self.candidates is None and (greedy or self.parts.coupling.verifier.shared)

    def context(self, state: DecodeState, group: SampleGroup) -> DraftContext:
        """What the drafter is told about the step."""
        target, _, topology, coupling, decider = self.parts
        shared, greedy = coupling.verifier.shared, group.noise is None
        candidates = None if self.candidates is None else self.candidates(state, group)
        max_depth: list[int | None] = [None] * len(state.samples)
        temperatures = [0.0] * len(state.samples)
        told = True
        for sample in group.samples:
            # The last token of a verdict is not drafted, so a tree need not be deeper than the budget less one.
            max_depth[sample.number] = sample.budget - (candidates is None)
            temperature = draft_temperature(sample, shared)
            told = told and temperature is not None
            temperatures[sample.number] = temperature or 0.0
        return DraftContext(
            tokens=[sample.tokens if sample else () for sample in state.samples],
            max_depth=max_depth,
            topology=topology,
            mask=self.mask,
            law=Fixed(coupling.law.k) if greedy else coupling.law,
            pathwise=greedy or shared,
            process_logits=lambda logits, place_of: draft_scores(state, logits, place_of, untruncated=shared),
            temperatures=temperatures if told else None,
            plan=_nothing if self.waits(state, greedy) else decider.plan if decider.can_plan else _unplanned,
            decide=decider,
            memory=[sample.memory if sample else None for sample in state.samples],
            noise=group.noise,
            expected_batch=self.expected_batch,
            candidates=candidates,
            vocab_size=target.vocab_size,
            fixed_batch=state.fixed_batch,
            path_states=[sample.path_state if sample else None for sample in state.samples],
            static=self.static if isinstance(state.cache, StaticCache) else None,
            extra_rows=len(state.active) - len(group.samples),
        )


def _nothing(situation: Situation) -> Plan:
    return Plan.everything([0] * len(situation.max_depth))


def _unplanned(situation: Situation) -> None:
    """Has the decider asked before every level."""


__all__ = ["Candidates", "Drafting"]
