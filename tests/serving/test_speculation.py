"""Requests bound their drafts and predict their answers, and each answer reports its drafts."""

import pytest
from fastapi.testclient import TestClient
from support.served import answered_alone, serving, tiny_decoder

from arbordraft.decoding.engine import Engine
from arbordraft.decoding.text import encode
from arbordraft.serving.app import build_app
from arbordraft.serving.service import Service

HELLO = [{"role": "user", "content": "hello there"}]
FIGURES = {
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_histogram",
    "num_spec_steps",
    "num_accepted_draft_tokens",
    "num_draft_tokens",
}
TIMINGS = {
    *("cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second", "draft_n", "draft_n_accepted"),
    *("predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second"),
}


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder()


@pytest.fixture(scope="module")
def client(decoder):
    with serving(decoder) as served:
        yield served.client


@pytest.fixture(scope="module")
def http(decoder):
    with TestClient(build_app(Service(Engine(decoder, max_samples=4, max_cache_tokens=4000), "tiny", 40))) as client:
        yield client


def chat(client, seed=4, **further):
    create = client.chat.completions.create
    return create(model="tiny", messages=HELLO, max_tokens=30, seed=seed, extra_body=further)


def complete(client, seed=4, **further):
    return client.completions.create(model="tiny", prompt="abcab", max_tokens=30, seed=seed, extra_body=further)


def respond(client, seed=4, **further):
    further = {"seed": seed, **further}
    return client.responses.create(model="tiny", input="hello there", max_output_tokens=30, extra_body=further)


ASKING = {"chats": chat, "completions": complete, "responses": respond}


def text_of(reply):
    if reply.object == "response":
        return reply.output_text
    (choice,) = reply.choices
    return choice.text if reply.object == "text_completion" else choice.message.content


def details_of(reply):
    usage = reply.usage
    return usage.output_tokens_details if reply.object == "response" else usage.completion_tokens_details


def tokens_of(reply):
    return reply.usage.output_tokens if reply.object == "response" else reply.usage.completion_tokens


@pytest.mark.parametrize("name", ASKING)
def test_a_request_turns_drafting_off(client, name):
    ask = ASKING[name]
    free, off = ask(client), ask(client, speculative={"enabled": False})
    assert text_of(off) == text_of(free)
    assert details_of(free).drafted_tokens > 0
    assert details_of(off).drafted_tokens == 0
    assert details_of(off).target_forwards == tokens_of(off)
    assert off.metrics["speculative_decoding"]["num_spec_steps"] == 0


@pytest.mark.parametrize("name", ASKING)
def test_a_request_bounds_its_drafts(client, name):
    ask = ASKING[name]
    free = ask(client)
    for bound in (0, 1, 3):
        reply = ask(client, speculative={"max_drafts": bound})
        assert text_of(reply) == text_of(free)
        assert details_of(reply).drafted_tokens <= bound * details_of(reply).target_forwards
        assert len(reply.metrics["speculative_decoding"]["acceptance_histogram"]) <= bound + 1
    assert details_of(free).drafted_tokens > 3 * details_of(free).target_forwards / 2
    again = ask(client, speculative={"enabled": True, "max_drafts": None})
    assert details_of(again) == details_of(free)


def test_steps_show_the_bound(client):
    reply = chat(client, speculative={"max_drafts": 2}, arbordraft={"steps": True})
    nodes = [len(step["nodes"]) - 1 for step in reply.choices[0].arbordraft["steps"]]
    assert max(nodes) == 2


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("parts", [False, True], ids=["a text", "parts"])
def test_a_prediction_saves_forwards(client, name, parts):
    """A sampled text that repeats nothing, predicted with one letter changed."""
    ask = ASKING[name]
    free = ask(client)
    expected = text_of(free)
    changed = expected[:14] + ("x" if expected[14] != "x" else "y") + expected[15:]
    content = [{"type": "text", "text": changed}] if parts else changed
    reply = ask(client, prediction={"type": "content", "content": content})
    assert text_of(reply) == expected
    assert details_of(reply).target_forwards < details_of(free).target_forwards
    off = ask(client, prediction={"type": "content", "content": content}, speculative={"enabled": False})
    assert text_of(off) == expected
    assert 2 * details_of(reply).target_forwards <= details_of(off).target_forwards
    details = details_of(reply)
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens == len(changed)
    assert details.accepted_prediction_tokens >= len(changed) - 1
    assert (details_of(free).accepted_prediction_tokens, details_of(free).rejected_prediction_tokens) == (0, 0)


def test_a_prediction_is_not_part_of_the_prompt(client):
    plain = chat(client)
    reply = chat(client, prediction={"type": "content", "content": "zzz"})
    assert reply.usage.prompt_tokens == plain.usage.prompt_tokens
    assert details_of(reply).rejected_prediction_tokens in (2, 3)


@pytest.mark.parametrize("name", ASKING)
def test_whole_answers_have_figures(decoder, client, name):
    reply = ASKING[name](client)
    found, timings = reply.metrics["speculative_decoding"], reply.timings
    assert found.keys() == FIGURES
    assert timings.keys() == TIMINGS
    assert found["num_draft_tokens"] == timings["draft_n"] == details_of(reply).drafted_tokens
    assert found["num_accepted_draft_tokens"] == timings["draft_n_accepted"]
    assert sum(found["acceptance_histogram"]) == found["num_spec_steps"]
    assert timings["predicted_n"] == tokens_of(reply)
    assert timings["predicted_ms"] > 0
    assert timings["predicted_per_second"] > 0
    if name == "chats":
        prompt = encode(decoder.target.tokenizer, HELLO, raw=False)
        (answer,), _ = answered_alone(decoder, prompt, seed=4, max_new_tokens=30)
        assert found == answer.stats.speculative_decoding()


def test_figures_of_several_answers_are_summed(client):
    reply = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=1, n=3)
    found = reply.metrics["speculative_decoding"]
    assert reply.timings["predicted_n"] == reply.usage.completion_tokens
    assert reply.timings["prompt_n"] + reply.timings["cache_n"] == 3 * reply.usage.prompt_tokens
    assert found["num_draft_tokens"] == reply.usage.completion_tokens_details.drafted_tokens


def extras(chunk):
    return {name: chunk.model_extra[name] for name in ("metrics", "timings") if name in chunk.model_extra}


@pytest.mark.parametrize("kind", ["chats", "completions"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True], ids=["without usage", "with usage"])
def test_the_last_chunk_has_figures(client, kind, n, usage):
    asked = {"model": "tiny", "max_tokens": 12, "seed": 4, "n": n}
    create = client.chat.completions.create if kind == "chats" else client.completions.create
    asked |= {"messages": HELLO} if kind == "chats" else {"prompt": "abcab"}
    whole = create(**asked)
    further = {"stream_options": {"include_usage": True}} if usage else {}
    *chunks, last = create(**asked, **further, stream=True)
    assert not any(extras(chunk) for chunk in chunks)
    assert extras(last).keys() == {"metrics", "timings"}
    assert last.metrics == whole.metrics
    assert last.timings["predicted_n"] == whole.timings["predicted_n"]
    assert (last.choices == []) == usage
    assert (last.usage is None) != usage
    if usage:
        assert last.usage == whole.usage


def test_the_last_event_of_a_response_has_figures(client):
    whole = respond(client)
    *events, last = client.responses.create(
        model="tiny", input="hello there", max_output_tokens=30, extra_body={"seed": 4}, stream=True
    )
    assert last.response.metrics == whole.metrics
    assert last.response.timings.keys() == TIMINGS
    assert not any(extras(event) for event in [*events, last])
    assert not any(extras(event.response) for event in events if hasattr(event, "response"))


WRONG = {
    "an unknown key": ({"speculative": {"draft": 4}}, "speculative.draft is not supported: leave it out"),
    "no object": ({"speculative": False}, "speculative: it has to be a JSON object"),
    "a word for a switch": ({"speculative": {"enabled": "no"}}, "speculative.enabled: it has to be true or false"),
    "a number for a switch": ({"speculative": {"enabled": 0}}, "speculative.enabled: it has to be true or false"),
    "a negative bound": (
        {"speculative": {"max_drafts": -1}},
        "speculative.max_drafts: Input should be greater than or equal to 0",
    ),
    "a text for a bound": ({"speculative": {"max_drafts": "4"}}, "speculative.max_drafts: it has to be a whole number"),
    "half a draft": ({"speculative": {"max_drafts": 1.5}}, "speculative.max_drafts: it has to be a whole number"),
    "a prediction that is a text": ({"prediction": "abc"}, "prediction: it has to be a JSON object"),
    "a prediction without content": ({"prediction": {"type": "content"}}, "prediction.content: this field is required"),
    "another type": (
        {"prediction": {"type": "edit", "content": "a"}},
        "prediction.type: Input should be 'content'",
    ),
    "a picture": (
        {"prediction": {"type": "content", "content": [{"type": "image_url", "text": "a"}]}},
        "prediction.content.0.type: Input should be 'text'",
    ),
    "a number as content": (
        {"prediction": {"type": "content", "content": 5}},
        "prediction.content: a content is a text or a list of parts",
    ),
    "an unknown key of a prediction": (
        {"prediction": {"type": "content", "content": "a", "weight": 1}},
        "prediction.weight is not supported: leave it out",
    ),
    "too long a prediction": (
        {"prediction": {"type": "content", "content": "a" * 9000}},
        "too long",
    ),
}
PATHS = {
    "chat/completions": {"messages": HELLO, "max_tokens": 3},
    "completions": {"prompt": "a", "max_tokens": 3},
    "responses": {"input": "a", "max_output_tokens": 3},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_are_refused_by_name(http, path, name):
    given, reason = WRONG[name]
    reply = http.post(f"/v1/{path}", json={**PATHS[path], **given})
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_values_without_effect_are_accepted(http, path):
    for given in (
        {"speculative": None, "prediction": None},
        {"speculative": {}, "prediction": {"type": "content", "content": ""}},
        {"speculative": {"enabled": True}, "prediction": {"type": "content", "content": []}},
    ):
        assert http.post(f"/v1/{path}", json={**PATHS[path], **given}).status_code == 200
