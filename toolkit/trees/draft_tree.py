"""The data that flows through one decoding step: draft trees, and verdicts about them.

Shapes: B samples, n_b nodes of sample b (root included, 0 if it is finished), T = sum of n_b, V vocabulary.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.rows import Row, Rows, Share
from arbordraft.trees.topology import TreeTopology


class Exactness(StrEnum):
    """What a verifier promises about the output law.

    ``pathwise``: more than the law, the very tokens that plain decoding with the same seed draws.
    """

    PATHWISE = "pathwise"
    EXACT = "exact"
    EPSILON = "epsilon"
    LOSSY = "lossy"

    @property
    def lossless(self) -> bool:
        """Whether the output has the law of the target."""
        return self in (Exactness.PATHWISE, Exactness.EXACT)


class Outcome(NamedTuple):
    """What became of a sample's drafts in one step; all of it is committed.

    Args:
        drafted: levels of drafts that the target verified.
        accepted: how many of them were accepted.
        stated: of the root and the accepted nodes below it, as far as they have verified children: the sum of these
            children's draft probabilities. One more than was accepted, unless the path ended at a leaf.
        source: which drafter proposed them, see :attr:`~arbordraft.deciders.decisions.Situation.source`.
        certain: depths of ``stated`` at which nothing was guessed, see :attr:`SampleTree.certain`.
    """

    drafted: int
    accepted: int
    stated: tuple[float, ...] = ()
    source: str = ""
    certain: tuple[int, ...] = ()


@dataclass(frozen=True)
class SampleTree:
    """The draft tree of one sample: the living nodes of its topology, their tokens and draft rows.

    A node is alive only if its parent is. Siblings are given up from the last drawn to the first, and never
    because of the token of a node that was drawn at random: verification would no longer be lossless.

    Args:
        topology: the planned shape.
        law: the law by which children were drawn; a node planned with fewer children used ``law.narrow``.
        tokens: token of every living node in ascending node order. Node 0 is the last committed token.
        draft_probs: ``[V]`` draft row of every node with children, as sampled from. A node may lack one only
            if its law is deterministic.
        chances: draft probability of every node below the root, given its parent; may be left out.
        source: which drafter proposed it, see :attr:`~arbordraft.deciders.decisions.Situation.source`.
        gain: tokens that its drafts are expected to bring, less what their rows could bring elsewhere.
        certain: nodes whose tokens are the only ones that constraints allow behind their parents.

    Siblings may repeat a token if they were drawn with replacement, or if they are certain. Of equal certain ones only
    the first is ever accepted: the others waste their rows, no more.

    Raises:
        ValueError: if the root is not alive, nodes are out of order, a living node has a dead parent, or siblings that
            were drawn without replacement repeat a token.
    """

    topology: TreeTopology
    law: DraftLaw
    tokens: Mapping[int, int]
    draft_probs: Mapping[int, Tensor] = field(default_factory=dict)
    chances: Mapping[int, float] = field(default_factory=dict)
    source: str = ""
    gain: float = 0.0
    certain: Collection[int] = ()

    def __post_init__(self) -> None:
        nodes, parents = list(self.tokens), self.topology.parent_list
        if nodes[:1] != [0] or nodes != sorted(nodes) or nodes[-1] >= len(parents):
            raise ValueError(f"tokens must list nodes of the topology from 0 upwards, got nodes {nodes}")
        if orphan := next((node for node in nodes[1:] if parents[node] not in self.tokens), None):
            raise ValueError(f"node {orphan} is alive, but its parent {parents[orphan]} is not")
        if not (self.law.deterministic or self.law.replacement):
            self._check_distinct()

    def _check_distinct(self) -> None:
        parents, seen = self.topology.parent_list, set()
        for node, token in self.tokens.items():
            if (parents[node], token) in seen and parents[node] in self.draft_probs:
                raise ValueError(
                    f"two children of node {parents[node]} have the token {token}, which {self.law} cannot draw: state "
                    "the law that drew them, such as IID"
                )
            seen.add((parents[node], token))

    @property
    def is_chain(self) -> bool:
        """Whether every living node but the last has one living child.

        Examples:
            >>> from arbordraft import Fixed
            >>> fork = TreeTopology([-1, 0, 0, 1])
            >>> [SampleTree(fork, Fixed(2), {0: 5, 1: 6, node: 7}).is_chain for node in (2, 3)]
            [False, True]
        """
        parents = self.topology.parent_list
        return all(parents[node] == above for above, node in pairwise(self.tokens))

    def children(self, node: int) -> list[int]:
        """Living children of a node, in the order in which they were drawn."""
        return [child for child in self.topology.child_list[node] if child in self.tokens]

    def law_of(self, node: int) -> DraftLaw:
        """The law that drew the children of a node."""
        return self.law.narrow(len(self.topology.child_list[node]))

    def outcome(self, judged: "SampleVerdict") -> Outcome:
        """What became of it."""
        path = (0, *judged.path)
        levels = max(map(self.topology.depth_list.__getitem__, self.tokens))
        tried = [children for node in path if (children := self.children(node))]
        stated = [sum(self.chances.get(child, 0.0) for child in children) for children in tried]
        certain = [depth for depth, children in enumerate(tried) if children[0] in self.certain]
        return Outcome(levels, len(judged.path), tuple(stated), self.source, tuple(certain))

    @property
    def guesses(self) -> int:
        """Drafts that need not be right."""
        return len(self.tokens) - 1 - len(self.certain)

    def path(self, node: int) -> list[int]:
        """Drafted tokens from below the root down to ``node``."""
        return [self.tokens[passed] for passed in self.topology.path(node)[1:]]


@dataclass(frozen=True)
class DraftTree:
    """One draft tree per sample of the batch; ``None`` for a sample that is finished."""

    samples: tuple[SampleTree | None, ...]

    @property
    def lengths(self) -> list[int]:
        """``n_b`` for every sample."""
        return [len(sample.tokens) if sample else 0 for sample in self.samples]

    def rows(self) -> Iterator[tuple[int, int, int]]:
        """``(sample, node, token)`` of the T packed rows, sample after sample, nodes ascending."""
        for index, sample in enumerate(self.samples):
            if sample:
                for node, token in sample.tokens.items():
                    yield index, node, token

    def split(self, rows: Rows[Row]) -> Iterator[tuple[SampleTree | None, Share[Row]]]:
        """Hands every sample its share of T packed rows, by node.

        Raises:
            ValueError: if there are not exactly T rows.
        """
        if len(rows) != sum(self.lengths):
            raise ValueError(f"the batch has {sum(self.lengths)} nodes, but {len(rows)} rows were given")
        start = 0
        for sample, length in zip(self.samples, self.lengths, strict=True):
            yield sample, Share(sample.tokens if sample else (), rows, start)
            start += length

    def packed_tokens(self) -> Tensor:
        """``[T]`` int64 input of the target's forward."""
        return torch.tensor([token for _, _, token in self.rows()], dtype=torch.int64)


@dataclass(frozen=True)
class SampleVerdict:
    """What the verifier decided about one sample.

    Args:
        path: accepted nodes below the root, from shallow to deep.
        token: the recovered or bonus token that follows them.
        recovered: whether drafted children of the last accepted node were rejected; else the token is a
            bonus.
    """

    path: tuple[int, ...]
    token: int
    recovered: bool


@dataclass(frozen=True)
class Verdict:
    """One verdict per sample of the batch; ``None`` for a sample that did not take part."""

    samples: tuple[SampleVerdict | None, ...]
