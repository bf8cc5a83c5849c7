"""The draft trees of a batch as one flat value: its fields, and the values of its parts."""

import builtins
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import arbordraft as ad
from arbordraft.trees.draft_tree import DraftTree, Proposal
from arbordraft.trees.verdict import Verdict

COLUMNS = ("token", "node", "parent", "depth", "chance", "certain", "draft_row")


@st.composite
def batches(draw):
    """Draws a batch of trees and its data: tokens, draft rows and chances of every sample by node."""
    parents = [draw(st.integers(0, node - 1)) for node in range(1, draw(st.integers(1, 9)))]
    topology = ad.TreeTopology([-1, *sorted(parents)])
    told = []
    for _ in range(draw(st.integers(1, 4))):
        tokens = {0: draw(st.integers(0, 99))}
        for node, parent in enumerate(topology.parent_list[1:], start=1):
            if parent in tokens and draw(st.integers(0, 3)):
                tokens[node] = draw(st.integers(0, 99))
        inner = {topology.parent_list[node] for node in tokens} - {-1}
        probs = {node: torch.rand(5) for node in sorted(inner) if draw(st.booleans())}
        chances = {node: draw(st.floats(0, 1)) for node in list(tokens)[1:] if draw(st.booleans())}
        told.append((tokens, probs, chances) if draw(st.integers(0, 3)) else (None, None, None))
    tree = DraftTree.of(topology, ad.Fixed(9), *map(list, zip(*told, strict=True)), source="told")
    certain = [bool(depth) and draw(st.booleans()) for depth in tree.depth]
    return replace(tree, certain=np.array(certain, dtype=bool)), told


def check_equal(found, expected):
    """Checks that samples and trees are the same; unused draft rows may differ."""
    assert list(found.proposals) == list(expected.proposals)
    assert list(found.offsets) == list(expected.offsets)
    for name in COLUMNS[:-1]:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        assert ours.tolist() == theirs.tolist(), name
    for row in range(expected.rows):
        ours, theirs = found.drawn_from(row), expected.drawn_from(row)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


@settings(deadline=None)
@given(batches())
def test_a_tree_returns_its_data(batch):
    tree, told = batch
    assert len(tree) == len(tree.proposals) == len(tree.offsets) - 1 == len(told)
    assert [len(getattr(tree, name)) for name in COLUMNS] == [tree.rows] * len(COLUMNS)
    assert tree.living == [sample for sample, (tokens, _, _) in enumerate(told) if tokens is not None]
    assert tree.rows_of(tree.living) == list(range(tree.rows))
    assert tree.tokens().tolist() == tree.token.tolist()
    row = 0
    for sample, (tokens, probs, chances) in enumerate(told):
        assert tree.lengths[sample] == len(tokens or ())
        if tokens is None:
            with pytest.raises(ValueError, match=f"sample {sample} takes no part in this step"):
                tree[sample]
            continue
        one, row_of = tree[sample], {}
        assert (one.root, one.rows, one.proposal.source) == (row, range(row, row + len(tokens)), "told")
        assert one.guesses == sum(not tree.certain[own] for own in one.rows[1:])
        for node, token in tokens.items():
            row_of[node] = row
            parent = tree.topology.parent_list[node]
            assert (tree.owner[row], tree.node[row], tree.token[row]) == (sample, node, token)
            assert (tree.depth[row], tree.parent[row]) == (tree.topology.depth_list[node], row_of.get(parent, -1))
            assert tree.chance[row] == chances.get(node, 0.0)
            nodes = tree.topology.path(node)
            assert tree.path(row) == [row_of[passed] for passed in nodes]
            assert one.path(row) == [tokens[passed] for passed in nodes[1:]]
            drawn = tree.drawn_from(row)
            assert (drawn is None) == (node not in probs)
            assert drawn is None or torch.equal(drawn, probs[node])
            if children := tree.topology.child_list[node]:
                assert tree.law_of(row).k == len(children)
            row += 1
        for node, own in row_of.items():
            assert one.children(own) == [row_of[c] for c in tree.topology.child_list[node] if c in tokens]


@settings(deadline=None)
@given(batches(), st.data())
def test_parts_are_trees_of_their_own(batch, data):
    tree, told = batch
    part_of = [data.draw(st.integers(0, 2)) for _ in told]
    parts = [tree.take([sample for sample in range(len(told)) if part_of[sample] == number]) for number in range(3)]
    for number, part in enumerate(parts):
        kept = [tuple(own if part_of[sample] == number else None for own in one) for sample, one in enumerate(told)]
        alone = DraftTree.of(tree.topology, ad.Fixed(9), *map(list, zip(*kept, strict=True)))
        certain = tree.certain[[part_of[owner] == number for owner in tree.owner]]
        check_equal(part, replace(alone, proposals=part.proposals, certain=certain))
        assert part.living == [sample for sample in tree.living if part_of[sample] == number]
    assert tree.take(range(len(told))) is tree
    assert tree.take(tree.living) is tree


@settings(deadline=None)
@given(batches())
def test_chains_are_trees_without_a_fork(batch):
    tree, _ = batch
    forks = [row for row in range(tree.rows) if len(tree.children[row]) > 1]
    assert tree.are_chains == (not forks)


@settings(deadline=None)
@given(batches(), st.data())
def test_a_verdict_is_a_path_and_a_token(batch, data):
    tree, told = batch
    ends = {
        sample: (data.draw(st.sampled_from(tree[sample].rows)), 100 + sample)
        for sample in tree.living
        if data.draw(st.booleans())
    }
    verdict = Verdict.of(tree, ends)
    assert len(verdict) == len(told)
    for sample in range(len(told)):
        if sample not in ends:
            assert verdict[sample] == ([], -1, False)
            continue
        end, token = ends[sample]
        assert verdict[sample] == (tree.path(end), token, bool(tree.children[end]))
        assert verdict.accepted(sample) == tree.depth[end]
        assert verdict.emitted(tree, sample) == [*tree[sample].path(end), token]
        outcome = verdict.outcome(tree, sample)
        assert (outcome.drafted, outcome.accepted) == (max(tree.depth[tree[sample].rows]), tree.depth[end])
        tried = [tree.children[row] for row in tree.path(end) if tree.children[row]]
        assert outcome.stated == tuple(sum(tree.chance[row] for row in children) for children in tried)
        assert outcome.certain == tuple(at for at, children in enumerate(tried) if tree.certain[children[0]])
    parts = [Verdict.of(tree, {sample: end}) for sample, end in ends.items()]
    assert list(Verdict.joined([Verdict.nothing(len(told)), *parts])) == list(verdict)


def test_roots():
    topology, proposal = ad.TreeTopology.k_ary(2, 2), Proposal(ad.Fixed(2), "nobody")
    tree = DraftTree.roots(topology, [7, None, 8], proposal)
    told = DraftTree.of(topology, proposal.law, [{0: 7}, None, {0: 8}])
    check_equal(tree, replace(told, proposals=[proposal, None, proposal]))
    assert tree.are_chains
    assert tree.children == [[], []]
    assert DraftTree.roots(topology, [None, None], proposal).rows == 0


def test_a_law_is_narrowed_once_per_number_of_children():
    tree = DraftTree.of(ad.TreeTopology([-1, 0, 0, 1]), ad.IID(2), [dict.fromkeys(range(4), 1)] * 2)
    laws = [tree.law_of(row) for row in (0, 1, 4, 5)]
    assert [law.k for law in laws] == [2, 1, 2, 1]
    assert laws[0] is laws[2]
    assert laws[1] is laws[3] is tree[1].law_of(5)


def test_a_tree_as_a_table():
    tree = DraftTree.of(
        ad.TreeTopology.fork(2, 1), ad.Fixed(2), [{0: 7}, {0: 8, 1: 4, 2: 5}], chances=[{}, {1: 0.5, 2: 0.25}]
    )
    frame = tree[1].to_frame()
    assert frame.to_dict("list") == {
        "row": [1, 2, 3],
        "node": [0, 1, 2],
        "parent": [-1, 1, 1],
        "depth": [0, 1, 1],
        "token": [8, 4, 5],
        "chance": [0.0, 0.5, 0.25],
        "certain": [False, False, False],
    }


def test_a_table_needs_pandas(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "pandas":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="a table of a tree needs pandas: pip install pandas"):
        DraftTree.of(ad.TreeTopology.chain(0), ad.Fixed(1), [{0: 1}])[0].to_frame()


UNEVEN = ad.TreeTopology([-1, 0, 0, 1])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ({}, "tokens must list nodes of the topology from 0 upwards, got nodes []"),
        ({1: 3}, "tokens must list nodes of the topology from 0 upwards, got nodes [1]"),
        ({0: 1, 2: 3, 1: 4}, "tokens must list nodes of the topology from 0 upwards, got nodes [0, 2, 1]"),
        ({0: 1, 4: 3}, "tokens must list nodes of the topology from 0 upwards, got nodes [0, 4]"),
        ({0: 1, 2: 3, 3: 4}, "node 3 is alive, but its parent 1 is not"),
    ],
    ids=str,
)
def test_impossible_trees_are_refused(tokens, words):
    for told in ([tokens], [{0: 1}, None, tokens]):
        with pytest.raises(ValueError, match="^" + words.replace("[", r"\[").replace("]", r"\]")):
            DraftTree.of(UNEVEN, ad.Fixed(2), told)


def test_repeated_siblings_need_a_law_that_draws_them():
    twice, row = {0: 1, 1: 3, 2: 3}, torch.full((5,), 0.2)
    with pytest.raises(ValueError, match=r"two children of node 0 have the token 3, which .* cannot draw"):
        DraftTree.of(UNEVEN, ad.WithoutReplacement(2), [twice], [{0: row}])
    for law, rows in ((ad.IID(2), {0: row}), (ad.Fixed(2), {}), (ad.WithoutReplacement(2), {})):
        assert DraftTree.of(UNEVEN, law, [twice], [rows]).token.tolist() == [1, 3, 3]


def test_each_list_has_one_entry_per_sample():
    for more in ({"draft_probs": [{}]}, {"chances": [{}]}):
        with pytest.raises(ValueError, match="zip"):
            DraftTree.of(UNEVEN, ad.Fixed(2), [{0: 1}, {0: 2}], **more)
