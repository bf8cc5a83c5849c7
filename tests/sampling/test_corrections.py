"""The changes of scores that drafting follows are those that the processors make themselves."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from arbordraft.kernels.draft_tree import Truncation
from arbordraft.sampling.corrections import (
    CountPenalty,
    TextCorrections,
    are_known,
    temperature_of,
    truncation_of,
)

VOCAB = 20
TEXT = [3, 4, 5, 3, 4, 9, 3, 4]
CHAINS = {
    "repetition": [hf.RepetitionPenaltyLogitsProcessor(1.3)],
    "repetition in the answer": [hf.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=5)],
    "presence and frequency": [CountPenalty(2, 0.5, 0.25)],
    "repeated pairs": [hf.NoRepeatNGramLogitsProcessor(2)],
    "repeated triples": [hf.NoRepeatNGramLogitsProcessor(3)],
    "repeated tokens": [hf.NoRepeatNGramLogitsProcessor(1)],
    "biases": [hf.SequenceBiasLogitsProcessor({(7,): 2.0, (3, 4, 8): -1.5, (5, 6): 3.0})],
    "bad words": [hf.NoBadWordsLogitsProcessor([[7], [4, 11], [9, 12]], eos_token_id=2)],
    "suppressed": [hf.SuppressTokensLogitsProcessor([6, 7])],
    "suppressed here": [hf.SuppressTokensAtBeginLogitsProcessor([6], len(TEXT))],
    "suppressed elsewhere": [hf.SuppressTokensAtBeginLogitsProcessor([6], len(TEXT) + 1)],
    "too short": [hf.MinLengthLogitsProcessor(10, 2)],
    "long enough": [hf.MinLengthLogitsProcessor(8, 2)],
    "too few new tokens": [hf.MinNewTokensLengthLogitsProcessor(5, 6, [2, 7])],
    "one after another": [
        hf.SequenceBiasLogitsProcessor({(4,): -3.0}),
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        CountPenalty(0, 0.1, 0.2),
        hf.SuppressTokensLogitsProcessor([9]),
    ],
}


def corrected(changes, scores, depth=0):
    """Applies changes as the kernels do."""
    found = scores.clone()
    for token, factor, bias, first, last in changes.tolist():
        if first <= depth < last:
            score = found[int(token)]
            found[int(token)] = (score / factor if score > 0 else score * factor) + bias
    return found


def processed(chain, tokens, scores):
    rows = scores[None].clone()
    for one in chain:
        rows = one(torch.tensor([tokens]), rows)
    return rows[0]


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_changes_are_those_of_the_processors(chain):
    changes, scores = TextCorrections(chain), torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    for length in range(1, len(TEXT) + 1):  # the text grows
        expected = processed(chain, TEXT[:length], scores)
        assert torch.allclose(corrected(changes(TEXT[:length]), scores), expected, rtol=1e-5)
    if not torch.equal(expected, scores):
        assert not torch.allclose(corrected(changes(TEXT)[1:], scores), expected), "each change counts"


@pytest.mark.parametrize("name", ["too short", "too few new tokens", "suppressed elsewhere"])
def test_changes_know_the_depths_at_which_they_hold(name):
    chain, scores = CHAINS[name], torch.zeros(VOCAB)
    changes, outcomes = TextCorrections(chain)(TEXT), set()
    for depth in range(5):
        expected = processed(chain, TEXT + [15] * depth, scores)
        assert torch.equal(corrected(changes, scores, depth), expected)
        outcomes.add(tuple(expected.tolist()))
    assert len(outcomes) == 2


def test_unknown_processors_are_left_out():
    class Mine(hf.RepetitionPenaltyLogitsProcessor):
        pass

    left_out = [lambda ids, scores: scores * 2, Mine(2.0), hf.TopKLogitsWarper(3), hf.TemperatureLogitsWarper(0.5)]
    assert TextCorrections(left_out)(TEXT).shape == (0, 5)
    assert len(TextCorrections([*left_out, hf.SuppressTokensLogitsProcessor([6])])(TEXT)) == 1


def test_temperature_and_truncation_of_a_chain():
    chain = [
        lambda ids, scores: scores,
        hf.TemperatureLogitsWarper(0.5),
        hf.TopKLogitsWarper(9),
        hf.TopKLogitsWarper(4),
        hf.TopPLogitsWarper(0.8),
        hf.MinPLogitsWarper(0.1),
        hf.TemperatureLogitsWarper(3.0),
    ]
    assert temperature_of(chain) == 1.5
    assert truncation_of(chain) == Truncation(4, 0.8, 0.1)
    assert (temperature_of([]), truncation_of([])) == (1.0, Truncation())


def test_changes_of_a_long_text_cost_no_more_than_their_number():
    """The text is read once: a second call sees its end alone."""

    class Watched(list):
        read = 0

        def __getitem__(self, at):
            found = super().__getitem__(at)
            Watched.read += len(found) if isinstance(at, slice) else 1
            return found

    text = Watched(np.arange(5000) % 50)
    changes = TextCorrections([hf.RepetitionPenaltyLogitsProcessor(1.1), hf.NoRepeatNGramLogitsProcessor(3)])
    changes(text)
    Watched.read = 0
    text.append(7)
    changes(text)
    assert Watched.read < 20


def decided(changes, scores):
    """Applies the changes of one node, in float32."""
    found = scores.clone()
    for token, factor, bias in changes.tolist():
        score = found[int(token)]
        found[int(token)] = (score * factor if score < 0 else score / factor) + bias
    return found


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
@pytest.mark.parametrize("seed", range(3))
def test_changes_after_drafts_are_the_processors_own_bit_for_bit(chain, seed):
    generator = np.random.default_rng(seed)
    changes, scores = TextCorrections(chain), torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    for length in range(1, len(TEXT) + 1):  # the text grows
        for depth in range(5):
            drafted = generator.choice([3, 4, 5, 8, 9, 11, 15], depth).tolist()
            expected = processed(chain, TEXT[:length] + drafted, scores)
            assert torch.equal(decided(changes.after(TEXT[:length], drafted), scores), expected)


@pytest.mark.parametrize(
    "name", ["repetition", "presence and frequency", "repeated pairs", "repeated tokens", "bad words"]
)
def test_changes_after_drafts_depend_on_them(name):
    changes, scores, drafted = TextCorrections(CHAINS[name]), torch.ones(VOCAB), [15, 5, 15, 9]
    assert not torch.equal(decided(changes.after(TEXT, drafted), scores), decided(changes.after(TEXT, []), scores))


def test_biases_of_one_token_are_summed_before_they_are_added():
    chain = [hf.SequenceBiasLogitsProcessor({(7,): 0.1, (3, 7): 0.2, (4, 3, 7): 1e-7, (5, 7): 9.0})]
    scores = torch.full((VOCAB,), 1e6)
    for text in ([3], [4, 3], [5], [1]):
        expected = processed(chain, text, scores)
        assert torch.equal(decided(TextCorrections(chain).after(text, []), scores), expected)
        assert torch.allclose(corrected(TextCorrections(chain)(text), scores), expected)


@pytest.mark.parametrize(
    ("known", "chain"),
    [
        (True, []),
        (True, [hf.RepetitionPenaltyLogitsProcessor(1.1), hf.TemperatureLogitsWarper(0.7), hf.TopPLogitsWarper(0.9)]),
        (True, [hf.TopKLogitsWarper(3), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.1)]),
        (False, [hf.TopPLogitsWarper(0.9), hf.TopKLogitsWarper(3)]),
        (False, [hf.TemperatureLogitsWarper(0.7), hf.RepetitionPenaltyLogitsProcessor(1.1)]),
        (False, [hf.TemperatureLogitsWarper(0.7), hf.TemperatureLogitsWarper(0.7)]),
        (False, [hf.TopPLogitsWarper(0.9, min_tokens_to_keep=2)]),
        (False, [hf.TopPLogitsWarper(0.9, filter_value=-5.0)]),
        (False, [hf.TypicalLogitsWarper(0.9)]),
        (False, [lambda ids, scores: scores]),
        (False, [hf.SequenceBiasLogitsProcessor({(VOCAB,): 1.0})]),
    ],
)
def test_chains_are_known_in_their_usual_order_alone(known, chain):
    assert are_known(chain, VOCAB) is known
