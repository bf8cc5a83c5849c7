"""What becomes of the drafts of a step.

Shapes: T packed rows, V vocabulary.
"""

from collections.abc import Callable

from torch import Tensor

from arbordraft.decoding.processing import target_rows
from arbordraft.decoding.state import DecodeState, SampleError
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers import matching_verdict
from arbordraft.verifiers.coupling import Coupling

Judge = Callable[[DecodeState, DraftTree, Tensor, Tensor, Noise | GumbelNoise | None], Verdict]
"""Of the drafts of a sample group: ``judge(state, tree, logits, best, noise)``, see :class:`CouplingJudge`."""


class CouplingJudge:
    """Judges trees by a coupling, and those of greedy samples by the target's most probable tokens."""

    def __init__(self, coupling: Coupling) -> None:
        self.coupling = coupling

    def __call__(
        self, state: DecodeState, tree: DraftTree, logits: Tensor, best: Tensor, noise: Noise | GumbelNoise | None
    ) -> Verdict:
        """The verdicts about a sample group.

        Args:
            state: the batch.
            tree: the group's drafts.
            logits: ``[T, V]``.
            best: ``[T]`` their most probable tokens.
            noise: the group's; ``None`` if it is greedy.

        Raises:
            SampleError: if a sample's processors fail, or leave no token to draw.
        """
        target = target_rows(state, tree, logits, best)
        if noise is None:
            return matching_verdict(tree, lambda rows, _: target.most_probable(rows))
        try:
            return self.coupling(tree, target, noise)
        except ValueError as error:  # nothing can be drawn behind some sample: with equal noise it fails alone, too
            living = [number for number, drafted in enumerate(tree.samples) if drafted]
            if len(living) == 1:
                raise SampleError(living[0], error) from error
            shares, highest = logits.split(tree.lengths), best.split(tree.lengths)
            for one in living:
                alone = DraftTree(tuple(drafted if one == own else None for own, drafted in enumerate(tree.samples)))
                self(state, alone, shares[one], highest[one], noise)
            raise


__all__ = ["CouplingJudge", "Judge"]
