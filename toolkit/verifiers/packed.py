"""Packs all trees of a batch into one table, for verification on the device.

Shapes: T rows of the batch, B samples, N inner nodes (nodes with children), K children, D draft rows, M tops, V
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
    """The rows with children, the higher levels first, and these children.

    Args:
        rows: ``[N]``.
        depth: ``[N]``.
        width: ``[N]`` how many children each has.
        children: ``[C]`` rows of all children, ascending by their parents.
        parents: ``[C]`` rows of these.
        rank: ``[C]`` which of its parent's children each of them is, in the order of their verification.
    """

    rows: Ints
    depth: Ints
    width: Ints
    children: Ints
    parents: Ints
    rank: Ints

    @classmethod
    def of(cls, tree: DraftTree) -> "InnerRows":
        """Those of a batch."""
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
    """Which draft rows children were drawn from at random, and how.

    Args:
        rows: ``[D]`` their places among those of the trees.
        laws: of each.
    """

    rows: Ints
    laws: Sequence[DraftLaw]

    def of(self, tree: DraftTree) -> Tensor:
        """``[D, V]`` rows themselves."""
        first, count = int(self.rows[0]), len(self.rows)
        if (self.rows == np.arange(first, first + count)).all():  # they stand level by level as well: nothing to upload
            return tree.draft_rows[first : first + count]
        return tree.draft_rows[torch.from_numpy(self.rows).to(tree.draft_rows.device)]


@dataclass(frozen=True)
class TreeTable(Table):
    """The shapes of a table of trees; it may have room for more than it holds.

    Args:
        rows: T.
        samples: B.
        levels: places for inner nodes, by depth; at least one of them.
        children: K, at least 1.
    """

    reals: ClassVar[frozenset[str]] = frozenset({"threshold", "accept", "final"})

    rows: int
    samples: int
    levels: tuple[int, ...]
    children: int

    @property
    def nodes(self) -> int:
        """N."""
        return sum(self.levels)

    @property
    def owners(self) -> int:
        """Samples that own rows."""
        return self.samples

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """The parts of the table with their shapes.

        By row: its token, its place in the post-order of its sample, its sample. By sample: the row of its root. By
        place for an inner node (all -1 where there is none): its row, its draft row, the place of its parent, which of
        the parent's children it is, its children's rows. Of random draws by row the uniforms that decide about it and
        that draw behind it, and by draft row what makes a token a top.
        """
        return {
            **dict.fromkeys(("tokens", "order", "sample", "accept", "final"), (self.rows,)),
            "roots": (self.owners,),
            **dict.fromkeys(("inner", "draft_row", "parent", "place", "most_tops", "threshold"), (self.nodes,)),
            "children": (self.nodes, self.children),
        }

    def write(self, into: SimpleNamespace, tree: DraftTree, inner: InnerRows) -> DraftRows:
        """Writes trees and their inner nodes into the parts of a blank table; returns the D draft rows."""
        into.tokens[: tree.rows], into.sample[: tree.rows] = tree.token, tree.owner
        into.order[: tree.rows] = post_order(tree)
        into.roots[tree.living] = np.flatnonzero(tree.depth == 0)
        for name in ("inner", "draft_row", "parent", "place", "children"):
            getattr(into, name)[:] = -1
        free = np.cumsum([0, *self.levels]) - np.cumsum([0, *np.bincount(inner.depth, minlength=len(self.levels))])
        places = free[inner.depth] + np.arange(len(inner.rows))
        place_of, rank_of = np.full((2, tree.rows + 1), -1)  # the last one for what roots have for parents
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
        """Writes the uniforms of their rows."""
        into.accept[: tree.rows] = noise.accept.numpy()[tree.owner, tree.node]
        into.final[: tree.rows] = noise.final.numpy()[tree.owner, tree.node]

    def unpack(self, part: Mapping[str, Tensor], tops: Tensor | None, replacement: bool) -> PackedTree:
        """The trees as verification takes them.

        Args:
            part: what :meth:`read` returned.
            tops: ``[D, M]`` int64 certain tokens of the draft rows, -1 behind the last one; ``None`` without rows.
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
    """Recursive rejection for many trees at once.

    Args:
        tree: the drafts.
        scores: ``[T, V]`` target scores, processed.
        noise: of all samples.
        lifted: judge a path by its end before its beginning.
        samples: those that are judged; by default all that take part.

    Returns:
        By sample the row of its last accepted node, and the token behind it.
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
    end, token = (part.tolist() for part in found)
    return {sample: (int(rows[end[sample]]), token[sample]) for sample in part.living}


def pack(tree: DraftTree, noise: Noise, device: torch.device) -> tuple[PackedTree, Tensor, Tensor, Tensor]:
    """Brings trees to a device, in one upload.

    Returns:
        The trees, the ``[D, V]`` draft rows that they name, without their tops, and the ``[T]`` uniforms that decide
        about rows and that draw behind them.
    """
    inner = InnerRows.of(tree)
    table = TreeTable(
        rows=tree.rows,
        samples=len(tree),
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
        # A top that was given up cannot be drawn either.
        tops = take_tops(draft, part["most_tops"][:count], part["threshold"][:count], min(most, draft.shape[1]))
    return table.unpack(part, tops, any(law.replacement for law in drawn.laws)), draft, part["accept"], part["final"]


def post_order(tree: DraftTree) -> list[int]:
    """Place of every row in the post-order of its sample."""
    parents, sizes = tree.parent.tolist(), [1] * tree.rows
    for row in reversed(range(tree.rows)):  # children stand behind their parents
        if parents[row] >= 0:
            sizes[parents[row]] += sizes[row]
    free, order = [0] * tree.rows, []  # the first place that is free in the subtree of a row
    for row, parent in enumerate(parents):
        if parent >= 0:
            free[row] = free[parent]
            free[parent] += sizes[row]
        order.append(free[row] + sizes[row] - 1)
    return order


__all__ = ["DraftRows", "InnerRows", "TreeTable", "pack", "post_order", "verify_packed"]
