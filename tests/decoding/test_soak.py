"""One decoder, thousands of requests of every kind: memory stays flat, and the last answer equals the first."""

import random
import sys

import pytest
import torch
from support.memory import resident
from support.models import PROMPTS, VOCAB, fusable, left_padded, ragged

import arbordraft as ad
from arbordraft.builders import lookup
from arbordraft.deciders import Bandit, FixedDepth

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

REQUESTS, SETTLED = 3000, 500  # memory is compared from request 500 on
TREE = ad.TreeTopology([-1, 0, 0, 1, 1, 2])
SAMPLED = ad.Coupling(ad.WithoutReplacement(2), ad.Lifted(ad.RecursiveRejection()))


def request(chance):
    """Returns arguments of generate(): ragged batches, greedy or sampled, some with processors, some with a mistake."""
    prompts = [
        [chance.randrange(3, VOCAB) for _ in range(chance.randrange(1, 12))] for _ in range(chance.choice((1, 3)))
    ]
    options = {"max_new_tokens": chance.randrange(1, 9), "pad_token_id": 0, "do_sample": chance.random() < 0.5}
    if options["do_sample"]:
        options |= {"seeds": [chance.randrange(2**64) for _ in prompts], "top_k": chance.choice((0, 5))}
    if chance.random() < 0.2:
        options["repetition_penalty"] = 1.3
    if chance.random() < 0.1:
        options["max_new_tokens"] = 1000  # more than there are positions
    return left_padded(prompts) | options


DECODERS = {
    "draft model": lambda: ad.SpeculativeDecoder(
        ragged(),
        ad.LanguageModelDrafter(ragged(seed=3)),
        TREE,
        SAMPLED,
        Bandit([FixedDepth(), ad.ConfidenceThreshold(0.3)]),
    ),
    "packed, early exit": lambda: _early_exit(ad.RaggedModel(fusable(), kernels="auto")),
    "lookup": lambda: lookup(ragged()),
}


def _early_exit(target):
    return ad.SpeculativeDecoder(target, ad.EarlyExitDrafter(target, 1), TREE, SAMPLED)


@pytest.mark.parametrize("kind", DECODERS)
def test_memory_stays_flat_over_thousands_of_requests(kind):
    decoder, chance = DECODERS[kind](), random.Random(0)
    fixed = left_padded(PROMPTS) | {"max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 0}

    def answers():
        sampled = decoder.generate(**fixed, do_sample=True, seeds=[5, 6, 7])
        return torch.cat([decoder.generate(**fixed, do_sample=False), sampled])

    first, refused, settled = answers(), 0, 0
    for number in range(REQUESTS):
        if number == SETTLED:
            settled = resident()
        try:
            decoder.generate(**request(chance))
        except ValueError:
            refused += 1
    grown = resident() / settled - 1
    assert torch.equal(answers(), first)
    assert REQUESTS / 20 < refused < REQUESTS / 5
    assert grown < 0.02, f"memory grew by {grown:.1%}"


def test_memory_that_grows_is_seen():
    """Negative control: memory that every request leaves behind shows."""
    settled, kept = resident(), []
    for _ in range(200):
        kept.append(torch.ones(settled // 200 // 4 // 20))
    assert resident() / settled - 1 > 0.02
