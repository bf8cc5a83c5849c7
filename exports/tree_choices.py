"""Trees in the notation of Medusa and EAGLE, which other engines read."""

from collections.abc import Iterable, Sequence

from arbordraft import TreeTopology


def to_tree_choices(topology: TreeTopology) -> list[tuple[int, ...]]:
    """Every drafted node as the ranks of its ancestors and itself among their siblings.

    ``TreeTopology.from_k_config((2, 1))`` gives ``[(0,), (1,), (0, 0), (1, 0)]``. The root is not listed.
    """
    ranks = {child: rank for children in topology.child_list for rank, child in enumerate(children)}
    return [tuple(ranks[node] for node in topology.path(drafted)[1:]) for drafted in range(1, topology.num_nodes)]


def from_tree_choices(choices: Iterable[Sequence[int]]) -> TreeTopology:
    """The topology of such a list, in any order.

    Raises:
        ValueError: if a node is listed twice or has a negative rank, or one of its ancestors or elder siblings is
            missing.
    """
    paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
    known: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    for path in paths:
        if not path or path in known:
            raise ValueError(f"node {path} is listed twice or is the root")
        if min(path) < 0:
            raise ValueError(f"node {path} has a negative rank; ranks start at 0")
        elder = (*path[:-1], path[-1] - 1)
        if path[:-1] not in known or (path[-1] > 0 and elder not in known):
            raise ValueError(f"node {path} is listed without its parent {path[:-1]} or its elder siblings")
        known[path] = len(parents)
        parents.append(known[path[:-1]])
    return TreeTopology.from_parents(parents)
