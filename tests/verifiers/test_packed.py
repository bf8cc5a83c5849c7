"""Verification of all trees at once, from scores, against the walk that goes through one tree after the other."""

import pytest
import torch
from support.verdicts import COUPLINGS, check_verdicts, grown

from arbordraft import Lifted, RecursiveRejection, SpecHub, TopDown, TopTail, TreeTopology, WithoutReplacement
from arbordraft.sampling.noise import Noise
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.verifiers import KSeq
from arbordraft.verifiers.packed import verify_packed


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize(("vocabulary", "turns"), [(7, 60), (9000, 16)])
def test_the_same_verdicts(coupling, lifted, vocabulary, turns):
    check_verdicts(coupling, lifted, vocabulary, turns)


def test_banned_tokens_and_no_mass_left():
    """Rows of the target that are certain: what was drafted right is taken, and nothing else is ever emitted."""
    law, topology = TopTail(1, 1), TreeTopology.k_ary(2, 2)
    generator = torch.Generator().manual_seed(0)
    for turn in range(40):
        tree = DraftTree((grown(topology, law, 6, generator, 1.0),))
        count = len(tree.samples[0].tokens)
        wanted = torch.randint(6, (count,), generator=generator)
        scores = torch.full((count, 6), -torch.inf)
        scores[torch.arange(count), wanted] = 0.0
        noise = Noise.draw([Noise.source(turn)], topology.num_nodes)
        for lifted in (False, True):
            verdict = (Lifted if lifted else TopDown)(RecursiveRejection())(tree, SoftmaxRows(scores), noise).samples[0]
            last = verdict.path[-1] if verdict.path else 0
            assert verify_packed(tree, scores, noise, lifted=lifted) == [(last, verdict.token)]


def test_other_rules_are_left_to_the_walk():
    assert not any(rule.rejects_in_turn for rule in (KSeq(), SpecHub("paper")))


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
def test_nothing_was_drafted(lifted):
    """Every tree is a root, as when a decider stops at once: tokens are drawn from the target's rows."""
    tree = DraftTree((SampleTree(TreeTopology.chain(0), WithoutReplacement(1), {0: 1}), None) * 2)
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    noise = Noise.draw([Noise.source(sample) for sample in range(4)], 1)
    expected = (Lifted if lifted else TopDown)(RecursiveRejection())(tree, SoftmaxRows(scores), noise).samples
    found = verify_packed(tree, scores, noise, lifted=lifted)
    assert found == [verdict and (0, verdict.token) for verdict in expected]
