"""States of recurrent layers as memory: the cache's limit covers them, and prompts share them where they part."""

import random

import pytest
from support.models import VOCAB, ragged
from support.recurrent_models import recurrent_target

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.scheduler import Scheduler
from arbordraft.target.cache import CacheOverflow, RaggedKVCache
from arbordraft.target.states import MOST_STATES, RecurrentStates

KINDS = ("lfm2", "qwen3_next", "mamba2", "granitemoehybrid")
TREE = ad.TreeTopology([-1, 0, 0, 1, 1, 2, 3])
every_kind = pytest.mark.parametrize("architecture", KINDS)


def text(length, seed):
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def decoder(architecture, drafter=None):
    return ad.SpeculativeDecoder(recurrent_target(architecture), drafter or ad.NGramDrafter(), TREE)


def alone(made, request):
    return [answer.tokens for answer in Engine(made, max_cache_tokens=4000).submit(request).result()]


# Limits


@every_kind
def test_states_count_as_the_tokens_whose_bytes_they_take(architecture):
    target, cache = recurrent_target(architecture), RaggedKVCache()
    target.prefill({cache.open(9): text(9, 1)}, cache)
    if cache.row_bytes:
        assert 0 <= target.state_tokens * cache.row_bytes - cache.state_bytes < cache.row_bytes
    else:
        assert architecture == "mamba2"
        assert target.state_tokens == MOST_STATES
    assert cache.state_bytes == MOST_STATES * cache._states.nbytes // cache._states._slots > 0
    assert ragged().state_tokens == 0


@every_kind
def test_a_sample_has_no_more_states_than_are_counted(monkeypatch, architecture):
    """Portions, lone rows, trees and copies."""
    most, take = [0], RecurrentStates._take

    def counted(self):
        slot = take(self)
        most[0] = max(most[0], (self._slots - len(self._free)) / max(1, len(self._samples)))
        return slot

    monkeypatch.setattr(RecurrentStates, "_take", counted)
    for drafter in (ad.NoDrafter(), ad.LanguageModelDrafter(recurrent_target("mamba2"))):
        engine = Engine(decoder(architecture, drafter), max_cache_tokens=4000, max_rows=16, reuse=True)
        for more in (text(5, 2), text(50, 3), []):
            engine.submit(Request(prompt=[*text(60, 1), *more], max_new_tokens=8)).result()
    assert 3 < most[0] <= MOST_STATES


def test_a_cache_has_room_for_rows_and_states_together():
    cache = RaggedKVCache(100, state_tokens=20)
    samples = [cache.open(30), cache.open(30)]
    with pytest.raises(CacheOverflow, match="cannot make room for 1 more; each sample's states count as 20"):
        cache.open(1)
    cache.close(samples[0])
    assert cache.open(30) not in samples
    with pytest.raises(CacheOverflow, match=r"cannot make room for \d+ more; each sample's states"):
        cache.lay_out([samples[1]], [range(31)])
    assert cache.beside(None).state_tokens == 20
    attention = RaggedKVCache(100)
    assert [attention.open(30) for _ in range(3)] == [0, 1, 2]


def together(engine, requests):
    """Returns the greatest number of answers that were decoded at a time, and their tokens."""
    streams, most = [engine.submit(request) for request in requests], 0
    while engine.step():
        most = max(most, len(engine._scheduler.running))
    return most, [answer.tokens for stream in streams for answer in stream.answers]


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@every_kind
def test_engines_admit_answers_whose_states_fit(architecture, reuse):
    made = decoder(architecture)
    asked = [Request(prompt=text(12, seed), max_new_tokens=8, seed=seed) for seed in range(6)]
    rows, states = 12 + 8 + TREE.num_nodes, made.target.state_tokens
    engine = Engine(made, max_cache_tokens=3 * (rows + states), max_samples=6, reuse=reuse)
    most, found = together(engine, asked)
    assert most == 3
    assert found == [alone(made, one)[0] for one in asked]


@every_kind
def test_usual_limits_have_room_for_the_states_of_all_samples(monkeypatch, architecture):
    made = decoder(architecture)
    assert Engine(made, max_samples=5).max_cache_tokens == 65_536 + 5 * made.target.state_tokens
    assert Engine(ad.SpeculativeDecoder(ragged(), ad.NGramDrafter()), max_samples=5).max_cache_tokens == 65_536
    asked = [Request(prompt=text(12, seed), max_new_tokens=8, seed=seed) for seed in range(6)]
    rows = 6 * (12 + 8 + TREE.num_nodes)
    monkeypatch.setattr("arbordraft.decoding.step._USUAL_ROWS", rows)
    assert together(Engine(made, max_samples=6), asked)[0] == 6
    # Without room for states, fewer are decoded.
    limited = Engine(made, max_cache_tokens=rows + made.target.state_tokens, max_samples=6)
    assert together(limited, asked)[0] < 6


def test_states_that_count_for_nothing_would_be_seen(monkeypatch):
    """Negative control."""
    made = decoder("qwen3_next")
    limit = 3 * (12 + 8 + TREE.num_nodes + made.target.state_tokens)
    monkeypatch.setattr(made.target, "state_tokens", 0)
    asked = [Request(prompt=text(12, seed), max_new_tokens=8, seed=seed) for seed in range(6)]
    assert together(Engine(made, max_cache_tokens=limit, max_samples=6), asked)[0] > 3


def test_requests_that_never_fit_are_refused():
    made = decoder("granitemoehybrid")
    states = made.target.state_tokens
    engine = Engine(made, max_cache_tokens=states + 40)
    assert engine.room(20) == 20 - TREE.num_nodes
    with pytest.raises(CacheOverflow, match=rf"and its states of recurrent layers {states} more, the cache may hold"):
        engine.submit(Request(prompt=text(20, 1), max_new_tokens=40))
    assert len(engine.submit(Request(prompt=text(20, 1), max_new_tokens=13, ends=())).result()[0].tokens) == 13
    with pytest.raises(ValueError, match=r"trees of 7 nodes, the states of recurrent layers included, got"):
        Engine(made, max_cache_tokens=states + TREE.num_nodes)


def test_states_of_a_draft_model_count_too():
    model = recurrent_target("qwen3_next")
    for drafter in (
        ad.LanguageModelDrafter(model),
        ad.HybridDrafter(ad.NGramDrafter(), ad.LanguageModelDrafter(model)),
    ):
        made = ad.SpeculativeDecoder(ragged(), drafter, TREE)
        limit = 2 * (12 + 8 + TREE.num_nodes + model.state_tokens)
        engine = Engine(made, max_cache_tokens=limit, max_samples=6)
        asked = [Request(prompt=text(12, seed), max_new_tokens=8, seed=seed) for seed in range(4)]
        most, found = together(engine, asked)
        assert most == 2
        assert found == [alone(made, one)[0] for one in asked]


# Prompts that part


def served(made, requests, rows=200):
    """Returns how many tokens of each prompt were copied, and all tokens."""
    engine = Engine(made, max_cache_tokens=4000, max_samples=4, max_rows=rows, reuse=True)
    answers = [engine.submit(request).result()[0] for request in requests]
    return [answer.stats.copied for answer in answers], [answer.tokens for answer in answers]


def parting(count=4, rest=9):
    """Returns requests whose prompts begin with the same 50 tokens and go on differently."""
    prompts = [[*text(50, 1), 3 + number, *text(rest, 10 + number)] for number in range(count)]
    return [Request(prompt=prompt, max_new_tokens=6) for prompt in prompts]


@pytest.mark.parametrize("rows", [200, 40])
@every_kind
def test_a_state_is_kept_where_prompts_part(architecture, rows):
    """The second prompt leaves a state where it parts from the first; the third and fourth begin there."""
    made, asked = decoder(architecture, ad.LanguageModelDrafter(recurrent_target("mamba2"))), parting()
    copied, found = served(made, asked, rows)
    assert copied == [0, 39 if rows == 40 else 0, 49, 49]  # 39 tokens: the end of the first portion
    assert found == [alone(made, one)[0] for one in asked]


def copies(monkeypatch, rows):
    """Returns how many tokens of prompts were copied for a target, and for its draft model."""
    made = decoder("qwen3_next", ad.LanguageModelDrafter(recurrent_target("mamba2")))
    engine = Engine(made, max_cache_tokens=4000, max_samples=4, max_rows=rows, reuse=True)
    share, found = RaggedKVCache.share, ([], [])

    def counted(self, source, handle, tokens):
        found[self is not engine._scheduler.state.cache].append(tokens)
        share(self, source, handle, tokens)

    monkeypatch.setattr(RaggedKVCache, "share", counted)
    for request in parting():
        engine.submit(request).result()
    return found


@pytest.mark.parametrize("rows", [200, 40])
def test_draft_models_keep_states_where_their_target_does(monkeypatch, rows):
    targets, drafts = copies(monkeypatch, rows)
    assert targets == [39] * (rows == 40) + [49, 49]
    assert drafts == targets


def test_draft_models_that_keep_none_would_be_seen(monkeypatch):
    """Negative control: only ends of portions have a state, as the first one after 39 tokens."""
    monkeypatch.setattr(RaggedKVCache, "branch", lambda *_: None)
    assert copies(monkeypatch, 40) == ([39, 49, 49], [39, 39, 39])


def test_no_state_is_there_without_a_cut(monkeypatch):
    """Negative control."""
    monkeypatch.setattr(Scheduler, "_branch", lambda *_: 0)
    assert served(decoder("qwen3_next"), parting())[0] == [0, 0, 0, 0]


@every_kind
def test_a_copy_of_another_state_would_be_seen(monkeypatch, architecture):
    """Negative control: the last state of the text stands for the one where prompts part."""
    made, asked = decoder(architecture), parting(rest=2)
    expected = [alone(made, one)[0] for one in asked]
    restore = RecurrentStates._restore
    monkeypatch.setattr(RecurrentStates, "_restore", lambda self, sample, slot, n, _: restore(self, sample, slot, n, n))
    copied, found = served(made, asked)
    assert copied == [0, 0, 49, 49]
    assert found[:2] == expected[:2]
    assert found[2:] != expected[2:]


@every_kind
def test_prompts_that_come_together_share_their_beginning(architecture):
    made, asked = decoder(architecture), parting()
    engine = Engine(made, max_cache_tokens=4000, max_samples=4, max_rows=200, reuse=True)
    streams = [engine.submit(request) for request in asked]
    engine.run()
    assert [stream.answers[0].stats.copied for stream in streams] == [0, 49, 49, 49]
    assert [stream.answers[0].tokens for stream in streams] == [alone(made, one)[0] for one in asked]


def test_a_copied_state_outlives_its_source():
    """A cache with room for one finished text: the second is copied from the first, the third from the second."""
    made, asked = decoder("lfm2"), parting(5)
    engine = Engine(made, max_cache_tokens=4000, max_samples=1, reuse=True)
    copied = [engine.submit(request).result()[0].stats.copied for request in asked]
    assert copied == [0, 0, 49, 49, 49]
