"""Requests of all kinds in one batch: their tokens are drawn in one call, and are those that processors give."""

import pytest
import torch
from transformers import SuppressTokensLogitsProcessor

import arbordraft.sampling.drawn_rows as module
from arbordraft import Engine, NGramDrafter, RaggedModel, Request, SpeculativeDecoder, TreeTopology
from arbordraft.testing import tiny_model
from arbordraft.verifiers.coupling import Coupling

pytestmark = pytest.mark.usefixtures("kernels")

PROMPT = [5, 6, 7, 5, 6, 7, 5, 6]
REQUESTS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 0.8, "top_k": 4},
    "top-p": {"temperature": 1.3, "top_p": 0.7},
    "top-k and top-p": {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    "min-p": {"temperature": 0.9, "min_p": 0.2},
    "penalty": {"temperature": 0.0, "repetition_penalty": 1.4},
    "chat": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1},
    "frequency": {"temperature": 0.6, "frequency_penalty": 0.7, "presence_penalty": 0.3},
    "bias": {"temperature": 0.8, "logit_bias": {7: 3.0, 8: -100.0}},
    "short": {"temperature": 0.0, "min_new_tokens": 6},
}


@pytest.fixture(scope="module")
def decoder():
    target = RaggedModel(tiny_model(seed=3), self_test=False)
    return SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(3), Coupling.shared(1))


def texts(decoder, requests=REQUESTS, **options):
    engine = Engine(decoder, max_cache_tokens=4000)
    streams = [
        engine.submit(Request(prompt=[*PROMPT, at], max_new_tokens=24, seed=at, **settings, **options))
        for at, settings in enumerate(requests.values())
    ]
    engine.run()
    return [stream.result()[0].tokens for stream in streams]


@pytest.fixture
def calls(monkeypatch):
    """Returns the numbers of rows of the calls that draw tokens."""
    real, found = module.next_tokens, []
    monkeypatch.setattr(
        module, "next_tokens", lambda logits, rows, *rest: found.append(len(rows)) or real(logits, rows, *rest)
    )
    return found


def by_processors(monkeypatch, run):
    with monkeypatch.context() as patch:
        patch.setattr("arbordraft.decoding.judging.runs_natively", lambda logits: False)
        return run()


def test_tokens_are_those_of_the_processors(decoder, calls, monkeypatch):
    found = texts(decoder)
    assert max(calls) >= len(REQUESTS) - 1, "one call draws for all requests but a greedy one without processors"
    calls.clear()
    assert by_processors(monkeypatch, lambda: texts(decoder)) == found
    assert not calls
    assert len({tuple(text) for text in found}) > len(REQUESTS) / 2


@pytest.mark.parametrize("column", ["temperatures", "kept", "changes", "seeds", "positions"])
def test_each_column_counts(decoder, monkeypatch, column):
    """Negative control: a column that is wrong changes texts."""
    expected, real = texts(decoder), module.next_tokens

    def wrong(logits, rows, settings):
        values = getattr(settings, column)
        if column == "changes":
            other = values * torch.tensor([1.0, 0.0, 0.0]) + torch.tensor([0.0, 1.0, 0.0])
        elif column == "kept":
            other = [0, 1, 0] * len(rows)
        else:
            other = [1.7 * (value > 0) if column == "temperatures" else value + 1 for value in values]
        return real(logits, rows, settings._replace(**{column: other}))

    monkeypatch.setattr(module, "next_tokens", wrong)
    assert texts(decoder) != expected


def test_unknown_processors_run_beside_it(decoder, calls, monkeypatch):
    def odd(ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[1]) % 2 == 0, -torch.inf)

    requests = {**REQUESTS, "own": {"temperature": 0.8, "processors": (odd,)}}
    found = texts(decoder, requests)
    assert all(token % 2 for token in found[-1])
    assert calls
    assert by_processors(monkeypatch, lambda: texts(decoder, requests)) == found


def test_a_request_without_a_token_fails_alone(decoder):
    banned = {"temperature": 0.8, "processors": (SuppressTokensLogitsProcessor(range(decoder.target.vocab_size)),)}
    engine = Engine(decoder, max_cache_tokens=4000)
    bad, good = (engine.submit(Request(prompt=PROMPT, max_new_tokens=5, **settings)) for settings in (banned, {}))
    engine.run()
    assert len(good.result()[0].tokens) == 5
    with pytest.raises(Exception, match="no token"):
        bad.result()
