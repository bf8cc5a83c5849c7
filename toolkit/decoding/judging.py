"""Verifies the drafts of a step.

Shapes: T packed rows, V vocabulary.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from arbordraft.decoding.processing import target_rows
from arbordraft.decoding.state import DecodeState
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.owned_rows import SampleError
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers import matching_verdict
from arbordraft.verifiers.coupling import Coupling

Judge = Callable[[DecodeState, DraftTree, Tensor, Sequence[int], Noise | GumbelNoise | None, Sequence[int]], Verdict]
"""Verifies the drafts of a step: ``judge(state, tree, logits, best, noise, samples)``, see :class:`CouplingJudge`."""


class CouplingJudge:
    """Verifies trees by a coupling, and trees of greedy samples by the target's most probable tokens."""

    def __init__(self, coupling: Coupling) -> None:
        self.coupling = coupling

    def __call__(
        self,
        state: DecodeState,
        tree: DraftTree,
        logits: Tensor,
        best: Sequence[int],
        noise: Noise | GumbelNoise | None,
        samples: Sequence[int],
    ) -> Verdict:
        """Verifies the trees of some samples.

        Args:
            state: the batch.
            tree: the drafts.
            logits: ``[T, V]``.
            best: the most probable token of each of the T rows.
            noise: noise of the step; ``None`` if all samples are greedy.
            samples: numbers of the samples to verify.

        Raises:
            SampleError: if a sample's processors fail, or leave no token to draw.
        """
        if not samples:
            return Verdict.nothing(len(tree))
        target = target_rows(state, tree, logits, best, shared=isinstance(noise, GumbelNoise))
        # Shared noise marks greedy samples by `None`, so the coupling verifies them, too. Uniforms have no such mark.
        if noise is None or isinstance(noise, Noise):
            greedy = [sample for sample in samples if noise is None or state[sample].greedy]
        else:
            greedy = []
        if not greedy:
            return self._drawn(tree, target, noise, samples)
        verdicts = [matching_verdict(tree, lambda rows, _: target.most_probable(rows), greedy)]
        if len(greedy) < len(samples):
            drawing = [sample for sample in samples if not state[sample].greedy]
            verdicts.append(self._drawn(tree, target, noise, drawing))
        return Verdict.joined(verdicts)

    def _drawn(
        self, tree: DraftTree, target: SoftmaxRows, noise: Noise | GumbelNoise | None, samples: Sequence[int]
    ) -> Verdict:
        assert noise is not None
        try:
            return self.coupling(tree, target, noise, samples)
        except ValueError as error:  # some sample has no token to draw: verify one by one, with the same noise
            for sample in samples:
                try:
                    self.coupling(tree, target, noise, [sample])
                except ValueError as failure:
                    raise SampleError(sample, failure) from failure
            raise SampleError(samples[0], error) from error


__all__ = ["CouplingJudge", "Judge"]
