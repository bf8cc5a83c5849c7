"""Rows of temperature 0 are one-hot: exact verifiers decide as matching with the most probable tokens does."""

import pytest
import torch
from support.verdicts import COUPLINGS, LOST, THREE, TWO, grown

from arbordraft import Coupling, Lifted, RecursiveRejection, TopDown, WithoutReplacement
from arbordraft.sampling.noise import Noise
from arbordraft.sampling.rows import MixedRows, SoftmaxRows


def batches(law, turns):
    """Yields trees, scores near their draft rows, and noise."""
    generator = torch.Generator().manual_seed(2)
    for turn in range(turns):
        for shape in THREE if law.k == 3 else TWO:
            tree = grown(shape, law, 7, generator, 1.0, LOST)
            scores = torch.randn(tree.rows, 7, generator=generator)
            for row in range(tree.rows):
                scores[row, tree.token[tree.children[row]]] += 1.5  # so that drafts are often right
            yield tree, scores, Noise.draw([Noise.source(100 * turn + i) for i in range(len(tree))], shape.num_nodes)


@pytest.mark.parametrize("lift", [TopDown, Lifted])
@pytest.mark.parametrize("kind", COUPLINGS)
def test_matching_decides_as_exact_verifiers_do(kind, lift):
    law, rule = COUPLINGS[kind]
    coupling, lengths, differing = Coupling(law, lift(rule)), set(), 0
    for tree, scores, noise in batches(law, 8):
        rows = SoftmaxRows(scores, temperature=0.0)
        matched = coupling(tree, rows, None)
        for walked in (coupling.verifier(tree, rows, noise), coupling(tree, rows.probabilities, noise)):
            assert vars(walked) == vars(matched)
        lengths |= {matched.accepted(sample) for sample in tree.living}
        # Negative control: at temperature 1, verdicts differ.
        differing += vars(coupling(tree, SoftmaxRows(scores), noise)) != vars(matched)
    assert len(lengths) > 2
    assert differing > 8


@pytest.mark.parametrize("lift", [TopDown, Lifted])
def test_each_sample_of_a_batch_is_decided_at_its_own_temperature(lift):
    coupling, differing = Coupling(WithoutReplacement(3), lift(RecursiveRejection())), 0
    for tree, scores, noise in batches(coupling.law, 4):
        certain, drawn = SoftmaxRows(scores, temperature=0.0), SoftmaxRows(scores, temperature=0.7)
        mixed = MixedRows([certain, drawn], (tree.owner == 2).tolist())
        found = coupling(tree, mixed, noise)
        for sample in tree.living:
            rows, other = (drawn, certain) if sample == 2 else (certain, drawn)
            assert found[sample] == coupling(tree, rows, noise, [sample])[sample]
            differing += found[sample] != coupling(tree, other, noise, [sample])[sample]
        assert torch.equal(mixed.probabilities, torch.stack([mixed[row] for row in range(tree.rows)]))
        assert [row for row in range(tree.rows) if mixed[row].max() == 1] == (tree.owner != 2).nonzero()[0].tolist()
    assert differing, "negative control: the other temperature gives other verdicts"


def test_rows_that_are_not_certain_need_noise():
    coupling = Coupling(WithoutReplacement(3), TopDown(RecursiveRejection()))
    tree, scores, _ = next(batches(coupling.law, 1))
    with pytest.raises(TypeError, match="noise must be of type Noise"):
        coupling(tree, SoftmaxRows(scores), None)
