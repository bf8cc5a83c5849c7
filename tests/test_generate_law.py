"""The law of whole requests: what many samples of one prompt emit, against the target's own probabilities."""

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from models import next_logits, tiny
from scipy.stats import chisquare
from transformers import TopPLogitsWarper

from arbordraft import (
    IID,
    Coupling,
    EarlyExitDrafter,
    Fixed,
    LanguageModelDrafter,
    Lifted,
    Matching,
    NGramDrafter,
    RaggedModel,
    RecursiveRejection,
    SpecHub,
    SpeculativeDecoder,
    TopDown,
    TopTail,
    TreeTopology,
    WithoutReplacement,
)
from arbordraft.sampling import Noise
from arbordraft.verifiers import KSeq, NodeLaw

FEW, SAMPLES, LENGTH, TOP_P = 6, 1500, 3, 0.9
TEXT = [1, 2, 3, 1, 2, 4, 1, 2]


@cache
def small(seed):
    return RaggedModel(tiny(seed=seed, sharpness=1.5, vocab_size=FEW), kernels="torch")


@cache
def exact_law():
    """Probability of every text of three tokens after the prompt, by the model alone."""

    @cache
    def row(text):
        scores = next_logits(small(0).model, [*TEXT, *text])[None].double()
        return TopPLogitsWarper(TOP_P)(None, scores).softmax(-1)[0].tolist()

    return {
        text: torch.tensor([row(text[:at])[token] for at, token in enumerate(text)]).prod().item()
        for text in product(range(FEW), repeat=LENGTH)
    }


def fit(decoder):
    """P-value of what many samples of one prompt emitted; texts too rare to count share one cell."""
    output = decoder.generate(
        torch.tensor([TEXT] * SAMPLES),
        do_sample=True,
        top_k=0,
        top_p=TOP_P,
        max_new_tokens=LENGTH,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    assert output.stats.accepted.total() > SAMPLES / 4  # drafting took part in it
    assert min(output.stats.forwards) < LENGTH
    assert max(output.stats.forwards) > 1
    law = exact_law()
    counted = Counter(map(tuple, output.sequences[:, len(TEXT) :].tolist()))
    if any(law[text] == 0 for text in counted):
        return 0.0
    cells = [text for text in law if law[text] * SAMPLES >= 5]
    seen, expected = [counted[text] for text in cells], [law[text] * SAMPLES for text in cells]
    rest = SAMPLES - sum(expected)
    return chisquare([*seen, SAMPLES - sum(seen)], [*expected, rest]).pvalue


def small_decoder(law, verifier, topology, drafter=None):
    drafter = drafter or LanguageModelDrafter(small(3))
    return SpeculativeDecoder(small(0), drafter, topology, Coupling(law, verifier))


BUSH, PAIR = TreeTopology([-1, 0, 0, 1]), TreeTopology([-1, 0, 0])
LAWFUL = {
    "without replacement, lifted": lambda: small_decoder(WithoutReplacement(2), Lifted(RecursiveRejection()), BUSH),
    "spechub as in the paper": lambda: small_decoder(TopTail(1, 1), TopDown(SpecHub(order="paper")), PAIR),
    "iid, k-seq": lambda: small_decoder(IID(2), TopDown(KSeq()), BUSH),
    "n-gram": lambda: small_decoder(Fixed(2), TopDown(Matching()), BUSH, NGramDrafter(3, 1)),
    "early exit": lambda: small_decoder(
        WithoutReplacement(2), TopDown(RecursiveRejection()), PAIR, EarlyExitDrafter(small(0), 1)
    ),
}


@pytest.mark.parametrize("name", LAWFUL)
def test_sampling_has_the_law_of_the_target(name):
    assert fit(LAWFUL[name]()) > 1e-3


class NoResidual(Matching):
    """Negative control: after a rejection it draws from the target again instead of from the residual."""

    def node_law(self, target, weight, draft, tokens, law):
        found = RecursiveRejection().node_law(target, weight, draft, tokens, law)
        return NodeLaw(found.accept, target * (1 - sum(found.accept)), 0.0)


def test_a_biased_rule_would_be_seen():
    assert fit(small_decoder(WithoutReplacement(2), TopDown(NoResidual()), PAIR)) < 1e-6


def test_noise_used_twice_would_be_seen(monkeypatch):
    """Negative control: a step that repeats the uniforms of the one before it."""
    drawn, first = Noise.of, []

    def again(own, nodes):
        first.append(first[0] if first else drawn(own, nodes))
        return first[0]

    monkeypatch.setattr(Noise, "of", again)
    assert fit(LAWFUL["spechub as in the paper"]()) < 1e-6
