"""The draft trees of a batch as one flat value, from drafting to commit.

Shapes: B samples, n_b nodes of sample b (root included, 0 if it takes no part), T = sum(n_b) packed rows, R draft
rows, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw
from arbordraft.trees.topology import TreeTopology

if TYPE_CHECKING:
    from pandas import DataFrame

Ints = npt.NDArray[np.int64]
Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

NO_ROWS = torch.empty(0, 0)


class Proposal(NamedTuple):
    """Draft law and drafter of one sample's tree.

    Args:
        law: the law that drew the children; a node planned with fewer children used ``law.narrow``.
        source: kind of drafter that proposed the tree, see :attr:`~arbordraft.deciders.decisions.Situation.source`.
    """

    law: DraftLaw
    source: str = ""


@dataclass(frozen=True, eq=False)
class DraftTree:
    """The draft trees of a batch as columns: one packed row per node, sample after sample, nodes ascending.

    A node is present only if its parent is. Siblings are dropped from the last drawn to the first. The token of a
    randomly drawn node must not decide which nodes are dropped, or verification would no longer be lossless.

    Siblings may repeat a token if they were drawn with replacement or are certain. Among equal certain siblings, only
    the first is ever accepted; the others merely waste their rows.

    Args:
        topology: the planned shape.
        proposals: the proposal of every sample; ``None`` for a sample that takes no part.
        offsets: ``[B + 1]`` first row of every sample, and the end of the last sample.
        token: ``[T]`` int64; a root holds the last committed token.
        node: ``[T]`` int64 node of the topology.
        parent: ``[T]`` int64 row of the parent, -1 for a root.
        depth: ``[T]`` int64.
        chance: ``[T]`` float64 draft probability, given the parent; 0 if none was stated.
        certain: ``[T]`` bool: constraints allow no other token after the parent.
        draft_row: ``[T]`` int64 index of the unmodified draft row that the children were drawn from; -1 for none. Only
            children drawn by a deterministic law need none.
        draft_rows: ``[R, V]`` draft rows.
        drafted: levels that each kind of drafter drafted in this step, those included whose drafts were dropped.
        read: number of committed tokens that the drafters read before they drafted.

    Examples:
        >>> from arbordraft import Fixed
        >>> tree = DraftTree.of(TreeTopology.fork(2, 1), Fixed(2), [{0: 7, 1: 3}, None, {0: 8, 1: 4, 2: 5}])
        >>> tree.token.tolist(), tree.parent.tolist(), tree.lengths
        ([7, 3, 8, 4, 5], [-1, 0, -1, 2, 2], [2, 0, 3])
    """

    topology: TreeTopology
    proposals: Sequence[Proposal | None]
    offsets: Sequence[int]
    token: Ints
    node: Ints
    parent: Ints
    depth: Ints
    chance: Reals
    certain: Flags
    draft_row: Ints
    draft_rows: Tensor = field(default_factory=lambda: NO_ROWS)
    drafted: Mapping[str, int] = field(default_factory=dict)
    read: int = 0

    @classmethod
    def of(
        cls,
        topology: TreeTopology,
        law: DraftLaw,
        tokens: Sequence[Mapping[int, int] | None],
        draft_probs: Sequence[Mapping[int, Tensor] | None] = (),
        chances: Sequence[Mapping[int, float] | None] = (),
        source: str = "",
    ) -> Self:
        """Builds trees from tokens given node by node.

        Args:
            topology: the planned shape.
            law: the law that drew the children.
            tokens: by sample, the token of every node, node 0 included; ``None`` for a sample that takes no part.
            draft_probs: by sample and node, the ``[V]`` draft row that the children were drawn from.
            chances: by sample and node, the draft probability of a node below the root.
            source: kind of drafter that proposed the trees.

        Raises:
            ValueError: if a root is missing, or nodes are out of order or lack their parents. Also if siblings drawn
                without replacement repeat a token, or another list is not as long as ``tokens``.
        """
        parents, depths, absent = topology.parent_list, topology.depth_list, [None] * len(tokens)
        rows: list[tuple[int, int, int, int, int]] = []
        chance: list[float] = []
        draft_rows: list[Tensor] = []
        offsets = [0]
        for sample_tokens, probs, stated in zip(tokens, draft_probs or absent, chances or absent, strict=True):
            if sample_tokens is not None:
                probs, stated = probs or {}, stated or {}
                _check_nodes(topology, law, sample_tokens, probs)
                row_of = {-1: -1}
                for node, token in sample_tokens.items():
                    row_of[node], place = len(rows), -1
                    if node in probs:
                        place = len(draft_rows)
                        draft_rows.append(probs[node])
                    rows.append((token, node, row_of[parents[node]], depths[node], place))
                    chance.append(stated.get(node, 0.0))
            offsets.append(len(rows))
        columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy()
        return cls(
            topology,
            [None if sample_tokens is None else Proposal(law, source) for sample_tokens in tokens],
            offsets,
            token=columns[0],
            node=columns[1],
            parent=columns[2],
            depth=columns[3],
            chance=np.array(chance, dtype=np.float64),
            certain=np.zeros(len(rows), dtype=np.bool_),
            draft_row=columns[4],
            draft_rows=torch.stack(draft_rows) if draft_rows else NO_ROWS,
        )

    @classmethod
    def roots(cls, topology: TreeTopology, tokens: Sequence[int | None], proposal: Proposal) -> Self:
        """Builds lone roots from the last committed tokens; ``None`` stands for a sample that takes no part."""
        living = [token for token in tokens if token is not None]
        offsets = list(accumulate((token is not None for token in tokens), initial=0))
        proposals = [None if token is None else proposal for token in tokens]
        return cls(topology, proposals, offsets, np.array(living, dtype=np.int64), *_columns_of_roots(len(living)))

    def take(self, samples: Sequence[int]) -> "DraftTree":
        """Returns the trees of some samples; the others take no part. Draft rows stay where they are."""
        wanted = np.zeros(len(self.proposals), dtype=np.bool_)
        wanted[list(samples)] = True
        if wanted[[sample for sample, proposal in enumerate(self.proposals) if proposal is not None]].all():
            return self
        kept = wanted[self.owner]
        place = np.cumsum(kept) - 1
        parent = self.parent[kept]
        columns = {
            name: getattr(self, name)[kept] for name in ("token", "node", "depth", "chance", "certain", "draft_row")
        }
        lengths = [length if one else 0 for length, one in zip(self.lengths, wanted, strict=True)]
        return DraftTree(
            self.topology,
            [proposal if one else None for proposal, one in zip(self.proposals, wanted, strict=True)],
            [0, *np.cumsum(lengths).tolist()],
            **columns,
            parent=np.where(parent < 0, -1, place[parent.clip(0)]),
            draft_rows=self.draft_rows,
        )

    def __len__(self) -> int:
        """Returns B."""
        return len(self.proposals)

    def __getitem__(self, sample: int) -> "SampleTree":
        """Returns the tree of a sample that takes part."""
        if self.proposals[sample] is None:
            raise ValueError(f"sample {sample} takes no part in this step")
        return SampleTree(self, sample)

    @cached_property
    def living(self) -> list[int]:
        """The samples that take part."""
        return [sample for sample, proposal in enumerate(self.proposals) if proposal is not None]

    @property
    def rows(self) -> int:
        """Number of packed rows T."""
        return len(self.token)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of nodes ``n_b`` of every sample."""
        return [end - begin for begin, end in pairwise(self.offsets)]

    @cached_property
    def owner(self) -> Ints:
        """``[T]`` sample of every row."""
        return np.repeat(np.arange(len(self.proposals)), self.lengths)

    @cached_property
    def slot(self) -> Ints:
        """``[T]`` place of every row's sample among those that take part."""
        return np.repeat(np.arange(len(self.living)), [self.lengths[sample] for sample in self.living])

    @cached_property
    def inner(self) -> Ints:
        """Rows with children, by ascending depth."""
        rows = np.unique(self.parent[self.depth > 0])
        return rows[self.depth[rows].argsort(kind="stable")]

    @cached_property
    def children(self) -> list[list[int]]:
        """By row, the rows of its children in the order of drawing."""
        found: list[list[int]] = [[] for _ in range(self.rows)]
        for row, parent in enumerate(self.parent.tolist()):
            if parent >= 0:
                found[parent].append(row)
        return found

    @cached_property
    def are_chains(self) -> bool:
        """Whether every tree is a chain, for which causal order suffices as a mask."""
        parents = self.parent.tolist()
        return all(parent in (-1, row - 1) for row, parent in enumerate(parents))

    def rows_of(self, samples: Sequence[int]) -> list[int]:
        """Returns the rows of some samples."""
        return [row for sample in samples for row in range(self.offsets[sample], self.offsets[sample + 1])]

    def path(self, row: int) -> list[int]:
        """Returns the rows from the root of a row's sample down to that row, both included."""
        path = [row]
        while (above := int(self.parent[path[-1]])) >= 0:
            path.append(above)
        return path[::-1]

    def law_of(self, row: int) -> DraftLaw:
        """Returns the law that drew the children of a row."""
        return self[int(self.owner[row])].law_of(row)

    @cached_property
    def _laws(self) -> dict[tuple[int, int], DraftLaw]:
        return {}

    def drawn_from(self, row: int) -> Tensor | None:
        """Returns the ``[V]`` draft row of a row's children; ``None`` if there is none."""
        place = int(self.draft_row[row])
        return None if place < 0 else self.draft_rows[place]

    def tokens(self) -> Tensor:
        """Returns the ``[T]`` int64 input of the target's forward."""
        return torch.from_numpy(self.token)


class SampleTree(NamedTuple):
    """A view of one sample's tree for users and hooks; rows are numbered as in the batch.

    Args:
        batch: all trees.
        sample: number of the sample.
    """

    batch: DraftTree
    sample: int

    @property
    def proposal(self) -> Proposal:
        """Draft law and drafter of the tree."""
        return self.batch.proposals[self.sample]  # type: ignore[return-value]

    @property
    def rows(self) -> range:
        """Rows of the tree; the first one is the root's."""
        return range(self.batch.offsets[self.sample], self.batch.offsets[self.sample + 1])

    @property
    def root(self) -> int:
        """Row of the root."""
        return self.batch.offsets[self.sample]

    @property
    def tokens(self) -> list[int]:
        """Tokens of the tree's rows."""
        return self.batch.token[self.root : self.rows.stop].tolist()

    @property
    def parents(self) -> list[int]:
        """Parent row of each row of the tree, -1 for the root."""
        return self.batch.parent[self.root : self.rows.stop].tolist()

    def token(self, row: int) -> int:
        """Returns the token of a row."""
        return int(self.batch.token[row])

    def children(self, row: int) -> list[int]:
        """Returns the rows of a row's children in the order of drawing."""
        return self.batch.children[row]

    def path(self, row: int) -> list[int]:
        """Returns the drafted tokens from below the root down to a row."""
        return self.batch.token[self.batch.path(row)[1:]].tolist()

    def law_of(self, row: int) -> DraftLaw:
        """Returns the law that drew the children of a row."""
        law, laws = self.proposal.law, self.batch._laws
        kind = id(law), len(self.batch.topology.child_list[self.batch.node[row]])
        if kind not in laws:  # a law is an nn.Module, which is slow to create
            laws[kind] = law.narrow(kind[1])
        return laws[kind]

    def drawn_from(self, row: int) -> Tensor | None:
        """Returns the ``[V]`` draft row of a row's children; ``None`` if there is none."""
        return self.batch.drawn_from(row)

    @property
    def guesses(self) -> int:
        """Number of drafts that are not certain."""
        return len(self.rows) - 1 - int(self.batch.certain[self.root : self.rows.stop].sum())

    def to_frame(self) -> "DataFrame":
        """Returns the nodes as a pandas table: row, node, parent, depth, token, chance, certain.

        Raises:
            ImportError: if pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("a table of a tree needs pandas: pip install pandas") from error
        names = ("node", "parent", "depth", "token", "chance", "certain")
        columns = {name: getattr(self.batch, name)[self.root : self.rows.stop] for name in names}
        return DataFrame({"row": self.rows, **columns})


@lru_cache
def _columns_of_roots(count: int) -> "tuple[Ints, Ints, Ints, Reals, Flags, Ints]":
    """Returns the columns after ``token`` for lone roots; they are cached, since columns are never written to."""
    zeros, nothing = np.zeros(count, dtype=np.int64), np.full(count, -1)
    return zeros, nothing, zeros, np.zeros(count), np.zeros(count, dtype=np.bool_), nothing


def _check_nodes(
    topology: TreeTopology, law: DraftLaw, tokens: Mapping[int, int], draft_probs: Mapping[int, Tensor]
) -> None:
    nodes, parents = list(tokens), topology.parent_list
    if nodes[:1] != [0] or nodes != sorted(nodes) or nodes[-1] >= len(parents):
        raise ValueError(f"tokens must list nodes of the topology from 0 upwards, got nodes {nodes}")
    if orphan := next((node for node in nodes[1:] if parents[node] not in tokens), None):
        raise ValueError(f"node {orphan} is alive, but its parent {parents[orphan]} is not")
    for node in draft_probs:
        check_drawn(law, node, [tokens[child] for child in topology.child_list[node] if child in tokens])


def check_drawn(law: DraftLaw, node: int, tokens: Sequence[int]) -> None:
    """Raises ValueError if siblings repeat a token although the law draws distinct ones."""
    if law.deterministic or law.replacement or len(set(tokens)) == len(tokens):
        return
    token = next(token for place, token in enumerate(tokens) if token in tokens[:place])
    raise ValueError(
        f"two children of node {node} have the token {token}, which {law} cannot draw: state the law that drew them, "
        "such as IID"
    )


__all__ = ["DraftTree", "Proposal", "SampleTree", "check_drawn"]
