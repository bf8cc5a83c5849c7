"""Packs all trees of a batch into one table, for verification on the device.

Shapes: T rows of the batch, S samples that take part, N inner nodes (nodes with children), K children, D draft rows,
M tops, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.transfer import download
from arbordraft.kernels.verify import log_sum_exp, take_tops
from arbordraft.kernels.verify.tree import PackedTree, verify_tree
from arbordraft.sampling.noise import Noise
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.utils.table import Table


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

        - By row: its token, its node's place in post-order, and its sample.
        - By sample: the row of its root.
        - By place for an inner node, -1 if unused: its row, draft row, and children's rows and tokens.
        - For random draws, by row: the uniforms that decide about it and that draw the token after it.
        - For random draws, by draft row: the greatest number of tops and their least probability.
        """
        return {
            **dict.fromkeys(("tokens", "order", "sample", "accept", "final"), (self.rows,)),
            "roots": (self.owners,),
            **dict.fromkeys(("inner", "draft_row", "most_tops", "threshold"), (self.nodes,)),
            **dict.fromkeys(("children", "child_tokens"), (self.nodes, self.children)),
        }

    def write(self, into: SimpleNamespace, tree: DraftTree) -> None:
        """Writes rows and samples into the parts of a blank table."""
        into.tokens[: tree.rows], into.sample[: tree.rows] = tree.token, tree.slot
        into.roots[: len(tree.living)] = np.flatnonzero(tree.depth == 0)
        for part in (into.inner, into.draft_row, into.children, into.child_tokens):
            part[:] = -1

    def write_draws(self, into: SimpleNamespace, tree: DraftTree, noise: Noise) -> list[int]:
        """Writes inner nodes and uniforms; returns the D rows whose children were drawn at random."""
        into.order[: tree.rows] = tree.topology.post_order[tree.node]
        into.accept[: tree.rows] = noise.accept.numpy()[tree.owner, tree.node]
        into.final[: tree.rows] = noise.final.numpy()[tree.owner, tree.node]
        inner, below = tree.inner, np.flatnonzero(tree.depth)
        depth, place = tree.depth[inner], np.zeros(tree.rows, dtype=np.int64)
        place[inner] = np.cumsum([0, *self.levels])[depth] + np.arange(len(inner)) - np.searchsorted(depth, depth)
        into.inner[place[inner]] = inner
        child = place[tree.parent[below]], tree.topology.rank_array[tree.node[below]]
        into.children[child], into.child_tokens[child] = below, tree.token[below]
        drawn = [row for row in inner.tolist() if tree.draft_row[row] >= 0 and not tree.law_of(row).deterministic]
        into.draft_row[place[drawn]] = np.arange(len(drawn))
        for number, row in enumerate(drawn):
            law = tree.law_of(row)
            into.most_tops[number] = law.tops_within(tree.draft_rows, int(tree.draft_row[row]))
            into.threshold[number] = law.threshold
        return drawn

    def unpack(self, part: Mapping[str, Tensor], tops: Tensor, replacement: bool) -> PackedTree:
        """Returns the trees in the form that verification takes.

        Args:
            part: parts of the table, from :meth:`read`.
            tops: ``[D, M]`` int64 certain tokens of the draft rows, padded with -1.
            replacement: whether draws may repeat a token.
        """
        same = ("roots", "inner", "draft_row", "children", "order", "sample")
        columns = {name: part[name] for name in same}
        return PackedTree(
            levels=self.levels, tokens=part["child_tokens"], tops=tops, replacement=replacement, **columns
        )


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
    found = download(*verify_tree(scores, log_sum_exp(scores), draft, packed, accept, final, lifted=lifted))
    ends = zip(part.living, *(numbers.tolist() for numbers in found), strict=True)
    return {sample: (int(rows[end]), token) for sample, end, token in ends}


def pack(tree: DraftTree, noise: Noise, device: torch.device) -> tuple[PackedTree, Tensor, Tensor, Tensor]:
    """Moves trees to a device in one upload.

    Returns:
        The trees, and the ``[D, V]`` draft rows that they refer to, without their tops. Then the ``[T]`` uniforms that
        decide about rows, and those that draw the tokens after them.
    """
    ranks = tree.topology.rank_array[tree.node]
    table = TreeTable(
        rows=tree.rows,
        samples=len(tree.living),
        levels=tuple(np.bincount(tree.depth[tree.inner]).tolist()) or (1,),
        children=1 + int(ranks.max()),
    )
    numbers = torch.empty(table.size, dtype=torch.int64)
    into = table.blank(numbers)
    table.write(into, tree)
    drawn = table.write_draws(into, tree, noise)
    part, count = table.read(numbers.to(device)), len(drawn)
    draft = torch.empty(0, 0, device=device)
    tops = part["children"].new_empty(0, 0)
    if count:
        draft, most = rows_drawn_from(tree, drawn).clone(), int(into.most_tops.max())
        # A top that was dropped from the tree cannot be drawn either.
        tops = take_tops(draft, part["most_tops"][:count], part["threshold"][:count], min(most, draft.shape[1]))
    replacement = any(tree.law_of(row).replacement for row in drawn)
    return table.unpack(part, tops, replacement), draft, part["accept"], part["final"]


def rows_drawn_from(tree: DraftTree, drawn: Sequence[int]) -> Tensor:
    """Returns the ``[D, V]`` draft rows of rows that :meth:`TreeTable.write_draws` found."""
    places = tree.draft_row[drawn]
    if len(places) and (np.diff(places) == 1).all():  # consecutive rows need no index upload
        return tree.draft_rows[places[0] : places[-1] + 1]
    return tree.draft_rows[torch.from_numpy(places).to(tree.draft_rows.device)]


__all__ = ["TreeTable", "pack", "rows_drawn_from", "verify_packed"]
