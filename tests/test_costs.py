"""What rows cost, which drafts are given up for it, and that this loses nothing."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import PROMPTS, context, left_padded, ragged, tiny

from arbordraft import (
    CostTable,
    Coupling,
    EarlyExitDrafter,
    Fixed,
    HybridDrafter,
    LanguageModelDrafter,
    Lifted,
    Matching,
    NGramDrafter,
    RaggedModel,
    RecursiveRejection,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
    builders,
)
from arbordraft.costs import NodeBudget
from arbordraft.measuring import measure_rows
from arbordraft.types import SampleVerdict, Verdict

FLAT = CostTable((1, 64), (1.0, 1.0))
STEEP = CostTable((1, 64), (1.0, 64.0))


def test_costs_are_interpolated_and_extrapolated():
    table = CostTable((1, 4, 8), (1.0, 4.0, 12.0))
    assert [table(rows) for rows in (1, 2, 4, 6, 8, 10)] == [1.0, 2.0, 4.0, 8.0, 12.0, 16.0]


def test_noise_cannot_make_more_rows_cheaper():
    assert CostTable((1, 2, 3), (2.0, 1.0, 3.0)).seconds == (2.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("rows", "seconds"), [((2, 4), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (1.0,)), ((1, 2), (0.0, 1.0)), ((), ())]
)
def test_malformed_tables_are_refused(rows, seconds):
    with pytest.raises(ValueError, match=r"cost table|seconds\[0\] must be above 0"):
        CostTable(rows, seconds)


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    samples=st.integers(1, 4),
    chances=st.lists(st.floats(0, 1), max_size=6),
)
def test_the_best_number_of_drafts_is_found(seconds, samples, chances):
    table = CostTable((1, 4, 8), tuple(seconds))
    chances = sorted(chances, reverse=True)
    rates = [(samples + sum(chances[:n])) / table(samples + n) for n in range(len(chances) + 1)]
    assert rates[table.worthwhile(samples, chances)] == pytest.approx(max(rates))
    # Below the floor nothing pays, however many there are.
    hopeless = [min(1.0, max(0.0, table.floor(samples) * 0.99))] * 6
    gained = (samples + sum(hopeless[: (n := table.worthwhile(samples, hopeless))])) / table(samples + n)
    assert gained == pytest.approx(samples / table(samples))


@given(
    seconds=st.lists(st.floats(0.01, 10), min_size=3, max_size=3),
    alike=st.integers(1, 6),
    chances=st.lists(st.floats(0, 1), max_size=6),
)
def test_a_sample_spends_as_in_a_batch_of_its_like(seconds, alike, chances):
    """So many drafts are kept of each of several equal samples, where all keep the same."""
    table = CostTable((1, 4, 8), tuple(seconds))
    chances = sorted(chances, reverse=True)
    rates = [alike * (1 + sum(chances[:n])) / table(alike * (1 + n)) for n in range(len(chances) + 1)]
    assert rates[table.worthwhile(1, chances, alike)] == pytest.approx(max(rates))
    floor = table.floor(1, alike=alike)
    hopeless = [min(1.0, max(0.0, floor * 0.99))] * 6
    kept = table.worthwhile(1, hopeless, alike)
    assert (1 + sum(hopeless[:kept])) / table(alike * (1 + kept)) == pytest.approx(1 / table(alike))


def test_sampled_samples_have_each_their_own_budget():
    budget, chances = NodeBudget(3), [0.9, 0.5, 0.4, 0.3]
    assert [budget.worthwhile(1, chances, alike) for alike in (1, 5)] == [2, 2]
    assert [budget.floor(1, chances, alike) for alike in (1, 5)] == [0.5, 0.5]


def test_a_table_survives_the_disk(tmp_path):
    table = CostTable((1, 8), (0.1, 0.2))
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json") == table
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_measuring_leaves_nothing_behind():
    table = measure_rows(ragged(), rows=(1, 2, 4), context=8, repeats=1)
    assert table.rows == (1, 2, 4)
    assert min(table.seconds) > 0


def test_the_trim_keeps_trees_and_the_best_nodes():
    """Chances 0.9, 0.9 * 0.9 on the first branch and 0.1 on the second: two rows pay, the third does not."""

    class Certain(NGramDrafter):
        def _lookup(self, index, text, wanted):
            return dict(itertools.islice({7: 4, 8: 1}.items(), wanted))

    topology = TreeTopology.from_k_config((2, 1))
    drafter = Certain()
    state = drafter.start([[5, 6]], None, [0])
    state.odds[0]._counts = {(4, 0): (90.0, 100.0), (1, 1): (10.0, 100.0)}
    costs = CostTable((1, 64), (1.0, 1.0 + 63 * 0.3))
    view = context([[5, 6]], topology, Fixed(2))
    drafter.propose(state, view)
    object.__setattr__(view, "costs", costs)
    (tree,) = drafter.propose(state, view).samples
    assert tree.tokens == {0: 6, 1: 7, 3: 7}


def test_lookups_learn_how_often_they_come_true():
    drafter = NGramDrafter(longest=2, shortest=1)
    topology = TreeTopology.chain(1)
    state = drafter.start([[1, 2, 1, 2, 1]], None, [0])
    before = state.odds[0](2, 0)
    tree = drafter.propose(state, context([[1, 2, 1, 2, 1]], topology, Fixed(1)))
    assert tree.samples[0].tokens == {0: 1, 1: 2}
    drafter.commit(state, tree, Verdict((SampleVerdict((1,), 1, recovered=False),)))
    assert state.odds[0](2, 0) > before
    tree = drafter.propose(state, context([[1, 2, 1, 2, 1, 2, 1]], topology, Fixed(1)))
    learned = state.odds[0](2, 0)
    drafter.commit(state, tree, Verdict((SampleVerdict((), 9, recovered=True),)))
    assert state.odds[0](2, 0) < learned
    assert state.odds[0](1, 0) == NGramDrafter().start([[1]], None, [0]).odds[0](1, 0)  # others learn nothing


def decode(decoder, **settings):
    output = decoder.generate(**left_padded(PROMPTS), max_new_tokens=40, return_dict_in_generate=True, **settings)
    return output.sequences.tolist(), output.stats


@pytest.mark.parametrize("costs", [None, FLAT, STEEP], ids=["all", "free rows", "dear rows"])
@pytest.mark.parametrize("kind", ["lookup", "early exit", "hybrid", "hybrid with a model"])
def test_greedy_output_is_the_same_at_any_price(kind, costs):
    target = RaggedModel(tiny(sharpness=3), kernels="torch")
    lookup, early = NGramDrafter(longest=4, shortest=2), EarlyExitDrafter(target, 1)
    drafter = {
        "lookup": lookup,
        "early exit": early,
        "hybrid": HybridDrafter(lookup, early),
        "hybrid with a model": HybridDrafter(lookup, LanguageModelDrafter(ragged(seed=1))),
    }[kind]
    coupling = Coupling(Fixed(2), TopDown(Matching()))
    decoder = SpeculativeDecoder(target, drafter, TreeTopology.from_k_config((2, 2, 1)), coupling, costs=costs)
    expected, _ = decode(builders.plain(target), do_sample=False)
    found, stats = decode(decoder, do_sample=False)
    assert found == expected
    assert (stats.drafted > 0) == (costs is not STEEP)


def test_random_drafts_are_never_given_up():
    """A drawn token must be verified: giving it up for its probability would bias the output."""
    target = ragged()
    coupling = Coupling(TopTail(1, 1), TopDown(RecursiveRejection()))
    decoder = SpeculativeDecoder(target, EarlyExitDrafter(target, 1), TreeTopology.chain(3), coupling, costs=STEEP)
    _, stats = decode(decoder, do_sample=True, seeds=[1, 2, 3])
    assert stats.drafted > 0


def test_a_hybrid_needs_a_verifier_for_both_laws():
    target = ragged()
    hybrid = HybridDrafter(NGramDrafter(), EarlyExitDrafter(target, 1))
    topology = TreeTopology.k_ary(2, 2)
    SpeculativeDecoder(target, hybrid, topology, Coupling(TopTail(1, 1), Lifted(RecursiveRejection())))
    with pytest.raises(ValueError, match="not valid"):
        SpeculativeDecoder(target, hybrid, topology, Coupling(TopTail(1, 1), TopDown(SpecHub())))


def test_plain_decoding_is_one_token_per_forward():
    target = RaggedModel(tiny(sharpness=3), kernels="torch")
    found, stats = decode(builders.plain(target), do_sample=False)
    assert stats.tau == 1
    assert stats.drafted == 0
    for prompt, row in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        alone = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
        columns = max(map(len, PROMPTS))
        assert row[columns : columns + alone.shape[1] - len(prompt)] == alone[0, len(prompt) :].tolist()
