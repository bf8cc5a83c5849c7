"""Requests that join and leave a batch: each gets the tokens it would get alone."""

import asyncio
import gc
import itertools
import random
import threading
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from support.fragile import Fragile
from support.models import EOS, PROMPTS, VOCAB, ragged, tiny

import arbordraft as ad
from arbordraft.decoding.engine import Engine, EngineClosed, QueueFull
from arbordraft.decoding.requests import Request
from arbordraft.decoding.static.bucket import Bucket
from arbordraft.heads.eagle import EagleHead
from arbordraft.target.cache import CacheOverflow, RaggedKVCache

TREE = ad.TreeTopology.from_k_config((2, 2, 1))


def decoder(drafter=None, coupling=None, **options):
    drafter = drafter or ad.HybridDrafter(ad.NGramDrafter(), ad.LanguageModelDrafter(ragged(seed=3)))
    return ad.SpeculativeDecoder(ragged(), drafter, TREE, coupling, **options)


def text(length, seed):
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def alone(made, request):
    engine = Engine(made, max_cache_tokens=4000)
    return [answer.tokens for answer in engine.submit(request).result()]


def requests(count):
    """Builds requests of all kinds, each with a seed."""
    kinds = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 5},
        {"repetition_penalty": 1.3},
        {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.5, "n": 2},
        {"temperature": 0.9, "min_p": 0.02, "logit_bias": {7: 4.0, 8: -50.0}},
    ]
    settings = zip(range(count), itertools.cycle(kinds), strict=False)
    return [
        Request(prompt=text(1 + 7 * number % 40, number), max_new_tokens=1 + 5 * number % 23, seed=number, **kind)
        for number, kind in settings
    ]


COUPLINGS = {
    "shared noise": (None, None),
    "random drafts": (
        ad.LanguageModelDrafter(ragged(seed=3)),
        ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection())),
    ),
    "nothing drafted": (ad.NoDrafter(), ad.Coupling.shared(2)),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
def test_answers_are_those_of_a_request_alone(name, reuse):
    made, asked = decoder(*COUPLINGS[name]), requests(21)
    engine = Engine(made, max_cache_tokens=400, max_samples=5, max_rows=16, reuse=reuse)
    streams = []
    for number, request in enumerate(asked):
        streams.append(engine.submit(request))
        for _ in range(number % 4):
            engine.step()
    engine.run()
    assert [[answer.tokens for answer in stream.answers] for stream in streams] == [alone(made, r) for r in asked]


def test_stop_tokens_end_answers():
    made, asked = decoder(), {"prompt": PROMPTS[1], "max_new_tokens": 20, "ends": []}
    (answer,) = alone(made, Request(**asked))
    end = answer[7]
    expected = answer[: answer.index(end) + 1]
    assert alone(made, Request(**asked, stop_token_ids=[end])) == [expected]
    assert alone(made, Request(**{**asked, "ends": [end]})) == [expected]
    (longer,) = alone(made, Request(**asked, stop_token_ids=[end], min_new_tokens=12))
    assert end not in longer[:11]


def test_log_probabilities_are_the_models_own():
    model, request = ragged().model, Request(prompt=PROMPTS[2], max_new_tokens=9, temperature=1.4, seed=3, logprobs=2)
    (answer,) = Engine(decoder(), max_cache_tokens=500).submit(request).result()
    assert len(answer.logprobs) == len(answer.tokens)
    known = list(request.prompt)
    for token, found in zip(answer.tokens, answer.logprobs, strict=True):
        with torch.no_grad():
            row = model(torch.tensor([known])).logits[0, -1].double().log_softmax(-1)
        assert found.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [other for other, _ in found.others] == row.topk(2).indices.tolist()
        known.append(token)


def test_events_hold_drafts_and_verdicts():
    stream = Engine(decoder(), max_cache_tokens=500).submit(Request(prompt=PROMPTS[2], max_new_tokens=12, ends=()))
    events = list(stream)
    assert events[-1].finish_reason == "length"
    assert [token for event in events for token in event.tokens] == stream.answers[0].tokens
    for event in events[:-1]:
        path = [event.tree.token(row) for row in event.verdict.path[1:]]
        assert [*path, event.verdict.token][: len(event.tokens)] == list(event.tokens)
    (answer,) = stream.answers
    assert answer.stats.forwards == len(events) - 1
    assert answer.stats.drafted >= answer.stats.accepted > 0


@pytest.mark.parametrize(
    ("settings", "reason", "length"),
    [({"ends": ()}, "length", 12), ({"ends": None}, None, None), ({"ends": "third"}, "stop", 3)],
    ids=["budget", "the model's end tokens", "a given end token"],
)
def test_answers_say_why_they_ended(settings, reason, length):
    made, asked = decoder(), {"prompt": PROMPTS[0], "max_new_tokens": 12}
    (whole,) = alone(made, Request(**asked, ends=()))
    if settings["ends"] == "third":
        third = whole[2]
        settings, length = {"ends": [third]}, whole.index(third) + 1
    (answer,) = Engine(made, max_cache_tokens=500).submit(Request(**asked, **settings)).result()
    if reason is None:
        length = whole.index(EOS) + 1 if EOS in whole else 12
        reason = "stop" if EOS in whole else "length"
    assert (answer.finish_reason, answer.tokens) == (reason, whole[:length])


# A request's own failures


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_that_fails_ends_its_own_request(name, temperature):
    made = decoder(*COUPLINGS[name])
    engine = Engine(made, max_cache_tokens=500, max_samples=8)
    others = [r for r in requests(7) if r.n == 1]
    streams = [engine.submit(request) for request in others]
    lost = engine.submit(
        Request(prompt=text(9, 1), max_new_tokens=20, processors=[Fragile(12)], temperature=temperature, ends=())
    )
    engine.run()
    with pytest.raises(RuntimeError, match="broken on purpose"):
        lost.result()
    assert len(lost.answers[0].tokens) <= 3
    assert [stream.result()[0].tokens for stream in streams] == [alone(made, request)[0] for request in others]


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("score", [-torch.inf, torch.nan])
def test_a_processor_that_leaves_nothing_to_draw_ends_its_own_request(name, score):
    def forbidding(input_ids, scores):
        return torch.full_like(scores, score) if input_ids.shape[1] >= 12 else scores

    made = decoder(*COUPLINGS[name])
    engine = Engine(made, max_cache_tokens=500)
    kept, lost = (
        engine.submit(Request(prompt=prompt, max_new_tokens=12, temperature=1.0, seed=1, ends=(), processors=own))
        for prompt, own in [(PROMPTS[0], ()), (text(9, 1), [forbidding])]
    )
    engine.run()
    with pytest.raises(ValueError, match="cannot draw"):
        lost.result()
    assert kept.result()[0].tokens == alone(made, kept.request)[0]


def test_rows_after_a_rejected_draft_may_have_no_token_to_draw():
    def forbidding(input_ids, scores):
        banned = torch.arange(VOCAB) == 7
        return scores.masked_fill(banned | (input_ids[:, -1:] == 7), -torch.inf)

    made = decoder(
        ad.NGramDrafter(longest=1, shortest=1), ad.Coupling(ad.Fixed(2), ad.TopDown(ad.RecursiveRejection()))
    )
    prompt = [3, 7, 3, 7, 9, 7, *range(8, VOCAB, 2), 7, 3]
    request = Request(prompt=prompt, max_new_tokens=9, temperature=1.0, seed=1, ends=(), processors=[forbidding])
    assert 7 not in alone(made, request)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_processors_may_return_scores_of_another_dtype(dtype):
    made = decoder()

    def halved(input_ids, scores):
        return (scores / 2).to(dtype).float()

    def narrowed(input_ids, scores):
        return halved(input_ids, scores).to(dtype)

    want, got = (
        made.generate(torch.tensor(PROMPTS[:1] * 2), max_new_tokens=8, logits_processor=[own])
        for own in (halved, narrowed)
    )
    assert got.tolist() == want.tolist()


def test_nan_logits_end_their_own_request():
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = torch.nan
    made = ad.SpeculativeDecoder(ad.RaggedModel(model, kernels="torch", self_test=False), ad.NGramDrafter())
    engine = Engine(made, max_cache_tokens=500)
    kept, lost = (
        engine.submit(Request(prompt=prompt, max_new_tokens=8, ends=())) for prompt in (PROMPTS[0], [5, 60, 7])
    )
    engine.run()
    with pytest.raises(FloatingPointError, match="NaN"):
        lost.result()
    assert kept.result()[0].tokens == alone(made, kept.request)[0]


def test_an_unexpected_error_ends_only_admitted_requests(monkeypatch):
    made = decoder()
    engine = Engine(made, max_cache_tokens=500, max_samples=2)
    streams = [engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=6)) for _ in range(3)]
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(made.target, "run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    for stream in streams[:2]:
        with pytest.raises(ZeroDivisionError):
            stream.result()
    assert streams[2].result()[0].tokens == alone(made, streams[2].request)[0]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_repeated_failures_of_steps_end_waiting_requests(monkeypatch, error):
    """No request can be admitted. With a thread that steps, readers of waiting requests would hang."""

    def fails(*_):
        raise error

    made = decoder()
    engine = Engine(made, max_cache_tokens=500)
    with monkeypatch.context() as patch:
        patch.setattr(made.stepper, "add", fails)
        stream = engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=6))
        for failures in range(3):
            assert engine.healthy
            assert engine.waiting == 1
            assert not stream.done, failures
            with pytest.raises(error):
                engine.step()
        assert not engine.healthy
        with engine:
            for lost in (stream, engine.submit(stream.request)):
                with pytest.raises((error, EngineClosed)):
                    lost.result()
            patch.undo()
            assert engine.submit(stream.request).result()[0].tokens == alone(made, stream.request)[0]
            assert engine.healthy
    assert not engine.healthy


def test_cancelled_requests_give_back_their_room():
    made = decoder()
    engine = Engine(made, max_cache_tokens=100, max_samples=4, reuse=False)
    long = Request(prompt=PROMPTS[0], max_new_tokens=60, ends=())
    first, second, third = (engine.submit(long) for _ in range(3))
    for _ in range(3):
        engine.step()
    assert first.answers[0].tokens
    assert not second.answers[0].tokens, "the cache has room for one"
    second.cancel()
    first.cancel()
    assert third.result()[0].tokens == alone(made, long)[0]
    for cancelled in (first, second):
        assert cancelled.result()[0].finish_reason == "cancelled"


# Admission


def test_impossible_requests_are_refused_at_once():
    engine = Engine(decoder(), max_cache_tokens=100)
    cases = [
        ({"prompt": [5] * 90, "max_new_tokens": 20}, CacheOverflow, "raise that limit"),
        ({"prompt": [VOCAB]}, ValueError, "outside the target's vocabulary"),
        ({"prompt": [5], "max_new_tokens": 129}, ValueError, "positions"),
        ({"prompt": [5], "max_new_tokens": 5, "stop": ["x"]}, ValueError, "tokenizer"),
    ]
    for settings, error, message in cases:
        with pytest.raises(error, match=message):
            engine.submit(Request(**settings))
    with pytest.raises(TypeError, match="request must be of type Request"):
        engine.submit([5])
    assert not engine.step()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"temperature": 1e308}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"frequency_penalty": 1e308}, "frequency_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"n": 0}, "n must"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": {3: 100.5}}, "logit_bias"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Request(**{"prompt": [5], **settings})


def test_requests_are_ordered_by_priority_then_by_arrival():
    engine, ended = Engine(decoder(), max_cache_tokens=200, max_samples=1), []
    streams = {
        name: engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=3, priority=priority, ends=()))
        for name, priority in (("b", 0), ("c", 0), ("a", 1), ("d", -1))
    }
    while engine.step():
        ended += [name for name, stream in streams.items() if stream.done and name not in ended]
    assert "".join(ended + [name for name in streams if name not in ended]) == "abcd"


class Arrival(NamedTuple):
    """A prompt of ``length`` tokens that is submitted before step ``step``."""

    length: int
    step: int = 0
    priority: int = 0


def portions_of(engine, arrivals):
    """Returns the prompt tokens that each step reads, by index of arrival; each request asks for one new token."""
    read, portions, submitted = engine.decoder.stepper.prefill, [], 0

    def watched(state, tokens):
        names = [arrivals.index(next(a for a in arrivals if a.length == state[n].prompt)) for n in tokens]
        portions.append(dict(zip(names, tokens.values(), strict=True)))
        read(state, tokens)

    engine.decoder.stepper.prefill = watched
    for step in itertools.count():
        for number, arrival in enumerate(arrivals):
            if arrival.step == step:
                prompt = text(arrival.length, number)
                engine.submit(Request(prompt=prompt, max_new_tokens=1, priority=arrival.priority))
                submitted += 1
        if not engine.step() and submitted == len(arrivals):
            return portions


@pytest.mark.parametrize(
    ("arrivals", "order"),
    [
        ([Arrival(81), Arrival(41), Arrival(61)], [1, 2, 0]),
        ([Arrival(81), Arrival(61, 1)], [1, 0]),
        ([Arrival(81), Arrival(41), Arrival(61, 3)], [1, 0, 2]),
        ([Arrival(81, priority=1), Arrival(41), Arrival(61, priority=-1)], [0, 1, 2]),
    ],
    ids=["shortest first", "a bit later", "too late to overtake", "priority before length"],
)
def test_prompts_are_read_in_their_turn(arrivals, order):
    """A step reads 16 tokens. A prompt that comes too late does not overtake, although it is shorter."""
    engine = Engine(
        ad.SpeculativeDecoder(ragged(), ad.NoDrafter(), TREE), max_cache_tokens=500, max_rows=16, reuse=False
    )
    portions = portions_of(engine, arrivals)
    last = {name: step for step, portion in enumerate(portions) for name in portion}
    assert sorted(last, key=last.__getitem__) == order


def test_a_portion_ends_with_a_prompt_unless_it_is_small():
    engine = Engine(
        ad.SpeculativeDecoder(ragged(), ad.NoDrafter(), TREE), max_cache_tokens=500, max_rows=40, reuse=False
    )
    arrivals = [Arrival(6), Arrival(8), Arrival(31), Arrival(101)]
    assert portions_of(engine, arrivals) == [{0: 5, 1: 7}, {2: 30}, {3: 40}, {3: 40}, {3: 20}]


@pytest.mark.parametrize(
    ("name", "temperature", "waits"),
    [("random drafts", 0.0, True), ("shared noise", 1.0, True), ("random drafts", 1.0, False)],
    ids=["greedy", "shared noise", "random drafts"],
)
def test_drafts_wait_for_prompts_where_they_change_no_text(name, temperature, waits):
    """Deciders learn nothing from steps that waited; otherwise later drafts would depend on the load."""
    made, steps, learned = decoder(*COUPLINGS[name]), [], []
    made.on_step = lambda state, tree, verdict: steps.append((state.prefilling, tree))
    made.decider.learn = lambda memory, outcome: learned.append(outcome)
    engine = Engine(made, max_cache_tokens=600, max_rows=16, reuse=False)
    engine.submit(Request(prompt=PROMPTS[2], max_new_tokens=40, seed=1, temperature=temperature, ends=()))
    engine.step()
    engine.submit(Request(prompt=text(80, 1), max_new_tokens=1, seed=1, temperature=temperature))
    engine.run()
    living = [(when, tree[0].guesses) for when, tree in steps if 0 in tree.living]
    drafted = {reading: sum(guesses for when, guesses in living if when == reading) for reading in (True, False)}
    assert drafted[False] > 0
    assert (drafted[True] == 0) == waits
    reading = sum(when for when, _ in steps)
    trees = sum(tree is not None for _, tree in steps) + 1  # plus the only tree of the other request
    assert reading == 4
    assert len(learned) == trees - reading * waits


def rounds(engine, streams, until=lambda: False):
    """Runs steps; returns the indices of streams in the order in which their answers began."""
    begun, order = [0] * len(streams), []
    while not until() and engine.step():
        for number, stream in enumerate(streams):
            now = sum(bool(answer.tokens) for answer in stream.answers)
            order += [number] * (now - begun[number])
            begun[number] = now
    return order


def many(answers, tokens=6, **settings):
    return Request(prompt=PROMPTS[0], max_new_tokens=tokens, n=answers, seed=1, temperature=1.0, ends=(), **settings)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_newcomer_gets_the_first_slot_that_becomes_free(slots):
    engine = Engine(decoder(ad.NoDrafter()), max_cache_tokens=500, max_samples=slots)
    first = engine.submit(many(12))
    engine.step()
    late = engine.submit(many(1, tokens=1))
    rounds(engine, [first, late], until=lambda: late.done)
    assert sum(answer.finish_reason is not None for answer in first.answers) <= slots
    engine.run()
    assert [answer.finish_reason for answer in first.answers] == ["length"] * 12


def test_slots_are_shared_between_requests_and_not_between_answers():
    """Two requests want many answers and one a few: none gets ahead of another while both wait."""
    engine = Engine(decoder(ad.NoDrafter()), max_cache_tokens=900, max_samples=3)
    streams = [engine.submit(many(count)) for count in (7, 6, 2)]
    order = rounds(engine, streams)
    assert [sorted(order[at : at + 3]) for at in (0, 3)] == [[0, 1, 2]] * 2
    assert all(abs(order[:end].count(0) - order[:end].count(1)) <= 2 for end in range(len(order)))


def test_a_request_for_many_answers_is_not_overtaken_for_ever():
    """There is one slot and always a new request; the large request still gets its turns."""
    engine = Engine(decoder(ad.NoDrafter()), max_cache_tokens=500, max_samples=1)
    large, news = engine.submit(many(4, tokens=2)), [engine.submit(many(1, tokens=2))]
    for _ in range(40):
        engine.step()
        if news[-1].done:
            news += [engine.submit(many(1, tokens=2)) for _ in range(2)]  # more than can be served
    assert large.done
    for stream in news:
        stream.cancel()
    engine.run()


def test_an_admission_that_fails_leaves_the_queue_whole(monkeypatch):
    """Memory runs out while requests are admitted; the other requests are answered later."""
    made = decoder(ad.NoDrafter())
    engine, add = Engine(made, max_cache_tokens=500, max_samples=4), made.stepper.add
    joined = []

    def failing(state, sample, rows):
        joined.append(sample)
        if len(joined) == 2:
            raise MemoryError
        add(state, sample, rows)

    monkeypatch.setattr(made.stepper, "add", failing)
    streams = [engine.submit(many(1)) for _ in range(3)]
    with pytest.raises(MemoryError):
        engine.step()
    engine.run()
    with pytest.raises(MemoryError):
        streams[0].result()
    assert [len(stream.result()[0].tokens) for stream in streams[1:]] == [6, 6]
    assert engine.waiting == 0


def test_turns_change_no_answer_and_come_after_priorities():
    made = decoder()
    asked = [many(5), many(3, priority=1), many(1), Request(prompt=text(50, 3), max_new_tokens=9, seed=4, n=2)]
    engine = Engine(made, max_cache_tokens=400, max_samples=2, max_rows=16)
    streams = [engine.submit(request) for request in asked]
    order = rounds(engine, streams)
    assert order[:3] == [1, 1, 1]
    assert [[answer.tokens for answer in stream.answers] for stream in streams] == [alone(made, r) for r in asked]


def test_a_request_for_many_answers_does_not_fill_the_queue():
    engine = Engine(decoder(), max_cache_tokens=300, max_samples=2, max_waiting=1)
    streams = [engine.submit(many(30)) for _ in range(2)]
    engine.step()
    streams.append(engine.submit(many(30)))
    assert engine.waiting == 3 * 30 - 2
    with pytest.raises(QueueFull, match="1 requests wait already, 1 may: ask again later"):
        engine.submit(many(1))
    for stream in streams:
        stream.cancel()
    engine.run()
    engine.submit(many(1))


def test_admitted_requests_never_overflow_the_cache():
    """Runs random requests in a cache that holds a few of them at a time."""
    rng = random.Random(5)
    engine = Engine(decoder(), max_cache_tokens=150, max_samples=6, max_rows=8)
    asked = [
        Request(prompt=text(rng.randrange(1, 60), n), max_new_tokens=rng.randrange(1, 40), seed=n, temperature=n % 2)
        for n in range(30)
    ]
    streams = [engine.submit(request) for request in asked]
    engine.run()
    assert all(stream.result()[0].tokens for stream in streams)


# Common prefixes


class Counted(RaggedKVCache):
    """Counts copied tokens."""

    copied = 0

    def share(self, source, sample, tokens):
        type(self).copied += tokens
        super().share(source, sample, tokens)


@pytest.mark.parametrize("rows", [8, 100])
def test_common_prefixes_are_copied(monkeypatch, rows):
    """Copies from a finished text, from a running one, and from a prompt that is still being read."""
    made, system = decoder(), text(50, 1)
    asked = [Request(prompt=[*system, *text(n, n)], max_new_tokens=5, seed=n, temperature=n % 2) for n in range(3, 9)]
    expected = [alone(made, request) for request in asked]
    monkeypatch.setattr("arbordraft.decoding.runner.RaggedKVCache", Counted)
    monkeypatch.setattr(Counted, "copied", 0)
    engine = Engine(made, max_cache_tokens=2000, max_samples=3, max_rows=rows, reuse=True)
    first = engine.submit(asked[0])
    assert first.result()[0].tokens == expected[0][0]
    assert Counted.copied == 0
    streams = [engine.submit(request) for request in asked[1:]]
    engine.run()
    assert [[answer.tokens for answer in stream.answers] for stream in streams] == expected[1:]
    assert Counted.copied >= 5 * 50 - 5


def recorded(kind):
    """Builds a decoder whose steps have fixed shapes."""
    target = ragged(num_hidden_layers=4)
    if kind == "lookups":
        return ad.SpeculativeDecoder(target, ad.NGramDrafter(), ad.TreeTopology.chain(3), buckets=(8, 32))
    if kind == "head":
        torch.manual_seed(1)
        head = EagleHead.for_target(target.model, list(range(40)), hidden_layers=[1, 2, 3])
        return ad.SpeculativeDecoder(target, ad.EagleDrafter(head, target), TREE, buckets=(32,))
    drawn = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))
    coupling = drawn if kind == "random drafts" else None
    return ad.SpeculativeDecoder(target, ad.LanguageModelDrafter(ragged(seed=3)), TREE, coupling, buckets=(32,))


@pytest.mark.parametrize("kind", ["lookups", "head", "draft model", "random drafts"])
def test_recorded_steps_keep_finished_texts_and_become_no_wider(kind):
    made, system = recorded(kind), text(50, 1)
    asked = [Request(prompt=[*system, *text(n, n)], max_new_tokens=5, seed=n, temperature=n % 3) for n in range(3, 12)]
    apart = Engine(recorded(kind), max_cache_tokens=4000, reuse=False)
    expected = [[answer.tokens for answer in apart.submit(request).result()] for request in asked]
    engine = Engine(made, max_cache_tokens=4000, max_samples=2, max_rows=100, reuse=True)
    found = [[answer.tokens for answer in engine.submit(request).result()] for request in asked[:5]]
    assert {bucket.samples for bucket in made.stepper.static.shapes} == {1}
    assert len(engine._scheduler.state.samples) == 5
    streams = [engine.submit(request) for request in asked[5:]]
    engine.run()
    found += [[answer.tokens for answer in stream.answers] for stream in streams]
    assert found == expected
    assert {bucket.samples for bucket in made.stepper.static.shapes} == {1, 2}


def test_noise_of_another_sample_would_be_seen(monkeypatch):
    """Negative control: two samples beside finished texts draw with each other's noise."""
    made = recorded("lookups")
    asked = [Request(prompt=text(40, n), max_new_tokens=6, seed=n, temperature=1.0) for n in range(4)]
    expected = [alone(made, request) for request in asked]
    fill = Bucket.fill_noise

    def swapped(bucket, into, tree, noise, temperatures):
        fill(bucket, into, tree, replace(noise, sources=noise.sources[::-1]), temperatures)

    monkeypatch.setattr(Bucket, "fill_noise", swapped)
    engine = Engine(made, max_cache_tokens=4000, max_samples=2, reuse=True)
    streams = [engine.submit(request) for request in asked]
    engine.run()
    assert [[answer.tokens for answer in stream.answers] for stream in streams] != expected


def test_several_answers_read_their_prompt_once(monkeypatch):
    monkeypatch.setattr("arbordraft.decoding.runner.RaggedKVCache", Counted)
    monkeypatch.setattr(Counted, "copied", 0)
    engine = Engine(decoder(), max_cache_tokens=2000, reuse=True)
    stream = engine.submit(Request(prompt=text(60, 2), n=4, seed=5, temperature=1.0, max_new_tokens=6))
    engine.run()
    assert Counted.copied == 3 * 58
    assert len({tuple(answer.tokens) for answer in stream.answers}) > 1


def test_a_copy_of_other_rows_would_be_seen(monkeypatch):
    """Negative control: copied rows change their sign."""
    made, share = decoder(), RaggedKVCache.share

    def wrong(self, source, sample, tokens):
        share(self, source, sample, tokens)
        for pool in self._pools():
            start = self._slabs[sample].start
            pool[start : start + tokens] *= -1

    monkeypatch.setattr(RaggedKVCache, "share", wrong)
    engine, prompt = Engine(made, max_cache_tokens=2000, reuse=True), text(60, 2)
    engine.submit(Request(prompt=prompt, max_new_tokens=2)).result()
    again = engine.submit(Request(prompt=prompt, max_new_tokens=20)).result()
    assert again[0].tokens != alone(made, Request(prompt=prompt, max_new_tokens=20))[0]


# Threads, asynchronous readers, closing


def test_an_engine_thread_serves_many_clients():
    made, asked = decoder(), requests(14)
    expected = [alone(made, request) for request in asked]
    found = [None] * len(asked)
    with Engine(made, max_cache_tokens=600, max_samples=4, max_rows=16) as engine:

        def client(number):
            found[number] = [answer.tokens for answer in engine.submit(asked[number]).result()]

        threads = [threading.Thread(target=client, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == expected
    with pytest.raises(EngineClosed):
        engine.submit(asked[0])


@pytest.mark.parametrize("threaded", [True, False])
def test_asynchronous_readers(threaded):
    made, asked = decoder(), requests(8)

    async def read(engine, request):
        gathered = [[] for _ in range(request.n)]
        async for event in engine.submit(request):
            gathered[event.answer] += event.tokens
        return gathered

    async def main():
        engine = Engine(made, max_cache_tokens=600, max_samples=4)
        if threaded:
            engine.start()
        try:
            return await asyncio.gather(*(read(engine, request) for request in asked))
        finally:
            engine.close()

    assert asyncio.run(main()) == [alone(made, request) for request in asked]


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("threaded", [True, False])
def test_closing(drain, threaded):
    made = decoder()
    engine = Engine(made, max_cache_tokens=600, max_samples=2)
    streams = [engine.submit(Request(prompt=PROMPTS[0], max_new_tokens=80, ends=())) for _ in range(4)]
    if threaded:
        engine.start()
    engine.close(drain=drain)
    for stream in streams:
        if drain:
            assert len(stream.result()[0].tokens) == 80
        else:
            with pytest.raises(EngineClosed, match="before the answer had ended"):
                stream.result()


def test_many_requests_leave_nothing_behind():
    made = decoder(ad.NGramDrafter())
    engine = Engine(made, max_cache_tokens=300, max_samples=4)

    def live():
        gc.collect()
        return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())

    for round_ in range(3):
        for number in range(40):
            engine.submit(Request(prompt=text(20, number), max_new_tokens=3, seed=number, temperature=1.0))
        engine.run()
        if round_ == 0:
            before = live()
    assert live() <= before + 5
    assert len(engine._scheduler.state.samples) <= 5 * 4
