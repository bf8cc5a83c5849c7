"""Verification of all trees at once, from scores, against the walk that goes through one tree after the other."""

import pytest
import torch

from arbordraft import (
    IID,
    Fixed,
    Lifted,
    RecursiveRejection,
    SpecHub,
    TopDown,
    TopTail,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.laws import AdaptiveTopTail
from arbordraft.sampling import Noise, SoftmaxRows
from arbordraft.types import DraftTree, SampleTree
from arbordraft.verifiers import KSeq, TopTailRule
from arbordraft.verifiers.packed import verify_packed


class Repeated(Fixed):
    """The children of a drafter that proposes its best token twice."""

    def narrow(self, children):
        return Repeated(children)

    def draw(self, draft, uniforms):
        best, *others = super().draw(draft, uniforms)
        return [best, best, *others][: self.k]


COUPLINGS = {
    "iid": (IID(3), RecursiveRejection()),
    "without replacement": (WithoutReplacement(3), RecursiveRejection()),
    "one top": (TopTail(1, 2), RecursiveRejection()),
    "two tops": (TopTail(2, 1), TopTailRule()),
    "adaptive": (AdaptiveTopTail(3, 0.15), RecursiveRejection()),
    "certain": (Fixed(3), RecursiveRejection()),
    "repeated": (Repeated(3), RecursiveRejection()),
    "hub": (TopTail(1, 1), SpecHub()),
}
THREE = [TreeTopology.k_ary(3, 2), TreeTopology.from_k_config((3, 2, 1)), TreeTopology.chain(3), TreeTopology.chain(0)]
TWO = [TreeTopology.k_ary(2, 3), TreeTopology.from_k_config((2, 1, 1))]


def grown(topology, law, vocabulary, generator, sharp, lost=()):
    """A tree drafted from random rows; ``lost`` nodes and what is below them were given up."""
    tokens, rows = {0: 1}, {}
    for node in range(topology.num_nodes):
        children = topology.child_list[node]
        if node not in tokens or not children:
            continue
        row = (torch.randn(vocabulary, generator=generator) * sharp).softmax(dim=-1)
        narrow = law.narrow(len(children))
        drawn = narrow.draw(row, torch.rand(len(children), generator=generator, dtype=torch.float64).tolist())
        kept = [(child, token) for child, token in zip(children, drawn, strict=False) if child not in lost]
        if kept:
            tokens |= kept
            if not narrow.deterministic:
                rows[node] = row
    return SampleTree(topology, law, dict(sorted(tokens.items())), rows)


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
@pytest.mark.parametrize(("vocabulary", "turns"), [(7, 60), (9000, 16)])
def test_the_same_verdicts(coupling, lifted, vocabulary, turns):
    law, rule = coupling
    verifier, shapes = (Lifted if lifted else TopDown)(rule), THREE if law.k == 3 else TWO
    assert verifier.rejects_in_turn
    generator, lengths, recovered = torch.Generator().manual_seed(1), set(), set()
    for turn in range(turns):
        sharp = 1.0 if vocabulary < 100 else 4.0
        trees = [grown(shape, law, vocabulary, generator, sharp) for shape in shapes]
        trees.insert(1, None)
        if law.k == 3:
            trees.append(grown(THREE[0], law, vocabulary, generator, sharp, lost=(3, 9, 12)))
        tree = DraftTree(tuple(trees))
        scores = []
        for sample, node, _ in tree.rows():
            row = tree.samples[sample].draft_probs.get(node)
            near = torch.randn(vocabulary, generator=generator) * sharp if row is None else row.log()
            if row is None:  # what was chosen without a row had better be right now and then
                drafted = tree.samples[sample]
                near[[drafted.tokens[child] for child in drafted.children(node)]] += 2 * sharp
            scores.append(near + 0.5 * torch.randn(vocabulary, generator=generator))
        scores = torch.stack(scores)
        nodes = max(shape.num_nodes for shape in shapes)
        noise = Noise.draw([Noise.source(100 * turn + i) for i in range(len(trees))], nodes)
        expected = verifier(tree, SoftmaxRows(scores), noise).samples
        found = verify_packed(tree, scores, noise, lifted=lifted)
        for sample, (verdict, end) in enumerate(zip(expected, found, strict=True)):
            if verdict is None:
                assert end is None
                continue
            last = verdict.path[-1] if verdict.path else 0
            assert end == (last, verdict.token), (turn, sample)
            lengths.add(len(verdict.path))
            recovered.add(verdict.recovered)
    assert len(lengths) >= 2
    assert recovered == {False, True}


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
    assert not any(TopDown(rule).rejects_in_turn for rule in (KSeq(), SpecHub("paper")))


@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
def test_nothing_was_drafted(lifted):
    """Every tree is a root, as when a decider stops at once: tokens are drawn from the target's rows."""
    tree = DraftTree((SampleTree(TreeTopology.chain(0), WithoutReplacement(1), {0: 1}), None) * 2)
    scores = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    noise = Noise.draw([Noise.source(sample) for sample in range(4)], 1)
    expected = (Lifted if lifted else TopDown)(RecursiveRejection())(tree, SoftmaxRows(scores), noise).samples
    found = verify_packed(tree, scores, noise, lifted=lifted)
    assert found == [verdict and (0, verdict.token) for verdict in expected]
