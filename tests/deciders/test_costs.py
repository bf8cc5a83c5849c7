"""Costs of rows, the drafts that are given up for them, and output that stays the same."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression
from support.models import check_greedy, context, decode, grown, joined, ragged

import arbordraft as ad
from arbordraft import builders
from arbordraft.deciders import CostAware, Decider
from arbordraft.deciders.costs import StepCosts, levelled
from arbordraft.deciders.decisions import Limits, Verification
from arbordraft.drafters.ngram import Guess
from arbordraft.trees.verdict import Verdict


def test_costs_are_interpolated_and_extrapolated():
    table = ad.CostTable((1, 4, 8), (1.0, 4.0, 12.0))
    assert [table(rows) for rows in (1, 2, 4, 6, 8, 10)] == [1.0, 2.0, 4.0, 8.0, 12.0, 16.0]


@pytest.mark.parametrize(
    ("seconds", "most", "rows"),
    [(0.5, 20, 1), (4.0, 20, 4), (8.0, 20, 6), (16.0, 20, 10), (15.9, 20, 9), (99.0, 20, 20)],
    ids=["none is as fast", "measured", "in between", "beyond", "not quite", "bounded"],
)
def test_how_many_rows_a_time_allows(seconds, most, rows):
    assert ad.CostTable((1, 4, 8), (1.0, 4.0, 12.0)).within(seconds, most) == rows


def test_noise_cannot_make_more_rows_cheaper():
    assert ad.CostTable((1, 2, 3), (2.0, 1.0, 3.0)).seconds == (1.5, 1.5, 3.0)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.1, 20)), min_size=1, max_size=9))
def test_times_are_levelled_to_the_nearest_rising_ones(measured):
    values, weights = map(list, zip(*measured, strict=True))
    assert levelled(values, weights) == pytest.approx(isotonic_regression(values, weights=weights).x.tolist())


@given(st.lists(st.floats(0.01, 10), min_size=3, max_size=3), st.integers(1, 20), st.integers(1, 20))
def test_the_least_slope_is_that_of_the_cheapest_number_of_rows(seconds, rows, more):
    table = ad.CostTable((1, 4, 8), tuple(seconds))
    found = table.least_slope(rows, more)
    slopes = [(table(rows + extra) - table(rows)) / extra for extra in range(1, more + 1)]
    assert found in slopes
    assert 0 <= found <= min(slopes) + 1e-12


def test_a_table_survives_the_disk(tmp_path):
    table = ad.CostTable((1, 8), (0.1, 0.2))
    table.save(tmp_path / "costs.json")
    assert ad.CostTable.load(tmp_path / "costs.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_step_costs_survive_a_file(tmp_path):
    rows, levels = ad.CostTable((1, 64), (1.0, 7.3)), ad.CostTable((1, 64), (0.2, 0.2))  # 0.1 a row, 0.2 a level
    costs = StepCosts(rows, levels, decide=0.125, rest=10.0)
    assert [costs.step(1, levels) for levels in range(3)] == pytest.approx([11, 11.425, 11.85])
    costs.save(tmp_path / "costs.json")
    assert StepCosts.load(tmp_path / "costs.json") == costs
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]
    for broken in ("{}", "[]", "no", '{"target": {"rows": [1], "seconds": [0]}, "draft": 3}'):
        (tmp_path / "costs.json").write_text(broken)
        with pytest.raises(ValueError, match="holds no step costs"):
            StepCosts.load(tmp_path / "costs.json")
    beginning = replace(costs, start=1.0, joining=0.5)
    assert [beginning.step(samples, 0) for samples in (1, 3)] == [costs.step(samples, 0) for samples in (1, 3)]
    assert beginning.step(3, 2) - costs.step(3, 2) == pytest.approx(2.0)
    assert [replace(costs, lookup=1.0, finding=0.5).looking(samples) for samples in (1, 3)] == [1.0, 2.0]


def test_pruning_keeps_trees_and_the_best_nodes():
    """Chances are 0.9 and 0.9 * 0.9 on the first branch, and 0.1 on the second: two rows pay, the third does not."""

    class Certain(ad.NGramDrafter):
        def _lookup(self, index, tokens, suffix, wanted, allowed, pool, predicted):
            return [Guess(7, size=4, votes=1, rank=0), Guess(8, size=1, votes=1, rank=1)][:wanted]

    topology = ad.TreeTopology.from_k_config((2, 1))
    drafter = Certain()
    state = joined(drafter, [[5, 6]])
    state.texts[0].odds._counts = {(4, 1, 0): (90.0, 100.0), (1, 1, 1): (10.0, 100.0)}
    costs = ad.CostTable((1, 64), (1.0, 1.0 + 63 * 0.3))
    tree = grown(drafter, state, context([[5, 6]], topology, ad.Fixed(2)), decide=CostAware(costs))
    assert (tree.node.tolist(), tree.token.tolist()) == ([0, 1, 3], [6, 7, 7])
    assert tree.chance[1:].tolist() == pytest.approx([0.9, 0.9])
    assert grown(drafter, state, context([[5, 6]], topology, ad.Fixed(2))).rows > 3


@pytest.mark.parametrize("right", [True, False])
def test_lookups_learn_how_often_they_are_accepted(right):
    drafter, text = ad.NGramDrafter(longest=2, shortest=1), [1, 2, 1, 2, 1]
    state = joined(drafter, [text])
    tree = grown(drafter, state, context([text], ad.TreeTopology.chain(1), ad.Fixed(1)))
    assert tree.token.tolist() == [1, 2]
    odds, guess = state.texts[0].odds, Guess(2, size=2, votes=1, rank=0)
    before = odds(guess)
    assert tree.chance[1] == before
    drafter.commit(state, tree, Verdict.of(tree, {0: (1, 1) if right else (0, 9)}))
    assert (odds(guess) > before) == right
    new = joined(ad.NGramDrafter(), [[1]]).texts[0].odds
    for other in (guess._replace(size=1), guess._replace(votes=2), guess._replace(rank=1)):
        assert odds(other) == new(other)  # others learn nothing


class Stingy(Decider):
    """Plans one draft and keeps none."""

    can_plan = True

    def plan(self, situation):
        return Limits.everything(situation.max_depth, budget=1, verification=Verification(np.zeros(1), 0.0))


@pytest.mark.parametrize(("law", "nodes"), [(ad.TopTail(1, 1), 5), (ad.Fixed(2), 1)], ids=str)
def test_random_drafts_are_never_given_up(law, nodes):
    """A drawn token must be verified: giving it up for its probability would bias the output."""
    target = ragged()
    coupling = ad.Coupling(law, ad.TopDown(ad.RecursiveRejection()))
    topology, steps = ad.TreeTopology.from_k_config((2, 1)), []
    decoder = ad.SpeculativeDecoder(target, ad.EarlyExitDrafter(target, 1), topology, coupling, Stingy())
    decoder.on_step = lambda state, tree, verdict: steps.append(tree.lengths)
    decode(decoder, max_new_tokens=40, do_sample=True, seeds=[1, 2, 3])
    assert steps[0] == [nodes] * 3


def test_a_hybrid_needs_a_verifier_for_both_laws():
    target = ragged()
    hybrid = ad.HybridDrafter(ad.NGramDrafter(), ad.EarlyExitDrafter(target, 1))
    topology = ad.TreeTopology.k_ary(2, 2)
    ad.SpeculativeDecoder(target, hybrid, topology, ad.Coupling(ad.TopTail(1, 1), ad.Lifted(ad.RecursiveRejection())))
    with pytest.raises(ValueError, match="not valid"):
        ad.SpeculativeDecoder(target, hybrid, topology, ad.Coupling(ad.TopTail(1, 1), ad.TopDown(ad.SpecHub())))


def test_plain_decoding_is_one_token_per_forward():
    target = ragged(sharpness=3)
    stats = check_greedy(builders.plain(target), count=40)
    assert stats.tau == 1
    assert stats.drafted == 0
