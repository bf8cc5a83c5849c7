"""All trees of a batch as tables, for verification on the device.

Shapes: T rows of the batch, D draft rows, V vocabulary, B samples.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.verify.tree import PackedTree, verify_tree
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.sampling.noise import Noise
from arbordraft.trees.draft_tree import DraftTree, SampleTree


def verify_packed(tree: DraftTree, scores: Tensor, noise: Noise, *, lifted: bool) -> list[tuple[int, int] | None]:
    """Recursive rejection on ``[T, V]`` scores: of every sample its last accepted node and the token behind it."""
    places = [(sample, node) for sample, node, _ in tree.rows()]
    if not places:
        return [None for _ in tree.samples]
    packed, draft = pack(tree, scores.device)
    samples, nodes = map(list, zip(*places, strict=True))
    accept, final = (values[samples, nodes].to(scores.device) for values in (noise.accept, noise.final))
    end, token = verify_tree(scores, draft, packed, accept, final, lifted=lifted)
    ends = iter(zip(end.tolist(), token.tolist(), strict=True))
    verdicts: list[tuple[int, int] | None] = []
    for sample in tree.samples:
        if sample is None:
            verdicts.append(None)
            continue
        row, following = next(ends)
        verdicts.append((places[row][1], following))
    return verdicts


class InnerNode(NamedTuple):
    """A node with children, by the rows of the batch.

    Args:
        depth: its depth.
        row: its row.
        children: rows of its children, in the order of their verification.
        tokens: their tokens.
        parent: index of its parent among the inner nodes, and
        place: which of its children the node is; both -1 for a root.
        law: the law that drew the children.
        draft: ``[V]`` what it drew them from; ``None`` if they were not drawn at random.
    """

    depth: int
    row: int
    children: list[int]
    tokens: list[int]
    parent: int
    place: int
    law: DraftLaw
    draft: Tensor | None


_UNUSED = InnerNode(0, -1, [], [], -1, -1, Fixed(1), None)  # tables are never empty


def inner_nodes(tree: DraftTree) -> list[InnerNode]:
    """The nodes with children of all samples, the higher levels first."""
    row_of = {(sample, node): row for row, (sample, node, _) in enumerate(tree.rows())}
    places = sorted(
        (drafted.topology.depth_list[node], row_of[sample, node], sample, node)
        for sample, drafted in enumerate(tree.samples)
        if drafted
        for node in drafted.tokens
        if drafted.children(node)
    )
    inner: list[InnerNode] = []
    above: dict[int, tuple[int, int]] = {}  # by the row of a child
    laws: dict[tuple[DraftLaw, int], DraftLaw] = {}  # a law is a module, which takes long to make
    for depth, row, sample, node in places:
        drafted = _of(tree, sample)
        below, kind = drafted.children(node), (drafted.law, len(drafted.topology.child_list[node]))
        law = laws.get(kind) or laws.setdefault(kind, drafted.law_of(node))
        rows = [row_of[sample, child] for child in below]
        parent, place = above.get(row, (-1, -1))
        above |= {child: (len(inner), rank) for rank, child in enumerate(rows)}
        draft = None if law.deterministic else drafted.draft_probs.get(node)
        tokens = [drafted.tokens[child] for child in below]
        inner.append(InnerNode(depth, row, rows, tokens, parent, place, law, draft))
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


def pack(tree: DraftTree, device: torch.device) -> tuple[PackedTree, Tensor]:
    """The trees as tables, and the ``[D, V]`` draft rows that they name."""
    inner = inner_nodes(tree) or [_UNUSED]
    depths = [node.depth for node in inner]
    drafts: list[Tensor] = []
    draft_row, certain = [], []
    replacement = False
    for node in inner:
        if node.draft is None:
            draft_row.append(-1)
            certain.append([True] * len(node.tokens))
            continue
        draft, tops = node.draft, node.law.top_tokens(node.draft)
        if not set(tops) <= set(node.tokens):
            draft = draft.clone()  # a top that was given up cannot be drawn either
            draft[tops] = 0
        draft_row.append(len(drafts))
        drafts.append(draft)
        certain.append([token in tops for token in node.tokens])
        replacement |= node.law.replacement
    width = max(1, *(len(node.children) for node in inner))
    living = [length for length in tree.lengths if length]

    def table(values: list[list[int]], fill: int) -> Tensor:
        padded = [row + [fill] * (width - len(row)) for row in values]
        return torch.tensor(padded, dtype=torch.int64).view(-1, width).to(device)

    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    packed = PackedTree(
        roots=column([0, *accumulate(living)][:-1]),
        inner=column(node.row for node in inner),
        levels=[depths.count(depth) for depth in sorted(set(depths))],
        draft_row=column(draft_row),
        children=table([node.children for node in inner], -1),
        tokens=table([node.tokens for node in inner], -1),
        certain=table([[int(sure) for sure in row] for row in certain], 0).bool(),
        parent=column(node.parent for node in inner),
        place=column(node.place for node in inner),
        order=column(post_order(tree)),
        sample=column(number for number, length in enumerate(living) for _ in range(length)),
        replacement=replacement,
    )
    return packed, torch.stack(drafts) if drafts else torch.empty(0, 0, device=device)


def _of(tree: DraftTree, sample: int) -> SampleTree:
    drafted = tree.samples[sample]
    assert drafted is not None
    return drafted


__all__ = ["InnerNode", "inner_nodes", "pack", "post_order", "verify_packed"]
