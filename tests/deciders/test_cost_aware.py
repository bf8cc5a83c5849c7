"""Cost-aware drafting in simulated steps, with known costs and acceptance and without a model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import context
from torch import Tensor

from arbordraft import CostTable, Fixed, TreeTopology
from arbordraft.deciders import CostAware, Decider, FixedDepth, PathSurvival
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Draw, Limits, Origin, Situation, StepView
from arbordraft.drafters.base import Drafter, Guesses, Lookup
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.grow import grow
from arbordraft.kernels.draft_tree.reference import number_kept
from arbordraft.sampling.laws import IID, DraftLaw
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Outcome, Verdict

DEPTH = 6


def costs(rows: float, level: float, rest: float = 0.0, widest: float | None = None) -> StepCosts:
    """Prices a forward at 1, each further row at ``rows``, and a level at ``level``, or at ``widest`` with 64 rows."""
    drafts = CostTable((1, 64), (level, level if widest is None else widest))
    return StepCosts(CostTable((1, 65), (1.0, 1.0 + 64 * rows)), drafts, rest=rest)


CHEAP, DEAR = costs(0.01, 0.05), costs(0.4, 0.4)
STAIRS = StepCosts(
    CostTable((1, 8, 9, 16, 17, 32, 33, 64), (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 3.0)), CostTable((1, 64), (0.1, 0.1))
)


class Guessing(Drafter):
    """Drafts chains with stated chances; ``acceptance`` is its promise before it drafts.

    Attributes:
        stated: the chances, by depth.
        levels: number of levels that it has drafted.
    """

    def __init__(self, promise: float, certain: bool = True) -> None:
        super().__init__()
        self.acceptance = (promise, 0.0)
        self.certain = certain
        self.stated: Sequence[float] = ()
        self.levels = 0

    def scores(self, state: object, frontier: Frontier) -> Tensor | Guesses:
        self.levels += 1
        chance = self.stated[frontier.depth]
        if self.certain:
            return [([7], [chance])] * len(frontier)
        return torch.tensor([[1 - chance, *[0.0] * 6, chance]] * len(frontier)).log()


class Finding(Guessing, Lookup):
    """Drafts such chains at no cost."""


class Sevens(IID):
    """Always draws token 7."""

    def draw(self, draft: Tensor, uniforms: Sequence[float]) -> list[int]:
        return [7]


@dataclass
class Run:
    """Results of simulated steps: per step the levels drafted, the drafts verified, tokens and seconds."""

    levels: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def rate(self, first: int = 0) -> float:
        return sum(self.tokens[first:]) / sum(self.seconds[first:])

    def busy(self, first: int, last: int) -> float:
        """Returns the share of steps with drafts."""
        return sum(kept > 0 for kept in self.kept[first:last]) / (last - first)


def begun(decider: Decider, samples: int = 1, law: DraftLaw | None = None, **options: object) -> DraftContext:
    """Builds a step whose drafts are certain, or drawn by a law."""
    topology = TreeTopology.chain(DEPTH)
    step = context([[5, 6]] * samples, topology, law or Fixed(1), greedy=law is None, **options)
    for sample in step.samples:
        sample.memory = decider.start()
    return step


def grown(step: DraftContext, decider: Decider, drafter: Guessing, stated: Sequence[float]) -> tuple[DraftTree, int]:
    """Grows a step's chains with these chances by depth; returns the tree and the number of drafted levels."""
    drafter.stated, drafter.levels = stated, 0
    return grow(step, decider, drafter, None), drafter.levels


def simulate(
    decider: Decider,
    price: StepCosts,
    truth: Callable[[int], float],
    stated: float,
    *,
    promise: float | None = None,
    samples: int = 1,
    steps: int = 300,
    free: bool = False,
) -> Run:
    """Simulates steps; ``truth`` gives each step's acceptance rate of drafts whose parent is accepted."""
    run, chance = Run(), random.Random(0)
    drafter = (Finding if free else Guessing)(stated if promise is None else promise)
    step = begun(decider, samples)
    for number in range(steps):
        tree, levels = grown(step, decider, drafter, [stated] * DEPTH)
        run.levels.append(levels)
        run.kept.append(sum(tree.lengths) - samples)
        run.seconds.append(
            price.target(sum(tree.lengths)) + price.rest + (0 if free else levels * price.draft(samples))
        )
        right = [
            next((n for n in range(length - 1) if chance.random() >= truth(number)), length - 1)
            for length in tree.lengths
        ]
        ends = {sample: (tree[sample].rows[count], 3) for sample, count in enumerate(right)}
        verdict = Verdict.of(tree, ends)
        for sample, text in enumerate(step.samples):
            decider.learn(text.memory, verdict.outcome(tree, sample))
        run.tokens.append(samples + sum(right))
    return run


def situation(decider: CostAware, samples: int = 1, promise: float = 0.6, **options: object) -> Situation:
    memory = [decider.start() for _ in range(samples)]
    return Situation(max_depth=[DEPTH] * samples, memory=memory, acceptance=(promise, 0.1), **options)


def kept(limits: Limits, chances: Sequence[float]) -> int:
    """Returns how many drafts of these reaches, descending, are verified."""
    return number_kept(np.array(chances), limits.budget, limits.verification)


def taught(
    decider: CostAware, memory: dict, *, right: float, stated: float, steps: int = 400, source: str = ""
) -> None:
    """Teaches steps of one level, of which the share ``right`` is accepted."""
    due = 0.0
    for _ in range(steps):
        due += right
        decider.learn(memory, Outcome(1, int(due >= 1), (stated,), source))
        due -= due >= 1


# Drafting


def test_it_rests_when_drafts_fail_and_comes_back_when_they_succeed():
    decider = CostAware(costs(0.1, 0.1))
    run = simulate(decider, decider.costs, lambda step: 0.0 if 50 <= step < 250 else 0.9, 0.8, steps=500)
    assert run.busy(0, 50) == 1
    assert 0 < run.busy(80, 250) < 0.2, "failing drafts must become rare, but must not stop for good"
    assert run.busy(450, 500) == 1
    assert max(run.levels[450:]) == DEPTH


def test_a_decider_without_memory_would_not_rest():
    """Negative control."""
    run = simulate(FixedDepth(), costs(0.1, 0.1), lambda step: 0.0, 0.8)
    assert run.busy(0, 300) == 1


@pytest.mark.parametrize("price", [costs(0.02, 0.05), costs(0.1, 0.02)], ids=["levels", "rows"])
def test_the_larger_the_batch_the_less_is_drafted(price):
    """Rows take time that all samples of a batch share."""
    found = []
    for samples in (1, 2, 4, 8, 16, 32):
        decider = CostAware(price)
        tree, _ = grown(begun(decider, samples), decider, Guessing(0.6), [0.6] * DEPTH)
        assert len(set(tree.lengths)) <= 2, "equal samples draft alike, except for a remainder that does not divide"
        found.append(sum(tree.lengths) / samples - 1)
    assert found[0] >= 2
    assert found == sorted(found, reverse=True)
    assert found[-1] < found[0]


def test_a_sampled_request_drafts_as_in_its_expected_batch():
    """IID draws are shortened by whole levels, not by rows; one sample decides as its expected batch would."""
    found = []
    for alike in (1, 4, 16, 64):
        decider = CostAware(costs(0.1, 0.02))
        step = begun(decider, law=Sevens(1), expected_batch=alike)
        found.append(grown(step, decider, Guessing(0.7, certain=False), [0.7] * DEPTH)[1])
    assert found[0] > found[-1]
    assert found == sorted(found, reverse=True)


def test_more_expensive_rows_keep_fewer_drafts():
    chances = sorted((0.9**depth * width for depth in range(1, 7) for width in (1, 0.4, 0.1)), reverse=True)
    found = []
    for slope in (0.0, 0.01, 0.1, 0.3, 0.5, 1.0):
        decider = CostAware(costs(slope, 0.01))
        found.append(kept(decider.plan(situation(decider, promise=0.9)), chances))
    assert found[0] == len(chances)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) > 3
    assert found[-1] == 0


@pytest.mark.parametrize("price", [CHEAP, DEAR], ids=["cheap", "expensive"])
def test_free_drafts_are_drafted_whole_and_pruned(price):
    decider = CostAware(price)
    limits = decider.plan(situation(decider, 2, promise=0.0, free=True))
    assert limits.levels.tolist() == [DEPTH, DEPTH]
    assert limits.level_cost == 0
    assert (limits.expected == 1).all()
    assert 0 < limits.row_cost < 1
    assert kept(limits, [0.99] * 4) == 4
    assert kept(limits, [0.8, 0.5, 0.3, 0.1]) == (4 if price is CHEAP else 1)
    assert kept(limits, [0.001] * 4) == 0


def test_lookups_must_pay_for_their_own_time():
    chances = [0.9, 0.8, 0.7, 0.1]
    for price, count in ({}, 4), ({"lookup": 0.5}, 4), ({"lookup": 0.5, "finding": 1.5}, 0):
        decider = CostAware(replace(CHEAP, **price))
        assert kept(decider.plan(situation(decider, 2, promise=0.0, free=True)), chances) == count


@pytest.mark.parametrize("nodes", [1, 2, 5])
@pytest.mark.parametrize("samples", [1, 3])
def test_trees_fill_the_budget_of_nodes_and_no_more(nodes, samples):
    decider = CostAware(costs(0.0, 1e-6), nodes=nodes)
    limits = decider.plan(situation(decider, samples, promise=0.9))
    assert limits.budget == samples * (nodes - 1)
    assert kept(limits, [0.9] * 40) == samples * (nodes - 1)
    tree, levels = grown(begun(decider, samples), decider, Guessing(0.9), [0.9] * DEPTH)
    assert sum(tree.lengths) == samples * nodes
    assert levels <= nodes


def test_samples_that_fail_do_not_draft_beside_those_that_succeed():
    decider = CostAware(costs(0.1, 0.1))
    both = situation(decider, 2)
    taught(decider, both.memory[0], right=0.0, stated=0.6)
    taught(decider, both.memory[1], right=1.0, stated=0.6)
    assert decider.plan(both).levels.tolist() == [0, DEPTH]


def test_drafts_must_pay_for_the_tokens_that_a_drafter_reads_first():
    decider = CostAware(costs(0.01, 0.05, widest=2.0))
    found = [decider.plan(situation(decider, lag=[tokens])) for tokens in (0, 5, 300, 1000, 3000)]
    gains = [limits.gains[0] for limits in found]
    assert [limits.levels.tolist() for limits in found] == [[DEPTH]] * 3 + [[0]] * 2
    assert gains[0] == gains[1] > gains[2] > 0 > gains[3] > gains[4]


def test_a_short_answer_pays_for_less_reading():
    """The more tokens a step brings, the fewer steps are left."""
    decider = CostAware(costs(0.01, 0.05, widest=2.0))
    found = [decider.plan(situation(decider, lag=[300], remaining=left)) for left in ((), [1000], [20], [1])]
    unknown, long, short, last = [limits.gains[0] for limits in found]
    assert unknown == long > short > last
    assert long > 0 > short


@settings(max_examples=200)
@given(st.integers(1, 4000), st.integers(1, 4000), st.floats(0.3, 0.95), st.floats(0.02, 0.4), st.floats(0.005, 0.1))
def test_a_prompt_is_read_if_the_answer_saves_more_time_than_that_takes(prompt, tokens, right, level, row):
    price = costs(0.02, level, widest=level * (1 + 63 * row))
    decider, one = CostAware(price), situation(CostAware(price), promise=1.0)
    free = decider.plan(replace(one, acceptance=(right, 0.1)))
    saved = 0.0
    for depth in range(1, DEPTH + 1):
        each = 1 + sum(right * (0.85 * right) ** below for below in range(depth))
        saved = max(saved, tokens / each * (each - price.target(1 + depth) - depth * price.draft(1)))
    reading = prompt * price.per_draft
    asked = replace(one, acceptance=(right, 0.1), lag=[prompt], remaining=[tokens], emitted=[tokens], pathwise=True)
    (reads,) = decider.worth_reading(asked)
    if reads:
        assert saved > reading
    elif free.levels.any():  # less would be saved than the decider's margin
        assert 0.75 * saved - 0.1 * tokens < reading


def test_answers_count_as_long_as_those_before_or_as_they_have_become():
    price = costs(0.01, 0.05, widest=2.0)

    def reads(answers=0, length=0, emitted=0, pathwise=True):
        decider = CostAware(price)
        for _ in range(answers):
            taught(decider, decider.start(), right=0.7, stated=0.7, steps=length)
        one = situation(decider, lag=[1000], emitted=[emitted], pathwise=pathwise, source="another")
        return decider.plan(one).levels.any()

    assert not reads()
    assert not reads(emitted=60)
    assert reads(emitted=600)
    assert reads(answers=5, length=600)
    assert not reads(answers=5, length=20)
    assert not reads(answers=5, length=600, pathwise=False), "other texts must not change what is drafted at random"


# Asked level by level instead of planning


@settings(max_examples=60)
@given(st.floats(0, 0.3), st.floats(0.001, 0.5), st.floats(0, 1), st.sampled_from([0.0, 0.3]))
def test_asking_and_planning_agree(slope, level, right, rest):
    """If drafts turn out as expected, asking before each level drafts the planned levels, or one more or less."""
    price = costs(slope, level, rest)
    decider, asked = CostAware(price), CostAware(price, survival=PathSurvival())
    assert decider.can_plan
    assert not asked.can_plan
    stated = [right, *[0.85 * right] * (DEPTH - 1)]
    drafter = Guessing(right)
    planned, told = (grown(begun(each), each, drafter, stated)[1] for each in (decider, asked))
    assert abs(planned - told) <= 1
    assert (planned > 0) == (told > 0)


@pytest.mark.parametrize("chance", [0.05, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("alike", [1, 3, 8])
def test_one_sample_that_stands_for_many_decides_as_many_do(chance, alike):
    decider = CostAware(costs(0.05, 0.2), survival=PathSurvival())
    paths, memory = [[(Draw(chance, Origin()),)]], [decider.start()]
    one = StepView(1, paths, memory, alike=alike, acceptance=(0.8,))
    many = StepView(1, paths * alike, memory * alike, pathwise=True, acceptance=(0.8,))
    assert decider(one) * alike == decider(many)
    if chance in (0.05, 0.95):
        assert decider(one) == [chance > 0.5]


# Pruning


TABLES = st.lists(st.floats(0.01, 10), min_size=4, max_size=4).map(lambda s: CostTable((1, 4, 8, 30), tuple(s)))
CHANCES = st.lists(st.floats(0, 1), max_size=12).map(lambda chances: sorted(chances, reverse=True))


@given(TABLES, st.floats(0.01, 2), st.integers(1, 3), st.integers(1, 4), CHANCES, st.floats(0, 1))
def test_the_number_of_kept_drafts_gains_most(table, level, samples, alike, chances, promise):
    """Compares with every other number of drafts; a second is worth the tokens that decoding emits in it."""
    decider = CostAware(StepCosts(table, CostTable((1, 2), (level, level))))
    limits = decider.plan(situation(decider, samples, promise, alike=alike))
    rate, before = limits.level_cost / level, table(samples * alike)
    gains = [
        alike * sum(chances[:count]) - rate * (table((samples + count) * alike) - before)
        for count in range(len(chances) + 1)
    ]
    assert gains[kept(limits, chances)] == pytest.approx(max(gains), abs=1e-9)
    assert rate >= samples * alike / before * (1 - 1e-12)


@given(TABLES, st.floats(0.0, 2), st.floats(0, 1), st.integers(1, 3), st.integers(1, 4), CHANCES, st.floats(0, 1))
def test_kept_drafts_are_never_slower_than_plain_decoding(table, level, rest, samples, alike, chances, promise):
    decider = CostAware(StepCosts(table, CostTable((1,), (max(level, 1e-9),)), rest=rest))
    limits = decider.plan(situation(decider, samples, promise, alike=alike))
    count, rows = kept(limits, chances), samples * alike
    plain = rows / (table(rows) + rest)
    assert (rows + alike * sum(chances[:count])) / (table(rows + alike * count) + rest) >= plain * (1 - 1e-9)


@given(st.floats(0, 1), st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 1), st.integers(1, 4))
def test_planned_drafts_are_expected_to_be_no_slower_than_plain_decoding(slope, level, rest, promise, samples):
    """Uses the limits' own numbers: chains grow as long as their prices allow, with the expectation of each level."""
    price = costs(slope, level, rest)
    decider = CostAware(price)
    limits = decider.plan(situation(decider, samples, promise))
    reaches = list(accumulate([promise, *[0.85 * promise] * (DEPTH - 1)], mul))
    plain = samples / (price.target(samples) + rest)
    depth = 0
    while depth < max(limits.levels) and samples * (reaches[depth] - limits.row_cost) >= limits.level_cost:
        depth += 1
    assert depth > 0 or limits.levels.tolist() == [0] * samples
    tokens = samples * (1 + sum(reaches[:depth]))
    assert tokens / (price.target(samples * (1 + depth)) + rest + depth * level) >= plain * (1 - 1e-9)


NARROW = StepCosts(CostTable((1, 8, 12, 13, 16), (1.0, 1.0, 1.02, 2.0, 2.0)), CostTable((1, 64), (0.1, 0.1)))


def test_a_batch_drafts_for_all_where_only_some_drafts_are_cheap_to_verify():
    """Eight more rows would double the forward and four are nearly free, so the likeliest four are verified."""
    decider = CostAware(NARROW)
    limits = decider.plan(situation(decider, 8, 0.6))
    assert min(limits.levels) > 0
    assert kept(limits, [0.6] * 8) == 4
    assert kept(limits, [0.9, 0.8, 0.02, 0.01]) == 2
    whole = replace(NARROW, target=CostTable((1, 8, 9, 16), (1.0, 1.0, 2.0, 2.0)))
    assert CostAware(whole).plan(situation(decider, 8, 0.6)).levels.tolist() == [0] * 8


@pytest.mark.parametrize("samples", [1, 8])
def test_the_cost_of_each_sample_that_starts_to_draft_counts(samples):
    dear = replace(NARROW, joining=0.2)
    assert dear.starting(samples) == pytest.approx(0.2 * (samples - 1))
    limits = CostAware(dear).plan(situation(CostAware(dear), samples, 0.6))
    assert (limits.levels > 0).tolist() == [samples == 1] * samples


# Learning


@pytest.mark.parametrize(("right", "stated"), [(0.3, 0.6), (0.6, 0.3), (0.5, 0.5), (0.0, 0.8), (1.0, 0.25)])
def test_calibration_is_acceptance_over_stated_chances(right, stated):
    decider = CostAware(CHEAP, decay=0.99)
    case = situation(decider)
    assert decider.plan(case).calibration.tolist() == [[1.0] * 4]
    taught(decider, case.memory[0], right=right, stated=stated)
    (calibration,) = decider.plan(case).calibration.tolist()
    assert calibration[0] == pytest.approx(right / stated, rel=0.25, abs=0.06)
    assert calibration[1:] == [1.0] * 3, "other depths learn nothing"
    assert decider.plan(case).expected[0, 0] == pytest.approx(right, abs=0.05)


@pytest.mark.parametrize(("right", "stated", "more"), [(0.45, 0.9, False), (0.9, 0.45, True)])
def test_confidence_is_corrected(right, stated, more):
    """Overconfident drafts get shorter, and modest drafts longer, than their stated chances suggest."""
    price = costs(0.15, 0.1)
    believed = simulate(CostAware(price, decay=0.0), price, lambda step: stated, stated, steps=200)
    run = simulate(CostAware(price), price, lambda step: right, stated, promise=0.6, steps=400)
    late, said = sum(run.kept[200:]) / 200, sum(believed.kept[:1])
    assert (late > said) == more
    assert late != said


def test_accepted_drafts_are_learned_by_depth():
    decider = CostAware(CHEAP, decay=0.9)
    case = situation(decider)
    for _ in range(200):
        decider.learn(case.memory[0], Outcome(6, 2, (0.5,) * 3))
    (calibration,), (expected,) = decider.plan(case).calibration, decider.plan(case).expected
    assert calibration[0] == calibration[1] > 1.3
    assert calibration[2] < 0.7
    assert calibration[3] == 1
    assert expected[0] == pytest.approx(expected[1], abs=0.01)
    assert expected[1] > expected[3] > expected[2]


def test_each_drafter_is_learned_separately():
    decider = CostAware(costs(0.1, 0.1))
    case = situation(decider)
    taught(decider, case.memory[0], right=0.0, stated=0.9, source="copies")
    levels = {name: decider.plan(replace(case, source=name)).levels.tolist() for name in ("copies", "model", "")}
    assert levels == {"copies": [0], "model": [DEPTH], "": [DEPTH]}
    other = situation(decider, source="copies")
    assert decider.plan(other).levels.tolist() == [DEPTH], "another sample has not learned that"


def test_each_sample_is_learned_separately():
    """Each sampled request plans alone: other samples and their history change nothing."""
    decider = CostAware(costs(0.1, 0.1))
    step, drafter = begun(decider, 3, Sevens(1)), Guessing(0.6, certain=False)
    alone = [grown(step, decider, drafter, [0.6] * DEPTH)[0].lengths for _ in range(2)]
    assert alone[0] == alone[1] == [alone[0][0]] * 3 > [1] * 3
    taught(decider, step.samples[1].memory, right=0.0, stated=0.6, source="Guessing")
    assert grown(step, decider, drafter, [0.6] * DEPTH)[0].lengths == [alone[0][0], 1, alone[0][0]]


def test_an_idle_step_forgets_a_little():
    decider = CostAware(costs(0.1, 0.1))
    case = situation(decider)
    taught(decider, case.memory[0], right=0.0, stated=0.6, steps=40)
    assert decider.plan(case).levels.tolist() == [0]
    waits = next(
        steps for steps in range(1000) if decider.plan(case).levels[0] or decider.learn(case.memory[0], Outcome(0, 0))
    )
    assert 5 < waits < 500


def test_idle_steps_fade_memory_equally_one_by_one_or_at_once():
    def faded(asked: bool) -> list[float]:
        decider = CostAware(costs(0.1, 0.1))
        case = situation(decider)
        taught(decider, case.memory[0], right=0.5, stated=0.6, steps=40)
        for _ in range(30):
            decider.learn(case.memory[0], Outcome(0, 0))
            if asked:
                case.memory[0][""].wake()
        case.memory[0][""].wake()
        record = case.memory[0][""]
        return [*record.tried, *record.accepted, *record.stated, *record.presumed]

    assert faded(asked=True) == pytest.approx(faded(asked=False))
    assert faded(asked=True)[0] > 0


def test_a_sample_rests_if_all_its_drafters_rest():
    decider = CostAware(costs(0.1, 0.1))
    case = situation(decider, source="model")
    memory = case.memory[0]
    assert not decider.rests(memory), "no drafter was asked yet"
    for source in ("copies", "model"):
        taught(decider, memory, right=0.0, stated=0.6, source=source)
    resting = []
    for _ in range(64):
        plans = [decider.plan(replace(case, source=source)).levels for source in ("copies", "model")]
        resting.append(decider.rests(memory))
        assert not np.any(plans) or not resting[-1]
        decider.learn(memory, Outcome(0, 0))
    assert 0.5 < sum(resting) / len(resting) < 1, "it rests in most steps, but tries again now and then"
    taught(decider, memory, right=1.0, stated=0.6, source="model", steps=1)
    assert not decider.rests(memory), "one drafter drafts"


@pytest.mark.parametrize("decay", [0.0, 1.0])
def test_the_bounds_of_forgetting(decay):
    decider = CostAware(CHEAP, decay=decay)
    case = situation(decider)
    taught(decider, case.memory[0], right=0.5, stated=0.5, steps=100)
    record = case.memory[0][""]
    assert record.tried[0] == (1 if decay == 0 else 100)
    assert record.accepted[0] == (1 if decay == 0 else 50)


# In the long run

MARKETS = {
    "cheap": CHEAP,
    "expensive": DEAR,
    "expensive rows": costs(0.3, 0.01),
    "expensive levels": costs(0.01, 0.3),
    "rest": costs(0.1, 0.1, rest=1.0),
    "stairs": STAIRS,
    "an expensive second row": StepCosts(CostTable((1, 2, 64), (1.0, 2.0, 2.1)), CostTable((1, 64), (0.05, 0.05))),
    "slow wide levels": costs(0.02, 0.05, widest=2.0),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(
    ("right", "stated"), [(0.0, 0.9), (0.1, 0.7), (0.2, 0.7), (0.3, 0.3), (0.6, 0.3), (0.6, 0.6), (0.9, 0.9)]
)
@pytest.mark.parametrize("market", MARKETS)
def test_never_slower_than_plain_decoding(market, right, stated, samples):
    """This holds for any promise, before drafting and per draft; a few steps are spent to test the promise."""
    price = MARKETS[market]
    run = simulate(CostAware(price), price, lambda step: right, stated, samples=samples)
    least = 0.92 if right == 0 else 0.96
    assert run.rate(100) >= least * samples / (price.target(samples) + price.rest)


@pytest.mark.parametrize(
    ("market", "right", "least"), [("cheap", 0.9, 3.0), ("cheap", 0.6, 1.75), ("stairs", 0.9, 2.2)]
)
def test_drafts_that_pay_are_used(market, right, least):
    """Otherwise a decider that always rests would pass."""
    price = MARKETS[market]
    run = simulate(CostAware(price), price, lambda step: right, right)
    assert run.rate(100) >= least / price.target(1)


def test_a_decider_that_always_drafts_is_slower():
    """Negative control."""
    for market in ("expensive", "expensive rows", "expensive levels"):
        price = MARKETS[market]
        run = simulate(FixedDepth(), price, lambda step: 0.2, 0.7)
        assert run.rate(100) < 0.8 / price.target(1)


def test_limits_are_plain_numbers():
    """Kernels get numbers of their types: no tensors, no NaN."""
    decider = CostAware(STAIRS, nodes=5)
    limits = decider.plan(situation(decider, 3))
    assert isinstance(limits, Limits)
    assert (limits.levels.dtype, limits.levels.shape) == (np.int64, (3,))
    for told in (limits.calibration, limits.expected):
        assert (told.dtype, told.shape) == (np.float64, (3, 4))
        assert ((told >= 0) & (told <= 10)).all()
    assert (limits.weight.dtype, limits.weight.tolist()) == (np.float64, [1.0] * 3)
    assert isinstance(limits.budget, int)
    assert limits.level_cost > 0
    assert limits.row_cost >= 0
