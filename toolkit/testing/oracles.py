"""Exact oracles: compute the output law of a decoder by enumerating every draft tree and every decision about it.

A *table* maps a prefix of tokens to its target row and its draft row. So the rows of a tree depend on the whole path.
All values are float64 on vocabularies of a few tokens, so an exact verifier errs by rounding alone.

Shapes: V vocabulary, T packed rows.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.verifiers import Rule, TreeVerifier

Tokens = tuple[int, ...]
Table = Callable[[Tokens], tuple[Tensor, Tensor]]
Law = dict[Tokens, float]

ROW_KINDS = ("random", "peaked", "holes", "ties", "equal", "disjoint", "certain target", "certain draft")


def row(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    """Makes ``[V]`` probabilities proportional to ``values``."""
    weights = torch.tensor(values, dtype=torch.float64)
    return (weights / weights.sum()).to(dtype)


def random_rows(kind: str, vocabulary: int, *seed: int) -> tuple[Tensor, Tensor]:
    """Draws a ``[V]`` target row and a draft row.

    Args:
        kind: one of ``ROW_KINDS``, shapes of rows that rules have got wrong before.
        vocabulary: V, a few tokens.
        *seed: any integers.
    """
    generator = np.random.default_rng([ROW_KINDS.index(kind), vocabulary, *seed])
    scale = 4.0 if kind == "peaked" else 1.0
    target, draft = np.exp(scale * generator.normal(size=(2, vocabulary)))
    if kind == "holes":  # zeros like those of top-p: other ones in each row, never everywhere
        for values in (target, draft):
            values[generator.permutation(vocabulary)[: generator.integers(vocabulary)]] = 0
    elif kind == "ties":
        target, draft = generator.integers(1, 3, size=(2, vocabulary))
    elif kind == "equal":
        draft = target
    elif kind == "disjoint":
        side = generator.permutation(vocabulary) < vocabulary // 2
        target, draft = target * side, draft * ~side
    elif kind.startswith("certain"):
        certain = np.eye(vocabulary)[generator.integers(vocabulary)]
        target, draft = (certain, draft) if kind == "certain target" else (target, certain)
    return row(*target), row(*draft)


def random_table(kind: str, vocabulary: int, seed: int = 0) -> Table:
    """Makes a table of :func:`random_rows` that depend on every token of the prefix."""

    @cache
    def table(prefix: Tokens) -> tuple[Tensor, Tensor]:
        return random_rows(kind, vocabulary, seed, *(token + 1 for token in prefix))

    return table


def draft_trees(
    topology: TreeTopology,
    law: DraftLaw,
    table: Table,
    prefix: Tokens = (),
    *,
    goes_on: Callable[[int, SampleTree], bool] = lambda depth, before: True,
    drops: Callable[[int, SampleTree], bool] = lambda depth, after: False,
) -> Iterator[tuple[float, SampleTree]]:
    """Yields every tree that may be drafted after ``prefix``, with its probability.

    Args:
        topology: shape of the trees.
        law: how children are drawn.
        table: gives the draft rows.
        prefix: committed tokens.
        goes_on: decides whether a level is drafted, given the tree above it. Deciders may see this tree.
        drops: decides whether a drafted level is dropped again, given the tree with it. No decider may do that.
    """

    narrow = cache(law.narrow)

    def grow(depth: int, probability: float, tree: SampleTree) -> Iterator[tuple[float, SampleTree]]:
        if depth > topology.max_depth or not goes_on(depth, tree):
            yield probability, tree
            return
        tokens, rows = tree_arguments(tree)
        parents = [node for node in topology.levels[depth - 1] if node in tokens and topology.child_list[node]]
        row_of = dict(zip(tokens, tree.rows, strict=True))
        rows |= {node: table((*prefix, *tree.path(row_of[node])))[1] for node in parents}
        for outcome in product(*(narrow(len(topology.child_list[node])).enumerate(rows[node]) for node in parents)):
            drafted, share = dict(tokens), probability
            for node, (chance, drawn) in zip(parents, outcome, strict=True):
                drafted |= zip(topology.child_list[node], drawn, strict=False)
                share *= chance
            grown = one_tree(topology, law, drafted, rows)
            if drops(depth, grown):
                yield share, tree
            else:
                yield from grow(depth + 1, share, grown)

    yield from grow(1, 1.0, one_tree(topology, law, {0: prefix[-1] if prefix else 0}))


def one_tree(
    topology: TreeTopology, law: DraftLaw, tokens: Mapping[int, int], draft_probs: Mapping[int, Tensor] | None = None
) -> SampleTree:
    """Builds the tree of a single sample from tokens and ``[V]`` draft rows by node of the topology, in any order."""
    return DraftTree.of(topology, law, [dict(sorted(tokens.items()))], [draft_probs])[0]


def tree_arguments(tree: SampleTree) -> tuple[dict[int, int], dict[int, Tensor]]:
    """Returns the arguments that :func:`one_tree` got: tokens and draft rows by node of the topology."""
    nodes = {row: int(tree.batch.node[row]) for row in tree.rows}
    probs = {node: probs for row, node in nodes.items() if (probs := tree.drawn_from(row)) is not None}
    return {node: tree.token(row) for row, node in nodes.items()}, probs


def target_rows(tree: SampleTree, table: Table, prefix: Tokens = ()) -> dict[int, Tensor]:
    """Returns the ``[V]`` target rows of a tree, by row."""
    return {row: table((*prefix, *tree.path(row)))[0] for row in tree.rows}


def step_law(
    verifier: TreeVerifier, trees: Iterator[tuple[float, SampleTree]], table: Table, prefix: Tokens = ()
) -> Law:
    """Computes the law of the tokens that one step appends to ``prefix``: accepted ones and the next."""
    emitted: Law = defaultdict(float)
    for chance, tree in trees:
        for share, path, following in verifier.law(tree, target_rows(tree, table, prefix)):
            accepted = tree.path(path[-1])
            for token, probability in enumerate(following.tolist()):
                if probability > 0:
                    emitted[(*accepted, token)] += chance * share * probability
    return emitted


def complete(law: Law, table: Table, length: int) -> Law:
    """Continues every output with the target until it has ``length`` tokens."""
    completed: Law = defaultdict(float)
    open_outputs = list(law.items())
    while open_outputs:
        tokens, chance = open_outputs.pop()
        if len(tokens) >= length:
            completed[tokens[:length]] += chance
            continue
        for token, probability in enumerate(table(tokens)[0].tolist()):
            if probability > 0:
                open_outputs.append(((*tokens, token), chance * probability))
    return completed


def total_variation(first: Law, second: Law) -> float:
    """Computes half the sum of the absolute differences of two laws: 0 for equal laws, at most 1."""
    return sum(abs(first.get(tokens, 0.0) - second.get(tokens, 0.0)) for tokens in {*first, *second}) / 2


def distance_to_target(
    verifier: TreeVerifier,
    topology: TreeTopology,
    law: DraftLaw,
    table: Table,
    steps: int = 1,
    draft: Callable[..., Iterator[tuple[float, SampleTree]]] = draft_trees,
) -> float:
    """Computes the total variation between the law of some consecutive steps and the target's own law.

    Args:
        verifier: decides about whole trees, such as ``TopDown(rule)`` and ``Lifted(rule)``.
        topology: shape of the draft trees; a step emits up to their greatest depth plus one token.
        law: how children are drawn.
        table: gives target and draft rows.
        steps: number of steps; a second step shows a bias that depends on the outcome of the first.
        draft: yields the trees of a step with their probabilities, as :func:`draft_trees` does.

    Returns:
        The distance, which is below 1e-12 for an exact verifier.
    """
    emitted: Law = {(): 1.0}
    for _ in range(steps):
        following: Law = defaultdict(float)
        for prefix, chance in emitted.items():
            for tokens, share in step_law(verifier, draft(topology, law, table, prefix), table, prefix).items():
                following[prefix + tokens] += chance * share
        emitted = following
    length = steps * (topology.max_depth + 1)
    return total_variation(complete(emitted, table, length), complete({(): 1.0}, table, length))


def expected_accepted(verifier: TreeVerifier, topology: TreeTopology, law: DraftLaw, table: Table) -> float:
    """Computes the expected number of accepted tokens of one step."""
    return sum(
        chance * share * (len(path) - 1)
        for chance, tree in draft_trees(topology, law, table)
        for share, path, _ in verifier.law(tree, target_rows(tree, table))
    )


def acceptance(rule: Rule, law: DraftLaw, target: Tensor, draft: Tensor) -> float:
    """Computes the probability that a rule accepts one of the children."""
    return sum(chance * sum(rule(target, 1.0, draft, tokens, law).accept) for chance, tokens in law.enumerate(draft))


def packed(
    trees: Sequence[SampleTree | None], targets: Sequence[Mapping[int, Tensor] | None]
) -> tuple[DraftTree, Tensor]:
    """Packs trees of one topology as a batch.

    Args:
        trees: tree of every sample; ``None`` for a sample that takes no part.
        targets: ``[V]`` target rows of every sample's tree, by row of that tree.

    Returns:
        The draft tree of the batch and ``[T, V]`` target rows.
    """
    known = [({}, {}) if tree is None else tree_arguments(tree) for tree in trees]
    topology, law = next((tree.batch.topology, tree.proposal.law) for tree in trees if tree)
    batch = DraftTree.of(topology, law, [tokens or None for tokens, _ in known], [probs for _, probs in known])
    proposals = [tree and tree.proposal for tree in trees]
    rows = [target[row] for tree, target in zip(trees, targets, strict=True) if tree and target for row in tree.rows]
    return replace(batch, proposals=proposals), torch.stack(rows)
