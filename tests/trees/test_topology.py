"""Shapes of trees: literal examples, random parents, and the Sequoia optimum against all trees."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.shapes import ancestors, parent_lists

from arbordraft import TreeTopology
from arbordraft.trees.topology import ancestor_words


@pytest.mark.parametrize(
    ("topology", "parents"),
    [
        (TreeTopology.chain(0), [-1]),
        (TreeTopology.chain(3), [-1, 0, 1, 2]),
        (TreeTopology.fork(2, 3), [-1, 0, 0, 1, 2, 3, 4]),
        (TreeTopology.k_ary(3, 1), [-1, 0, 0, 0]),
        (TreeTopology.k_ary(5, 0), [-1]),
        (TreeTopology.from_k_config((3, 1)), [-1, 0, 0, 0, 1, 2, 3]),
        (TreeTopology.from_parents([-1, 0, 0, 2]), [-1, 0, 0, 2]),
    ],
    ids=repr,
)
def test_named_shapes(topology, parents):
    assert list(topology.parent_list) == parents


def test_mcsd_notation_counts_nodes():
    assert TreeTopology.from_k_config((4, 2, 2)).num_nodes == 29


@settings(max_examples=25, deadline=None, derandomize=True)
@given(parent_lists())
def test_every_view_of_a_tree_agrees(parents):
    topology = TreeTopology(parents)
    words = ancestor_words(topology.visible)
    assert topology.num_nodes == len(parents)
    assert [node for level in topology.levels for node in level] == list(range(len(parents)))
    for node in range(len(parents)):
        expected = sorted(ancestors(parents, node))
        assert topology.visible[node].nonzero().flatten().tolist() == expected
        assert [j for j in range(len(parents)) if words[node, j // 64].item() >> (j % 64) & 1] == expected
        assert list(topology.path(node)) == expected
        assert topology.depth_list[node] == len(expected) - 1
        assert all(parents[child] == node for child in topology.child_list[node])
        assert topology.rank_array[list(topology.child_list[node])].tolist() == list(range(parents.count(node)))

    def children_first(node):
        return [below for child in topology.child_list[node] for below in children_first(child)] + [node]

    assert topology.post_order.argsort().tolist() == children_first(0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(parent_lists(40), st.data())
def test_the_first_nodes_are_a_tree(parents, data):
    nodes = data.draw(st.integers(1, len(parents)))
    whole, start = TreeTopology(parents), TreeTopology(parents[:nodes])
    assert torch.equal(start.visible, whole.visible[:nodes, :nodes])


def test_words_use_the_sign_bit():
    words = ancestor_words(TreeTopology.chain(64).visible)
    assert words[63].tolist() == [-1, 0]
    assert words[62].tolist() == [2**63 - 1, 0]
    assert words[64].tolist() == [-1, 1]
    assert ancestor_words(torch.zeros(2, 0, dtype=torch.bool)).tolist() == [[0], [0]]


def test_a_topology_moves_like_any_module():
    topology = torch.nn.Sequential(TreeTopology.k_ary(2, 2)).to("meta")[0]
    assert topology.parents.device.type == topology.visible.device.type == "meta"
    assert topology.eval().state_dict() == {}


def expected_accepted(parents, acceptance):
    """Sums the probabilities that the whole path of a node is accepted, over all nodes."""
    reach, ranks = [1.0], [0] * len(parents)
    for parent in parents[1:]:
        reach.append(reach[parent] * acceptance[ranks[parent]])
        ranks[parent] += 1
    return sum(reach)


def all_trees(nodes, width, max_depth):
    """Yields every tree in level order; equal shapes may appear twice."""
    for parents in itertools.product(*(range(node) for node in range(1, nodes))):
        parents = [-1, *parents]
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        if depths == sorted(depths) and max(depths) <= max_depth and max(map(parents.count, range(nodes))) <= width:
            yield parents


@pytest.mark.parametrize(
    "acceptance", [(0.6, 0.2, 0.1), (0.2, 0.7), (0.05, 0.1, 0.8), (0.9,), (0.5, 0.0, 0.5), (1.0, 0.0)], ids=str
)
@pytest.mark.parametrize("max_depth", [None, 1, 2, 3])
def test_sequoia_is_the_best_of_all_trees(acceptance, max_depth):
    for nodes in range(1, 8):
        depth = nodes - 1 if max_depth is None else max_depth
        values = [expected_accepted(parents, acceptance) for parents in all_trees(nodes, len(acceptance), depth)]
        if not values:
            with pytest.raises(ValueError, match="no tree of depth"):
                TreeTopology.sequoia(acceptance, nodes, max_depth)
            continue
        found = TreeTopology.sequoia(acceptance, nodes, max_depth)
        assert found.num_nodes == nodes
        assert found.max_depth <= depth
        assert max(len(children) for children in found.child_list) <= len(acceptance)
        assert expected_accepted(found.parent_list, acceptance) == pytest.approx(max(values), abs=1e-12)


def test_sequoia_grows_to_hundreds_of_nodes():
    assert TreeTopology.sequoia((0.7, 0.15, 0.05), 512).num_nodes == 512
    assert TreeTopology.sequoia((0.9,), 300).max_depth == 299


# Delayed trees.


def expected_of_delayed(topology, chain, fork):
    """Returns the expected accepted tokens by the definition of the arguments, node by node."""
    chance = {0: 1.0}
    for depth, level in enumerate(topology.levels[1:]):
        lone = chain[min(depth, len(chain) - 1)]
        for node in level:
            parent = topology.parent_list[node]
            width = len(topology.child_list[parent])
            missed = (1 - fork[width - 1]) / (1 - fork[0])
            chance[node] = chance[parent] * (1 - (1 - lone) * missed) / width
    return sum(chance.values()) - 1


@pytest.mark.parametrize(
    ("chain", "fork"),
    [([0.9, 0.9, 0.4], [0.8, 0.9, 0.95]), ([0.3], [0.3, 0.5, 0.6, 0.65]), ([0.5, 0.8, 0.9], [0.5, 0.52])],
    ids=str,
)
def test_a_delayed_tree_is_the_best_of_all_delayed_trees(chain, fork):
    for nodes in (1, 2, 3, 5, 9, 14):
        found = TreeTopology.delayed(chain, fork, nodes)
        assert found.num_nodes <= nodes
        shapes = [
            [1] * trunk + [width] + [1] * (length - 1)
            for trunk in range(nodes)
            for width in range(1, len(fork) + 1)
            for length in range(1, nodes)
            if trunk + width * length < nodes
        ]
        best = max(
            (expected_of_delayed(TreeTopology.from_k_config(shape), chain, fork) for shape in shapes), default=0.0
        )
        assert expected_of_delayed(found, chain, fork) == pytest.approx(best, abs=1e-12)


def test_delayed_trees_fork_where_drafts_begin_to_fail():
    levels = [len(level) for level in TreeTopology.delayed([0.95, 0.95, 0.5], [0.95, 0.97], 9).levels]
    assert levels == [1, 1, 1, 2, 2, 2]
    assert TreeTopology.delayed([1.0], [1.0], 6).parent_list == TreeTopology.chain(5).parent_list


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [0.5], 4), "chain and fork"),
        (([0.5], [], 4), "chain and fork"),
        (([1.5], [0.5], 4), "chain"),
        (([0.5], [-0.1], 4), "fork"),
        (([0.5], [0.5], 0), "nodes"),
        (([0.5], [0.5] * 300, 4), "fork"),
    ],
    ids=str,
)
def test_bad_arguments_of_delayed_trees_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TreeTopology.delayed(*arguments)
