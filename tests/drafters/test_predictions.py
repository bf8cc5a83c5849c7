"""A predicted answer is looked up by its own request alone: fewer forwards, the same tokens."""

import random

import pytest
import torch
from support.models import PAYS, PROMPTS, VOCAB, context, generated, grown, joined, ragged, tiny

import arbordraft as ad
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request

TOKENS, LENGTH = 400, 96


def reciting(after):
    """Returns a target that writes ``after[token]`` after each token: no layer adds anything to the embedding."""
    size = len(after)
    model = tiny(
        vocab_size=size,
        hidden_size=size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        eos_token_id=None,
        max_position_embeddings=512,
    )
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(size))
        model.get_output_embeddings().weight.copy_(torch.eye(size)[torch.tensor(after).argsort()] * 30)
    return ad.RaggedModel(model, kernels="torch", self_test=False)


@pytest.fixture(scope="module")
def recital():
    """Returns a target that recites, the prompt, and the text that follows: no token occurs twice."""
    order = random.Random(0).sample(range(TOKENS), TOKENS)
    after = [0] * TOKENS
    for token, following in zip(order, [*order[1:], order[0]], strict=True):
        after[token] = following
    return reciting(after), order[:8], order[8 : 8 + LENGTH]


def edited(text, places=(7, 8, 30, 61, 80)):
    """Returns the text with other words at some places, without one word, and with one more."""
    changed = [(token + 1) % TOKENS if place in places else token for place, token in enumerate(text)]
    return [*changed[:45], 5, *changed[45:70], *changed[71:]]


def decoder(target, *, drafter=None, **options):
    return ad.SpeculativeDecoder(target, drafter or ad.NGramDrafter(), ad.TreeTopology.chain(6), **options)


SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [3]}
GREEDY = {"do_sample": False}


def answered(made, prompt, predictions=None, **options):
    tokens, output = generated(made, [prompt], max_new_tokens=LENGTH, predictions=predictions, **options)
    return tokens[0], output.answers[0]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("decider", [None, "cost aware"])
def test_an_edited_text_takes_less_than_half_of_the_forwards(recital, options, hybrid, decider):
    target, prompt, text = recital
    parts = {"decider": ad.CostAware(PAYS)} if decider else {}
    if hybrid:
        wrong = ad.LanguageModelDrafter(ad.RaggedModel(tiny(vocab_size=TOKENS), kernels="torch", self_test=False))
        parts["drafter"] = ad.HybridDrafter(ad.NGramDrafter(8, 1), wrong)
    made = decoder(target, **parts)
    plain, without = answered(made, prompt, **options)
    tokens, with_prediction = answered(made, prompt, [edited(text)], **options)
    assert plain == tokens == text
    assert with_prediction.forwards < without.forwards / 2
    assert (with_prediction.accepted_prediction, with_prediction.rejected_prediction) == (LENGTH - 6, 6)
    assert (without.accepted_prediction, without.rejected_prediction) == (0, 0)


def test_the_answer_begins_with_the_prediction(recital):
    """The first forward already verifies the beginning of the prediction."""
    target, prompt, text = recital
    made, found = decoder(target), []
    made.on_step = lambda state, tree, verdict: found.append(tree.token.tolist())
    answered(made, prompt, [text], **GREEDY)
    assert found[0] == [prompt[-1], *text[:6]]


def test_the_place_that_the_answer_has_reached_is_found_in_repetitive_texts():
    """The words between repeat; a short suffix alone does not tell which line follows."""
    lines = [[10, 11, 12, 13, 14, number] for number in range(20, 60)]
    drafter = ad.NGramDrafter(4, 2)
    text = [token for line in lines for token in line]
    at = text.index(40) + 1  # just after the line that ends with 40
    tokens = [3, 4, *text[: at + 5]]
    step = context([tokens], ad.TreeTopology.chain(1), ad.Fixed(1), greedy=True)
    step.samples[0].prediction = tuple(text)
    tree = grown(drafter, joined(drafter, [tokens]), step)
    assert tree.token.tolist() == [14, 41]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predictions_change_no_text_of_random_models(temperature):
    """Right, wrong and empty predictions, in an engine with other requests."""
    made = ad.SpeculativeDecoder(
        ragged(),
        ad.HybridDrafter(ad.NGramDrafter(4, 1), ad.LanguageModelDrafter(ragged(seed=3))),
        ad.TreeTopology.from_k_config((2, 2, 1)),
    )
    source = random.Random(2)
    asked = [
        Request(prompt=PROMPTS[number % 3], max_new_tokens=20, temperature=temperature, seed=number, ends=())
        for number in range(6)
    ]
    plain = [Engine(made).submit(request).result()[0].tokens for request in asked]
    engine = Engine(made, max_cache_tokens=600, max_samples=4)
    guesses = [plain[0], plain[0], [], source.choices(range(VOCAB), k=200), [7], plain[5][::-1]]
    streams = [
        engine.submit(Request(**{**vars(request), "prediction": guess}))
        for request, guess in zip(asked, guesses, strict=True)
    ]
    engine.run()
    assert [stream.answers[0].tokens for stream in streams] == plain
    assert streams[0].answers[0].stats.accepted_prediction == 20


def test_a_prediction_is_never_drafted_for_others(recital):
    target, prompt, text = recital
    pool = ad.TextPool()
    made = decoder(target, drafter=ad.NGramDrafter(pool=pool))
    engine = Engine(made, max_cache_tokens=2000, max_samples=4)
    secret = [text[0], text[1], 399, 398, 397]  # goes on otherwise than the answer
    first = engine.submit(Request(prompt=prompt, max_new_tokens=8, prediction=secret))
    other = engine.submit(Request(prompt=prompt, max_new_tokens=8))
    drafts = {0: set(), 1: set()}
    for number, stream in enumerate((first, other)):
        for event in stream:
            if event.tree is not None:
                drafts[number].update(event.tree.tokens[1:])
    assert drafts[0] & {399, 398, 397}
    assert not drafts[1] & {399, 398, 397}
    engine.submit(Request(prompt=prompt, max_new_tokens=8)).result()
    for held in engine._scheduler.state.samples:
        assert held is None or not held.prediction
    assert all(known.prediction is None for known in engine._scheduler.state.drafts.texts.values())
    assert not any(token in known for known in pool.texts() for token in (399, 398, 397))


def test_without_lookups_a_prediction_has_no_effect(recital):
    target, prompt, text = recital
    made = decoder(target, drafter=ad.NoDrafter())
    tokens, stats = answered(made, prompt, [text], **GREEDY)
    assert tokens == text
    assert stats.forwards == LENGTH


def test_predictions_are_refused_that_are_none():
    ids = torch.tensor(PROMPTS[:1])
    made = ad.SpeculativeDecoder(ragged(), ad.NGramDrafter())
    for predictions, error, reason in (
        ([[VOCAB]], ValueError, "predictions hold ids outside the target's vocabulary of 61 tokens"),
        ([[1], [2]], ValueError, "2 predictions for 1 samples; pass None for a sample without one"),
        ([[-1]], ValueError, r"predictions\[0\]\[0\] must be a whole number of at least 0"),
        (["text"], TypeError, r"predictions\[0\] must be a list of numbers"),
        ("text", TypeError, "predictions must be a list of numbers"),
        ([1, 2], TypeError, r"predictions\[0\] must be a list of numbers"),
    ):
        with pytest.raises(error, match=reason):
            made.generate(ids, max_new_tokens=2, predictions=predictions)
    with pytest.raises(TypeError, match="prediction must be a list of numbers"):
        Request(prompt=[1], prediction="text")
    with pytest.raises(ValueError, match="prediction holds ids outside the target's vocabulary of 61 tokens"):
        Engine(made).submit(Request(prompt=[1], prediction=[VOCAB]))
