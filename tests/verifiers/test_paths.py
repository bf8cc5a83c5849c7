"""Greedy multi-path block verification: its law by enumeration, the law of the best path, and refused inputs."""

from collections import defaultdict

import pytest
import torch

import arbordraft as ad
from arbordraft.sampling.laws import IID, SharedNoise, TopTail, WithoutReplacement
from arbordraft.testing import (
    ROW_KINDS,
    distance_to_target,
    draft_trees,
    expected_accepted,
    one_tree,
    random_table,
    row,
    target_rows,
)
from arbordraft.verifiers import GreedyMultiPath, Lifted, RecursiveRejection

FORKS = [
    (ad.TreeTopology.fork(2, 2), 3),
    (ad.TreeTopology.fork(3, 2), 2),
    (ad.TreeTopology.fork(4, 1), 3),
    (ad.TreeTopology.from_k_config((1, 2, 1)), 3),
    (ad.TreeTopology.from_k_config((1, 1, 3)), 2),
]


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(("topology", "vocabulary"), FORKS, ids=str)
def test_law_is_the_targets(kind, topology, vocabulary):
    table = random_table(kind, vocabulary, seed=1)
    assert distance_to_target(GreedyMultiPath(), topology, IID(topology.width), table) < 1e-12


def test_law_is_the_targets_over_two_steps():
    table = random_table("random", 2, seed=3)
    assert distance_to_target(GreedyMultiPath(), ad.TreeTopology.fork(2, 2), IID(2), table, steps=2) < 1e-12


class Unskewed(GreedyMultiPath):
    """Verifies the best path as if it were the only one."""

    def pick(self, tree, target):
        path, _ = super().pick(tree, target)
        return path, [tree.drawn_from(row) for row in path[:-1]]


def test_verifying_the_best_path_like_a_single_path_is_biased():
    table = random_table("random", 3, seed=1)
    assert distance_to_target(Unskewed(), ad.TreeTopology.fork(2, 2), IID(2), table) > 1e-2


@pytest.mark.parametrize("kind", ["random", "ties", "holes"])
@pytest.mark.parametrize(("topology", "vocabulary"), FORKS, ids=str)
def test_the_best_path_has_the_law_that_verifies_it(kind, topology, vocabulary):
    table = random_table(kind, vocabulary, seed=5)
    found, promised = defaultdict(float), {}
    for chance, tree in draft_trees(topology, IID(topology.width), table):
        path, skewed = GreedyMultiPath().pick(tree, target_rows(tree, table))
        tokens = tuple(tree.path(path[-1]))
        found[tokens] += chance
        promised[tokens] = torch.stack([law[token] for law, token in zip(skewed, tokens, strict=True)]).prod().item()
    assert found == pytest.approx(promised, abs=1e-12)
    assert sum(promised.values()) == pytest.approx(1, abs=1e-12)


def expected(verifier, topology, table):
    return expected_accepted(verifier, topology, IID(topology.width), table)


def test_more_paths_accept_more_and_one_is_block_verification():
    """Two paths accept more than block verification of one and, on average, than recursive rejection of both."""
    gains = []
    for seed in range(6):
        table = random_table("random", 3, seed)
        one = expected(Lifted(RecursiveRejection()), ad.TreeTopology.chain(2), table)
        assert expected(GreedyMultiPath(), ad.TreeTopology.chain(2), table) == pytest.approx(one, abs=1e-12)
        two, in_turn = (
            expected(verifier, ad.TreeTopology.fork(2, 2), table)
            for verifier in (GreedyMultiPath(), Lifted(RecursiveRejection()))
        )
        assert two > one
        gains.append(two - in_turn)
    assert sum(gains) / len(gains) > 0.01


def test_long_paths_of_little_mass():
    """The product of 80 probabilities of 1e-9 underflows in float64."""
    depth, tokens = 80, {0: 0}
    topology = ad.TreeTopology.fork(2, depth)
    rare = row(1, 1e-9)
    tokens |= dict.fromkeys(range(1, topology.num_nodes), 1)
    tree = one_tree(topology, IID(2), tokens, dict.fromkeys(range(topology.num_nodes - 2), rare))
    path, skewed = GreedyMultiPath().pick(tree, dict.fromkeys(tree.rows, row(1, 3e-9)))
    assert len(path) == depth + 1
    assert all(torch.isfinite(law).all() and law.sum() == pytest.approx(1) for law in skewed)


@pytest.mark.parametrize("law", [WithoutReplacement(2), TopTail(1, 1), ad.Fixed(2), SharedNoise(2)], ids=str)
def test_other_draft_laws_are_refused(law):
    with pytest.raises(ValueError, match="not valid"):
        ad.Coupling(law, GreedyMultiPath())


@pytest.mark.parametrize("parents", [[-1, 0, 0, 1], [-1, 0, 0, 1, 2, 3, 3]])
def test_other_trees_are_refused(parents):
    with pytest.raises(ValueError, match="trunk that ends in chains"):
        ad.Coupling(IID(2), GreedyMultiPath()).check(ad.TreeTopology(parents))
