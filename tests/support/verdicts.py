"""Compares verification of all trees at once, from scores, with verification of one tree after the other."""

import torch

import arbordraft as ad
from arbordraft.kernels import choice
from arbordraft.sampling.laws import AdaptiveTopTail
from arbordraft.sampling.noise import Noise
from arbordraft.sampling.rows import SoftmaxRows
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.verifiers import TopTailRule
from arbordraft.verifiers.packed import verify_packed


class Repeated(ad.Fixed):
    """Draws children like a drafter that proposes its best token twice."""

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
CROSSED = [ad.TreeTopology([-1, 0, 0, 2, 1, 2, 1, 5, 3, 4])]  # nodes of a level in another order than their parents
LOST = [(), None, (3, 9, 12), (1, 6)]  # per sample: nodes that are given up with their descendants


def drawn(topology, law, vocabulary, generator, sharp, lost=()):
    """Returns tokens and draft rows of a random tree; ``lost`` nodes and their descendants are given up."""
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
    return dict(sorted(tokens.items())), rows


def grown(topology, law, vocabulary, generator, sharp, lost):
    """Returns a batch of such trees; ``lost`` lists the lost nodes per sample, or ``None`` if it takes no part."""
    trees = [(None, None) if own is None else drawn(topology, law, vocabulary, generator, sharp, own) for own in lost]
    return DraftTree.of(topology, law, *map(list, zip(*trees, strict=True)))


def ends_of(verdict):
    """Returns the last accepted row and the next token per sample, as the packed verifier does."""
    return {
        sample: (path[-1], token)
        for sample, (path, token) in enumerate(zip(verdict.paths, verdict.tokens, strict=True))
        if path
    }


def check_verdicts(coupling, lifted, vocabulary, turns, path="auto", shapes=None):
    """Verifies random batches of trees both ways; checks that paths differ in length and last tokens in kind.

    ``path`` chooses the kernels that verify all trees at once.
    """
    law, rule = coupling
    verifier, shapes = (ad.Lifted if lifted else ad.TopDown)(rule), shapes or (THREE if law.k == 3 else TWO)
    assert rule.rejects_in_turn
    generator, lengths, recovered = torch.Generator().manual_seed(1), set(), set()
    for turn in range(turns):
        sharp = 1.0 if vocabulary < 100 else 4.0
        for shape in shapes:
            tree = grown(shape, law, vocabulary, generator, sharp, LOST)
            scores = []
            for row in range(tree.rows):
                draft = tree.drawn_from(row)
                near = torch.randn(vocabulary, generator=generator) * sharp if draft is None else draft.log()
                if draft is None:  # tokens chosen without a row must be accepted now and then
                    near[tree.token[tree.children[row]]] += 2 * sharp
                scores.append(near + 0.5 * torch.randn(vocabulary, generator=generator))
            scores = torch.stack(scores)
            noise = Noise.draw([Noise.source(100 * turn + i) for i in range(len(tree))], shape.num_nodes)
            expected = verifier(tree, SoftmaxRows(scores), noise)
            with choice.use(path):
                assert verify_packed(tree, scores, noise, lifted=lifted) == ends_of(expected), turn
            lengths |= {expected.accepted(sample) for sample in tree.living}
            recovered |= {expected.recovered[sample] for sample in tree.living}
    assert len(lengths) >= 2
    assert recovered == {False, True}
