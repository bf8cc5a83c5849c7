"""A verifier's verdict on the draft trees of a batch, and its promise about the output law.

Shapes: B samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple, Self

from arbordraft.trees.draft_tree import DraftTree


class Exactness(StrEnum):
    """A verifier's promise about the output law.

    ``pathwise`` promises more than the law: the very tokens that plain decoding with the same seed draws.
    """

    PATHWISE = "pathwise"
    EXACT = "exact"
    EPSILON = "epsilon"
    LOSSY = "lossy"

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's law."""
        return self in (Exactness.PATHWISE, Exactness.EXACT)


class Causality(IntEnum):
    """Drafts of a step on which the growth of its trees may depend, from the fewest to the most.

    A decider states on which its decisions depend; a verifier states for which its promise about the output law holds.
    """

    FIXED = 0
    """None: settings, committed tokens and earlier verdicts alone."""

    CAUSAL = 1
    """Drafts that exist before the tokens are drawn which the decision is about."""

    ANTICIPATING = 2
    """Any drafts, including those which the decision is about."""


class Outcome(NamedTuple):
    """Acceptance of a sample's drafts in one committed step.

    Args:
        drafted: number of draft levels that the target verified.
        accepted: number of these levels that were accepted.
        stated: for the root and each accepted node with verified children, the sum of the children's draft
            probabilities. Has one entry more than ``accepted``, unless the path ended at a leaf.
        source: kind of drafter that proposed them, see :attr:`~arbordraft.deciders.decisions.Situation.source`.
        certain: depths of ``stated`` whose children were certain, see :attr:`DraftTree.certain`.
    """

    drafted: int
    accepted: int
    stated: tuple[float, ...] = ()
    source: str = ""
    certain: tuple[int, ...] = ()


class SampleVerdict(NamedTuple):
    """The verdict on one sample.

    Args:
        path: rows from the root to the last accepted node.
        token: the recovered or bonus token that follows.
        recovered: whether drafted children of the last accepted node were rejected; otherwise the token is a bonus.
    """

    path: Sequence[int]
    token: int
    recovered: bool


@dataclass(frozen=True, eq=False)
class Verdict:
    """The verdict on a batch.

    Args:
        paths: by sample, the rows from the root to the last accepted node; empty for a sample that took no part.
        tokens: by sample, the recovered or bonus token that follows; -1 for a sample that took no part.
        recovered: by sample, whether drafted children of the last accepted node were rejected; otherwise the token
            is a bonus.
    """

    paths: Sequence[Sequence[int]]
    tokens: Sequence[int]
    recovered: Sequence[bool]

    @classmethod
    def of(cls, tree: DraftTree, ends: Mapping[int, tuple[int, int]]) -> Self:
        """Builds the verdict whose paths end at the given rows.

        Args:
            tree: the drafts.
            ends: by sample, the row of the last accepted node and the token after it.
        """
        paths: list[list[int]] = [[] for _ in tree.proposals]
        tokens, recovered = [-1] * len(paths), [False] * len(paths)
        for sample, (end, token) in ends.items():
            paths[sample], tokens[sample], recovered[sample] = tree.path(end), token, bool(tree.children[end])
        return cls(paths, tokens, recovered)

    @classmethod
    def nothing(cls, samples: int) -> Self:
        """Returns a verdict in which no sample took part."""
        return cls([[]] * samples, [-1] * samples, [False] * samples)

    @classmethod
    def joined(cls, verdicts: Sequence["Verdict"]) -> "Verdict":
        """Merges verdicts on parts of a batch; each sample took part in at most one of them."""
        if len(verdicts) == 1:
            return verdicts[0]
        chosen = [next((one for one in own if one.path), own[0]) for own in zip(*verdicts, strict=True)]
        paths, tokens, recovered = zip(*chosen, strict=True)
        return cls(paths, tokens, recovered)

    def __len__(self) -> int:
        """Returns B."""
        return len(self.paths)

    def __getitem__(self, sample: int) -> SampleVerdict:
        """Returns the verdict on one sample; its path is empty if the sample took no part."""
        return SampleVerdict(self.paths[sample], self.tokens[sample], self.recovered[sample])

    def accepted(self, sample: int) -> int:
        """Returns the number of accepted drafted tokens of a sample that took part."""
        return len(self.paths[sample]) - 1

    def emitted(self, tree: DraftTree, sample: int) -> list[int]:
        """Returns the accepted tokens of a sample that took part, followed by the recovered or bonus token."""
        accepted = self.paths[sample][1:]
        return [*tree.token[accepted].tolist(), self.tokens[sample]] if accepted else [self.tokens[sample]]

    def outcome(self, tree: DraftTree, sample: int) -> Outcome:
        """Returns the acceptance of the drafts of a sample that took part."""
        if tree.lengths[sample] == 1:
            return Outcome(0, 0, source=tree[sample].proposal.source)
        tried = [children for row in self.paths[sample] if (children := tree.children[row])]
        stated = [sum(tree.chance[children].tolist()) for children in tried]
        certain = [depth for depth, children in enumerate(tried) if tree.certain[children[0]]]
        deepest = int(tree.depth[tree.offsets[sample + 1] - 1])  # nodes are listed level by level
        return Outcome(deepest, self.accepted(sample), tuple(stated), tree[sample].proposal.source, tuple(certain))


__all__ = ["Exactness", "Outcome", "SampleVerdict", "Verdict"]
