"""Couplings: the only way to pair a draft law with a verifier."""

from collections.abc import Sequence
from typing import Self

from torch import Tensor, nn

from arbordraft.sampling.laws import DraftLaw, Fixed, SharedNoise
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.rows import Rows, SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Exactness, Verdict
from arbordraft.utils.checks import check_instance
from arbordraft.verifiers import (
    Lifted,
    Matching,
    RecursiveRejection,
    SharedMatching,
    TopDown,
    TreeVerifier,
    matching_verdict,
)


class Coupling(nn.Module):
    """A draft law together with a tree verifier that is valid for it.

    Args:
        law: how children are drawn.
        verifier: decides about the tree.

    Raises:
        TypeError: if either has another type, for example a bare rule.
        ValueError: if the verifier would not emit the target's law on such drafts.

    Examples:
        >>> from arbordraft.sampling.laws import IID, TopTail
        >>> from arbordraft.verifiers import KSeq, TopDown
        >>> Coupling(IID(2), TopDown(KSeq())).exactness.value
        'exact'
        >>> Coupling(TopTail(1, 1), TopDown(KSeq()))
        Traceback (most recent call last):
            ...
        ValueError: ... is not valid for children drawn by TopTail(tops=1, tails=1, replacement=False): ...
    """

    def __init__(self, law: DraftLaw, verifier: TreeVerifier) -> None:
        super().__init__()
        if not isinstance(law, DraftLaw):
            raise TypeError(f"law must be a DraftLaw such as WithoutReplacement(2), got {type(law).__name__}")
        if not isinstance(verifier, TreeVerifier):
            raise TypeError(
                f"verifier must be a TreeVerifier, got {type(verifier).__name__}; "
                "wrap a rule as TopDown(rule) or Lifted(rule)"
            )
        if law.shared and not verifier.shared:
            raise ValueError(
                f"{verifier} is not valid for children drawn by {law}, which depend on the target's noise: the output "
                "law would change. Only SharedMatching() is valid for them: Coupling.shared(k)"
            )
        if verifier.shared and not law.deterministic:
            raise ValueError(
                f"{verifier} keeps a child only if it is the token that the target draws; children drawn by {law}, "
                "with other noise, seldom are: take SharedNoise(k) or Fixed(k)"
            )
        if not verifier.supports(law):
            raise ValueError(
                f"{verifier} is not valid for children drawn by {law}: the output law would change. "
                "RecursiveRejection() and Matching() are valid for every draft law"
            )
        self.law = law
        self.verifier = verifier

    @classmethod
    def shared(cls, width: int = 1) -> Self:
        """Pairs shared noise with matching: for any drafts, a seed's text is that of plain decoding.

        Suits trees and lookups. Greedy requests are decoded as with any other coupling.

        Examples:
            >>> Coupling.shared(2).exactness.value
            'pathwise'

        Args:
            width: greatest number of children of a node, 1 or more.
        """
        return cls(SharedNoise(width), SharedMatching())

    @classmethod
    def matching(cls, width: int = 1) -> Self:
        """Pairs the most probable children with matching: keeps a child if the target draws it with separate noise.

        Sampling is lossless, but the text of a seed depends on the drafts, unlike with :meth:`shared`.

        Examples:
            >>> Coupling.matching(2).law
            Fixed(tops=2, tails=0, replacement=False)

        Args:
            width: greatest number of children of a node, 1 or more.
        """
        return cls(Fixed(width), TopDown(Matching()))

    @classmethod
    def of(cls, law: DraftLaw) -> Self:
        """Pairs a law with the verifier that suits it: lifted recursive rejection for random drafts, else shared noise.

        Args:
            law: how children are drawn.
        """
        check_instance("law", law, DraftLaw)
        return cls(law, SharedMatching() if law.deterministic else Lifted(RecursiveRejection()))

    @property
    def exactness(self) -> Exactness:
        """The coupling's promise about the output law."""
        return self.verifier.exactness

    def check(self, topology: TreeTopology) -> None:
        """Raises ValueError if the topology plans more children than the law draws, or the verifier cannot judge it."""
        widest = max(len(children) for children in topology.child_list)
        if widest > self.law.k:
            raise ValueError(f"the topology has nodes with {widest} children, but {self.law} draws only {self.law.k}")
        self.verifier.check(topology)

    def forward(
        self,
        tree: DraftTree,
        target_probs: Rows[Tensor],
        noise: Noise | GumbelNoise | None,
        samples: Sequence[int] | None = None,
    ) -> Verdict:
        """Verifies a batch; see :meth:`TreeVerifier.forward`.

        Rows of temperature 0 are one-hot, so every lossless decision gives the same text. Drafts are then matched with
        the most probable tokens, for every verifier and law.

        Args:
            tree: the drafts.
            target_probs: ``[T, V]`` target probabilities.
            noise: noise of the step; ``None`` if all rows have temperature 0.
            samples: samples to decide about; by default all that take part.
        """
        samples = tree.living if samples is None else samples
        if isinstance(noise, GumbelNoise) or not isinstance(target_probs, SoftmaxRows):
            verdict: Verdict = self.verifier(tree, target_probs, noise, samples)
            return verdict
        offsets = tree.offsets
        certain = [sample for sample in samples if target_probs.certain(offsets[sample])]
        verdict = matching_verdict(tree, lambda rows, _: target_probs.most_probable(rows), certain)
        if len(certain) == len(samples):
            return verdict
        drawn = [sample for sample in samples if sample not in certain]
        return Verdict.joined([self.verifier(tree, target_probs, noise, drawn), verdict])
