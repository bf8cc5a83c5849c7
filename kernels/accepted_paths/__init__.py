"""Finds the accepted paths of all trees of a batch on a device, and the moves that compact them."""

import torch
from torch import Tensor

from arbordraft.kernels.accepted_paths.reference import accepted_paths_reference, matching_ends_reference
from arbordraft.kernels.dispatch import Operator

_TRITON = "arbordraft.kernels.accepted_paths.triton:launch_"

_ends = Operator(
    "matching_ends(Tensor tokens, Tensor best, Tensor parent, Tensor roots, int depth) -> (Tensor, Tensor)",
    matching_ends_reference,
    lambda tokens, best, parent, roots, depth: (torch.empty_like(roots), torch.empty_like(roots)),
    triton=f"{_TRITON}ends",
)
_paths = Operator(
    "accepted_paths(Tensor end, Tensor parent, Tensor level, Tensor slots, Tensor home, Tensor sample, Tensor roots, "
    "int depth) -> (Tensor, Tensor, Tensor)",
    accepted_paths_reference,
    lambda end, *others: (
        end.new_empty(len(end), others[-1] + 1),
        end.new_empty(len(end) * others[-1]),
        end.new_empty(len(end) * others[-1]),
    ),
    triton=f"{_TRITON}paths",
)


def matching_ends(tokens: Tensor, best: Tensor, parent: Tensor, roots: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Follows each tree from its root as long as a child is the target's token.

    Args:
        tokens: ``[T]`` int64 tokens of the rows, -1 for none.
        best: ``[T]`` int64 the target's token after each row, at least 0.
        parent: ``[T]`` int64 row of the parent, -1 for none.
        roots: ``[B]`` int64 rows of the roots.
        depth: length of the longest path.

    Returns:
        ``[B]`` int64 rows of the last accepted nodes, and the target's tokens after them. Of several children with the
        token, the first row counts.
    """
    return _ends(tokens, best, parent, roots, depth)


def accepted_paths(
    end: Tensor, parent: Tensor, level: Tensor, slots: Tensor, home: Tensor, sample: Tensor, roots: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the rows from each root to the end of its path, and the moves of pool rows that keep them.

    Accepted rows move up to their roots. Every other move copies a sample's root onto itself, and so do all moves of
    samples that own no root.

    Args:
        end: ``[B]`` int64 rows of the last accepted nodes.
        parent: ``[T]`` int64 row of the parent, -1 for none.
        level: ``[T]`` int64 depth of each row.
        slots: ``[T]`` int64 pool row of each row.
        home: ``[B]`` int64 pool row of each root.
        sample: ``[T]`` int64 sample of each row.
        roots: ``[B]`` int64 rows of the roots.
        depth: length of the longest path, P.

    Returns:
        ``[B, P + 1]`` int64 rows, padded with -1; and ``[B P]`` int64 sources and destinations of moves.
    """
    return _paths(end, parent, level, slots, home, sample, roots, depth)


__all__ = ["accepted_paths", "accepted_paths_reference", "matching_ends", "matching_ends_reference"]
