"""Chooses the children of a level's nodes: their most probable tokens, or tokens drawn from their scores.

Shapes: R nodes, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.transfer import download, upload
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.kernels.verify import take_tops
from arbordraft.sampling.laws import DraftLaw
from arbordraft.trees.draft_tree import Flags, Ints, Reals


class Children(NamedTuple):
    """The children of R nodes, on the host.

    Args:
        tokens: ``[R, K]`` children in the order in which they were drawn, -1 for none.
        chances: ``[R, K]`` draft probabilities of these tokens.
        finite: ``[R]`` whether the probabilities of each node are finite; otherwise it has no children. ``None`` if all
            are.
        draft_rows: ``[R, V]`` rows that tokens were drawn from; ``None`` if nothing was drawn at random.
    """

    tokens: Ints
    chances: Reals
    finite: Flags | None = None
    draft_rows: Tensor | None = None

    @classmethod
    def of(cls, guesses: "Sequence[tuple[Sequence[int], Sequence[float]]]", width: int) -> Self:
        """Builds children from tokens and probabilities by node; K is ``width`` or greater."""
        width = max(width, *(len(tokens) for tokens, _ in guesses))
        padded, likely = [], []
        for tokens, chances in guesses:
            count = min(len(tokens), len(chances))
            padded.append([*tokens[:count], *[-1] * (width - count)])
            likely.append([*chances[:count], *[0.0] * (width - count)])
        return cls(np.array(padded, dtype=np.int64), np.array(likely, dtype=np.float64))

    def keep(self, row: int, kept: Sequence[bool]) -> None:
        """Keeps some children of a node, in place."""
        tokens, chances = self.tokens[row][kept], self.chances[row][kept]
        self.tokens[row], self.chances[row] = -1, 0
        self.tokens[row, : len(tokens)], self.chances[row, : len(tokens)] = tokens, chances


def children_of(
    scores: Tensor,
    most: int,
    laws: Sequence[DraftLaw | None],
    width: int,
    uniforms: Sequence[Sequence[float]],
) -> Children:
    """Chooses the children of a level's nodes, with one download.

    Tokens of probability 0 are left out, so a node may get fewer children than planned.

    Args:
        scores: ``[R, V]``.
        most: how many of the most probable tokens to find. It is the same at every level, because it may change the
            order of equally probable tokens.
        laws: by node, the law that draws its children at random; ``None`` to take the most probable tokens.
        width: K, greatest number of children of a node.
        uniforms: by node, the uniforms for ``laws``.
    """
    likeliest, chances = tree_expand(scores, min(most if None in laws else 1, scores.shape[1]))
    found, draft_rows = [likeliest, chances.exp()], None
    if any(law is not None for law in laws):
        draft_rows = scores.softmax(dim=-1)
        drawn = draw_children(draft_rows, laws, uniforms)
        found += [drawn, draft_rows.gather(1, drawn.clamp(min=0))]
    best, odds, *others = ((part if part.dtype == torch.int64 else part.double()).numpy() for part in download(*found))
    tokens, likely = np.full((len(best), width), -1, dtype=np.int64), np.zeros((len(best), width))
    count = min(width, best.shape[1])
    finite = np.isfinite(odds[:, 0])
    kept = (odds[:, :count] > 0) & finite[:, None]
    tokens[:, :count] = np.where(kept, best[:, :count], -1)
    likely[:, :count] = np.where(kept, odds[:, :count], 0)
    for node, law in enumerate(laws if others else ()):
        if law is not None:
            (taken,) = np.nonzero(others[0][node] >= 0) if finite[node] else (np.arange(0),)
            taken = taken[:width]
            tokens[node], likely[node] = -1, 0
            tokens[node, : len(taken)], likely[node, : len(taken)] = others[0][node, taken], others[1][node, taken]
    return Children(tokens, likely, finite, draft_rows)


class _Counts(NamedTuple):
    """A law's draw from one row, in numbers that go to a device."""

    most_tops: int = 0
    threshold: float = 0.0
    tails: int = 0
    children: int = 0
    repeats: bool = True


def draw_together(drafts: Tensor, laws: Sequence[DraftLaw | None], uniforms: Sequence[Sequence[float]]) -> Tensor:
    """Draws for many rows on their device as :meth:`DraftLaw.draw` does, with one upload and no download.

    Args:
        drafts: ``[R, V]`` draft rows, exactly as the verifier will see them.
        laws: by row, the law that draws its children; ``None`` for a row without children.
        uniforms: by row, as :meth:`DraftLaw.draw` takes them.

    Returns:
        ``[R, K]`` int64 tokens in the order in which they must be verified. K is the most tails plus the most tops of
        any row. An entry of -1, at any place, is no token.
    """
    counts = [
        _Counts(law.tops_within(drafts, row), law.threshold, law.tails, law.k, law.replacement) if law else _Counts()
        for row, law in enumerate(laws)
    ]
    rounds, first = max(count.tails for count in counts), len(_Counts._fields)
    told = np.zeros((len(counts), first + rounds))
    told[:, :first] = counts
    for row, (count, some) in enumerate(zip(counts, uniforms, strict=True)):
        told[row, first : first + count.tails] = some[: count.tails]
    (table,) = upload(drafts.device, torch.from_numpy(told))
    most_tops, threshold, tails, children, repeats, *uniform = table[:, :, None].unbind(1)
    most, tokens = max(count.most_tops for count in counts), drafts.shape[1]
    rest = drafts.clone()
    tops = take_tops(rest, most_tops[:, 0].long(), threshold[:, 0], min(most, tokens))
    wanted = torch.minimum(tails, children - (tops >= 0).sum(dim=1, keepdim=True))
    drawn: list[Tensor] = []
    for index in range(rounds):
        if index == 0 or not all(count.repeats for count in counts):
            sums = rest.double().cumsum(dim=1)  # in float32 a large vocabulary loses its tail
            total = sums[:, -1:]
        # Stays below the total, so that the search ends where the sum grows: at a token of positive probability.
        at = torch.minimum(uniform[index] * total, total.nextafter(torch.zeros_like(total)))
        token = torch.searchsorted(sums, at, right=True).clamp(max=tokens - 1)
        good = (index < wanted) & (total > 0)
        drawn.append(torch.where(good, token, -1))
        rest.scatter_(1, token, torch.where(good & (repeats == 0), 0.0, rest.gather(1, token)))
    return torch.cat([*drawn, tops], dim=1)


def draw_children(drafts: Tensor, laws: Sequence[DraftLaw | None], uniforms: Sequence[Sequence[float]]) -> Tensor:
    """Draws children by any laws: on a GPU with :func:`draw_together` if possible, otherwise row by row on the host.

    Laws of users may override :meth:`DraftLaw.draw`, which needs the host. On a CPU, few rows are drawn faster one by
    one than together. Rows of NaN give no children.
    """
    if not drafts.is_cpu and all(type(law).draw is DraftLaw.draw for law in laws if law):
        return draw_together(drafts, laws, uniforms)
    told = zip(drafts.cpu(), laws, uniforms, strict=True)
    found = [law.draw(draft, some) if law and not draft[0].isnan() else [] for draft, law, some in told]
    most = max(map(len, found))
    padded = [tokens + [-1] * (most - len(tokens)) for tokens in found]
    return torch.tensor(padded, dtype=torch.int64, device=drafts.device)


__all__ = ["Children", "children_of", "draw_children", "draw_together"]
