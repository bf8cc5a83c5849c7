"""Completions of several prompts, and echoed prompts with their log-probabilities."""

import random

import openai
import pytest
import torch
from support.served import poisoned_decoder, serving, tiny_decoder
from support.spellings import KINDS, drawn

from arbordraft.decoding.detokenizing import TokenDecoder
from arbordraft.decoding.state import TokenLogprobs
from arbordraft.decoding.streams import Event
from arbordraft.serving.echoes import Echo

PROMPTS = ["abcab", "z", "the quick brown fox jumps over the lazy dog 0123456789"]


@pytest.fixture(scope="module")
def served():
    with serving(tiny_decoder()) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client


@pytest.fixture(scope="module")
def tokenizer(served):
    return served.engine.decoder.target.tokenizer


def complete(client, prompt, **settings):
    return client.completions.create(model="tiny", prompt=prompt, **settings)


def streamed(client, prompt, **settings):
    """Joins the chunks of a stream; returns the choices by index."""
    joined = {}
    for chunk in complete(client, prompt, stream=True, **settings):
        (choice,) = chunk.choices
        known = joined.setdefault(choice.index, {"text": "", "finish_reason": None, "logprobs": {}})
        assert known["finish_reason"] is None
        known["text"] += choice.text
        known["finish_reason"] = choice.finish_reason
        for name, values in choice.logprobs or ():
            known["logprobs"].setdefault(name, []).extend(values)
    return joined


@pytest.mark.parametrize("tokens", [False, True], ids=["texts", "tokens"])
def test_several_prompts_are_answered_in_order(client, tokenizer, tokens):
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS] if tokens else PROMPTS
    settings = {"seed": 3, "n": 2, "max_tokens": 12}
    apart = [complete(client, prompt, **settings) for prompt in prompts]
    expected = [choice.text for reply in apart for choice in reply.choices]
    reply = complete(client, prompts, **settings)
    assert [(choice.index, choice.text) for choice in reply.choices] == list(enumerate(expected))
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(reply.usage, name) == sum(getattr(one.usage, name) for one in apart)
    said = streamed(client, prompts, **settings)
    assert [said[index]["text"] for index in range(6)] == expected
    assert [said[index]["finish_reason"] for index in range(6)] == [c.finish_reason for c in reply.choices]


def test_one_invalid_prompt_refuses_the_whole_request(served, client):
    for prompt in (["a", "b" * 600], [[5], [61]]):
        with pytest.raises(openai.BadRequestError):
            complete(client, prompt)
    assert (served.engine.waiting, served.engine.running) == (0, 0)


def test_one_answer_that_fails_ends_the_others():
    decoder = poisoned_decoder()
    nine = decoder.target.tokenizer.convert_tokens_to_ids("9")
    with serving(decoder) as served:
        settings = {"max_tokens": 400, "logit_bias": {str(nine): -100}, "extra_body": {"ignore_eos": True}}
        with pytest.raises(openai.InternalServerError) as failure:
            complete(served.client, ["abc", "9"], **settings)
        assert failure.value.code == "not_finite"
        with pytest.raises(openai.InternalServerError) as failure:  # the prompt itself gives NaN
            complete(served.client, ["abc", "9a"], echo=True, logprobs=1, max_tokens=0)
        assert failure.value.code == "not_finite"
        short = complete(served.client, "abc", max_tokens=2)
        assert short.usage.completion_tokens == 2
        assert served.engine.running == 0


@pytest.mark.parametrize("length", [0, 6])
def test_echo_puts_the_prompt_before_the_answer(client, length):
    settings = {"seed": 3, "n": 2, "max_tokens": length, "echo": True}
    apart = [complete(client, PROMPTS, seed=3, n=2, max_tokens=length).choices] if length else []
    said = [choice.text for choices in apart for choice in choices] or [""] * 6
    expected = [PROMPTS[index // 2] + text for index, text in enumerate(said)]
    reply = complete(client, PROMPTS, **settings)
    assert [choice.text for choice in reply.choices] == expected
    assert all(choice.logprobs is None for choice in reply.choices)
    assert reply.usage.completion_tokens <= 6 * length
    joined = streamed(client, PROMPTS, **settings)
    assert [joined[index]["text"] for index in range(6)] == expected
    assert {choice["finish_reason"] for choice in joined.values()} <= {"length", "stop"}


def test_echo_decodes_prompts_given_as_tokens(client, tokenizer):
    ids = tokenizer("<|start|>user abc<|end|>")["input_ids"]
    assert complete(client, ids, max_tokens=0, echo=True).choices[0].text == tokenizer.decode(ids)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_log_probabilities_of_prompts_match_transformers(served, client, tokenizer, length):
    """Evaluation harnesses read these values; the first token has none."""
    settings = {"echo": True, "logprobs": 3, "max_tokens": length, "temperature": 0}
    reply = complete(client, PROMPTS, **settings)
    joined = streamed(client, PROMPTS, **settings)
    for prompt, choice in zip(PROMPTS, reply.choices, strict=True):
        ids, told = tokenizer(prompt)["input_ids"], choice.logprobs
        with torch.no_grad():
            rows = served.engine.decoder.target.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        own = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None]).flatten().tolist()
        assert told.token_logprobs[0] is None
        assert told.top_logprobs[0] is None
        assert told.token_logprobs[1 : len(ids)] == pytest.approx(own, abs=1e-4)
        for found, row in zip(told.top_logprobs[1 : len(ids)], rows[:-1], strict=True):
            assert list(found) == [tokenizer.decode([token]) for token in row.topk(3).indices]
            assert list(found.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert told.tokens[: len(ids)] == [tokenizer.decode([token]) for token in ids]
        assert "".join(told.tokens) == choice.text
        assert told.text_offset == [len("".join(told.tokens[:at])) for at in range(len(told.tokens))]
        assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) >= len(ids)
        assert joined[choice.index]["text"] == choice.text
        assert joined[choice.index]["logprobs"] == told.to_dict()
        # A harness regards a continuation as greedy if each of its tokens has the highest value at its position.
        if length:
            assert told.token_logprobs[len(ids)] == max(told.top_logprobs[len(ids)].values())


def test_an_answer_scores_the_same_when_sent_as_a_prompt(client, tokenizer):
    ids = tokenizer(PROMPTS[2])["input_ids"]
    first = complete(client, [ids], logprobs=1, max_tokens=5, seed=2, extra_body={"ignore_eos": True}).choices[0]
    whole = [*ids, *tokenizer(first.text)["input_ids"]]
    again = complete(client, [whole], logprobs=1, max_tokens=0, echo=True).choices[0]
    assert again.logprobs.token_logprobs[-5:] == pytest.approx(first.logprobs.token_logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "only decodes"])
def test_tokens_of_prompts_join_to_their_text(kind):
    tokenizer, source = KINDS[kind](), random.Random(1)
    for turn in range(30):
        tokens = drawn(tokenizer, source) or [0]
        begin = tokens[0] if turn % 3 == 0 else None
        echo = Echo(TokenDecoder(tokenizer), tokens, None, True, begin)
        known = [TokenLogprobs(-float(i), ((token, -float(i)),)) for i, token in enumerate(tokens)][1:]
        middle = source.randint(0, len(known))
        told = [echo(Event(0, prompt_logprobs=part)) for part in (known[:middle], known[middle:])]
        text, spelt = "".join(text for text, _ in told), [one for _, part in told for one in part]
        assert "".join(one.text for one in spelt) == text
        assert [one.logprob for one in spelt] == [None, *(-float(i) for i in range(1, len(tokens)))]
        left = tokens[1:] if begin is not None else tokens
        assert text == tokenizer.decode(left, clean_up_tokenization_spaces=False)
        if begin is not None:
            assert spelt[0].text == ""
