"""Verification of all trees at once, from scores, against the walk that goes through one tree after the other."""

import torch

import arbordraft as ad
from arbordraft.kernels import choice
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.sampling.noise import Noise
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.verifiers import TopTailRule
from arbordraft.verifiers.packed import verify_packed


class Repeated(ad.Fixed):
    """The children of a drafter that proposes its best token twice."""

    def narrow(self, children):
        return Repeated(children)

    def draw(self, draft, uniforms):
        best, *others = super().draw(draft, uniforms)
        return [best, best, *others][: self.k]


COUPLINGS = {
    "iid": (ad.IID(3), ad.RecursiveRejection()),
    "without replacement": (ad.WithoutReplacement(3), ad.RecursiveRejection()),
    "one top": (ad.TopTail(1, 2), ad.RecursiveRejection()),
    "two tops": (ad.TopTail(2, 1), TopTailRule()),
    "adaptive": (AdaptiveTopTail(3, 0.15), ad.RecursiveRejection()),
    "certain": (ad.Fixed(3), ad.RecursiveRejection()),
    "repeated": (Repeated(3), ad.RecursiveRejection()),
    "hub": (ad.TopTail(1, 1), ad.SpecHub()),
}
THREE = [
    ad.TreeTopology.k_ary(3, 2),
    ad.TreeTopology.from_k_config((3, 2, 1)),
    ad.TreeTopology.chain(3),
    ad.TreeTopology.chain(0),
]
TWO = [ad.TreeTopology.k_ary(2, 3), ad.TreeTopology.from_k_config((2, 1, 1))]


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


def check_verdicts(coupling, lifted, vocabulary, turns, path="auto"):
    """Verifies random batches of trees both ways, and sees paths of several lengths and both kinds of last token.

    ``path`` says which kernels verify all trees at once.
    """
    law, rule = coupling
    verifier, shapes = (ad.Lifted if lifted else ad.TopDown)(rule), THREE if law.k == 3 else TWO
    assert rule.rejects_in_turn
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
        with choice.use(path):
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
