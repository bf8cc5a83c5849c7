"""Trees in other engines' notation, and trees fitted to what a target accepts."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import PROMPTS, left_padded, ragged

from arbordraft import (
    Coupling,
    DecodeStats,
    LanguageModelDrafter,
    RecursiveRejection,
    SpeculativeDecoder,
    TopDown,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.deciders import FixedDepth
from arbordraft.exports import from_tree_choices, to_tree_choices
from arbordraft.training import fit_topology


@st.composite
def parent_lists(draw):
    """Trees of up to four levels, children in the order of their parents."""
    parents, level = [-1], range(1)
    for _ in range(draw(st.integers(0, 3))):
        counts = [draw(st.integers(0, 3)) for _ in level]
        parents += [parent for parent, count in zip(level, counts, strict=True) for _ in range(count)]
        level = range(level.stop, len(parents))
    return parents


def test_tree_choices_are_ranks_along_the_path():
    assert to_tree_choices(TreeTopology.from_k_config((2, 1))) == [(0,), (1,), (0, 0), (1, 0)]
    assert to_tree_choices(TreeTopology.chain(0)) == []


@given(parent_lists(), st.randoms())
def test_tree_choices_round_trip(parents, random):
    choices = to_tree_choices(TreeTopology(parents))
    random.shuffle(choices)
    assert list(from_tree_choices(choices).parent_list) == parents


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([(0,), (0,)], "listed twice"),
        ([()], "is the root"),
        ([(0, 0)], r"without its parent \(0,\)"),
        ([(1,)], "elder siblings"),
        ([(0,), (-1,)], "ranks start at 0"),
    ],
)
def test_malformed_tree_choices(choices, message):
    with pytest.raises(ValueError, match=message):
        from_tree_choices(choices)


def decoder(drafter, decider=None):
    coupling = Coupling(WithoutReplacement(3), TopDown(RecursiveRejection()))
    return SpeculativeDecoder(ragged(), LanguageModelDrafter(drafter), TreeTopology.k_ary(3, 1), coupling, decider)


def test_a_perfect_drafter_deserves_a_chain():
    batches = [left_padded(PROMPTS[:2]), left_padded(PROMPTS[2:])]
    fitted = fit_topology(decoder(ragged()), batches, 5, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert fitted.parent_list == TreeTopology.chain(4).parent_list


def test_a_fitted_tree_has_the_wanted_size():
    options = {"max_new_tokens": 24, "do_sample": True, "top_k": 0, "eos_token_id": None, "seeds": [1, 2, 3]}
    fitted = fit_topology(decoder(ragged(seed=3)), [left_padded(PROMPTS)], 9, max_depth=2, **options)
    assert (fitted.num_nodes, fitted.max_depth) == (9, 2)


def test_acceptance_is_counted_by_rank():
    """Half of the tries went to the first child, three in ten to the third: the second earns nothing below it."""
    stats = DecodeStats("exact", [10], [10], tried=Counter({1: 10}), accepted_rank=Counter({0: 5, 2: 3}))
    coupling = SimpleNamespace(law=WithoutReplacement(3))
    measured = SimpleNamespace(coupling=coupling, generate=lambda **kwargs: SimpleNamespace(stats=stats))
    fitted = fit_topology(measured, [{}], nodes=6)
    assert fitted.parent_list == TreeTopology.sequoia((0.5, 0.0, 0.3), 6).parent_list


def test_nothing_to_fit_to():
    with pytest.raises(ValueError, match="no drafts were tried on these prompts; give longer outputs"):
        fit_topology(decoder(ragged(), FixedDepth(0)), [left_padded(PROMPTS)], 5, max_new_tokens=4, do_sample=False)
