"""All trees of a batch as tables, for verification on the device.

Shapes: T rows of the batch, D draft rows, V vocabulary, B samples.
"""

import torch
from torch import Tensor

from arbordraft.kernels.verify.tree import PackedTree, verify_tree
from arbordraft.sampling import Noise
from arbordraft.types import DraftTree, SampleTree


def verify_packed(tree: DraftTree, scores: Tensor, noise: Noise, *, lifted: bool) -> list[tuple[int, int] | None]:
    """Recursive rejection on ``[T, V]`` scores: of every sample its last accepted node and the token behind it."""
    places = [(sample, node) for sample, node, _ in tree.rows()]
    if not places:
        return [None for _ in tree.samples]
    packed, draft = pack(tree, scores.device)
    samples, nodes = map(list, zip(*places, strict=True))
    accept, final = (values[samples, nodes].to(scores.device) for values in (noise.accept, noise.final))
    end, token = verify_tree(scores, draft, packed, accept, final, lifted=lifted)
    found = iter(zip(end.tolist(), token.tolist(), strict=True))
    verdicts: list[tuple[int, int] | None] = []
    for sample in tree.samples:
        if sample is None:
            verdicts.append(None)
            continue
        row, following = next(found)
        verdicts.append((places[row][1], following))
    return verdicts


def pack(tree: DraftTree, device: torch.device) -> tuple[PackedTree, Tensor]:
    """The trees as tables, and the ``[D, V]`` draft rows that they name."""
    row_of = {(sample, node): row for row, (sample, node, _) in enumerate(tree.rows())}
    inner = sorted(
        (drafted.topology.depth_list[node], row_of[sample, node], sample, node)
        for sample, drafted in enumerate(tree.samples)
        if drafted
        for node in drafted.tokens
        if drafted.children(node)
    )
    index = {(sample, node): number for number, (_, _, sample, node) in enumerate(inner)}
    depths = [depth for depth, _, _, _ in inner]
    drafts: list[Tensor] = []
    draft_row, children, tokens, certain = [], [], [], []
    parent, place = [-1] * len(inner), [-1] * len(inner)
    replacement = False
    for number, (_, _, sample, node) in enumerate(inner):
        drafted = _of(tree, sample)
        below = drafted.children(node)
        law, draft = drafted.law_of(node), drafted.draft_probs.get(node)
        tops: list[int] | None = None  # all of them
        if draft is not None and not law.deterministic:
            tops = law.top_tokens(draft)
            draft_row.append(len(drafts))
            if not set(tops) <= {drafted.tokens[child] for child in below}:
                draft = draft.clone()  # a top that was given up cannot be drawn either
                draft[tops] = 0
            drafts.append(draft)
            replacement |= law.replacement
        else:
            draft_row.append(-1)
        children.append([row_of[sample, child] for child in below])
        tokens.append([drafted.tokens[child] for child in below])
        certain.append([tops is None or token in tops for token in tokens[-1]])
        for rank, child in enumerate(below):
            if (sample, child) in index:
                parent[index[sample, child]], place[index[sample, child]] = number, rank
    width = max(map(len, children), default=1)
    order = [0] * len(row_of)
    for sample, drafted_or_none in enumerate(tree.samples):
        for rank, node in enumerate(_post_order(drafted_or_none) if drafted_or_none else ()):
            order[row_of[sample, node]] = rank
    living = [sample for sample, drafted_or_none in enumerate(tree.samples) if drafted_or_none]
    number_of = {sample: number for number, sample in enumerate(living)}

    def table(values: list[list[int]], fill: int) -> Tensor:
        padded = [row + [fill] * (width - len(row)) for row in values]
        return torch.tensor(padded, dtype=torch.int64).view(-1, width).to(device)

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    packed = PackedTree(
        roots=column([row_of[sample, 0] for sample in living]),
        inner=column([row for _, row, _, _ in inner]),
        levels=[depths.count(depth) for depth in sorted(set(depths))],
        draft_row=column(draft_row),
        children=table(children, -1),
        tokens=table(tokens, -1),
        certain=table([[int(sure) for sure in row] for row in certain], 0).bool(),
        parent=column(parent),
        place=column(place),
        order=column(order),
        sample=column([number_of[sample] for sample, _ in row_of]),
        replacement=replacement,
    )
    vocabulary = len(drafts[0]) if drafts else 0
    return packed, torch.stack(drafts) if drafts else torch.empty(0, vocabulary, device=device)


def _of(tree: DraftTree, sample: int) -> SampleTree:
    found = tree.samples[sample]
    assert found is not None
    return found


def _post_order(tree: SampleTree, node: int = 0) -> list[int]:
    return [*(below for child in tree.children(node) for below in _post_order(tree, child)), node]


__all__ = ["pack", "verify_packed"]
