"""Tokens per target forward with whole trees, by shape, draft law and verifier."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise

from torch import Tensor

from arbordraft.bench.tables import HIDDEN
from arbordraft.bench.workload import ProgressCallback, Workload, quiet
from arbordraft.drafters import Drafter
from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.rows import Rows
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import GlobalResolution, Remembered, Rule
from arborlab.verifiers.laws import laws_of, verifiers_of
from arborlab.verifiers.positions import by_cluster, clustered, watch

SHARED_TREES = 4  # drafted at every position with noise that target and drafter share


@dataclass(frozen=True)
class TreeRow:
    """Tokens per target forward with one kind of tree, on average over positions.

    Args:
        nodes: number of nodes, root included.
        tau: 1 + expected accepted tokens.
        error: standard error of ``tau``; prompts are independent.
        by_prompt: tau of each prompt, from which the error of a difference between two rows follows.
    """

    drafter: str
    temperature: float
    topology: str
    nodes: int
    law: str
    verifier: str
    positions: int
    tau: float
    error: float
    by_prompt: list[float] = field(default_factory=list, metadata=HIDDEN)


def tree_tau(
    target: RaggedModel,
    drafters: Mapping[str, Drafter],
    workload: Workload,
    *,
    nodes: Sequence[int] = (8, 16, 32),
    children: Sequence[int] = (2,),
    ranks: Mapping[tuple[str, str], Sequence[float]] | None = None,
    resolution: bool = False,
    on_progress: ProgressCallback = quiet,
) -> Iterator[TreeRow]:
    """Yields the tokens per forward of trees of about the same size, by shape, law and verifier.

    Args:
        workload: prompts; ``new_tokens`` is the number of positions per prompt.
        nodes: sizes, root included. A shape that has no tree of that size takes the next smaller one.
        children: numbers of children of a node, each at least 2. Chains are measured once.
        ranks: by drafter and law, acceptance by rank. Sequoia and delayed trees are fitted to it, and are omitted
            without it.
        resolution: whether to measure global resolution as well, which takes about 20 ms per node.
    """
    for name, drafter in drafters.items():
        single = laws_of(1)
        laws = {key: single[key] for key in ("IID(1)", "SharedNoise(1)")}
        for count in children:
            laws |= laws_of(count)
        chains = {False: [0.5], True: [0.5]}  # acceptance by depth, by whether noise is shared
        for law_name, (law, rules) in laws.items():
            rates = (ranks or {}).get((name, law_name))
            rules = {key: rule for key, rule in rules.items() if resolution or not isinstance(rule, GlobalResolution)}
            measured: dict[tuple[int, ...], list[TreeRow]] = {}  # by parents: two shapes may be one tree
            for shape, topology in _shapes(law, nodes, rates, chains[law.shared]):
                if (known := measured.get(topology.parent_list)) is not None:
                    yield from (replace(row, topology=shape) for row in known)
                    continue
                rows = measured.setdefault(topology.parent_list, [])
                accepted: dict[str, list[tuple[int, float]]] = defaultdict(list)
                reached: list[float] = [0.0] * (topology.max_depth + 1)
                weigh = partial(_weigh, accepted, reached, law, rules, topology)
                for other in range(SHARED_TREES if law.shared else 1):
                    watch(target, drafter, topology, law, workload, weigh, on_progress, other)
                if shape == "chain":
                    chains[law.shared] = [below / max(above, 1e-9) for above, below in pairwise(reached)]
                for verifier, values in accepted.items():
                    mean, error = clustered(values)
                    size, at = topology.num_nodes, workload.temperature
                    means = [1 + each for each in by_cluster(values)]
                    rows.append(TreeRow(name, at, shape, size, law_name, verifier, len(values), 1 + mean, error, means))
                yield from rows


def complete_tree(k: int, size: int) -> TreeTopology:
    """Returns the greatest complete tree of at most ``size`` nodes, k children per node, k being 2 or more."""
    return TreeTopology.k_ary(k, int(math.log(size * (k - 1) + 1, k) + 1e-9) - 1)


def _shapes(
    law: DraftLaw, nodes: Sequence[int], rates: Sequence[float] | None, chain: Sequence[float]
) -> Iterator[tuple[str, TreeTopology]]:
    """Yields trees by name; the longest chain comes last."""
    for size in sorted(nodes):
        if law.k == 1:
            yield "chain", TreeTopology.chain(size - 1)
        if law.k == 1 or size <= law.k:  # no room for all children of one node
            continue
        yield "complete", complete_tree(law.k, size)
        yield "paths", TreeTopology.fork(law.k, (size - 1) // law.k)
        if rates is not None:
            yield "sequoia", TreeTopology.sequoia([max(rate, 1e-3) for rate in rates], size)
            fork = [chain[0]] * (law.k - 1) + [max(sum(rates), chain[0])]  # of one child or of all
            yield "delayed", TreeTopology.delayed(chain, fork, size)


def _weigh(
    accepted: dict[str, list[tuple[int, float]]],
    reached: list[float],
    law: DraftLaw,
    rules: Mapping[str, Rule],
    topology: TreeTopology,
    prompt: int,
    tree: SampleTree,
    rows: Rows[Tensor],
    matched: int,
) -> None:
    """Appends ``(prompt, expected accepted tokens)`` at one position, for every verifier.

    Adds to ``reached[d]`` the probability that the first verifier accepts d tokens or more.
    """
    if law.shared:
        accepted["SharedMatching"].append((prompt, matched))
        for depth in range(matched + 1):
            reached[depth] += 1
        return
    remembered = {name: Remembered(rule) for name, rule in rules.items()}  # of the rows of this position
    for number, (name, verifier) in enumerate(verifiers_of(law, remembered, topology).items()):
        ends = verifier.law(tree, rows)
        accepted[name].append((prompt, sum(chance * (len(path) - 1) for chance, path, _ in ends)))
        if number == 0:
            for chance, path, _ in ends:
                for depth in range(len(path)):
                    reached[depth] += chance
