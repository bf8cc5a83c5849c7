"""Trees grown in one call of the kernels equal trees grown level by level in plain torch."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from support.companions import Rounds
from support.grown_trees import (
    BETWEEN_LEVELS,
    BINARY,
    ENDS,
    GREEDY,
    HOT,
    LAW,
    MANY,
    PLANS,
    TEMPERATURES,
    TEXTS,
    TOPOLOGIES,
    at_most,
    check,
    check_no_drafts,
    trees,
)
from support.models import PROMPTS, VOCAB
from support.native_drafters import KINDS, built
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from arbordraft import EagleDrafter, TreeTopology
from arbordraft.deciders.decisions import Limits
from arbordraft.drafters import feeding, grow, one_call
from arbordraft.heads.medusa import MedusaHead
from arbordraft.kernels.decoder_layers import Norm
from arbordraft.kernels.draft_tree import DraftRun
from arbordraft.kernels.prepacked_linear import WEIGHTS

pytestmark = pytest.mark.usefixtures("kernels")


@cache
def both(kind):
    """Returns targets and drafters with native kernels and with torch's modules; tests must not change them."""
    return built(kind), built(kind, "torch")


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """Records for every attempt to grow trees in one call whether it succeeded."""
    done, real = [], grow.grow_in_one_call

    def counted(stage, group):
        found = real(stage, group)
        done.append(found)
        return found

    monkeypatch.setattr(grow, "grow_in_one_call", counted)
    return done


NEAR = 0.04  # with noise, the mass of all tokens but the first is an estimate from above


def pair(kind, texts=TEXTS):
    fast, slow = both(kind)
    return Rounds(fast[1], fast[0], texts), Rounds(slow[1], slow[0], texts)


# With noise, chances are estimates, which may decide otherwise about drafts at a price.
CASES = [("0", plan) for plan in PLANS]
CASES += [(heat, plan) for heat in ("0.5", "1") for plan in ("everything", "levels", "large budget")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("heat", "plan"), CASES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_call_grows_the_same_trees(calls, kind, topology, heat, plan):
    near = {} if heat == "0" else {"near": NEAR}
    count = check(*pair(kind), TOPOLOGIES[topology], PLANS[plan], **near, **TEMPERATURES[heat])
    nothing = topology == "root" or plan == "nothing"
    assert calls == [True, nothing] * 3, "the first drafter must grow trees in one call"
    assert (count > 0) != nothing


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heat", TEMPERATURES)
@pytest.mark.parametrize("text", PROMPTS, ids=len)
@pytest.mark.parametrize("kind", KINDS)
def test_single_samples(kind, text, heat):
    """A text of one token has no state to start from."""
    count = check(*pair(kind, [text]), BINARY, PLANS["everything"], near=NEAR, **TEMPERATURES[heat])
    assert count > (14 if "model" not in kind and len(text) == 1 else 28)


@pytest.mark.parametrize("chunk", [1, 3, 4, 12, 13])
@pytest.mark.parametrize("kind", ["eagle, trimmed", "model"])
def test_prompts_in_portions(monkeypatch, kind, chunk):
    monkeypatch.setattr(feeding, "CHUNK", chunk)
    long = [list(range(3, 40)), [9], list(range(50, 20, -1)), [5, 6] * 7]
    assert check(*pair(kind, long), BINARY, PLANS["everything"], **GREEDY) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_finished_samples_get_no_tree(kind):
    fast, slow = pair(kind)
    for rounds in (fast, slow):
        rounds.commit(trees(rounds, BINARY, PLANS["everything"], **GREEDY)[0], [1, None, 0, None])
    (_, found), (_, expected) = (trees(rounds, BINARY, PLANS["everything"], **GREEDY) for rounds in (fast, slow))
    assert [tree is None for tree in found] == [False, True, False, True]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours and ours[0]) == (theirs and theirs[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heat", TEMPERATURES)
# The gates of block heads go through torch's sigmoid, whose rounding depends on the place.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "block" not in kind])
def test_other_samples_change_no_bit(kind, heat):
    target, drafter = both(kind)[0]
    together = Rounds(drafter, target, TEXTS)
    alone = [Rounds(drafter, target, [text]) for text in TEXTS]
    for number in range(3):
        tree, found = trees(together, BINARY, at_most(MANY), seed=50 * number, **TEMPERATURES[heat])
        together.commit(tree, ENDS[4][number])
        for sample, rounds in enumerate(alone):
            tree, (one,) = trees(rounds, BINARY, at_most(MANY), seed=50 * number + sample, **TEMPERATURES[heat])
            assert one == found[sample]
            rounds.commit(tree, [ENDS[4][number][sample]])


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind):
    target, drafter = both(kind)[0]
    expected = trees(Rounds(drafter, target, TEXTS), BINARY, at_most(MANY), **GREEDY)[1]
    torch.set_num_threads(2)
    assert trees(Rounds(drafter, target, TEXTS), BINARY, at_most(MANY), **GREEDY)[1] == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("heat", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(calls, kind, heat):
    """Rounding differs slightly from that of level by level."""
    target, drafter = built(kind, dtype=torch.bfloat16)
    wide = both(kind)[1]
    found = trees(Rounds(drafter, target, TEXTS), BINARY, at_most(MANY), **TEMPERATURES[heat])[1]
    expected = trees(Rounds(wide[1], wide[0], TEXTS), BINARY, at_most(MANY), **TEMPERATURES[heat])[1]
    same = [ours[0][1] == theirs[0][1] for ours, theirs in zip(found, expected, strict=True) if len(ours[1])]
    assert calls[0]
    assert sum(same) >= 2 or kind == "eagle"
    assert all(0 < chance <= 1 for _, chances in found for chance in chances)
    assert all(0 <= token < VOCAB for tokens, _ in found for token in tokens.values())


@pytest.mark.parametrize("heat", TEMPERATURES)
@pytest.mark.parametrize("bits", WEIGHTS)
def test_draft_models_of_fewer_bits(calls, bits, heat):
    """Control: the original weights draft other trees."""
    (target, fast), (_, slow) = built("model", bits=bits), built("model", bits=bits)
    slow._network._native = slow.model.prepacking, None  # level by level
    rounds = Rounds(fast, target, TEXTS), Rounds(slow, target, TEXTS)
    assert check(*rounds, BINARY, PLANS["everything"], near=NEAR, **TEMPERATURES[heat]) > 28
    assert calls == [True, False] * 3
    (own, _), options = both("model"), TEMPERATURES[heat]
    found, expected = (
        trees(Rounds(drafter, target, TEXTS), BINARY, PLANS["everything"], **options)[1] for drafter in (fast, own[1])
    )
    assert found != expected


def broken(network):
    """Breaks output weights, so that every row of logits holds a NaN."""
    with torch.no_grad():
        for head in network.lm_heads if isinstance(network, MedusaHead) else [network.lm_head]:
            head.weight[3] = float("nan")


@pytest.mark.parametrize("heat", ["0", "1"])
@pytest.mark.parametrize("kind", ["eagle", "eagle, trimmed", "medusa", "model"])
def test_nan_weights_draft_nothing(kind, heat):
    target, drafter = built(kind, change=None if kind == "model" else broken)
    if kind == "model":  # a model with NaN from the start would be refused
        sound = drafter._network.native.weights
        broken_run = DraftRun(replace(sound, norm=Norm(sound.norm.weight * float("nan"))))
        drafter._network._native = drafter.model.prepacking, broken_run
    check_no_drafts(Rounds(drafter, target, TEXTS), **TEMPERATURES[heat])


PROCESSORS = {
    "min-p": [TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.05)],
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.1)],
    "no repeated n-gram": [NoRepeatNGramLogitsProcessor(3)],
    "bad words": [NoBadWordsLogitsProcessor([[7], [8, 9]], eos_token_id=2)],
    "least length": [MinNewTokensLengthLogitsProcessor(3, 9, 2)],
    "a chat's mix": [RepetitionPenaltyLogitsProcessor(1.1), TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.9)],
    "the user's own": [lambda ids, scores: scores * 2],
}


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("processors", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_processor_sends_python_between_levels(calls, kind, processors, greedy):
    target, drafter = both(kind)[0]
    tree = Rounds(drafter, target, TEXTS).propose(BINARY, law=LAW, processors=processors, greedy=greedy)
    assert calls == [True]
    assert tree.lengths[0] > 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_drafts_follow_the_processors(kind):
    """Children of roots are those of the processed scores."""

    def first(processors, backend=0):
        target, drafter = both(kind)[backend]
        tree = Rounds(drafter, target, TEXTS).propose(
            TreeTopology.chain(1), law=LAW, greedy=True, processors=processors
        )
        return tree.token[tree.node > 0].tolist()

    free = first([])
    for processors in ([RepetitionPenaltyLogitsProcessor(1e6)], [SuppressTokensLogitsProcessor(free)]):
        assert first(processors) == first(processors, 1)
    assert not set(first([SuppressTokensLogitsProcessor(free)])) & set(free)


@pytest.mark.parametrize("options", BETWEEN_LEVELS.values(), ids=BETWEEN_LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_need_the_host_between_levels_are_grown_level_by_level(calls, kind, options):
    target, drafter = both(kind)[0]
    tree = Rounds(drafter, target, TEXTS).propose(BINARY, **{"law": LAW, **options})
    assert calls
    assert not calls[0]
    assert tree.lengths[0] == 15


# Plans and requests that one side might read differently


@pytest.mark.parametrize("kind", KINDS)
def test_plans_that_ask_for_more_levels_than_there_is_room(kind):
    def plan(situation):
        return Limits.everything([9] * len(situation.max_depth))

    assert check(*pair(kind), BINARY, plan, **GREEDY, max_depth=[3, 1, 0, 2]) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_plans_whose_parts_have_unequal_depths(kind):
    def plan(situation):
        count = len(situation.max_depth)
        return Limits.of(situation.max_depth, [(0.5, 1.5, 1.2, 0.3)] * count, [(0.8,)] * count, row_cost=0.03)

    assert check(*pair(kind), BINARY, plan, **GREEDY) > 0


# Negative controls: differences are seen.


def caught(fast, slow, **options):
    with pytest.raises(AssertionError):
        check(fast, slow, BINARY, options.pop("plan", at_most(MANY)), **{**GREEDY, **options})


@pytest.mark.parametrize(("field", "factor"), [("calibration", 1.3), ("expected", 0.6)])
def test_another_weight_of_a_draft_would_be_seen(monkeypatch, field, factor):
    (fast, slow), real = pair("eagle"), DraftRun.__call__

    def other(self, *given):
        trees = given[4]
        limits = replace(trees.limits, **{field: factor * getattr(trees.limits, field)})
        return real(self, *given[:4], trees._replace(limits=limits), *given[5:])

    monkeypatch.setattr(DraftRun, "__call__", other)
    caught(fast, slow, plan=PLANS["dear rows"])


def test_a_shifted_position_would_be_seen(monkeypatch):
    """Only the positions of some rows are shifted; a shift of all rows would change nothing."""
    fast, slow = pair("eagle")
    first = trees(fast, BINARY, at_most(MANY), **GREEDY)[0]
    trees(slow, BINARY, at_most(MANY), **GREEDY)
    for rounds in (fast, slow):
        rounds.commit(first, [1, 0, 2, 3])
    real = DraftRun.__call__

    def shifted(self, tokens, states, pools, slabs, *rest):
        moved = slabs.clone()
        moved[0] -= 1
        moved[1] += 1
        return real(self, tokens, states, pools, moved, *rest)

    monkeypatch.setattr(DraftRun, "__call__", shifted)
    caught(fast, slow)


def test_the_state_of_a_sibling_would_be_seen(monkeypatch):
    fast, slow = pair("eagle")
    real = EagleDrafter.scores

    def swapped(self, state, frontier):
        if frontier.depth == 2:
            state.out = state.out.view(-1, 2, state.out.shape[1]).flip(1).flatten(0, 1)  # every node has two children
        return real(self, state, frontier)

    monkeypatch.setattr(EagleDrafter, "scores", swapped)
    caught(fast, slow)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: replace(weights, scale=1.0),
        lambda weights: replace(weights, layers=[replace(layer, window=None) for layer in weights.layers]),
        lambda weights: replace(weights, layers=[replace(layer, table=0) for layer in weights.layers]),
    ],
    ids=["embeddings", "windows", "tables"],
)
def test_another_reading_of_a_model_would_be_seen(change):
    fast, slow = pair("model, windows")
    drafter = fast.drafter
    known = drafter._network.native
    drafter._network._native = drafter.model.prepacking, DraftRun(change(known.weights))
    try:
        caught(fast, slow)
    finally:
        drafter._network._native = drafter.model.prepacking, known


def test_noise_of_another_seed_would_be_seen(monkeypatch):
    fast, slow = pair("medusa")
    real = one_call.draws_of
    monkeypatch.setattr(one_call, "draws_of", lambda *given: (one := real(*given))._replace(seeds=one.seeds + 1))
    caught(fast, slow, greedy=False, **HOT, near=NEAR)
