"""The law of whole requests: many samples of one prompt against the exact law of a model of six tokens."""

from collections import Counter
from functools import cache

import pytest
import torch
from scipy.stats import chisquare
from transformers import TopPLogitsWarper

from arbordraft import Coupling, LanguageModelDrafter, SpeculativeDecoder, TreeTopology
from support.models import next_logits, ragged

FEW, LENGTH, TOP_P = 6, 3, 0.9
TEXT = [1, 2, 3, 1, 2, 4, 1, 2]
BUSH, PAIR = TreeTopology([-1, 0, 0, 1]), TreeTopology([-1, 0, 0])


def few_tokens(seed, positions=128):
    return ragged(seed=seed, sharpness=1.5, vocab_size=FEW, max_position_embeddings=positions)


def small_decoder(law, verifier, topology, drafter=None):
    drafter = drafter or LanguageModelDrafter(few_tokens(3))
    return SpeculativeDecoder(few_tokens(0), drafter, topology, Coupling(law, verifier))


@cache
def exact_law(model, allowed=None):
    """Returns the probability of every text of three tokens after the prompt, by the model alone.

    Args:
        model: a model of six tokens.
        allowed: function that returns the tokens that may follow a text; by default all may.
    """

    def row(text):
        scores = next_logits(model, [*TEXT, *text])[None].double()
        if allowed is not None:
            scores[0, [token for token in range(FEW) if token not in allowed(text)]] = -torch.inf
        return TopPLogitsWarper(TOP_P)(None, scores).softmax(-1)[0].tolist()

    law = {(): 1.0}
    for _ in range(LENGTH):
        law = {(*text, token): law[text] * chance for text in law for token, chance in enumerate(row(text)) if chance}
    assert sum(law.values()) == pytest.approx(1)
    return law


def fit(decoder, samples=1500, allowed=None, **options):
    """Returns the p-value of texts that many samples of one prompt emit; texts too rare to count share one cell.

    Args:
        decoder: decoder of a target of six tokens.
        samples: number of samples.
        allowed: see :func:`exact_law`.
        options: options of generate().
    """
    output = decoder.generate(
        torch.tensor([TEXT] * samples),
        do_sample=True,
        top_k=0,
        top_p=TOP_P,
        max_new_tokens=LENGTH,
        eos_token_id=None,
        return_dict_in_generate=True,
        **options,
    )
    assert output.stats.accepted.total() > samples / 4  # enough drafts were accepted
    assert min(output.stats.forwards) < LENGTH
    assert max(output.stats.forwards) > 1
    law = exact_law(decoder.target.model, allowed)
    counted = Counter(map(tuple, output.sequences[:, len(TEXT) :].tolist()))
    if not counted.keys() <= law.keys():
        return 0.0
    cells = [text for text in law if law[text] * samples >= 5]
    seen, expected = [counted[text] for text in cells], [law[text] * samples for text in cells]
    return chisquare([*seen, samples - sum(seen)], [*expected, samples - sum(expected)]).pvalue
