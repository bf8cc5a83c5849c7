"""The children of the nodes of a level: the most probable tokens of their scores, or tokens drawn from these.

Shapes: R nodes, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from arbordraft.kernels.transfer import download
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.sampling.laws import DraftLaw, draw_children


class Children(NamedTuple):
    """The children of R nodes, on the host.

    Args:
        tokens: those of every node; ``None`` for a node whose scores are no numbers.
        chances: at least as many probabilities.
        draft_rows: ``[R, V]`` what was drawn from; ``None`` if nothing was drawn at random.
    """

    tokens: list[list[int] | None]
    chances: list[list[float]]
    draft_rows: Tensor | None


def children_of(
    scores: Tensor, laws: Sequence[DraftLaw | None], widths: Sequence[int], uniforms: Sequence[Sequence[float]]
) -> Children:
    """Gives the nodes of a level their children, in one download.

    Tokens of probability 0 are none: a node may get fewer than planned.

    Args:
        scores: ``[R, V]``.
        laws: by node what its children are drawn by, at random; ``None`` where they are the most probable tokens.
        widths: by node how many of these it gets.
        uniforms: by node, for ``laws``.
    """
    most = max((width for law, width in zip(laws, widths, strict=True) if law is None), default=1)
    likeliest, chances = tree_expand(scores, min(most, scores.shape[1]))
    found, draft_rows = [likeliest, chances.exp()], None
    if any(law is not None for law in laws):
        draft_rows = scores.softmax(dim=-1)
        drawn = draw_children(draft_rows, laws, uniforms)
        found += [drawn, draft_rows.gather(1, drawn.clamp(min=0))]
    best, odds, *others = (part.tolist() for part in download(*found))
    tokens: list[list[int] | None] = []
    for node, (law, width) in enumerate(zip(laws, widths, strict=True)):
        if not math.isfinite(odds[node][0]):
            tokens.append(None)
        elif law is None:
            tokens.append(best[node][: min(width, sum(chance > 0 for chance in odds[node]))])
        else:
            taken = [place for place, token in enumerate(others[0][node]) if token >= 0]
            tokens.append([others[0][node][place] for place in taken])
            odds[node] = [others[1][node][place] for place in taken]
    return Children(tokens, odds, draft_rows)


__all__ = ["Children", "children_of"]
