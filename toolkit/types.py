"""The data that flows through one decoding step.

Shapes: B samples, n_b nodes of sample b (root included, 0 if it is finished), T = sum of n_b, V vocabulary, H hidden
size of a drafter.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from arbordraft.kernels.draft_tree import Drafted, Draws, Growth
from arbordraft.laws import DraftLaw
from arbordraft.masks import SlicedCausalMask
from arbordraft.sampling import GumbelNoise, Noise
from arbordraft.stateful import PathState
from arbordraft.topology import TreeTopology

Row = TypeVar("Row")
RowOut = TypeVar("RowOut", covariant=True)

TOP = 10  # highest probabilities of a draft row that deciders are told


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
        source: which drafter proposed it, see :attr:`Situation.source`.
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

    def children(self, node: int) -> list[int]:
        """Living children of a node, in the order in which they were drawn."""
        return [child for child in self.topology.child_list[node] if child in self.tokens]

    def law_of(self, node: int) -> DraftLaw:
        """The law that drew the children of a node."""
        return self.law.narrow(len(self.topology.child_list[node]))

    def outcome(self, judged: "SampleVerdict") -> "Outcome":
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


class Rows(Protocol[RowOut]):
    """Packed rows; a tensor's, or such as are computed when they are asked for."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> RowOut: ...


class Share(Mapping[int, Row]):
    """One sample's part of packed rows, by node.

    Args:
        nodes: its nodes, in the order of their rows.
        rows: the rows of all samples.
        start: the first one of this sample.
    """

    def __init__(self, nodes: Iterable[int], rows: Rows[Row], start: int) -> None:
        self._rows = rows
        self._row_of = {node: row for row, node in enumerate(nodes, start)}

    def __getitem__(self, node: int) -> Row:
        return self._rows[self._row_of[node]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._row_of)

    def __len__(self) -> int:
        return len(self._row_of)


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

    def split(self, rows: "Rows[Row]") -> "Iterator[tuple[SampleTree | None, Share[Row]]]":
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


class Outcome(NamedTuple):
    """What became of a sample's drafts in one step; all of it is committed.

    Args:
        drafted: levels of drafts that the target verified.
        accepted: how many of them were accepted.
        stated: of the root and the accepted nodes below it, as far as they have verified children: the sum of these
            children's draft probabilities. One more than was accepted, unless the path ended at a leaf.
        source: which drafter proposed them, see :attr:`Situation.source`.
        certain: depths of ``stated`` at which nothing was guessed, see :attr:`SampleTree.certain`.
    """

    drafted: int
    accepted: int
    stated: tuple[float, ...] = ()
    source: str = ""
    certain: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Origin:
    """What the children of a node were drawn from; siblings share it.

    Args:
        read: gives the ``[V]`` draft row, which may have to be computed first; ``None`` where there was none.
        hidden: ``[H]`` what the drafter's head made the row from, if the drafter shows it.
    """

    read: Callable[[], Tensor] | None = None
    hidden: Tensor | None = None

    @cached_property
    def row(self) -> Tensor | None:
        """``[V]`` draft row; ``None`` where there was none."""
        return None if self.read is None else self.read()

    @cached_property
    def entropy(self) -> float:
        """Entropy of the row in nats, 0 where there was none."""
        return 0.0 if self.row is None else torch.special.entr(self.row).sum().item()

    @cached_property
    def top(self) -> list[float]:
        """The ``TOP`` highest probabilities of the row, descending; 0 for what it lacks."""
        top = [] if self.row is None else self.row.topk(min(TOP, len(self.row))).values.tolist()
        return [*top, *[0.0] * (TOP - len(top))]


class Draw(NamedTuple):
    """How a drafted token came about.

    Args:
        probability: its draft probability.
        origin: what it was drawn from.
    """

    probability: float
    origin: Origin


@dataclass(frozen=True)
class StepView:
    """What a decider may look at before the children of the nodes at ``depth`` are drawn.

    Every list has one entry per sample; the inner ones have one entry per frontier node (those at ``depth``).

    Args:
        depth: depth of the frontier, 0 for the roots.
        paths: the draws that led from the root to each frontier node; none for a root.
        memory: what the decider remembers of each sample, see :meth:`~arbordraft.deciders.Decider.start`.
        pathwise: whether the text is the same whatever is drafted, see :class:`DraftContext`.
        batch: samples that the target's forward will serve, those that stopped drafting included.
        planned: rows of that forward so far, all samples, roots included.
        alike: samples of the batch that each one shown stands for. A pathwise view shows all that go on, each for
            itself. Any other shows a single sample, which stands for a whole batch of its like: it decides by itself
            alone, so that its text does not depend on what shares its batch.
    """

    depth: int
    paths: Sequence[Sequence[Sequence[Draw]]]
    memory: Sequence[Any]
    pathwise: bool = False
    batch: int = 1
    planned: int = 1
    alike: int = 1
    source: str = ""
    acceptance: Sequence[float] = (0.5,)

    @property
    def confidence(self) -> list[list[float]]:
        """Draft probability of each frontier node's token, 1 for a root."""
        return [[path[-1].probability if path else 1.0 for path in nodes] for nodes in self.paths]

    @property
    def rows(self) -> list[list[Tensor | None]]:
        """``[V]`` draft row that each frontier node was drawn from; ``None`` where there was none."""
        return [[path[-1].origin.row if path else None for path in nodes] for nodes in self.paths]

    @property
    def entropy(self) -> list[list[float]]:
        """Entropy in nats of the row each frontier node was drawn from, 0 where there was none."""
        return [[path[-1].origin.entropy if path else 0.0 for path in nodes] for nodes in self.paths]


@dataclass(frozen=True)
class Situation:
    """What is known before anything is drafted in a step, about samples that share what pays.

    Args:
        room: greatest useful depth of every sample's tree.
        memory: what the decider remembers of each, see :meth:`~arbordraft.deciders.Decider.start`.
        alike: samples that each of them stands for, as in :class:`StepView`.
        source: the drafter by its kind, so that what is learned of one is not taken for another's.
        acceptance: how often its most probable token is the next one, its second, and so on, before anything is known.
        free: a level takes next to no time beside the target's forward, as lookups do.
        behind: committed tokens of every sample that the drafter would have to read first; none if empty.
        left: tokens that every sample may still get; no matter how many if empty.
    """

    room: Sequence[int]
    memory: Sequence[Any]
    alike: int = 1
    source: str = ""
    acceptance: Sequence[float] = (0.5,)
    free: bool = False
    behind: Sequence[int] = ()
    left: Sequence[int] = ()


def _all_of(chances: Sequence[float]) -> int:
    return len(chances)


@dataclass(frozen=True)
class Plan:
    """How far the trees of some samples go on, decided before they are drafted.

    The reach of a node, the chance that its path is accepted, is the product of the draft probabilities along it, each
    times the ``trust`` in it and 1 at most, times the weight of its sample. A node gets children if ``reach * next -
    row`` is not negative, and a level is drafted if the sum of that over its nodes is at least ``level``. Trees that
    were drawn at random are not pruned node by node, only ended, as verification would no longer be lossless.

    Args:
        levels: most levels, by sample; 0 drafts nothing.
        trust: by sample and depth of the parent, the last one for all that is deeper: how often drafts are accepted for
            every time that their draft probabilities say so.
        next: by sample and depth of the parent: how often some child is expected to be accepted.
        level: tokens that a level must gain besides.
        row: tokens that a node must gain for its rows.
        budget: most drafts of all the samples, the likeliest ones.
        keep: how many of the drafts with these reaches, descending, are verified; all by default.
        weights: by sample, what its tokens are worth to the batch; 1 by default.
        gains: by sample, tokens that drafting is expected to bring, less what its time could bring elsewhere; what is
            not said is not expected to beat other drafts.
    """

    levels: Sequence[int]
    trust: Sequence[Sequence[float]]
    next: Sequence[Sequence[float]]
    level: float = 0.0
    row: float = 0.0
    budget: int | None = None
    keep: Callable[[Sequence[float]], int] = _all_of
    weights: Sequence[float] = ()
    gains: Sequence[float] = ()

    @classmethod
    def everything(cls, levels: Sequence[int], **limits: Any) -> Self:
        """Drafts all that the topology offers down to these levels, at what the drafter says it is worth."""
        ones = [(1.0,)] * len(levels)
        return cls(levels, ones, ones, **limits)


class WholeDrafts(Protocol):
    """Grows the trees of a step with a drafter's network, all levels at once.

    Attributes:
        rows: most tokens that a sample's cache may lack.
    """

    rows: int

    def __call__(
        self, network: Any, cache: Any, missing: Mapping[int, Any], growth: Growth, draws: Draws | None
    ) -> Drafted:
        """Feeds what is missing, which is committed, and grows the trees.

        Args:
            network: a :class:`~arbordraft.drafters.whole.DraftNetwork`.
            cache: the drafter's, which was made beside the target's.
            missing: by handle, in the order of ``growth``; see :data:`~arbordraft.drafters.whole.Missing`.
            growth: how far trees go on.
            draws: how tokens are drawn.
        """


@dataclass(frozen=True)
class DraftContext:
    """All a drafter may know about the step it drafts for.

    Args:
        tokens: committed tokens of every sample, prompt included.
        room: greatest useful depth of each sample's tree; ``None`` for one that does not take part.
        topology: the planned shape.
        mask: the topology's sliced mask.
        law: how children are drawn. At temperature 0, where the verdict depends on the tokens alone, the most probable
            ones, whatever the coupling says.
        pathwise: the text is the same whatever is drafted: at temperature 0, or with noise that target and drafter
            share. What is drafted may then depend on anything.
        warp: the request's logits processors. Given ``[R, V]`` logits and, per row, the sample and the drafted tokens
            before the prediction, it returns ``[R, V]`` scores.
        plan: says before anything is drafted how far the trees of some samples go on; ``None`` to be asked instead.
        temperatures: by sample, all that ``warp`` does is to divide by it; 0 where it does nothing, as decoding is
            greedy. ``None`` if it does more for some sample.
        decide: says before every level which samples go on.
        memory: what the decider remembers of each sample.
        noise: of this step: uniforms, or the shared one, which drafters add to their scores; ``None`` at temperature 0.
        expected_batch: samples that a sampled one takes its batch to have, all of them like itself.
        candidates: children that each root has already, with the ``[V]`` row that they were drawn from; ``None`` if the
            drafter gives roots theirs.
        vocab_size: V, the target's; ``None`` if the drafter has as many ids, come what may.
        behind: committed tokens of every sample that the drafter has not read, if there are any.
        closed: whether nobody else will join the batch, so that it counts which sample ends last.
        places: by sample, its stateful processors behind the committed tokens; ``None`` where it has none.
        static: grows whole trees in fixed shapes, as the target's steps have them; ``None`` where steps have not.
    """

    tokens: Sequence[Sequence[int]]
    room: Sequence[int | None]
    topology: TreeTopology
    mask: SlicedCausalMask
    law: DraftLaw
    pathwise: bool
    warp: Callable[[Tensor, Callable[[int], tuple[int, Sequence[int]]]], Tensor]
    temperatures: Sequence[float] | None
    plan: Callable[[Situation], Plan | None]
    decide: Callable[[StepView], Sequence[bool]]
    memory: Sequence[Any]
    noise: Noise | GumbelNoise | None
    expected_batch: int = 1
    candidates: "Sequence[tuple[Sequence[int], Tensor] | None] | None" = None
    vocab_size: int | None = None
    behind: Sequence[int] = ()
    closed: bool = False
    places: Sequence[PathState | None] = ()
    static: WholeDrafts | None = None
