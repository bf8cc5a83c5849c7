"""Requests that join and leave a batch: each gets what it would get alone, whatever happens around it."""

import itertools
import random

import pytest
import torch
from models import EOS, PROMPTS, VOCAB, ragged

from arbordraft import (
    Coupling,
    HybridDrafter,
    LanguageModelDrafter,
    Lifted,
    NGramDrafter,
    NoDrafter,
    RecursiveRejection,
    SpeculativeDecoder,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.engine import Engine
from arbordraft.requests import Request

TREE = TreeTopology.from_k_config((2, 2, 1))


def decoder(drafter=None, coupling=None, **options):
    drafter = drafter or HybridDrafter(NGramDrafter(), LanguageModelDrafter(ragged(seed=3)))
    return SpeculativeDecoder(ragged(), drafter, TREE, coupling, **options)


def text(length, seed):
    return random.Random(seed).choices(range(3, VOCAB), k=length)


def alone(made, request):
    engine = Engine(made, max_tokens=4000)
    return [answer.tokens for answer in engine.submit(request).result()]


def requests(count):
    """Of all kinds that there are, each with a seed."""
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
        LanguageModelDrafter(ragged(seed=3)),
        Coupling(WithoutReplacement(2), Lifted(RecursiveRejection())),
    ),
    "nothing drafted": (NoDrafter(), Coupling.shared(2)),
}


@pytest.mark.parametrize("name", COUPLINGS)
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
def test_answers_are_those_of_a_request_alone(name, reuse):
    made, asked = decoder(*COUPLINGS[name]), requests(21)
    engine = Engine(made, max_tokens=400, max_samples=5, max_rows=16, reuse=reuse)
    streams = []
    for number, request in enumerate(asked):
        streams.append(engine.submit(request))
        for _ in range(number % 4):
            engine.step()
    engine.run()
    assert [[answer.tokens for answer in stream.answers] for stream in streams] == [alone(made, r) for r in asked]


def test_generate_says_the_same():
    made = decoder()
    for do_sample in (False, True):
        settings = {"temperature": 0.8, "top_k": 0} if do_sample else {}
        for number, prompt in enumerate(PROMPTS):
            ids = made.generate(
                torch.tensor([prompt]), do_sample=do_sample, max_new_tokens=20, seeds=[number], **settings
            )
            request = Request(
                prompt=prompt, max_new_tokens=20, seed=number, temperature=0.8 if do_sample else 0, ends=[EOS]
            )
            assert alone(made, request) == [ids[0, len(prompt) :].tolist()]
