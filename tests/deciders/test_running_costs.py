"""Costs follow the seconds of the running program, and plans follow the costs."""

import time
from dataclasses import replace

import pytest
import torch
from support.models import PROMPTS, left_padded, ragged

import arbordraft as ad
from arbordraft import CostTable
from arbordraft.deciders import CostAware
from arbordraft.deciders.costs import StepCosts
from arbordraft.deciders.decisions import Situation
from arbordraft.deciders.experience import Looks
from arbordraft.deciders.running_costs import RunningCosts, StepTimes
from arbordraft.decoding import drafting, metrics, step
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.runner import PackedRunner
from arbordraft.trees.verdict import Outcome

PRIOR = StepCosts(CostTable((1, 8, 64), (1.0, 1.4, 4.0)), CostTable((1, 8), (0.1, 0.2)), rest=0.05, start=0.02)
KIND = "LanguageModelDrafter"


def times(samples=1, drafts=0, levels=0, slower=1.0, drafting=1.0, per_row=0.0, unit=0.01):
    """Returns the seconds of a step that takes as long as expected, but for the given factors."""
    rows = samples + drafts
    draft = (PRIOR.start + levels * PRIOR.draft(max(1.0, drafts / levels))) if levels else 0.0
    return StepTimes(
        samples,
        rows,
        {KIND: levels} if levels else {},
        unit * draft * drafting,
        unit * PRIOR.target(rows) * slower,
        unit * (PRIOR.rest + per_row * drafts),
    )


def test_steps_that_take_as_long_as_expected_change_nothing():
    running = RunningCosts(PRIOR)
    for turn in range(20):
        running.learn(times(drafts=7 * (turn % 2), levels=7 * (turn % 2)))
    found = running.of(KIND)
    assert found.target.seconds == pytest.approx(PRIOR.target.seconds, rel=1e-6)
    assert found.draft.seconds == pytest.approx(PRIOR.draft.seconds, rel=1e-6)
    assert (found.rest, found.start) == (pytest.approx(PRIOR.rest), pytest.approx(PRIOR.start))


def test_drafts_that_take_longer_are_known_after_a_few_steps():
    running = RunningCosts(PRIOR)
    for _ in range(4):
        running.learn(times(drafts=7, levels=7, drafting=2.5))
    assert 1.9 < running.of(KIND).draft(1) / PRIOR.draft(1) <= 2.5
    assert running.of("EagleDrafter").draft(1) == PRIOR.draft(1), "of other drafters nothing was learned"


def test_rows_that_take_long_to_verify_cost_more():
    running = RunningCosts(PRIOR)
    for turn in range(12):
        running.learn(times(drafts=7 * (turn % 2), levels=7 * (turn % 2), per_row=0.2))
    found = running.of(KIND).target
    assert found(8) - found(1) > PRIOR.target(8) - PRIOR.target(1) + 7 * 0.1
    assert found(1) == pytest.approx(PRIOR.target(1), rel=0.02)


def test_a_machine_that_is_slower_as_a_whole_changes_no_plan():
    running = RunningCosts(PRIOR)
    for turn in range(12):
        running.learn(times(drafts=7 * (turn % 2), levels=7 * (turn % 2), unit=0.5))
    assert running.of(KIND).target.seconds == pytest.approx(PRIOR.target.seconds, rel=1e-6)
    assert running.of(KIND).draft.seconds == pytest.approx(PRIOR.draft.seconds, rel=1e-6)


def test_a_single_paused_step_is_no_evidence():
    running = RunningCosts(PRIOR)
    for _ in range(10):
        running.learn(times(drafts=7, levels=7))
    running.learn(times(drafts=7, levels=7, drafting=1000))
    assert running.of(KIND).draft(1) < 1.4 * PRIOR.draft(1)


def test_a_slow_step_of_few_rows_does_not_make_the_rows_beyond_it_free():
    prior = replace(PRIOR, target=CostTable((1, 2, 8, 16), (1.0, 1.1, 1.2, 1.5)))
    running = RunningCosts(prior)
    for _ in range(20):
        running.learn(StepTimes(8, 8, {}, 0.0, 0.012, 0.0005))
    running.learn(StepTimes(2, 2, {}, 0.0, 0.03, 0.0005))
    target = running.of(KIND).target
    assert target(16) - target(8) > 0.1 * target(8)
    assert target(2) <= target(8)


@pytest.mark.parametrize("slower", [1.0, 2.0], ids=["alike", "slower"])
def test_steps_of_many_rows_do_not_change_the_ratio_to_few_rows(slower):
    """Few rows are as fast as measured, many rows half as fast, and then only steps of many rows follow."""
    running = RunningCosts(PRIOR)
    for turn in range(40):
        running.learn(times(samples=64, slower=2.0) if turn % 2 else times())
    for _ in range(200):
        running.learn(times(samples=64, slower=2.0 * slower))
    found = running.of(KIND).target
    assert found(64) / found(1) == pytest.approx(
        2 * PRIOR.target(64) / PRIOR.target(1), rel=0.1 if slower == 1 else 0.25
    )


def test_rows_not_seen_yet_follow_those_next_to_them():
    running = RunningCosts(replace(PRIOR, target=CostTable((1, 8, 16), (1.0, 1.4, 2.0))))
    for _ in range(40):
        running.learn(StepTimes(1, 1, {}, 0.0, 0.01, 0.0005))
    for _ in range(20):
        running.learn(StepTimes(8, 8, {}, 0.0, 0.028, 0.0005))
    target = running.of(KIND).target
    assert target(16) / target(8) == pytest.approx(2.0 / 1.4, rel=0.05), "16 rows are slower, too"


def test_a_slow_first_step_is_forgotten():
    running = RunningCosts(PRIOR)
    running.learn(times(unit=0.2))
    for _ in range(60):
        running.learn(times())
    found = running.of(KIND)
    assert found.target(8) / found.target(1) == pytest.approx(PRIOR.target(8) / PRIOR.target(1), rel=0.15)
    assert found.draft(1) / found.target(1) == pytest.approx(PRIOR.draft(1) / PRIOR.target(1), rel=0.15)


def test_a_step_without_a_forward_is_left_out():
    running = RunningCosts(PRIOR)
    running.learn(replace(times(), target=0.0))
    assert running.of(KIND).target.seconds == PRIOR.target.seconds


def test_costs_stay_one_object_while_they_change_little():
    running = RunningCosts(PRIOR)
    running.learn(times(drafts=7, levels=7))
    found = running.of(KIND)
    running.learn(times(drafts=7, levels=7, drafting=1.02))
    assert running.of(KIND) is found
    running.learn(times(drafts=7, levels=7, drafting=2.0))
    assert running.of(KIND) is not found


def idle_steps(observations):
    """Counts steps without drafts until costs that were found three times too high come back half the way."""
    running = RunningCosts(PRIOR)
    for _ in range(observations):
        running.learn(times(drafts=7, levels=7, drafting=3.0))
    high = running.of(KIND).draft(1)
    for count in range(1, 5000):
        running.learn(times())
        if running.of(KIND).draft(1) - PRIOR.draft(1) < (high - PRIOR.draft(1)) / 2:
            return count
    raise AssertionError("they never come back")


def test_costs_seen_often_are_forgotten_later():
    once, often = idle_steps(1), idle_steps(12)
    assert 50 < once < often < 3000


def planned(decider, pathwise=True):
    memory = decider.start()
    situation = Situation([7], [memory], source=KIND, acceptance=[0.7], pathwise=pathwise)
    return int(decider.plan(situation).levels[0])


def test_a_drafter_that_loses_rests_where_the_text_does_not_depend_on_drafts():
    decider = CostAware(PRIOR, running=True)
    assert planned(decider) > 0
    for _ in range(6):
        decider.timed(times(drafts=3, levels=3, drafting=12.0))
    assert planned(decider) == 0
    assert planned(decider, pathwise=False) > 0, "such a plan would let a text depend on the clock"
    frozen = CostAware(PRIOR)
    for _ in range(6):
        frozen.timed(times(drafts=3, levels=3, drafting=12.0))
    assert planned(frozen) > 0


def test_a_drafter_that_was_too_slow_once_is_tried_again():
    decider = CostAware(PRIOR, running=True)
    for _ in range(6):
        decider.timed(times(drafts=3, levels=3, drafting=12.0))
    for _ in range(3000):
        if planned(decider):
            break
        decider.timed(times())
    assert planned(decider) > 0


def test_better_costs_begin_anew():
    decider = CostAware(PRIOR, running=True)
    for _ in range(6):
        decider.timed(times(drafts=3, levels=3, drafting=12.0))
    decider.measure = lambda hurry: replace(PRIOR, rest=0.06)
    decider.settle()
    assert planned(decider) > 0


class Clock:
    """Time that passes with the work of a decoder: a level of drafting takes ``level`` seconds, all else little."""

    def __init__(self, level):
        self.now, self.level = 0.0, level

    def __call__(self):
        self.now += 1e-4
        return self.now


@pytest.mark.parametrize("level", [0.001, 1.0])
def test_a_losing_drafter_rests_by_the_clock(monkeypatch, level):
    """Seconds of each step reach the decider: drafting stops only where it loses."""
    clock = Clock(level)
    target, drafter = ragged(seed=1, kernels="torch"), ad.LanguageModelDrafter(ragged(seed=1, kernels="torch"))
    scores, run = drafter.scores, PackedRunner.__call__

    def slow(*given):
        clock.now += clock.level
        return scores(*given)

    def forward(*given):
        clock.now += 0.1
        return run(*given)

    monkeypatch.setattr(drafter, "scores", slow)
    monkeypatch.setattr(PackedRunner, "__call__", forward)
    for module in (metrics, step):
        monkeypatch.setattr(module.time, "thread_time", clock)
    costs = StepCosts(CostTable((1, 16), (0.1, 0.11)), CostTable((1,), (0.001,)))
    decider = CostAware(costs, running=True)
    decoder = ad.SpeculativeDecoder(target, drafter, ad.TreeTopology.chain(4), decider=decider)
    drafted = []
    decoder.on_step = lambda state, tree, verdict: drafted.append(tree.rows - len(tree.living))
    plain = ad.SpeculativeDecoder(target, ad.NoDrafter())
    inputs = left_padded(PROMPTS[:1])
    options = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    assert torch.equal(decoder.generate(**inputs, **options), plain.generate(**inputs, **options))
    assert drafted[0] > 0
    if level < 0.1:
        assert drafted.count(0) <= 2
    else:
        assert drafted.count(0) > len(drafted) / 2


def test_waits_for_other_threads_are_no_costs(monkeypatch):
    """A server's other threads take the interpreter after each step, to send its tokens."""
    run, seen = PackedRunner.__call__, []

    def forward(*given):
        time.sleep(0.05)
        return run(*given)

    monkeypatch.setattr(PackedRunner, "__call__", forward)
    decider = CostAware(PRIOR, running=True)
    monkeypatch.setattr(decider, "timed", seen.append)
    decoder = ad.SpeculativeDecoder(ragged(seed=1), ad.NoDrafter(), decider=decider)
    output = decoder.generate(
        **left_padded(PROMPTS[:1]), max_new_tokens=6, do_sample=False, return_dict_in_generate=True
    )
    assert len(seen) == 5, "the first step may read the prompt"
    assert sum(times.target for times in seen) < 0.05 < 0.25 < output.stats.seconds["target"]


def test_outcomes_without_times_are_learned_as_before():
    decider = CostAware(PRIOR, running=True)
    memory = decider.start()
    decider.learn(memory, Outcome(accepted=0, drafted=3, stated=(0.9,), source=KIND))
    assert memory[KIND].tried[0] == 1


def looks(accepted, steps=200, prior=0.1, rows=1):
    """Counts the steps that look for drafts, if each look takes a tenth of a forward and brings so many tokens."""
    decider, memory, count = CostAware(replace(PRIOR, lookup=prior), running=True), {}, 0
    for _ in range(steps):
        memory.clear()  # other texts than those of the last step, so that no sample knows
        situation = Situation([8], [memory], source="NGramDrafter", acceptance=[0.7], free=True, pathwise=True)
        looked = bool(decider.plan(situation).levels[0])
        count += looked
        drafted = {"NGramDrafter": 2} if looked else {}
        if looked and accepted:
            decider.learn(memory, Outcome(accepted=accepted, drafted=2, stated=(0.9, 0.9), source="NGramDrafter"))
        decider.timed(StepTimes(1, rows if looked else 1, drafted, 0.001 * looked, 0.01, 0.0005))
        decider.stepped(2 * looked, 1.0)
    return count


def weighed(*joining, running=True, drafts=0):
    """Counts the steps that weigh drafts of a costly drafter, for batches of so many samples of new texts."""
    decider, count = CostAware(replace(PRIOR, draft=CostTable((1,), (5.0,))), running=running), 0
    for samples in joining:
        if not decider.pauses(samples):
            memories = [decider.start() for _ in range(samples)]
            decider.plan(Situation([4] * samples, memories, source=KIND, acceptance=[0.7], pathwise=True))
            count += 1
        decider.stepped(drafts, 1.0)
    return count


def test_new_texts_do_not_make_a_batch_weigh_its_drafts_anew():
    """In a server a text joins at nearly every step, and each is a text without experience."""
    assert weighed(*[8] * 64) < 10
    assert weighed(*[8] * 64, drafts=1) == 64, "drafts pay"
    assert weighed(*[8] * 64, running=False) == 64, "plans of a frozen decider depend on the texts alone"


def test_a_smaller_batch_weighs_its_drafts_at_once():
    assert weighed(*[8] * 33) + 7 == weighed(*[8] * 33, *range(7, 0, -1))


@pytest.mark.parametrize("pausing", [True, False])
def test_steps_without_drafts_ask_rarely(pausing, monkeypatch):
    """Two samples at a time, one of which is followed by another after every second step or so."""
    if not pausing:
        monkeypatch.setattr(CostAware, "pauses", lambda self, samples: False)
    decoder = ad.SpeculativeDecoder(ragged(seed=1), ad.NGramDrafter(), decider=CostAware(PRIOR, running=True))
    asked, growth = [], drafting.Growth
    monkeypatch.setattr(drafting, "Growth", lambda *arguments: asked.append(1) or growth(*arguments))
    engine = Engine(decoder, max_samples=2)
    for first in range(12):
        engine.submit(Request(prompt=[5 + first, 9], max_new_tokens=4 + 2 * (first == 0), temperature=0.0))
    engine.run()
    assert 0 < len(asked) < 8 if pausing else len(asked) > 16


@pytest.mark.parametrize("prior", [0.0, 0.1])
def test_looks_that_bring_nothing_become_rare(prior):
    assert looks(accepted=0, prior=prior) < 30
    assert looks(accepted=1, prior=prior) == 200


def test_a_look_costs_the_verification_of_its_drafts():
    assert looks(accepted=0.3) == 200
    assert looks(accepted=0.3, rows=64) < 30


def test_a_look_that_pays_is_followed_by_another_soon():
    found = Looks(rate=1.0)
    for _ in range(12):
        found.note(0.1)
    assert found.wait == 64
    found.gained = 0.2
    found.note(0.1)
    assert (found.wait, found.pause) == (1, 2)


@pytest.mark.parametrize("read", [0, 700])
def test_a_drafter_that_reads_a_prompt_first_is_not_slow(read):
    running, step = RunningCosts(PRIOR), times(drafts=7, levels=7)
    for _ in range(4):
        running.learn(replace(step, draft=step.draft + 700 * 0.01 * PRIOR.per_draft, read=read))
    assert (running.of(KIND).draft(1) < 1.1 * PRIOR.draft(1)) == bool(read)


@pytest.mark.parametrize("running", [False, True])
def test_a_new_text_begins_with_the_experience_of_others(running):
    """Where texts do not depend on drafts; any other text begins alike in every program."""
    decider = CostAware(PRIOR, running=running)
    for _ in range(60):
        memory = decider.start()
        planned_with(decider, memory)
        decider.learn(memory, Outcome(accepted=0, drafted=4, stated=(0.9,), source=KIND))
    assert (planned(decider) == 0) == running
    assert planned(decider, pathwise=False) > 0


def after(failures, rests=0):
    """Returns a decider after texts whose only draft failed, the last of which goes on without drafts."""
    decider = CostAware(PRIOR, running=True)
    for _ in range(failures):
        memory = decider.start()
        planned_with(decider, memory)
        decider.learn(memory, Outcome(accepted=0, drafted=1, stated=(0.9,), source=KIND))
    for _ in range(rests):
        decider.learn(memory, Outcome(accepted=0, drafted=0, stated=(), source=KIND))
    return decider


def test_one_draft_that_failed_does_not_stop_a_drafter():
    assert planned(after(failures=1)) > 0
    assert planned(after(failures=40)) == 0


def test_failures_fade_for_new_texts_while_others_rest():
    assert planned(after(failures=40, rests=20)) == 0
    assert planned(after(failures=40, rests=800)) > 0


def planned_with(decider, memory):
    return decider.plan(Situation([7], [memory], source=KIND, acceptance=[0.7], pathwise=True))
