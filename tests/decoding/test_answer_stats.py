"""Counts and times of one answer, under the names of other servers."""

import random

import pytest
from support.models import PROMPTS, generated, ragged

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.metrics import AnswerStats
from arbordraft.decoding.prediction import CommonTokens
from arbordraft.decoding.requests import Request


def decoder(drafter=None):
    drafter = drafter or ad.HybridDrafter(ad.NGramDrafter(4, 1), ad.LanguageModelDrafter(ragged(seed=3)))
    return ad.SpeculativeDecoder(ragged(), drafter, ad.TreeTopology.from_k_config((2, 2, 1)))


def check(stats, events, prompt):
    """Checks counts against the events of the answer, and the names that tools read."""
    steps = [(len(event.tree.rows) - 1, len(event.verdict.path) - 1, len(event.tokens)) for event in events]
    assert (stats.prompt, stats.forwards, stats.emitted) == (prompt, len(steps), sum(kept for *_, kept in steps))
    accepted = [min(found, kept) for drafted, found, kept in steps if drafted]
    found = stats.speculative_decoding()
    assert found == {
        "mean_acceptance_length": 1 + sum(accepted) / max(1, len(accepted)),
        "draft_acceptance_rate": sum(accepted) / max(1, sum(drafted for drafted, *_ in steps)),
        "acceptance_histogram": [accepted.count(count) for count in range(max(accepted, default=-1) + 1)],
        "num_spec_steps": len(accepted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted for drafted, *_ in steps),
    }
    timings = stats.timings()
    assert timings["cache_n"] + timings["prompt_n"] == prompt
    assert timings["predicted_n"] == stats.emitted
    assert (timings["draft_n"], timings["draft_n_accepted"]) == (stats.drafted, stats.accepted)
    for name, seconds in (("prompt", stats.prompt_seconds), ("predicted", stats.decode_seconds)):
        assert seconds >= 0
        tokens = timings[f"{name}_n"]
        assert timings[f"{name}_ms"] == pytest.approx(1e3 * seconds)
        assert timings[f"{name}_per_second"] == pytest.approx(tokens / seconds if seconds else 0.0)
        assert timings[f"{name}_per_token_ms"] == pytest.approx(1e3 * seconds / max(1, tokens))


def test_an_engine_counts_each_answer():
    engine = Engine(decoder(), max_cache_tokens=900, max_samples=3)
    requests = [
        Request(prompt=PROMPTS[number % 3], max_new_tokens=9 + number, temperature=1.0, seed=number, n=1 + number % 2)
        for number in range(4)
    ]
    streams = [engine.submit(request) for request in requests]
    for request, stream in zip(requests, streams, strict=True):
        events = [event for event in stream if event.tree is not None]
        for index, answer in enumerate(stream.answers):
            check(answer.stats, [event for event in events if event.answer == index], len(request.prompt))
            assert answer.stats.emitted == len(answer.tokens)
            assert answer.stats.decode_seconds > 0


def test_copied_tokens_are_not_read():
    prompt = random.Random(0).choices(range(3, 60), k=60)
    engine = Engine(decoder(), max_cache_tokens=900, max_samples=2, reuse=True)
    first, second = (
        engine.submit(Request(prompt=prompt, max_new_tokens=4)).result()[0].stats.timings() for _ in range(2)
    )
    assert (first["cache_n"], first["prompt_n"]) == (0, 60)
    assert (second["cache_n"], second["prompt_n"]) == (58, 2)
    assert first["prompt_per_second"] > 0


def test_generate_counts_each_sample():
    tokens, output = generated(decoder(), max_new_tokens=11, do_sample=False, eos_token_id=None, pad_token_id=0)
    answers = output.answers
    assert [one.emitted for one in answers] == [len(each) for each in tokens] == output.stats.emitted
    assert [one.forwards for one in answers] == output.stats.forwards
    assert [one.prompt for one in answers] == [len(prompt) for prompt in PROMPTS]
    assert sum(one.drafted for one in answers) == output.stats.drafted
    assert sum(one.accepted for one in answers) == output.stats.accepted.total()
    assert all(one.timings()["predicted_per_second"] > 0 for one in answers)


def test_nothing_drafted_is_plain_decoding():
    _, output = generated(decoder(ad.NoDrafter()), max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert output.answers[0].speculative_decoding() == {
        "mean_acceptance_length": 1.0,
        "draft_acceptance_rate": 0.0,
        "acceptance_histogram": [],
        "num_spec_steps": 0,
        "num_accepted_draft_tokens": 0,
        "num_draft_tokens": 0,
    }


def test_figures_of_answers_are_summed():
    one = AnswerStats(prompt=3, emitted=4, forwards=2, drafted=5, acceptances=[0, 0, 1], prompt_seconds=0.5)
    other = AnswerStats(prompt=3, copied=1, emitted=1, forwards=1, drafted=2, acceptances=[1])
    both = one + other
    assert both.speculative_decoding()["acceptance_histogram"] == [1, 0, 1]
    assert both.speculative_decoding()["mean_acceptance_length"] == 2.0
    assert (both.timings()["prompt_n"], both.timings()["cache_n"], both.timings()["prompt_per_second"]) == (5, 1, 10.0)
    assert AnswerStats().timings()["predicted_per_second"] == 0.0


def longest_common(first, second):
    lengths = [[0] * (len(second) + 1)]
    for token in first:
        row = [0]
        for place, other in enumerate(second):
            row.append(lengths[-1][place] + 1 if token == other else max(row[-1], lengths[-1][place + 1]))
        lengths.append(row)
    return lengths[-1][-1]


def test_common_tokens_are_the_longest_common_subsequence():
    source = random.Random(1)
    for _ in range(200):
        prediction, answer = (source.choices(range(5), k=source.randint(0, 90)) for _ in range(2))
        common = CommonTokens(prediction)
        for token in answer:
            common.add([token])
        expected = longest_common(prediction, answer)
        assert common.counts == (expected, len(prediction) - expected)
