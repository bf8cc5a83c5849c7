"""Verification of all trees at once, from scores, against the walk through one tree after the other."""

import pytest
import torch
from support.verdicts import COUPLINGS, CROSSED, LOST, check_verdicts, ends_of, grown

from arbordraft import Lifted, RecursiveRejection, SpecHub, TopDown, TopTail, TreeTopology, WithoutReplacement
from arbordraft.sampling.noise import Noise
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree, Proposal
from arbordraft.verifiers import KSeq
from arbordraft.verifiers.packed import verify_packed


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize(("vocabulary", "turns"), [(7, 15), (9000, 4)])
def test_packed_verdicts_equal_those_of_the_walk(coupling, lifted, vocabulary, turns):
    check_verdicts(coupling, lifted, vocabulary, turns)


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_nodes_of_a_level_may_stand_in_any_order(coupling, lifted):
    check_verdicts(coupling, lifted, 7, 30, shapes=CROSSED)


def test_banned_tokens_and_no_mass_left():
    """Every row of the target allows one token, so no other token is ever accepted or emitted."""
    law, topology = TopTail(1, 1), TreeTopology.k_ary(2, 2)
    generator = torch.Generator().manual_seed(0)
    for turn in range(40):
        tree = grown(topology, law, 6, generator, 1.0, [()])
        wanted = torch.randint(6, (tree.rows,), generator=generator)
        scores = torch.full((tree.rows, 6), -torch.inf)
        scores[torch.arange(tree.rows), wanted] = 0.0
        noise = Noise.draw([Noise.source(turn)], topology.num_nodes)
        for lifted in (False, True):
            verdict = (Lifted if lifted else TopDown)(RecursiveRejection())(tree, SoftmaxRows(scores), noise)
            assert verify_packed(tree, scores, noise, lifted=lifted) == ends_of(verdict)


def test_rules_of_other_kinds_are_left_to_the_walk():
    assert not any(rule.rejects_in_turn for rule in (KSeq(), SpecHub("paper")))


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
def test_trees_without_drafts(lifted):
    """Every tree is only a root, as if a decider stopped at once; tokens are drawn from the target's rows."""
    tree = DraftTree.roots(TreeTopology.chain(0), [1, None, 1, None], Proposal(WithoutReplacement(1)))
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    noise = Noise.draw([Noise.source(sample) for sample in range(4)], 1)
    verdict = (Lifted if lifted else TopDown)(RecursiveRejection())(tree, SoftmaxRows(scores), noise)
    found = verify_packed(tree, scores, noise, lifted=lifted)
    assert found == {0: (0, verdict.tokens[0]), 2: (1, verdict.tokens[2])}


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("asked", [[0], [3, 2], [0, 2, 3]], ids=str)
def test_verdicts_about_some_samples(lifted, asked, monkeypatch):
    """Only the trees of the requested samples are verified, all at once."""
    monkeypatch.setattr("arbordraft.verifiers.trees.choice.uses_triton", lambda *_: True)
    law, topology, generator = WithoutReplacement(3), TreeTopology.k_ary(3, 2), torch.Generator().manual_seed(3)
    tree = grown(topology, law, 7, generator, 1.0, LOST)
    scores = torch.randn(tree.rows, 7, generator=generator)
    noise = Noise.draw([Noise.source(sample) for sample in range(4)], topology.num_nodes)
    verifier = (Lifted if lifted else TopDown)(RecursiveRejection())
    whole = verifier(tree, SoftmaxRows(scores), noise)
    found = verifier(tree, SoftmaxRows(scores), noise, asked)
    assert ends_of(found) == {sample: end for sample, end in ends_of(whole).items() if sample in asked}
    assert ends_of(whole) == verify_packed(tree, scores, noise, lifted=lifted)
