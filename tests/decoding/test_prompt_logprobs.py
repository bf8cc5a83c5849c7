"""Log-probabilities of prompts: the model's own, for any way to read a prompt and beside any requests."""

import random

import pytest
import torch
from support.models import PROMPTS, VOCAB, fusable, ragged, tiny

from arbordraft import LanguageModelDrafter, NoDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.decoding.engine import Engine, QueueFull
from arbordraft.decoding.requests import Request

TREE = TreeTopology.from_k_config((2, 2, 1))


@pytest.fixture(scope="module")
def decoder():
    return SpeculativeDecoder(ragged(), LanguageModelDrafter(ragged(seed=3)), TREE)


def text(length, seed=0):
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def scored(prompt, others=2, **settings):
    return Request(prompt=prompt, prompt_logprobs=others, **{"max_new_tokens": 0, "ends": (), **settings})


def check(model, prompt, found):
    """Compares with transformers' own logits."""
    with torch.no_grad():
        rows = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for row, token, known in zip(rows, prompt[1:], found, strict=False):
        assert known.logprob == pytest.approx(row[token].item(), abs=1e-4)
        assert [other for other, _ in known.others] == row.topk(len(known.others)).indices.tolist()


@pytest.mark.parametrize("max_rows", [7, 500])
def test_prompt_logprobs_are_those_of_transformers(decoder, max_rows):
    """Prompts are read at once or in portions, beside a plain request, with and without an answer."""
    engine = Engine(decoder, max_cache_tokens=4000, max_rows=max_rows)
    prompts = [text(length, length) for length in (1, 2, 9, 60)]
    plain = Request(prompt=text(20, 5), max_new_tokens=8, temperature=1.0, seed=1)
    beside = engine.submit(plain)
    streams = [(count, engine.submit(scored(p, max_new_tokens=count, n=2))) for p in prompts for count in (0, 6)]
    engine.run()
    for prompt, (count, stream) in zip([p for p in prompts for _ in range(2)], streams, strict=True):
        for answer in stream.answers:
            check(decoder.target.model, prompt, answer.prompt_logprobs)
            assert (len(answer.tokens), answer.finish_reason) == (count, "length")
    (undisturbed,) = Engine(decoder, max_cache_tokens=4000, max_rows=max_rows).submit(plain).result()
    assert beside.answers[0].tokens == undisturbed.tokens
    assert beside.answers[0].prompt_logprobs == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logprobs_of_an_answer_equal_those_of_its_text_as_a_prompt(dtype):
    target = RaggedModel(fusable().to(dtype), kernels="native")
    made, prompt = SpeculativeDecoder(target, LanguageModelDrafter(target), TREE), text(60)
    asked = Request(prompt=prompt, max_new_tokens=25, temperature=0.5, seed=3, ends=(), logprobs=3)
    (answer,) = Engine(made, max_cache_tokens=1000).submit(asked).result()
    assert answer.stats.accepted
    whole = [*prompt, *answer.tokens]
    for beside in ([], [scored(text(90, 1)), Request(prompt=text(40, 2), max_new_tokens=5)]):
        engine = Engine(made, max_cache_tokens=2000, max_rows=33)
        streams = [engine.submit(request) for request in [*beside, scored(whole, 3)]]
        engine.run()
        assert streams[-1].answers[0].prompt_logprobs[-len(answer.tokens) :] == answer.logprobs


def test_prefixes_are_copied_from_scored_prompts_and_never_for_them(decoder, monkeypatch):
    copied, share = [], decoder.stepper.share
    monkeypatch.setattr(
        decoder.stepper, "share", lambda *known: copied.append(known[2].prompt_logprobs) or share(*known)
    )
    prompt = text(80)
    engine = Engine(decoder, max_cache_tokens=2000, reuse=True)
    plain = Request(prompt=prompt, max_new_tokens=5)
    for request in (plain, scored(prompt), scored(prompt), plain):
        (answer,) = engine.submit(request).result()
        if request.prompt_logprobs is not None:
            check(decoder.target.model, prompt, answer.prompt_logprobs)
    assert copied == [None]


def test_rows_of_logits_in_memory_are_bounded(monkeypatch):
    target = RaggedModel(tiny(max_position_embeddings=800), kernels="torch", self_test=False)
    decoder, held, run = SpeculativeDecoder(target, NoDrafter()), [], target.run

    def watched(*known, **named):
        logits, states = run(*known, **named)
        held.append(len(logits))
        return logits, states

    monkeypatch.setattr(decoder.target, "run", watched)
    (answer,) = Engine(decoder, max_cache_tokens=4000, max_rows=4000).submit(scored(text(700), 0)).result()
    assert len(answer.prompt_logprobs) == 699
    assert max(held) == 256


def test_events_carry_prompt_logprobs_in_order(decoder):
    stream = Engine(decoder, max_cache_tokens=500, max_rows=10).submit(scored(text(40), max_new_tokens=3))
    events = list(stream)
    portions = [len(event.prompt_logprobs) for event in events]
    assert portions[:4] == [10, 10, 10, 9]
    assert not any(portions[4:])
    assert [known for event in events for known in event.prompt_logprobs] == stream.answers[0].prompt_logprobs


def poisoned():
    """Builds a model that gives NaN after token 9, and an engine with it."""
    model = tiny()
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = float("nan")
    made = SpeculativeDecoder(RaggedModel(model, kernels="torch", self_test=False), NoDrafter())
    return model, Engine(made, max_cache_tokens=1000)


def test_nan_fails_its_own_request_alone():
    model, engine = poisoned()
    sound = [token for token in text(30) if token != 9]
    good, bad = engine.submit(scored(sound)), engine.submit(scored([5, 9, 6, 7]))
    engine.run()
    check(model, sound, good.answers[0].prompt_logprobs)
    with pytest.raises(FloatingPointError, match="NaN"):
        bad.result()
    assert engine.healthy


def test_reading_ends_when_the_request_is_cancelled(decoder):
    engine = Engine(decoder, max_cache_tokens=500, max_rows=10)
    stream = engine.submit(scored(text(100)))
    engine.step()
    stream.cancel()
    engine.run()
    assert stream.answers[0].finish_reason == "cancelled"
    assert len(stream.answers[0].prompt_logprobs) == 10


def test_a_request_without_new_tokens_needs_prompt_logprobs():
    with pytest.raises(ValueError, match="max_new_tokens"):
        Request(prompt=[3], max_new_tokens=0)
    with pytest.raises(ValueError, match="prompt_logprobs"):
        Request(prompt=[3], prompt_logprobs=-1)


def test_answers_of_requests_submitted_together_keep_their_order(decoder):
    engine = Engine(decoder, max_cache_tokens=2000)
    asked = [Request(prompt=p, max_new_tokens=4 + i, temperature=1.0, seed=i, n=1 + i) for i, p in enumerate(PROMPTS)]
    stream = engine.submit(*asked)
    engine.run()
    apart = [answer.tokens for request in asked for answer in engine.submit(request).result()]
    assert [answer.tokens for answer in stream.answers] == apart
    assert stream.requests == tuple(asked)


def test_requests_submitted_together_are_all_accepted_or_all_refused(decoder):
    engine = Engine(decoder, max_cache_tokens=2000, max_samples=1, max_waiting=0)
    request = Request(prompt=PROMPTS[0], max_new_tokens=3)
    first = engine.submit(request)
    engine.step()
    with pytest.raises(QueueFull):
        engine.submit(request, request)
    first.result()
    with pytest.raises(ValueError, match="vocabulary"):
        engine.submit(request, Request(prompt=[VOCAB]))
    with pytest.raises(ValueError, match="at least one"):
        engine.submit()
    with pytest.raises(ValueError, match="one priority"):
        engine.submit(request, Request(prompt=PROMPTS[0], priority=1))
    assert engine.waiting == 0
    assert len(engine.submit(request, request).result()) == 2


def test_a_failing_request_ends_those_submitted_with_it():
    _, engine = poisoned()
    long = Request(prompt=[5, 6], max_new_tokens=100, ends=(), logit_bias={9: -100.0})
    stream, other = engine.submit(long, Request(prompt=[9], max_new_tokens=9)), engine.submit(long)
    with pytest.raises(FloatingPointError):
        stream.result()
    engine.step()
    assert engine.running == 1
    assert len(other.result()[0].tokens) == 100
