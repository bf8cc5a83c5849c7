"""Deciders: when they stop, that each sample stops for itself, and that the output stays the same."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.models import (
    PROMPTS,
    VOCAB,
    context,
    decode,
    generated,
    greedy_reference,
    grown,
    joined,
    left_padded,
    ragged,
)

import arbordraft as ad
from arbordraft.deciders import (
    AcceptedAverage,
    AdaEDL,
    Bandit,
    Decider,
    EntropyBound,
    FixedDepth,
    Heuristic,
    NodeBudget,
    PathSurvival,
)
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Draw, Limits, Origin, Situation, StepView
from arbordraft.drafters import Drafter
from arbordraft.kernels.draft_tree.reference import number_kept
from arbordraft.trees.verdict import Causality, Outcome

CERTAIN, FAIR = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])


def view(depth=1, confidence=((1.0,),), rows=None, memory=None, **options):
    rows = rows or [[None] * len(nodes) for nodes in confidence]
    paths = [
        [(Draw(probability, Origin(lambda row=row: row)),) for probability, row in zip(nodes, theirs, strict=True)]
        for nodes, theirs in zip(confidence, rows, strict=True)
    ]
    return StepView(depth, paths, memory or [None] * len(paths), **options)


def test_fixed_depth():
    three = ((1.0,),) * 3
    assert FixedDepth()(view(99, three)) == [True] * 3
    assert [FixedDepth(2)(view(depth, three)) for depth in (0, 1, 2)] == [[True] * 3, [True] * 3, [False] * 3]


def test_confidence_threshold():
    """One confident node is enough for a sample to go on; a node at the threshold is confident."""
    confidence = ((0.1, 0.5), (0.1, 0.39), (0.4,))
    assert ad.ConfidenceThreshold(0.4)(view(confidence=confidence)) == [True, False, True]


def test_entropy_bound():
    """1 - sqrt(0.2 ln 2) = 0.628; the surest row of a sample decides, and a root has no row."""
    rows = ((FAIR,), (FAIR, CERTAIN), (None,))
    step = view(confidence=((0.5,), (0.5, 1.0), (1.0,)), rows=rows)
    assert step.entropy == [[pytest.approx(math.log(2))], [pytest.approx(math.log(2)), 0.0], [0.0]]
    assert EntropyBound(threshold=0.62)(step) == [True, True, True]
    assert EntropyBound(threshold=0.63)(step) == [False, True, True]


def lengths(decider, accepted, deepest=30):
    """Returns the levels that one sample drafts in each step, if at most ``accepted[step]`` of them are accepted."""
    memory, found = decider.start(), []
    for most in accepted:
        found.append(next((d for d in range(deepest) if not decider(view(d, memory=[memory]))[0]), deepest))
        decider.learn(memory, Outcome(found[-1], min(found[-1], most)))
    return found


def test_the_heuristic_adds_two_or_takes_one():
    assert lengths(Heuristic(first=3, longest=6), [9, 9, 9, 2, 0, 0, 0, 0, 0, 0]) == [3, 5, 6, 6, 5, 4, 3, 2, 1, 1]


def test_the_accepted_average_follows():
    """The average halves its distance to accepted levels: 2, 1, .5, .25, 1.125. The margin is added and rounded up."""
    assert lengths(AcceptedAverage(first=2, margin=1, decay=0.5), [0, 0, 0, 9, 9]) == [3, 2, 2, 2, 3]
    assert lengths(AcceptedAverage(first=0, margin=0.5, decay=0.0), [1, 2, 3]) == [1, 2, 3]


def test_adaedl_asks_for_more_while_too_little_is_accepted():
    decider, step = AdaEDL(threshold=0.6, wanted=0.5, step=0.1, decay=0.5), view(confidence=((0.5,),), rows=((FAIR,),))
    memory, bounds, found = decider.start(), [], []
    for accepted in (0, 0, 4, 4, 4):
        found.append(decider(replace(step, memory=[memory]))[0])
        decider.learn(memory, Outcome(4, accepted))
        bounds.append(memory.threshold)
    # Averages .25, .125, .5625, .78125, ...: below one half twice. The row promises 0.628.
    assert bounds == pytest.approx([0.65, 0.7, 0.65, 0.6, 0.55])
    assert found == [True, False, False, False, True]


def test_path_survival_is_a_product():
    draws = [Draw(probability, Origin()) for probability in (0.5, 0.8, 0.1)]
    step = StepView(2, [[tuple(draws[:2]), (draws[0], draws[2])], [()]], [None, None])
    assert PathSurvival().survival(step) == [[pytest.approx(0.4), pytest.approx(0.05)], [1.0]]
    assert [PathSurvival(bound)(step) for bound in (0.39, 0.41, 1.1)] == [[True, True], [False, True], [False, False]]


def test_a_node_budget_plans_for_all_its_samples():
    limits = NodeBudget(4).plan(Situation(max_depth=[6, 3, 0], memory=[None] * 3))
    assert limits.levels.tolist() == [6, 3, 0]
    assert (limits.budget, limits.level_cost, limits.row_cost) == (9, 0, 0)
    kept = [number_kept(np.full(count, 0.5), limits.budget, limits.verification) for count in (0, 8, 9, 10)]
    assert kept == [0, 8, 9, 9]
    assert NodeBudget(1).plan(Situation([6], [None])).levels.tolist() == [0]
    assert NodeBudget(9)(view(2, ((1.0,), (0.1,)))) == [True, True]  # asked instead of planning


def test_the_limits_of_a_fixed_depth_equal_its_answers():
    for depth, max_depth in itertools.product((None, 0, 2, 9), (0, 1, 5)):
        limits = FixedDepth(depth).plan(Situation([max_depth], [None]))
        asked = next((at for at in range(max_depth) if not FixedDepth(depth)(view(at))[0]), max_depth)
        assert limits.levels.tolist() == [asked]
        assert limits.calibration.tolist() == limits.expected.tolist() == [[1.0]]
        assert (limits.budget, number_kept(np.full(7, 0.1), limits.budget, limits.verification)) == (-1, 7)


@pytest.mark.parametrize("decider", [ad.ConfidenceThreshold(), EntropyBound(), PathSurvival(), Heuristic()])
def test_deciders_that_look_at_drafts_or_history_cannot_plan(decider):
    assert not decider.can_plan


@pytest.mark.parametrize(("depth", "best"), [(1, 0), (6, 1)])
def test_a_bandit_finds_the_better_decider(depth, best):
    """Short drafts are better if one level is accepted, long drafts if all are; the bandit tries both."""
    decider = Bandit([FixedDepth(1), FixedDepth(6)], cost=0.3, longest=6)
    memory = decider.start()
    for _ in range(200):
        drafted = 6 if decider(view(1, memory=[memory]))[0] else 1
        decider.learn(memory, Outcome(drafted, min(drafted, depth)))
    assert min(memory.pulls) > 0
    assert memory.pulls[best] > 0.7 * sum(memory.pulls)


def test_a_bandit_asks_the_decider_of_each_sample_and_teaches_all():
    decider = Bandit([AcceptedAverage(), Heuristic(first=2)])
    one, other = decider.start(), decider.start()
    decider.learn(one, Outcome(1, 0))
    assert (one.arm, other.arm) == (1, 0)
    assert decider(view(0, ((1.0,), (1.0,)), memory=[one, other])) == [True, True]
    assert decider(view(2, ((1.0,), (1.0,)), memory=[one, other])) == [False, True]
    assert one.memories[0].levels == pytest.approx(2.4)
    assert one.memories[1].levels == 1


class Alternating(Decider):
    """Lets sample ``b`` draft ``b`` levels: the most ragged batch."""

    def forward(self, view):
        stopped = len(PROMPTS) - len(view.paths)  # the samples with smaller numbers
        return [stopped + index > view.depth for index in range(len(view.paths))]


def draft_model_decoder(decider):
    coupling = ad.Coupling(ad.WithoutReplacement(2), ad.TopDown(ad.RecursiveRejection()))
    topology = ad.TreeTopology.from_k_config((2, 2, 1))
    return ad.SpeculativeDecoder(ragged(), ad.LanguageModelDrafter(ragged(seed=3)), topology, coupling, decider)


@pytest.mark.parametrize(
    "decider",
    [
        FixedDepth(0),
        FixedDepth(1),
        ad.ConfidenceThreshold(0.05),
        EntropyBound(0.2),
        PathSurvival(0.1),
        AdaEDL(0.2),
        Heuristic(1, 3),
        AcceptedAverage(0.5, 0.5),
        Bandit([FixedDepth(1), Heuristic()]),
        ad.CostAware(StepCosts(ad.CostTable((1, 64), (1.0, 2.0)), ad.CostTable((1, 64), (0.1, 0.2)))),
        Alternating(),
    ],
    ids=lambda decider: type(decider).__name__,
)
def test_the_output_does_not_depend_on_the_decider(decider):
    tokens, output = generated(draft_model_decoder(decider), max_new_tokens=10, do_sample=False)
    stats = output.stats
    assert tokens == greedy_reference(ragged().model, PROMPTS, max_new_tokens=10)
    assert (stats.pad_rows, stats.pad_keys) == (0, 0)
    assert stats.rows == stats.drafted + sum(stats.forwards)


def test_every_sample_drafts_its_own_length():
    decoder, lengths = draft_model_decoder(Alternating()), []
    decoder.on_step = lambda state, tree, verdict: lengths.append(tree.lengths)
    decoder.generate(**left_padded(PROMPTS), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert lengths[0] == [1, 3, 7]


class EverySecond(Decider):
    """Rests for a step after a failure."""

    def start(self):
        return []

    def learn(self, memory, outcome):
        memory[:] = [1] if outcome.drafted and not outcome.accepted else []

    def forward(self, view):
        return [not failed for failed in view.memory]


def test_a_decoder_remembers_how_drafting_went():
    """A drafter that is always wrong is asked in every second step."""
    (tokens,) = greedy_reference(ragged().model, PROMPTS[:1], max_new_tokens=8, eos_token_id=None)
    wrong = next(token for token in range(VOCAB) if token not in tokens)

    class Wrong(Drafter):
        certain = True
        max_levels = 1

        def scores(self, state, frontier):
            return [([wrong], [1.0]) for _ in frontier.nodes]

    decoder = ad.SpeculativeDecoder(ragged(), Wrong(), ad.TreeTopology.chain(1), ad.Coupling.matching(), EverySecond())
    lengths = []
    decoder.on_step = lambda state, tree, verdict: lengths.extend(tree.lengths)
    _, stats = decode(decoder, PROMPTS[:1], max_new_tokens=8)
    assert lengths == [2, 1, 2, 1, 2, 1, 2, 1]
    assert (stats.tried, stats.acceptance_by_depth) == ({1: 4}, [0.0])


def test_nothing_is_drafted_at_depth_zero():
    decoder = draft_model_decoder(FixedDepth(0))
    _, output = generated(decoder, max_new_tokens=5, do_sample=False)
    assert (output.stats.drafted, output.stats.tau, output.stats.acceptance_by_depth) == (0, 1.0, [])


def never(self, view):
    return [False] * len(view.paths)


def overriding(base, **members):
    made = type("Other", (base,), members)
    return made(ad.CostTable((1, 2), (1.0, 1.0))) if base is ad.CostAware else made()


@pytest.mark.parametrize(
    ("base", "members", "fix"),
    [
        (Decider, {"plan": never}, "plan.. would never be asked: state can_plan = True"),
        (FixedDepth, {"forward": never}, "state can_plan = False"),
        (ad.CostAware, {"forward": never, "can_plan": False}, r"override rests\(\)"),
        (ad.CostAware, {"plan": never}, r"override rests\(\)"),
        (ad.CostAware, {"plan": never, "rests": Decider.rests}, r"override pauses\(\)"),
    ],
    ids=["plan alone", "forward below a plan", "forward below rests", "plan below rests", "plan below pauses"],
)
def test_an_overridden_method_that_would_not_be_asked_is_refused(base, members, fix):
    with pytest.raises(TypeError, match=fix):
        draft_model_decoder(overriding(base, **members))


@pytest.mark.parametrize("base", [Decider, FixedDepth, PathSurvival, ad.CostAware])
def test_forward_decides_if_there_is_no_plan(base):
    decider = overriding(base, forward=never, can_plan=False, rests=Decider.rests, pauses=Decider.pauses)
    _, output = generated(draft_model_decoder(decider), PROMPTS[:1], max_new_tokens=6, do_sample=False)
    assert output.stats.drafted == 0


def test_a_decider_that_looks_ahead_is_refused():
    class Peeking(FixedDepth):
        growth = Causality.ANTICIPATING

    with pytest.raises(ValueError, match="looks at tokens that are still to be verified"):
        ad.SpeculativeDecoder(
            ragged(),
            ad.NGramDrafter(),
            ad.TreeTopology.chain(1),
            ad.Coupling(ad.Fixed(1), ad.TopDown(ad.RecursiveRejection())),
            Peeking(),
        )


def lengths_of(limits):
    """Returns the lengths of the chains that lookups grow for two samples within these limits."""
    texts, drafter = [[7, 7, 7]] * 2, ad.NGramDrafter(longest=1, shortest=1)
    step = context(texts, ad.TreeTopology.chain(4), ad.Fixed(1), greedy=True)
    return grown(drafter, joined(drafter, texts), step, plan=lambda situation: limits).lengths


def test_limits_of_another_number_of_samples_are_refused():
    with pytest.raises(ValueError, match="must plan for 2 samples, planned for 1"):
        lengths_of(Limits.everything([3]))


def test_limits_may_be_any_integers_and_views():
    known, ones = Limits.everything([1, 3]), np.ones((2, 4))[:, ::2]
    other = replace(known, levels=np.array([1, 3], dtype=np.int32), calibration=ones, expected=ones)
    assert lengths_of(known) == lengths_of(other) == [2, 4]
