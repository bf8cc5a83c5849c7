"""The topology-aware causal mask: built once for the largest tree, then sliced.

Shapes: N nodes of the topology, W ancestor words.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arbordraft.trees.topology import WORD_BITS, TreeTopology, ancestor_words, words_of
from arbordraft.utils.checks import check_instance


class SlicedCausalMask(nn.Module):
    """Says which nodes of a draft tree each node may attend to, for drafts of every length.

    One buffer holds the ancestor words of the largest tree. Nodes are listed level by level, so the mask of a shorter
    draft is a rectangle of this buffer and :meth:`select` returns a view. Words do not cover the context: all of it is
    visible.

    Args:
        topology: the largest tree.

    Raises:
        TypeError: if ``topology`` is not a :class:`TreeTopology`.

    Source: improved MCSD (Lu et al., 2024), the topology-aware causal mask.
    """

    words: Tensor  # [N, W] int64

    def __init__(self, topology: TreeTopology) -> None:
        super().__init__()
        self.topology = check_instance("topology", topology, TreeTopology)
        self.register_buffer("words", ancestor_words(topology.visible.cpu()), persistent=False)

    def select(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Returns the ancestor words of the nodes ``rows`` if the cache holds the nodes ``columns``, in that order.

        Args:
            rows: R nodes, in the order of the result.
            columns: M nodes; bit ``j`` stands for ``columns[j]``.

        Returns:
            ``[R, max(1, ceil(M / 64))]`` int64. Consecutive rows of a prefix of the tree give a view. Words of a
            pruned tree are computed from its parents, those of any other choice with a gather.

        Examples:
            >>> SlicedCausalMask(TreeTopology([-1, 0, 0, 1])).select([1, 3], [0, 1, 3]).tolist() == [[0b11], [0b111]]
            True
        """
        if rows and rows[-1] < len(columns) and _is_range(columns, 0) and _is_range(rows, rows[0]):
            return self.words[rows[0] : rows[-1] + 1, : -(-len(columns) // WORD_BITS)]
        if list(rows) == list(columns) and all(before < after for before, after in pairwise(columns)):
            return self._pruned(columns).to(self.words.device)
        visible = self.topology.visible
        row_index = torch.as_tensor(rows, dtype=torch.int64, device=visible.device)
        column_index = torch.as_tensor(columns, dtype=torch.int64, device=visible.device)
        return ancestor_words(visible[row_index[:, None], column_index])

    def _pruned(self, nodes: Sequence[int]) -> Tensor:
        """Returns the ancestor words of ascending nodes among themselves; for a few nodes faster than a gather."""
        parents, seen = self.topology.parent_list, {-1: 0}
        for place, node in enumerate(nodes):
            above = parents[node]
            while above not in seen:
                above = parents[above]
            seen[node] = seen[above] | 1 << place
        return words_of([seen[node] for node in nodes], len(nodes))


def stack_words(words: Sequence[Tensor]) -> Tensor:
    """Stacks the ancestor words of several samples into one ``[T, W]`` tensor, padded to the widest."""
    if len(words) == 1:
        return words[0]
    width = max((rows.shape[1] for rows in words), default=1)
    return torch.cat([rows if rows.shape[1] == width else F.pad(rows, (0, width - rows.shape[1])) for rows in words])


def _is_range(values: Sequence[int], start: int) -> bool:
    return list(values) == list(range(start, start + len(values)))
