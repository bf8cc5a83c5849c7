"""Step costs: a decider's time is counted separately, and a decider stops no drafts while it is timed."""

import time
from types import SimpleNamespace

import pytest
from support.models import PROMPTS, ragged

from arbordraft import CostTable
from arbordraft.deciders import Decider
from arbordraft.decoding import measuring
from arbordraft.decoding.measuring import measure_steps, rows_within
from arbordraft.drafters import LanguageModelDrafter, NGramDrafter, NoDrafter


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless a test moves its ``now``."""
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: made.now)
    return made


def measured(drafter, decider=None, batches=(1, 2), rows=(1, 2, 3)):
    return measure_steps(ragged(), drafter, PROMPTS, decider, batches=batches, depth=2, new_tokens=4, rows=rows)


@pytest.mark.parametrize("batches", [(1, 2), (1, 3), (1,) * 4], ids=str)
def test_levels_are_timed_by_their_rows(batches):
    costs = measured(LanguageModelDrafter(ragged(seed=3)), batches=batches)
    assert set(batches) <= set(costs.draft.rows)
    assert costs.target.rows == (1, 2, 3)
    assert costs.decide == 0


def test_a_slow_decider_is_not_taken_for_slow_drafting(clock):
    class Slow(Decider):
        """Takes a second to stop all samples."""

        def forward(self, view):
            clock.now += 1.0
            return [False] * len(view.paths)

    costs = measured(LanguageModelDrafter(ragged(seed=3)), Slow(), rows=CostTable((1,), (1.0,)))
    assert costs.decide == pytest.approx(1.0)
    assert {1, 2} <= set(costs.draft.rows), "the decider stopped the drafting that was to be timed"
    assert costs.draft(1) < 0.01


def test_a_level_costs_its_time_and_no_drafting_costs_nothing(clock):
    """Only levels of drafts advance the clock, by a second each."""

    class Ticking(LanguageModelDrafter):
        def scores(self, state, frontier):
            clock.now += 1
            return super().scores(state, frontier)

    rows = CostTable((1,), (1.0,))
    costs = measured(Ticking(ragged(seed=3)), rows=rows)
    assert costs.draft(1) == pytest.approx(1)
    assert (costs.start, costs.rest) == (0, 0)
    assert measured(NoDrafter(), rows=rows).draft(1) == pytest.approx(1e-9), "the smallest time that a table holds"


def test_only_whole_trees_are_timed_and_no_prompts(clock):
    """Every draft advances the clock by a second, and the first step of a batch by a hundred more."""

    class Ticking(LanguageModelDrafter):
        def scores(self, state, frontier):
            first = frontier.depth == 0 and len(frontier.context.tokens(0)) == len(PROMPTS[0])
            clock.now += len(frontier) + 100 * first
            return super().scores(state, frontier)

    prompts = [PROMPTS[0]] * 4
    for seed in range(3):
        drafter = Ticking(ragged(seed=seed))  # seed 0 is the target, so its samples end early
        costs = measure_steps(
            ragged(), drafter, prompts, batches=(1, 4), depth=3, new_tokens=9, rows=CostTable((1,), (1.0,))
        )
        assert dict(zip(costs.draft.rows, costs.draft.seconds, strict=True)) == pytest.approx({1: 1, 4: 4, 16: 16})
        assert (costs.start, costs.rest) == (0, 0)


def test_lookups_are_timed_by_samples_with_any_drafter(clock, monkeypatch):
    """Only lookups advance the clock: by a second, and by half a second for every sample."""
    scores = NGramDrafter.scores

    def ticking(self, state, frontier):
        proposed = scores(self, state, frontier)
        if frontier.depth == 0 and any(tokens for tokens, _ in proposed):
            clock.now += 1 + 0.5 * len(frontier.context.samples)
        return proposed

    monkeypatch.setattr(NGramDrafter, "scores", ticking)
    for drafter in (NGramDrafter(), LanguageModelDrafter(ragged(seed=3))):
        costs = measured(drafter, batches=(1, 4), rows=CostTable((1,), (1.0,)))
        assert 0 < costs.lookup <= 1.5
        assert 0 < costs.finding <= 0.5
        assert costs.draft(1) == pytest.approx(1e-9)


@pytest.mark.parametrize(("table", "rows"), [((0.01, 0.091), 127), ((0.01, 0.01), 2048)], ids=["slow", "rows are free"])
def test_rows_read_at_a_time_follow_from_row_costs(monkeypatch, table, rows):
    monkeypatch.setattr(measuring, "known_rows", lambda target: CostTable((1, 55), table))
    assert rows_within(ragged()) == rows


def test_few_rows_take_at_least_their_share_of_the_time_of_many(clock):
    """The time of a level is a difference of measured ones, which noise may make negative."""

    class Noisy(LanguageModelDrafter):
        def scores(self, state, frontier):
            rows = len(frontier)
            clock.now += 8.0 if rows > 1 or not frontier.depth else -3.0
            return super().scores(state, frontier)

    costs = measured(Noisy(ragged(seed=3)), rows=CostTable((1,), (1.0,)))
    assert costs.draft(2) == pytest.approx(8)
    assert costs.draft(1) == pytest.approx(4)
