"""Global resolution: the optimum of independent drafts, for vocabularies too large for programs over all tuples."""

import numpy as np
import pytest

import arbordraft as ad
from arbordraft.sampling.laws import IID, SharedNoise, TopTail, WithoutReplacement
from arbordraft.testing import ROW_KINDS, acceptance, distance_to_target, random_rows, random_table, row
from arbordraft.verifiers import GlobalResolution, Lifted, Remembered, TopDown, optimal_acceptance
from arbordraft.verifiers.resolution import Race

TREE = ad.TreeTopology([-1, 0, 0, 1, 1])


@pytest.mark.parametrize("draws", [1, 2, 3])
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_resolution_reaches_the_optimum(kind, draws):
    rows = random_rows(kind, 4, 1)
    found = acceptance(GlobalResolution(tolerance=1e-6, rounds=500), IID(draws), *rows)
    assert found == pytest.approx(optimal_acceptance(IID(draws), *rows), abs=1e-5)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_law_is_the_targets_with_any_weights(kind):
    """With one group, all weights are equal; after one round, they are still the initial ones."""
    table = random_table(kind, 3, seed=2)
    for rule in (GlobalResolution(), GlobalResolution(groups=1), GlobalResolution(rounds=1)):
        for lift in (TopDown, Lifted):
            assert distance_to_target(lift(Remembered(rule)), TREE, IID(2), table) < 1e-12


class Unweighed(GlobalResolution):
    """Accepts the picked token by its draft probability, as if it were the only draft, not by that of being picked."""

    def node_law(self, target, weight, draft, tokens, law):
        found = super().node_law(target, weight, draft, tokens, law)
        ratios = [min(1.0, float(target[token] / draft[token])) / len(tokens) for token in tokens]
        scale = (1 - sum(ratios)) / max(1e-300, 1 - sum(found.accept))
        return type(found)(ratios, found.stop * scale, found.reject * scale)


def test_treating_a_picked_token_as_a_single_draft_is_biased():
    table = random_table("random", 3, seed=2)
    assert distance_to_target(TopDown(Unweighed()), ad.TreeTopology.k_ary(2, 1), IID(2), table) > 1e-2


@pytest.mark.parametrize("draws", [2, 4, 8])
def test_a_real_vocabulary(draws):
    """The law of picked tokens sums to one, and its acceptance is within 0.01 of the optimum over all tuples."""
    generator = np.random.default_rng(0)
    logits = 3 * generator.normal(size=50_000)
    q, p = np.exp(logits), np.exp(logits + 0.7 * generator.normal(size=50_000))
    q, p = q / q.sum(), p / p.sum()
    race = Race.best(p, q, draws, tolerance=1e-3, groups=1024, rounds=100)
    assert race.law.sum() == pytest.approx(1, abs=1e-12)
    best = optimal_acceptance(IID(draws), row(*p), row(*q))
    assert best - 0.01 < np.minimum(p, race.law).sum() <= best + 1e-12
    assert np.minimum(p, race.law).sum() > np.minimum(p, q).sum() + 0.05


@pytest.mark.parametrize("law", [WithoutReplacement(2), TopTail(1, 1), ad.Fixed(2), SharedNoise(2)], ids=str)
def test_other_draft_laws_are_refused(law):
    with pytest.raises(ValueError, match="not valid"):
        ad.Coupling(law, TopDown(GlobalResolution()))


@pytest.mark.parametrize("options", [{"tolerance": 0}, {"groups": 0}, {"rounds": 0}], ids=str)
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        GlobalResolution(**options)
