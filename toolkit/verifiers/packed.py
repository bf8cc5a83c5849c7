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
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.utils.table import Table


class InnerNode(NamedTuple):
    """A node with children, by the rows of the batch.

    Args:
        depth: its depth.
        row: its row.
        children: rows of its children, in the order of their verification.
        parent: index of its parent among the inner nodes, and
        place: which of its children the node is; both -1 for a root.
        law: the law that drew the children.
        draft: ``[V]`` what it drew them from; ``None`` if they were not drawn at random.
    """

    depth: int
    row: int
    children: list[int]
    parent: int
    place: int
    law: DraftLaw
    draft: Tensor | None


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

    def write(self, into: SimpleNamespace, tree: DraftTree, inner: Sequence[InnerNode]) -> list[InnerNode]:
        """Writes trees into a blank table.

        Args:
            into: the parts of the table.
            tree: the trees.
            inner: their inner nodes.

        Returns:
            The inner nodes whose children were drawn at random, in the order of the D draft rows.
        """
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
        drawn: list[InnerNode] = []
        places: list[int] = []
        for node in inner:
            place = free[node.depth]
            free[node.depth] += 1
            places.append(place)
            into.inner[place], into.place[place] = node.row, node.place
            into.parent[place] = places[node.parent] if node.parent >= 0 else -1
            into.children[place, : len(node.children)] = node.children
            if node.draft is not None:
                into.draft_row[place] = len(drawn)
                drawn.append(node)
        return drawn

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
    drawn = table.write(table.blank(numbers), tree, inner)
    # A top that was given up cannot be drawn either.
    parts = [node.law.split(node.draft) for node in drawn if node.draft is not None]
    most = max((len(tops) for tops, _ in parts), default=0)
    tops = [tops + [-1] * (most - len(tops)) for tops, _ in parts]
    packed = table.unpack(
        table.read(numbers.to(device)),
        torch.tensor(tops, dtype=torch.int64, device=device) if parts else None,
        any(node.law.replacement for node in drawn),
    )
    return packed, torch.stack([row for _, row in parts]) if parts else torch.empty(0, 0, device=device)


def inner_nodes(tree: DraftTree) -> list[InnerNode]:
    """The nodes with children of all samples, the higher levels first."""
    row_of = {(sample, node): row for row, (sample, node, _) in enumerate(tree.rows())}
    nodes = sorted(
        (drafted.topology.depth_list[node], row_of[sample, node], sample, node, drafted)
        for sample, drafted in enumerate(tree.samples)
        if drafted
        for node in drafted.tokens
        if drafted.children(node)
    )
    inner: list[InnerNode] = []
    above: dict[int, tuple[int, int]] = {}  # by the row of a child
    laws: dict[tuple[DraftLaw, int], DraftLaw] = {}  # a law is a module, which takes long to make
    for depth, row, sample, node, drafted in nodes:
        kind = (drafted.law, len(drafted.topology.child_list[node]))
        law = laws.get(kind) or laws.setdefault(kind, drafted.law_of(node))
        children = [row_of[sample, child] for child in drafted.children(node)]
        parent, place = above.get(row, (-1, -1))
        above |= {child: (len(inner), rank) for rank, child in enumerate(children)}
        draft = None if law.deterministic else drafted.draft_probs.get(node)
        inner.append(InnerNode(depth, row, children, parent, place, law, draft))
    return inner


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


__all__ = ["InnerNode", "TreeTable", "inner_nodes", "pack", "post_order", "verify_packed"]
