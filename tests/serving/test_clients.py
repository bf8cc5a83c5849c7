"""OpenAI's own client gets over HTTP the answers that the engine gives directly."""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.served import HELLO, answered_alone, serving, tiny_decoder

from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.decoding.text import encode


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def served(decoder):
    with serving(decoder) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client


def alone(decoder, messages, **settings):
    prompt = encode(decoder.target.tokenizer, messages, raw=False)
    return answered_alone(decoder, prompt, **{"max_new_tokens": 40, **settings})


def chat(client, messages=HELLO, **settings):
    own = {name: settings.pop(name) for name in ("top_k", "min_p", "repetition_penalty") if name in settings}
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=own, **settings)


SETTINGS = {
    "greedy": {"temperature": 0},
    "the default temperature": {"seed": 3},
    "several": {"seed": 5, "n": 3},
    "truncated": {"seed": 7, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": 0.01},
    "penalties": {"seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.6, "repetition_penalty": 1.2},
    "a bias": {"seed": 2, "logit_bias": {"9": 3.0, "10": -100}},
    "a stop": {"seed": 3, "stop": "z7"},
    "stops": {"seed": 5, "stop": ["zz", "p", "q"]},
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_answers_are_those_of_the_engine(decoder, client, name, streaming):
    settings = SETTINGS[name]
    theirs = {**settings, "logit_bias": {int(token): bias for token, bias in settings.get("logit_bias", {}).items()}}
    answers, texts = alone(decoder, HELLO, **theirs)
    reasons = [answer.finish_reason for answer in answers]
    if not streaming:
        reply = chat(client, **settings)
        assert [choice.message.content for choice in reply.choices] == texts
        assert [choice.finish_reason for choice in reply.choices] == reasons
        return
    said, ended, roles = [""] * len(texts), [None] * len(texts), []
    for chunk in chat(client, stream=True, **settings):
        (choice,) = chunk.choices
        assert ended[choice.index] is None
        said[choice.index] += choice.delta.content
        ended[choice.index] = choice.finish_reason
        roles += [choice.index] if choice.delta.role == "assistant" else []
    assert said == texts
    assert ended == reasons
    assert sorted(roles) == list(range(len(texts)))


def test_the_stops_of_the_settings_end_answers(decoder):
    for name in ("a stop", "stops"):
        assert [answer.finish_reason for answer in alone(decoder, HELLO, **SETTINGS[name])[0]] == ["stop"]


def test_concurrent_requests_get_the_answers_they_get_alone(decoder, client):
    asked = [
        ([{"role": "user", "content": "abc " * (1 + 5 * seed % 7)}], {"seed": seed, "temperature": seed % 3 / 2})
        for seed in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda each: chat(client, each[0], max_tokens=20, **each[1]), asked))
    for (messages, settings), reply in zip(asked, replies, strict=True):
        _, (text,) = alone(decoder, messages, max_new_tokens=20, **settings)
        assert reply.choices[0].message.content == text


def test_roles_and_parts_of_a_conversation_reach_the_prompt(decoder, client):
    said = [
        {"role": "developer", "content": "be short"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "four"},
    ]
    meant = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    assert chat(client, said, temperature=0).choices[0].message.content == alone(decoder, meant, temperature=0)[1][0]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_usage_counts_tokens_and_drafts(decoder, client, name):
    (answer,), _ = alone(decoder, HELLO, seed=4, max_new_tokens=11)
    prompt = len(encode(decoder.target.tokenizer, HELLO, raw=False))
    whole = chat(client, seed=4, **{name: 11}).usage
    *_, last = chat(client, seed=4, stream=True, stream_options={"include_usage": True}, **{name: 11})
    assert last.choices == []
    for usage in (whole, last.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, len(answer.tokens))
        assert usage.total_tokens == prompt + len(answer.tokens)
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
        assert (details.drafted_tokens, details.target_forwards) == (answer.stats.drafted, answer.stats.forwards)


def test_logprobs_are_those_of_the_engine(decoder, client):
    (answer,), _ = alone(decoder, HELLO, seed=6, max_new_tokens=9, logprobs=2)
    spell = decoder.target.tokenizer.decode
    settings = {"seed": 6, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    streamed = [chunk.choices[0].logprobs.content for chunk in chat(client, stream=True, **settings)]
    for content in (chat(client, **settings).choices[0].logprobs.content, [one for part in streamed for one in part]):
        assert [one.token for one in content] == [spell([token]) for token in answer.tokens]
        assert [one.logprob for one in content] == [known.logprob for known in answer.logprobs]
        assert [bytes(one.bytes).decode() for one in content] == [one.token for one in content]
        shown = [[(other.token, other.logprob) for other in one.top_logprobs] for one in content]
        assert shown == [[(spell([t]), value) for t, value in known.others] for known in answer.logprobs]


def test_completions_continue_texts_and_tokens(decoder, client):
    tokens = decoder.target.tokenizer("abcab")["input_ids"]
    request = Request(prompt=tokens, max_new_tokens=16, seed=2, temperature=1.0, logprobs=1)
    (answer,) = Engine(decoder).submit(request).result()
    text = decoder.target.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    for prompt in ("abcab", ["abcab"], tokens, [tokens]):
        reply = client.completions.create(model="tiny", prompt=prompt, seed=2, logprobs=1)
        assert reply.choices[0].text == text
        assert reply.choices[0].logprobs.token_logprobs == [known.logprob for known in answer.logprobs]
        assert reply.usage.completion_tokens == len(answer.tokens)
    streamed = list(client.completions.create(model="tiny", prompt="abcab", seed=2, logprobs=1, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == text
    offsets = [place for chunk in streamed for place in chunk.choices[0].logprobs.text_offset]
    assert offsets == reply.choices[0].logprobs.text_offset
    assert streamed[-1].choices[0].finish_reason == answer.finish_reason


def test_ignore_eos_continues_past_the_end_token(client):
    asked = {"model": "tiny", "prompt": "abc", "max_tokens": 30, "logit_bias": {"2": 100}}
    assert client.completions.create(**asked).usage.completion_tokens == 1
    assert client.completions.create(**asked, extra_body={"ignore_eos": True}).usage.completion_tokens == 30


def test_steps_show_which_drafts_were_accepted(decoder, client):
    asked = {"model": "tiny", "messages": HELLO, "seed": 4, "max_tokens": 30}
    whole = client.chat.completions.create(**asked, extra_body={"arbordraft": {"steps": True}})
    (choice,), usage = whole.choices, whole.usage
    steps = choice.arbordraft["steps"]
    streamed = client.chat.completions.create(**asked, stream=True, extra_body={"arbordraft": {"steps": True}})
    again = [step for chunk in streamed for step in getattr(chunk.choices[0], "arbordraft", {"steps": []})["steps"]]
    timeless = [[{**step, "seconds": 0} for step in kind] for kind in (steps, again)]
    assert timeless[0] == timeless[1]
    said = ""
    for step in steps:
        path = [node["text"] for node in step["nodes"] if node["accepted"]]
        said += "".join([*path, step["token"]][: step["emitted"]])
        assert step["nodes"][0]["parent"] == -1
        assert all(0 <= node["parent"] < place for place, node in enumerate(step["nodes"]) if place)
    assert said.removesuffix("<|end|>") == choice.message.content
    assert len(steps) == usage.completion_tokens_details.target_forwards
    assert sum(len(step["nodes"]) - 1 for step in steps) == usage.completion_tokens_details.drafted_tokens
    assert any(step["recovered"] for step in steps)
    assert "arbordraft" not in chat(client, max_tokens=3).choices[0].model_extra


def test_models_health_and_page_are_served(served, client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").exactness == "pathwise"
    assert chat(client, max_tokens=1).system_fingerprint.endswith("-pathwise")
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    page = httpx.get(served.url)
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>arbordraft</title>" in page.text


def test_metrics_agree_with_the_usage(decoder):
    with serving(decoder) as served:
        reply = chat(served.client, seed=4, n=2, max_tokens=20)
        shown = httpx.get(f"{served.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in shown.splitlines() if not line.startswith("#"))
    value = {name.removeprefix("arbordraft_"): float(number) for name, number in lines.items()}
    usage, details = reply.usage, reply.usage.completion_tokens_details
    assert value["tokens_total"] == usage.completion_tokens
    assert value["prompt_tokens_total"] == usage.prompt_tokens
    assert value["forwards_total"] == details.target_forwards
    assert value["drafted_tokens_total"] == details.drafted_tokens
    assert value["accepted_tokens_total"] == reply.metrics["speculative_decoding"]["num_accepted_draft_tokens"]
    assert value["rows_total"] == details.drafted_tokens + details.target_forwards
    assert value["tau"] == pytest.approx(usage.completion_tokens / details.target_forwards)
    assert value['requests_total{outcome="finished"}'] == 1
    assert (value["waiting"], value["living"]) == (0, 0)
    assert value["first_token_seconds_count"] == 1
    assert value["between_tokens_seconds_count"] == details.target_forwards - 2
    assert value["request_seconds_count"] == 1
