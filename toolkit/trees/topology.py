"""The static shape of a draft tree.

Shapes: N nodes (node 0 is the root), W = ceil(N / 64) ancestor words.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from arbordraft.utils.checks import check_float, check_int, check_sequence

WORD_BITS = 64
MOST_NODES = 2048  # their mask takes 4 MiB; no target verifies this many rows in the time of a few rows
MOST_DEPTH = 512  # trees are walked through recursively
MOST_SIBLINGS = 256  # children of one node, where a separate bound is needed
Values = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class TreeLevel(NamedTuple):
    """One depth of a topology at which nodes have children.

    Args:
        inner: ``[n]`` nodes with children.
        below: the m nodes one depth below.
        parent: ``[m]`` place of each one's parent among the n.
        rank: ``[m]`` rank of each one among its parent's children.
        width: greatest number of children of a node.
    """

    inner: Ints
    below: slice
    parent: Ints
    rank: Ints
    width: int


class TreeTopology(nn.Module):
    """Parents, depths, levels and ancestors of a draft tree.

    Node 0 is the root: the last committed token of a sample. Nodes are listed level by level, every parent
    before its children. The first ``n`` nodes are therefore a tree, too, so a mask is sliced instead of rebuilt.
    A tree has at most 2,048 nodes, root included, and 512 levels below its root. Every constructor checks these
    limits before it allocates memory.

    Args:
        parents: parent of every node, ``-1`` for the root alone. Depths must not decrease along the list.

    Raises:
        TypeError: if an argument is not a whole number, or not a list of them.
        ValueError: if the list is empty, or node 0 is not the only root. Also if a parent does not come before its
            child, nodes are not listed level by level, or the tree is too large.

    Examples:
        >>> tree = TreeTopology([-1, 0, 0, 1])
        >>> tree.num_nodes, tree.max_depth, tree.path(3)
        (4, 2, [0, 1, 3])
    """

    parents: Tensor  # [N] int64, -1 at the root
    depths: Tensor  # [N] int64, 0 at the root
    visible: Tensor  # [N, N] bool, visible[i, j]: j is i or an ancestor of i

    def __init__(self, parents: Sequence[int]) -> None:
        super().__init__()
        parents = list(check_sequence("parents", parents, check_int, MOST_NODES))
        depths = _checked_depths(parents)
        children: list[list[int]] = [[] for _ in parents]
        visible = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents[1:], start=1):
            children[parent].append(node)
            visible[node] |= visible[parent]
        # Plain-Python twins of the buffers: control flow reads these without a device round trip.
        self.parent_list = tuple(parents)
        self.depth_list = tuple(depths)
        self.child_list = tuple(tuple(nodes) for nodes in children)  # `children` is a method of every nn.Module
        self.child_offsets = tuple(accumulate(map(len, children), initial=0))  # each node's start in `child_order`
        self.child_order = tuple(node for nodes in children for node in nodes)
        sizes = Counter(depths).values()  # in order, as depths do not decrease
        self.levels = tuple(range(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))
        self.inner = tuple([node for node in level if children[node]] for level in self.levels)  # by depth
        self.register_buffer("parents", torch.tensor(parents), persistent=False)
        self.register_buffer("depths", torch.tensor(depths), persistent=False)
        self.register_buffer("visible", visible, persistent=False)

    @classmethod
    def from_parents(cls, parents: Sequence[int]) -> Self:
        """Builds a tree from its parent list; see the class for the checks."""
        return cls(parents)

    @classmethod
    def from_k_config(cls, k_config: Sequence[int]) -> Self:
        """Gives every node at depth ``d`` ``k_config[d]`` children, as in MCSD; ``(4, 2, 2)`` has 29 nodes.

        Raises:
            TypeError: if a child count is not a whole number.
            ValueError: if a child count is not positive, or the tree would be too large.

        Examples:
            >>> TreeTopology.from_k_config((4, 2, 2)).levels
            (range(0, 1), range(1, 5), range(5, 13), range(13, 29))
        """
        counts = check_sequence("k_config", k_config, partial(check_int, least=1), MOST_DEPTH)
        parents, level = [-1], range(1)
        for depth, k in enumerate(counts, start=1):
            if (nodes := len(parents) + len(level) * k) > MOST_NODES:
                raise ValueError(
                    f"a tree has at most {MOST_NODES} nodes; down to depth {depth} this one would have {nodes}"
                )
            parents += [parent for parent in level for _ in range(k)]
            level = range(level.stop, nodes)
        return cls(parents)

    @classmethod
    def chain(cls, length: int) -> Self:
        """Builds one path of ``length`` drafted tokens below the root, 0 to 512; ``chain(0)`` is plain decoding."""
        return cls.from_k_config([1] * check_int("length", length, 0, MOST_DEPTH))

    @classmethod
    def k_ary(cls, k: int, depth: int) -> Self:
        """Builds the complete ``k``-ary tree; ``k`` is at least 1 and ``depth`` is 0 to 512."""
        return cls.from_k_config([check_int("k", k, 1)] * check_int("depth", depth, 0, MOST_DEPTH))

    @classmethod
    def fork(cls, width: int, depth: int) -> Self:
        """Builds ``width`` chains, at least 1, of depth 1 to 512 that part at the root: the fork of improved MCSD."""
        return cls.from_k_config([check_int("width", width, 1)] + [1] * (check_int("depth", depth, 1, MOST_DEPTH) - 1))

    @classmethod
    def sequoia(cls, acceptance: Sequence[float], nodes: int, max_depth: int | None = None) -> Self:
        """Builds the tree of ``nodes`` nodes (root included) with the greatest expected number of accepted tokens.

        Args:
            acceptance: ``acceptance[j]``: probability that the child of rank ``j`` is the one accepted below
                an accepted node, measured for the draft law in use. Its length, at most 256, bounds the number of
                siblings. Values need not decrease with rank, but children are drawn by ascending rank.
            nodes: size of the tree, root included, 1 to 2,048.
            max_depth: greatest depth, 0 to 512; 512 by default.

        Raises:
            TypeError: if an argument is not a number, or ``acceptance`` is not a list of them.
            ValueError: if an argument is out of range, the probabilities sum to more than 1, or no such tree exists.

        Source: Sequoia (Chen et al., 2024), the dynamic programme of section 3.

        Examples:
            >>> TreeTopology.sequoia([0.6, 0.2], 5).parent_list
            (-1, 0, 0, 1, 3)
        """
        nodes = check_int("nodes", nodes, 1, MOST_NODES)
        deepest = MOST_DEPTH if max_depth is None else check_int("max_depth", max_depth, 0, MOST_DEPTH)
        rates = check_sequence("acceptance", acceptance, partial(check_float, least=0, most=1), MOST_SIBLINGS)
        if sum(rates) > 1 + 1e-9:
            raise ValueError(f"acceptance must sum to at most 1, got {sum(rates)}")
        return cls(_sequoia_parents(rates, nodes, min(deepest, nodes - 1)))

    @classmethod
    def delayed(cls, chain: Sequence[float], fork: Sequence[float], nodes: int) -> Self:
        """Builds the best tree of at most ``nodes`` nodes whose trunk forks late into chains of one length.

        Args:
            chain: ``chain[d]``: probability that a lone child at depth ``d + 1`` is accepted below an accepted node,
                measured for the draft law in use. Has 1 to 512 values; the last one also applies to greater depths.
            fork: ``fork[k - 1]``: probability that one of ``k`` children of the root is accepted, measured in the same
                way. Its length, at most 256, bounds the number of chains. At greater depths, the chance that all
                ``k`` children miss changes by the same factor as that of a lone child.
            nodes: greatest size of the tree, root included, 1 to 2,048.

        Raises:
            TypeError: if an argument is not a number, or not a list of them.
            ValueError: if an argument is out of range, or a list is empty.

        Source: delayed tree expansion (Thomas et al., 2026, arXiv 2602.16994), whose selector is a network.

        Examples:
            >>> TreeTopology.delayed([0.9, 0.9, 0.5], [0.9, 0.95, 0.96], 9)
            TreeTopology(nodes=9, levels=[1, 1, 1, 2, 2, 2])
        """
        nodes = check_int("nodes", nodes, 1, MOST_NODES)
        rate = partial(check_float, least=0, most=1)
        lone = check_sequence("chain", chain, rate, MOST_DEPTH)
        any_of = check_sequence("fork", fork, rate, MOST_SIBLINGS)
        if not lone or not any_of:
            raise ValueError("chain and fork need one probability at least")
        best, shape = -1.0, (0, 1, 0)
        depth = min(nodes - 1, MOST_DEPTH)
        rates = np.array([lone[min(d, len(lone) - 1)] for d in range(depth + 1)])
        survival = np.append(1.0, rates.cumprod())
        for trunk in range(depth + 1):
            for width, one_of in enumerate(any_of, start=1):
                length = min((nodes - 1 - trunk) // width, depth - trunk)
                if width > 1 and not length:
                    break
                missed = (1 - one_of) / (1 - any_of[0]) if any_of[0] < 1 else 1.0
                entered = survival[trunk] * (1 - (1 - rates[trunk]) * missed)
                below = np.append(1.0, rates[trunk + 1 : trunk + length].cumprod())[:length]
                expected = float(survival[1 : trunk + 1].sum() + entered * below.sum())
                if expected > best + 1e-12:
                    best, shape = expected, (trunk, width, length)
        trunk, width, length = shape
        return cls.from_k_config([1] * trunk + ([width] + [1] * (length - 1) if length else []))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included."""
        return len(self.parent_list)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return len(self.levels) - 1

    @property
    def width(self) -> int:
        """Greatest number of children of a node; 1 for a lone root, since a law draws at least one child."""
        return max(1, *map(len, self.child_list))

    @cached_property
    def parent_array(self) -> Ints:
        """``[N]`` parent of every node, 0 for the root."""
        return np.array(self.parent_list).clip(0)

    @cached_property
    def depth_array(self) -> Ints:
        """``[N]`` depth of every node."""
        return np.array(self.depth_list)

    @cached_property
    def offset_array(self) -> Ints:
        """``[N + 1]`` each node's start in :attr:`child_array`."""
        return np.array(self.child_offsets)

    @cached_property
    def child_array(self) -> Ints:
        """``[N - 1]`` children of node 0, of node 1, and so on."""
        return np.array(self.child_order, dtype=np.int64)

    @cached_property
    def rank_array(self) -> Ints:
        """``[N]`` rank of every node among its parent's children, 0 for the root."""
        return np.concatenate([[0], *(level.rank for level in self.tree_levels)])

    @cached_property
    def post_order(self) -> Ints:
        """``[N]`` place of every node in post-order, where nodes follow their children."""
        backwards, open_nodes = [], [0]
        while open_nodes:
            backwards.append(node := open_nodes.pop())
            open_nodes += self.child_list[node]
        return np.argsort(backwards[::-1])

    @cached_property
    def inner_counts(self) -> Ints:
        """``[max_depth + 1]`` by number of levels, how many nodes get children in them; the root counts, too."""
        return np.array([0, *accumulate(map(len, self.inner[:-1]))])

    @cached_property
    def tree_levels(self) -> tuple[TreeLevel, ...]:
        """By depth, the nodes with children and their children; without the deepest level."""
        return tuple(self._level(depth) for depth in range(self.max_depth))

    def _level(self, depth: int) -> TreeLevel:
        inner, below = self.inner[depth], self.levels[depth + 1]
        place, children = {node: number for number, node in enumerate(inner)}, self.child_list
        return TreeLevel(
            np.array(inner),
            slice(below.start, below.stop),
            np.array([place[self.parent_list[node]] for node in below]),
            np.array([children[self.parent_list[node]].index(node) for node in below]),
            max(len(children[node]) for node in inner),
        )

    def path(self, node: int) -> list[int]:
        """Returns the nodes from the root down to ``node``, both included."""
        path = [node]
        while path[-1] > 0:
            path.append(self.parent_list[path[-1]])
        return path[::-1]

    def extra_repr(self) -> str:
        return f"nodes={self.num_nodes}, levels={[len(level) for level in self.levels]}"


def ancestor_words(visible: Tensor) -> Tensor:
    """Packs a visibility matrix into words: bit ``j`` of row ``i`` says that row ``i`` sees column ``j``.

    Args:
        visible: ``[R, M]`` bool.

    Returns:
        ``[R, max(1, ceil(M / 64))]`` int64; bit ``j % 64`` of word ``j // 64`` stands for column ``j``.

    Examples:
        >>> ancestor_words(TreeTopology([-1, 0, 0, 1]).visible).flatten().tolist() == [0b1, 0b11, 0b101, 0b1011]
        True
    """
    rows, columns = visible.shape
    words = torch.zeros(rows, max(1, -(-columns // WORD_BITS)), dtype=torch.int64, device=visible.device)
    for word in range(words.shape[1]):
        bits = visible[:, word * WORD_BITS : (word + 1) * WORD_BITS].to(torch.int64)
        shifts = torch.arange(bits.shape[1], device=visible.device)
        words[:, word] = (bits << shifts).sum(dim=1)  # distinct bits, so the sum is their union, sign bit included
    return words


def words_of(seen: Sequence[int], columns: int) -> Tensor:
    """Packs rows given as integers into ancestor words, as :func:`ancestor_words` does for a matrix.

    Args:
        seen: R integers of any size; bit ``j`` of ``seen[i]`` says that row ``i`` sees column ``j``.
        columns: number of columns M.

    Examples:
        >>> words_of([0b1, 0b11], 2).tolist()
        [[1], [3]]
    """
    width, word = max(1, -(-columns // WORD_BITS)), (1 << WORD_BITS) - 1
    words = [[bits >> WORD_BITS * index & word for index in range(width)] for bits in seen]
    return torch.from_numpy(np.array(words, dtype=np.uint64).reshape(len(seen), width).view(np.int64))


def _checked_depths(parents: list[int]) -> list[int]:
    if not parents or parents[0] != -1:
        raise ValueError("a tree starts with its root: parents[0] must be -1")
    depths = [0]
    for node, parent in enumerate(parents[1:], start=1):
        if not 0 <= parent < node:
            raise ValueError(f"parents[{node}] = {parent}: every node but the root needs a parent listed before it")
        depths.append(depths[parent] + 1)
        if depths[node] < depths[node - 1]:
            raise ValueError(
                f"node {node} has depth {depths[node]} but follows a node of depth {depths[node - 1]}: "
                "list the nodes level by level"
            )
    if depths[-1] > MOST_DEPTH:
        raise ValueError(f"a tree has at most {MOST_DEPTH} levels below its root, this one has {depths[-1]}")
    return depths


def _sequoia_parents(acceptance: tuple[float, ...], nodes: int, max_depth: int) -> list[int]:
    # trees[h][n]: greatest expected number of accepted nodes, root included, of a tree with n nodes and height
    # at most h. forests[h][j][n]: that number for the subtrees of the root's children of rank j and later, n nodes
    # in all. A rank is used only after the lower ones, so an empty rank ends the forest.
    nothing = np.full(nodes + 1, -math.inf)  # values by size; a forest without trees has size 0
    nothing[0] = 0.0
    trees, forests = [np.roll(nothing + 1, 1)], [[nothing]]  # height 0: a lone root
    while len(trees) <= max_depth:
        ranks = [nothing]
        for rate in reversed(acceptance):
            ranks.insert(0, _forest(rate, trees[-1], ranks[0], nothing))
        deeper = np.concatenate([[-math.inf], 1 + ranks[0][:-1]])
        if np.array_equal(deeper, trees[-1]):
            break  # more height no longer helps a tree of any size
        trees.append(deeper)
        forests.append(ranks)

    if trees[-1][nodes] == -math.inf:
        raise ValueError(
            f"no tree of depth {max_depth} with at most {len(acceptance)} children per node has {nodes} nodes"
        )
    parents, level, height = [-1], [(0, nodes)], len(trees) - 1
    while level:
        following = []
        for node, size in level:
            budget = size - 1
            for rank, rate in enumerate(acceptance):
                if budget == 0:
                    break
                sizes = np.flatnonzero(trees[height - 1][: budget + 1] > -math.inf)
                later = forests[height][rank + 1][budget - sizes]
                child_size = int(sizes[np.argmax(rate * trees[height - 1][sizes] + later)])
                following.append((len(parents), child_size))
                parents.append(node)
                budget -= child_size
        level, height = following, max(height - 1, 0)
    return parents


def _forest(rate: float, trees: Values, later: Values, nothing: Values) -> Values:
    """Returns the values, by size, of a forest: its first tree is entered at ``rate``, the others give ``later``."""
    value = nothing.copy()
    for size in range(1, len(trees)):
        if trees[size] > -math.inf:
            np.maximum(value[size:], rate * trees[size] + later[: len(later) - size], out=value[size:])
    return value
