"""Packs all trees of a batch into one table, for verification on the device.

Shapes: T rows of the batch, B samples, N inner nodes (nodes with children), K children, D draft rows, M tops, V
vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.verify.tree import PackedTree, verify_tree
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import Noise
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.utils.table import Table


class InnerNode(NamedTuple):
    """A node with children: its depth, its row, its children's rows in the order of their verification, and itself."""

    depth: int
    row: int
    children: list[int]
    drafted: SampleTree
    node: int


class DraftRow(NamedTuple):
    """The ``[V]`` row that children were drawn from at random, and the law that drew them."""

    law: DraftLaw
    probs: Tensor


@dataclass(frozen=True)
class TreeTable(Table):
    """The shapes of a table of trees; it may have room for more than it holds.

    Args:
        rows: T.
        samples: B.
        levels: places for inner nodes, by depth; at least one of them.
        children: K, at least 1.
    """

    reals: ClassVar[frozenset[str]] = frozenset()

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
        the parent's children it is, its children's rows.
        """
        return {
            **dict.fromkeys(("tokens", "order", "sample"), (self.rows,)),
            "roots": (self.owners,),
            **dict.fromkeys(("inner", "draft_row", "parent", "place"), (self.nodes,)),
            "children": (self.nodes, self.children),
        }

    def write(self, into: SimpleNamespace, tree: DraftTree, inner: Sequence[InnerNode]) -> list[DraftRow]:
        """Writes trees and their inner nodes into the parts of a blank table; returns the D draft rows."""
        rows = list(tree.rows())
        if rows:
            samples, _, tokens = map(list, zip(*rows, strict=True))
            into.tokens[: len(rows)], into.sample[: len(rows)] = tokens, samples
            into.order[: len(rows)] = post_order(tree)
        firsts = accumulate(tree.lengths, initial=0)
        for sample, (length, first) in enumerate(zip(tree.lengths, firsts, strict=False)):
            into.roots[sample] = first if length else 0
        for name in ("inner", "draft_row", "parent", "place", "children"):
            getattr(into, name)[:] = -1
        free = [0, *accumulate(self.levels)]
        draft_rows: list[DraftRow] = []
        above: dict[int, tuple[int, int]] = {}  # by the row of a child: the place of its parent, its rank
        laws: dict[tuple[DraftLaw, int], DraftLaw] = {}  # a law is a module, which takes long to make
        for depth, row, children, drafted, node in inner:
            place = free[depth]
            free[depth] += 1
            into.inner[place] = row
            into.parent[place], into.place[place] = above.get(row, (-1, -1))
            into.children[place, : len(children)] = children
            above |= {child: (place, rank) for rank, child in enumerate(children)}
            kind = (drafted.law, len(drafted.topology.child_list[node]))
            law = laws.get(kind) or laws.setdefault(kind, drafted.law_of(node))
            probs = None if law.deterministic else drafted.draft_probs.get(node)
            if probs is not None:
                into.draft_row[place] = len(draft_rows)
                draft_rows.append(DraftRow(law, probs))
        return draft_rows

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


def verify_packed(tree: DraftTree, scores: Tensor, noise: Noise, *, lifted: bool) -> list[tuple[int, int] | None]:
    """Recursive rejection on ``[T, V]`` scores: of every sample its last accepted node and the token behind it."""
    rows = [(sample, node) for sample, node, _ in tree.rows()]
    if not rows:
        return [None for _ in tree.samples]
    packed, draft = pack(tree, scores.device)
    samples, nodes = map(list, zip(*rows, strict=True))
    accept, final = (values[samples, nodes].to(scores.device) for values in (noise.accept, noise.final))
    end, token = verify_tree(scores, draft, packed, accept, final, lifted=lifted)
    ends = zip(tree.samples, end.tolist(), token.tolist(), strict=True)
    return [(rows[row][1], following) if sample else None for sample, row, following in ends]


def pack(tree: DraftTree, device: torch.device) -> tuple[PackedTree, Tensor]:
    """The trees on a device, and the ``[D, V]`` draft rows that they name, without their tops."""
    inner = inner_nodes(tree)
    depths = [node.depth for node in inner]
    table = TreeTable(
        rows=sum(tree.lengths),
        samples=len(tree.samples),
        levels=tuple(depths.count(depth) for depth in sorted(set(depths))) or (1,),
        children=max((len(node.children) for node in inner), default=1),
    )
    numbers = torch.empty(table.size, dtype=torch.int64)
    draft_rows = table.write(table.blank(numbers), tree, inner)
    # A top that was given up cannot be drawn either.
    parts = [law.split(probs) for law, probs in draft_rows]
    most = max((len(tops) for tops, _ in parts), default=0)
    tops = [tops + [-1] * (most - len(tops)) for tops, _ in parts]
    packed = table.unpack(
        table.read(numbers.to(device)),
        torch.tensor(tops, dtype=torch.int64, device=device) if parts else None,
        any(row.law.replacement for row in draft_rows),
    )
    return packed, torch.stack([row for _, row in parts]) if parts else torch.empty(0, 0, device=device)


def inner_nodes(tree: DraftTree) -> list[InnerNode]:
    """The nodes with children of all samples, the higher levels first."""
    row_of = {(sample, node): row for row, (sample, node, _) in enumerate(tree.rows())}
    return sorted(
        InnerNode(
            drafted.topology.depth_list[node],
            row_of[sample, node],
            [row_of[sample, child] for child in children],
            drafted,
            node,
        )
        for sample, drafted in enumerate(tree.samples)
        if drafted
        for node in drafted.tokens
        if (children := drafted.children(node))
    )


def post_order(tree: DraftTree) -> list[int]:
    """Place of every row in the post-order of its sample."""
    order: list[int] = []
    for drafted in tree.samples:
        if drafted:
            # From the root on, the last child first, is the same order read backwards; a deep tree needs no deep stack.
            backwards, left = [], [0]
            while left:
                backwards.append(left.pop())
                left += drafted.children(backwards[-1])
            rank = {node: rank for rank, node in enumerate(reversed(backwards))}
            order += [rank[node] for node in drafted.tokens]
    return order


__all__ = ["DraftRow", "InnerNode", "TreeTable", "inner_nodes", "pack", "post_order", "verify_packed"]
