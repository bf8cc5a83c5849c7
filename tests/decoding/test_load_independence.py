"""Answers do not depend on load: in bfloat16, a request gets exactly the tokens that it gets alone."""

import gc
import random

import pytest
import torch
from support.fragile import Fragile
from support.models import PAYS, VOCAB, fusable
from support.native_drafters import KINDS, built

from arbordraft import CostAware, HybridDrafter, NGramDrafter, NoDrafter, RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request

pytestmark = pytest.mark.usefixtures("kernels")

TREE = TreeTopology.sequoia((0.5, 0.2, 0.1), 10, 4)


def decoder(kind, kernels="native"):
    target, drafter = built("eagle" if kind == "plain" else kind, kernels, torch.bfloat16)
    drafter = NoDrafter() if kind == "plain" else HybridDrafter(NGramDrafter(), drafter)
    return SpeculativeDecoder(target, drafter, TREE, decider=CostAware(PAYS))


def requests(count, longest, seed):
    """Builds requests with prompts of 5 or more tokens, most of them short; a third share a prefix."""
    rng = random.Random(seed)
    system, asked = rng.choices(range(3, VOCAB), k=min(200, longest)), []
    for number in range(count):
        length = int(5 * (longest / 5) ** rng.random())
        prompt = rng.choices(range(3, VOCAB), k=length)
        if number % 3 == 0:
            prompt = [*system[: rng.randrange(len(system))], *prompt][:longest]
        settings = {"temperature": rng.choice([0.0, 0.3, 0.7, 1.0]), "top_p": rng.choice([1.0, 1.0, 0.9])}
        if number % 10 == 7:
            settings["repetition_penalty"] = 1.2
        asked.append(Request(prompt=prompt, max_new_tokens=rng.randrange(1, 60), seed=rng.randrange(2**64), **settings))
    return asked


def under_load(made, asked, seed, **options):
    """Submits the requests at random times, among others that are cancelled or fail."""
    rng = random.Random(seed)
    engine = Engine(made, max_cache_tokens=8000, max_samples=12, max_rows=64, **options)
    streams, disturbing = [], []
    for request in asked:
        streams.append(engine.submit(request))
        if rng.random() < 0.2:
            disturbing.append(engine.submit(Request(prompt=request.prompt, max_new_tokens=40, temperature=1.0)))
        if rng.random() < 0.1:
            failing = [Fragile(len(request.prompt) + rng.randrange(6))]
            engine.submit(Request(prompt=request.prompt, max_new_tokens=40, processors=failing))
        for _ in range(rng.choice([0, 0, 1, 5])):
            engine.step()
        if disturbing and rng.random() < 0.5:
            disturbing.pop().cancel()
    engine.run()
    return [stream.result()[0].tokens for stream in streams]


def alone(made, asked):
    engine = Engine(made, max_cache_tokens=8000, reuse=False)
    return [engine.submit(request).result()[0].tokens for request in asked]


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_answers_under_load(kind):
    made, asked = decoder(kind), requests(24, 150, seed=1)
    assert under_load(made, asked, seed=2) == alone(decoder("plain"), asked)


@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.soak
def test_two_hundred_requests(reuse):
    """Prompts have up to 1,500 tokens; every drafter gives the same answers."""
    asked = requests(200, 1500, seed=3)
    expected = alone(decoder("plain"), asked)
    for kind in ("plain", "eagle", "model"):
        assert under_load(decoder(kind), asked, seed=4, reuse=reuse) == expected


def test_kernels_that_depend_on_the_batch_would_be_seen():
    """Negative control: PyTorch's own products in bfloat16."""
    asked = requests(24, 150, seed=1)
    assert under_load(decoder("eagle", "torch"), asked, seed=2) != alone(decoder("plain", "torch"), asked)


def served(engine, requests):
    """Answers ``requests`` different requests; returns the number of objects afterwards."""
    for number in range(0, requests, 8):
        for seed in range(number, number + 8):
            prompt, temperature = [3 + seed % 50, 4 + seed % 7, 5], seed % 2 * (1 + seed % 1000 / 1000)
            engine.submit(Request(prompt=prompt, max_new_tokens=2, seed=seed, temperature=temperature))
        engine.run()
    gc.collect()
    return len(gc.get_objects())


@pytest.mark.soak
@pytest.mark.parametrize("keeps", [False, True], ids=["as it is", "control: all streams are kept"])
def test_requests_leave_nothing_behind(keeps, monkeypatch):
    """The test detects a leak of one small object per ten requests."""
    kept, submit = [], Engine.submit
    if keeps:
        monkeypatch.setattr(Engine, "submit", lambda *args: kept.append(submit(*args)))
    decoder = SpeculativeDecoder(RaggedModel(fusable(), kernels="native"), NGramDrafter(), TreeTopology.chain(2))
    engine = Engine(decoder, max_cache_tokens=500, max_samples=8)
    before = served(engine, 2_000)
    after = served(engine, 2_000 if keeps else 20_000)
    assert (after - before < 2_000) is not keeps
