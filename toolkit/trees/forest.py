"""The draft trees of a step while they grow: dense arrays over the nodes of the topology.

Shapes: B samples, N nodes of the topology, R draft rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.draft_tree.limits import Trees
from arbordraft.trees.draft_tree import NO_ROWS, DraftTree, Flags, Ints, Proposal, Reals
from arbordraft.trees.topology import TreeTopology


@dataclass(eq=False)
class Forest(Trees):
    """The draft trees of B samples, filled in place; :meth:`rows` packs them.

    Args:
        token: ``[B, N]`` token of each node, -1 where there is none.
        chance: ``[B, N]`` draft probability of each node, given its parent; 0 where none was stated.
        reach: ``[B, N]`` chance that the path to a node is accepted, times its sample's weight; -1 where there is none.
        topology: the planned shape.
        proposals: by sample, draft law and drafter of its tree; ``None`` for a sample that takes no part.
        certain: ``[B, N]``: constraints allow no other token after the parent.
        draft_row: ``[B, N]`` index of the unmodified draft row that the children were drawn from; -1 for none.
        draft_rows: the rows, as ``[R, V]`` parts.
        prefilled: whether some nodes were there before the drafter proposed any.
    """

    token: Ints
    chance: Reals
    reach: Reals
    topology: TreeTopology
    proposals: list[Proposal | None]
    certain: Flags
    draft_row: Ints
    draft_rows: list[Tensor] = field(default_factory=list)
    prefilled: bool = False

    @classmethod
    def of_roots(
        cls, topology: TreeTopology, tokens: Sequence[int | None], proposals: Sequence[Proposal | None]
    ) -> Self:
        """Builds roots from the last committed tokens; ``None`` stands for a sample that takes no part."""
        shape = len(tokens), topology.num_nodes
        forest = cls(
            np.full(shape, -1, dtype=np.int64),
            np.zeros(shape),
            np.full(shape, -1.0),
            topology,
            list(proposals),
            np.zeros(shape, dtype=np.bool_),
            np.full(shape, -1, dtype=np.int64),
        )
        forest.token[:, 0] = [-1 if token is None else token for token in tokens]
        return forest

    @property
    def drafts(self) -> Ints:
        """``[B]`` number of drafts of every sample."""
        count: Ints = (self.token[:, 1:] >= 0).sum(axis=1)
        return count

    @property
    def trunk(self) -> Flags:
        """``[B, N]``: drafts that are certain to be accepted, which the target must read in any case."""
        trunk = self.certain.copy()
        if trunk.any():
            trunk[:, 0] = True
            for level in self.topology.levels[1:]:
                trunk[:, level] &= trunk[:, self.topology.parent_array[level]]
            trunk[:, 0] = False
        return trunk

    def path(self, sample: int, node: int) -> list[int]:
        """Returns the drafted tokens from below the root down to a node."""
        return self.token[sample, self.topology.path(node)[1:]].tolist()

    def drop(self, samples: Ints, nodes: Ints) -> None:
        """Removes nodes without children."""
        self.token[samples, nodes] = -1

    def take(self, other: "Forest", samples: Sequence[int]) -> None:
        """Replaces the trees of some samples by those of another forest of this topology."""
        first = sum(map(len, self.draft_rows))
        self.draft_rows += other.draft_rows
        rows = other.draft_row[samples]
        for name in ("token", "chance", "reach", "certain"):
            getattr(self, name)[samples] = getattr(other, name)[samples]
        self.draft_row[samples] = np.where(rows < 0, -1, rows + first)
        for sample in samples:
            self.proposals[sample] = other.proposals[sample]

    def rows(self) -> DraftTree:
        """Packs the nodes into rows: sample after sample, nodes ascending."""
        present = self.token >= 0
        owner, node = present.nonzero()
        place = present.ravel().cumsum() - 1
        parent = place[owner * present.shape[1] + self.topology.parent_array[node]]
        parent[node == 0] = -1
        return DraftTree(
            self.topology,
            self.proposals,
            [0, *present.sum(axis=1).cumsum().tolist()],
            token=self.token[present],
            node=node,
            parent=parent,
            depth=self.topology.depth_array[node],
            chance=self.chance[present],
            certain=self.certain[present],
            draft_row=self.draft_row[present],
            draft_rows=torch.cat(self.draft_rows) if self.draft_rows else NO_ROWS,
        )


__all__ = ["Forest"]
