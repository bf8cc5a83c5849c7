"""The only way to pair drafting with verifying."""

from typing import Self

from torch import Tensor, nn

from arbordraft.checks import instance
from arbordraft.laws import DraftLaw, Fixed
from arbordraft.sampling import Noise
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree, Exactness, Rows, Verdict
from arbordraft.verifiers import Lifted, Matching, RecursiveRejection, TopDown, TreeVerifier


class Coupling(nn.Module):
    """A draft law together with a tree verifier that is valid for it.

    Args:
        law: how children are drawn.
        verifier: how the tree is judged.

    Raises:
        TypeError: if either is something else (a bare rule, for instance).
        ValueError: if the verifier would not emit the target's law on such drafts.

    Examples:
        >>> from arbordraft.laws import IID, TopTail
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
        if not verifier.supports(law):
            raise ValueError(
                f"{verifier} is not valid for children drawn by {law}: the output law would change. "
                "RecursiveRejection() and Matching() are valid for every draft law"
            )
        self.law = law
        self.verifier = verifier

    @classmethod
    def matching(cls, width: int = 1) -> Self:
        """The most probable children, kept where the target says the same: the pair for greedy decoding and lookups.

        Sampling with it is lossless too, but random drafts (:meth:`of`) are accepted more often.

        Examples:
            >>> Coupling.matching(2).law
            Fixed(tops=2, tails=0, replacement=False)

        Args:
            width: most children of a node, 1 or more.
        """
        return cls(Fixed(width), TopDown(Matching()))

    @classmethod
    def of(cls, law: DraftLaw) -> Self:
        """A draft law with the verifier that suits it: matching for certain drafts, else lifted recursive rejection.

        Args:
            law: how children are drawn.
        """
        instance("law", law, DraftLaw)
        return cls(law, TopDown(Matching()) if law.deterministic else Lifted(RecursiveRejection()))

    @property
    def exactness(self) -> Exactness:
        """What the pair promises about the output law."""
        return self.verifier.exactness

    def check(self, topology: TreeTopology) -> None:
        """Raises ValueError if the topology plans more children than the law draws."""
        widest = max(len(children) for children in topology.child_list)
        if widest > self.law.k:
            raise ValueError(f"the topology has nodes with {widest} children, but {self.law} draws only {self.law.k}")

    def forward(self, tree: DraftTree, target_probs: Rows[Tensor], noise: Noise) -> Verdict:
        """Verifies a batch; see :meth:`TreeVerifier.forward`."""
        verdict: Verdict = self.verifier(tree, target_probs, noise)
        return verdict
