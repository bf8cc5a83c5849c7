"""Packs all trees of a batch into one table, for verification on the device.

Shapes: T rows of the batch, S samples that take part, N inner nodes (nodes with children), K children, D draft
rows, M tops, V
vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.transfer import download
from arbordraft.kernels.verify.tops import take_tops
from arbordraft.kernels.verify.tree import PackedTree, verify_tree
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import Noise
from arbordraft.trees.draft_tree import DraftTree, Ints
from arbordraft.utils.table import Table


class InnerRows(NamedTuple):
    """The rows with children, by ascending depth, and their children.

    Args:
        rows: ``[N]`` rows with children.
        depth: ``[N]`` their depths.
        width: ``[N]`` their numbers of children.
        children: ``[C]`` rows of all children, ascending by parent.
        parents: ``[C]`` row of each child's parent.
        rank: ``[C]`` place of each child among its siblings, in the order of verification.
    """

    rows: Ints
    depth: Ints
    width: Ints
    children: Ints
    parents: Ints
    rank: Ints

    @classmethod
    def of(cls, tree: DraftTree) -> "InnerRows":
        """Finds the inner rows of a batch."""
        children = np.flatnonzero(tree.depth)
        children = children[tree.parent[children].argsort(kind="stable")]
        parents = tree.parent[children]
        first = np.flatnonzero(np.diff(parents, prepend=-1))
        width = np.diff(first, append=len(parents))
        rank = np.arange(len(children)) - first.repeat(width)
        depth = tree.depth[parents[first]]
        order = depth.argsort(kind="stable")
        return cls(parents[first][order], depth[order], width[order], children, parents, rank)


class DraftRows(NamedTuple):
    """The draft rows that children were drawn from at random, and the laws that drew them.

    Args:
        rows: ``[D]`` indices into the draft rows of the trees.
        laws: the law of each row.
    """

    rows: Ints
    laws: Sequence[DraftLaw]

    def of(self, tree: DraftTree) -> Tensor:
        """Returns the ``[D, V]`` rows themselves."""
        first, count = int(self.rows[0]), len(self.rows)
        if (self.rows == np.arange(first, first + count)).all():  # rows in this order need no index upload
            return tree.draft_rows[first : first + count]
        return tree.draft_rows[torch.from_numpy(self.rows).to(tree.draft_rows.device)]


@dataclass(frozen=True)
class TreeTable(Table):
    """The shapes of a table of trees, which may have room for more than it holds.

    Args:
        rows: T.
        samples: S.
        levels: number of places for inner nodes, by depth; at least one place.
        children: K, at least 1.
    """

    reals: ClassVar[frozenset[str]] = frozenset({"threshold", "accept", "final"})

    rows: int
    samples: int
    levels: tuple[int, ...]
    children: int

    @property
    def nodes(self) -> int:
        """Number of places for inner nodes, N."""
        return sum(self.levels)

    @property
    def owners(self) -> int:
        """Number of samples that own rows."""
        return self.samples

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """The parts of the table with their shapes.

        - By row: its token, its place in the post-order of its sample, and its sample.
        - By sample: the row of its root.
        - By place for an inner node, -1 if unused: its row, draft row, parent's place, rank among its siblings, and
          children's rows.
        - For random draws, by row: the uniforms that decide about it and that draw the token after it.
        - For random draws, by draft row: the greatest number of tops and their least probability.
        """
        return {
            **dict.fromkeys(("tokens", "order", "sample", "accept", "final"), (self.rows,)),
            "roots": (self.owners,),
            **dict.fromkeys(("inner", "draft_row", "parent", "place", "most_tops", "threshold"), (self.nodes,)),
            "children": (self.nodes, self.children),
        }

    def write(self, into: SimpleNamespace, tree: DraftTree, inner: InnerRows) -> DraftRows:
        """Writes trees and their inner nodes into the parts of a blank table; returns the D draft rows."""
        into.tokens[: tree.rows], into.sample[: tree.rows] = tree.token, tree.slot
        into.order[: tree.rows] = post_order(tree)
        into.roots[: len(tree.living)] = np.flatnonzero(tree.depth == 0)
        for name in ("inner", "draft_row", "parent", "place", "children"):
            getattr(into, name)[:] = -1
        free = np.cumsum([0, *self.levels]) - np.cumsum([0, *np.bincount(inner.depth, minlength=len(self.levels))])
        places = free[inner.depth] + np.arange(len(inner.rows))
        place_of, rank_of = np.full((2, tree.rows + 1), -1)  # the last entry is for the parent -1 of roots
        place_of[inner.rows], rank_of[inner.children] = places, inner.rank
        into.inner[places] = inner.rows
        into.parent[places], into.place[places] = place_of[tree.parent[inner.rows]], rank_of[inner.rows]
        into.children[place_of[inner.parents], inner.rank] = inner.children
        stated = np.flatnonzero(tree.draft_row[inner.rows] >= 0)
        laws = [tree.law_of(row) for row in inner.rows[stated].tolist()]
        drawn = stated[[not law.deterministic for law in laws]]
        into.draft_row[places[drawn]] = np.arange(len(drawn))
        found = DraftRows(tree.draft_row[inner.rows[drawn]], [law for law in laws if not law.deterministic])
        for place, (row, law) in enumerate(zip(found.rows.tolist(), found.laws, strict=True)):
            into.most_tops[place], into.threshold[place] = law.tops_within(tree.draft_rows, row), law.threshold
        return found

    def write_noise(self, into: SimpleNamespace, tree: DraftTree, noise: Noise) -> None:
        """Writes the uniforms of the trees' rows."""
        into.accept[: tree.rows] = noise.accept.numpy()[tree.owner, tree.node]
        into.final[: tree.rows] = noise.final.numpy()[tree.owner, tree.node]

    def unpack(self, part: Mapping[str, Tensor], tops: Tensor | None, replacement: bool) -> PackedTree:
        """Returns the trees in the form that verification takes.

        Args:
            part: parts of the table, from :meth:`read`.
            tops: ``[D, M]`` int64 certain tokens of the draft rows, padded with -1; ``None`` if there are no rows.
            replacement: whether draws may repeat a token.
        """
        children, draft_row = part["children"], part["draft_row"]
        tokens = torch.where(children < 0, -1, part["tokens"][children.clamp(min=0)])
        certain = torch.zeros_like(children, dtype=torch.bool)
        if tops is not None:
            certain = (tokens[:, :, None] == tops[draft_row.clamp(min=0)][:, None, :]).any(dim=2)
        same = ("roots", "inner", "draft_row", "children", "parent", "place", "order", "sample")
        columns = {name: part[name] for name in same}
        return PackedTree(levels=self.levels, tokens=tokens, certain=certain, replacement=replacement, **columns)


def verify_packed(
    tree: DraftTree, scores: Tensor, noise: Noise, *, lifted: bool, samples: Sequence[int] | None = None
) -> dict[int, tuple[int, int]]:
    """Runs recursive rejection for many trees at once.

    Args:
        tree: the drafts.
        scores: ``[T, V]`` processed target scores.
        noise: uniforms of all samples.
        lifted: judge paths from their ends to the root.
        samples: samples to judge; by default all that take part.

    Returns:
        By sample, the row of the last accepted node and the token after it.
    """
    part = tree if samples is None else tree.take(samples)
    if not part.rows:
        return {}
    rows = np.arange(tree.rows)
    if part is not tree:
        rows = rows[np.isin(tree.owner, part.living)]
        scores = scores[torch.from_numpy(rows).to(scores.device)]
    packed, draft, accept, final = pack(part, noise, scores.device)
    found = download(*verify_tree(scores, draft, packed, accept, final, lifted=lifted))
    ends = zip(part.living, *(numbers.tolist() for numbers in found), strict=True)
    return {sample: (int(rows[end]), token) for sample, end, token in ends}


def pack(tree: DraftTree, noise: Noise, device: torch.device) -> tuple[PackedTree, Tensor, Tensor, Tensor]:
    """Moves trees to a device in one upload.

    Returns:
        The trees, and the ``[D, V]`` draft rows that they refer to, without their tops. Then the ``[T]`` uniforms that
        decide about rows, and those that draw the tokens after them.
    """
    inner = InnerRows.of(tree)
    table = TreeTable(
        rows=tree.rows,
        samples=len(tree.living),
        levels=tuple(np.bincount(inner.depth).tolist()) or (1,),
        children=int(inner.width.max(initial=1)),
    )
    numbers = torch.empty(table.size, dtype=torch.int64)
    into = table.blank(numbers)
    drawn = table.write(into, tree, inner)
    table.write_noise(into, tree, noise)
    part, count = table.read(numbers.to(device)), len(drawn.laws)
    tops, draft = None, torch.empty(0, 0, device=device)
    if count:
        draft, most = drawn.of(tree).clone(), int(into.most_tops.max())
        # A top that was dropped from the tree cannot be drawn either.
        tops = take_tops(draft, part["most_tops"][:count], part["threshold"][:count], min(most, draft.shape[1]))
    return table.unpack(part, tops, any(law.replacement for law in drawn.laws)), draft, part["accept"], part["final"]


def post_order(tree: DraftTree) -> list[int]:
    """Returns the place of every row in the post-order of its sample."""
    parents, sizes = tree.parent.tolist(), [1] * tree.rows
    for row in reversed(range(tree.rows)):  # children come after their parents
        if parents[row] >= 0:
            sizes[parents[row]] += sizes[row]
    free, order = [0] * tree.rows, []  # by row, the first free place in its subtree
    for row, parent in enumerate(parents):
        if parent >= 0:
            free[row] = free[parent]
            free[parent] += sizes[row]
        order.append(free[row] + sizes[row] - 1)
    return order


__all__ = ["DraftRows", "InnerRows", "TreeTable", "pack", "post_order", "verify_packed"]
