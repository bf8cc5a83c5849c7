"""The topology-aware causal mask: built once for the largest tree, sliced ever after.

Shapes: N nodes of the topology, n <= N nodes in use, C context tokens, W ancestor words.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arbordraft.trees.topology import WORD_BITS, TreeTopology, ancestor_words
from arbordraft.utils.checks import check_instance, check_int

MOST_BYTES = 2**30  # of a dense mask


class SlicedCausalMask(nn.Module):
    """Which keys the nodes of a draft tree may attend to, for every draft length and context length at once.

    One buffer holds, for the largest tree, a block of ones for the context and to its right the ancestor
    matrix. Because nodes are listed level by level, the mask of any shorter draft after any shorter context
    is a rectangle of that buffer: :meth:`prefix` returns a view and allocates nothing.

    Args:
        topology: the largest tree.
        max_context: greatest number of committed tokens that :meth:`prefix` may cover. The ancestor words of
            :meth:`select` do not mention the context (all of it is visible), so users of words alone leave it at 0.
            Times the nodes it may come to 1 GiB.

    Raises:
        TypeError: if ``topology`` is none, or ``max_context`` no whole number.
        ValueError: if ``max_context`` is negative, or the mask would be too large.

    Source: improved MCSD (Lu et al., 2024), the topology-aware causal mask.
    """

    strip: Tensor  # [N, max_context + N] bool
    words: Tensor  # [N, W] int64

    def __init__(self, topology: TreeTopology, max_context: int = 0) -> None:
        super().__init__()
        check_instance("topology", topology, TreeTopology)
        max_context = check_int("max_context", max_context, 0)
        if (size := topology.num_nodes * (max_context + topology.num_nodes)) > MOST_BYTES:
            raise ValueError(
                f"a mask of {topology.num_nodes} nodes with max_context {max_context} would take {size:,} bytes, "
                f"more than {MOST_BYTES:,}; users of ancestor words alone leave max_context at 0"
            )
        self.topology = topology
        self.max_context = max_context
        context = torch.ones(topology.num_nodes, max_context, dtype=torch.bool)
        self.register_buffer("strip", torch.cat([context, topology.visible.cpu()], dim=1), persistent=False)
        self.register_buffer("words", ancestor_words(topology.visible.cpu()), persistent=False)

    def prefix(self, nodes: int, context: int = 0) -> Tensor:
        """Mask of the first ``nodes`` nodes after ``context`` committed tokens: a ``[n, C + n]`` bool view.

        Raises:
            ValueError: if the topology has fewer nodes, or ``context`` exceeds ``max_context``.

        Examples:
            >>> SlicedCausalMask(TreeTopology([-1, 0, 0, 1]), max_context=8).prefix(3, context=2).int()
            tensor([[1, 1, 1, 0, 0],
                    [1, 1, 1, 1, 0],
                    [1, 1, 1, 0, 1]], dtype=torch.int32)
        """
        if not 0 <= nodes <= self.topology.num_nodes:
            raise ValueError(f"the topology has {self.topology.num_nodes} nodes, {nodes} were asked for")
        if not 0 <= context <= self.max_context:
            raise ValueError(f"context {context} exceeds max_context {self.max_context}; build the mask with more")
        return self.strip[:nodes, self.max_context - context : self.max_context + nodes]

    def select(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Ancestor words of the nodes ``rows`` when the cache holds the nodes ``columns``, in that order.

        Args:
            rows: R nodes, in the order wanted.
            columns: M nodes; bit ``j`` stands for ``columns[j]``.

        Returns:
            ``[R, max(1, ceil(M / 64))]`` int64. A stretch of a prefix of the tree is answered with a view, a tree that
            lost branches from its parents, any other choice with a gather.

        Examples:
            >>> SlicedCausalMask(TreeTopology([-1, 0, 0, 1])).select([1, 3], [0, 1, 3]).tolist() == [[0b11], [0b111]]
            True
        """
        if rows and rows[-1] < len(columns) and _is_range(columns, 0) and _is_range(rows, rows[0]):
            return self.words[rows[0] : rows[-1] + 1, : -(-len(columns) // WORD_BITS)]
        if list(rows) == list(columns) and all(before < after for before, after in pairwise(columns)):
            return self._pruned(columns).to(self.words.device)
        visible = self.strip[:, self.max_context :]
        row_index = torch.as_tensor(rows, dtype=torch.int64, device=visible.device)
        column_index = torch.as_tensor(columns, dtype=torch.int64, device=visible.device)
        return ancestor_words(visible[row_index[:, None], column_index])

    def _pruned(self, nodes: Sequence[int]) -> Tensor:
        """Ancestor words of ascending nodes among themselves: a few integers, where a gather takes longer to begin."""
        parents, seen = self.topology.parent_list, {-1: 0}
        for place, node in enumerate(nodes):
            above = parents[node]
            while above not in seen:
                above = parents[above]
            seen[node] = seen[above] | 1 << place
        width, word = max(1, -(-len(nodes) // WORD_BITS)), (1 << WORD_BITS) - 1
        words = [[seen[node] >> WORD_BITS * index & word for index in range(width)] for node in nodes]
        return torch.tensor(words, dtype=torch.uint64).reshape(len(nodes), width).view(torch.int64)

    def extra_repr(self) -> str:
        return f"max_context={self.max_context}"


def stack_words(words: Sequence[Tensor]) -> Tensor:
    """One ``[T, W]`` tensor of ancestor words from those of several samples, as wide as the widest."""
    width = max((rows.shape[1] for rows in words), default=1)
    return torch.cat([rows if rows.shape[1] == width else F.pad(rows, (0, width - rows.shape[1])) for rows in words])


def _is_range(values: Sequence[int], start: int) -> bool:
    return list(values) == list(range(start, start + len(values)))
