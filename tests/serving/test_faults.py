"""Failures have a clear status, end in time, and affect no other request."""

import asyncio
import json
import threading
import time

import httpx
import openai
import pytest
from support.models import tiny
from support.served import HELLO, POSITIONS, chat, poisoned_decoder, serving, tiny_decoder

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder
from arbordraft.decoding.engine import Engine
from arbordraft.serving.app import build_app
from arbordraft.serving.service import Service

LONG = {"max_tokens": 400, "extra_body": {"ignore_eos": True}}


def until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()


@pytest.fixture
def gate():
    """Yields an event that steps wait for, and sets it at the end of the test at the latest."""
    opened = threading.Event()
    yield opened
    opened.set()


@pytest.fixture
def held(gate):
    """Returns a decoder whose steps wait for the gate."""
    decoder = tiny_decoder()
    decoder.on_step = lambda *_: gate.wait(20)
    return decoder


@pytest.fixture(scope="module")
def served():
    with serving(tiny_decoder(), max_body=5000) as served:
        yield served


def asked(**fields):
    return json.dumps({"messages": HELLO, **fields})


WRONG = {
    "JSON that is cut off": ('{"messages": [', 400, "invalid_json", "no JSON"),
    "an empty body": ("", 400, None, "the body"),
    "not an object": ("[1]", 400, None, "the body"),
    "no messages": ("{}", 400, None, "messages"),
    "empty messages": (asked(messages=[]), 400, None, "messages"),
    "an empty prompt": ('{"prompt": []}', 400, None, "empty"),
    "an empty prompt of several": ('{"prompt": ["a", ""]}', 400, None, "entry 1 is empty"),
    "too many prompts": (json.dumps({"prompt": ["a"] * 700, "n": 3}), 400, None, "700 prompts with 3 answers each"),
    "unknown tokens": ('{"prompt": [61]}', 400, None, "vocabulary"),
    "negative tokens": ('{"prompt": [-1]}', 400, None, "prompt[0]"),
    "an image": (asked(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, None, "got image_url"),
    "a tool's message": (asked(messages=[{"role": "tool", "content": "x"}]), 400, None, "messages.0: tool_call_id"),
    "an unknown field": (asked(temprature=1), 400, "unsupported", "temprature is not supported"),
    "a format": (asked(response_format={"type": "json_object"}), 400, None, "tokenizer"),
    "tools": (asked(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "unsupported", "knows no tools"),
    "echo": (asked(echo=True), 400, "unsupported", "echo"),
    "neither an answer nor an echo": ('{"prompt": "a", "max_tokens": 0}', 400, None, "max_tokens: 0"),
    "a huge temperature": (asked(temperature=1e308), 400, None, "temperature"),
    "a presence penalty": (asked(presence_penalty=1e308), 400, None, "presence_penalty"),
    "a frequency penalty": (asked(frequency_penalty=-3), 400, None, "frequency_penalty"),
    "a repetition penalty": (asked(repetition_penalty=1e-308), 400, None, "repetition_penalty"),
    "a huge bias": (asked(logit_bias={"5": 1e308}), 400, None, "logit_bias"),
    "NaN": (asked(temperature=float("nan")), 400, None, "temperature"),
    "top_p": (asked(top_p=1.5), 400, None, "top_p"),
    "n": (asked(n=0), 400, None, "n: "),
    "an empty stop": (asked(stop=""), 400, None, "stop"),
    "top_logprobs without logprobs": (asked(top_logprobs=2), 400, None, "logprobs"),
    "a bias outside the vocabulary": (asked(logit_bias={"61": 1}), 400, None, "logit_bias"),
    "no tokens": (asked(max_tokens=0), 400, None, "max_tokens"),
    "too many tokens": (asked(max_tokens=POSITIONS), 400, "context_length_exceeded", "lower max_tokens"),
    "a long prompt": (json.dumps({"prompt": "a" * 600}), 400, "context_length_exceeded", "shorten the prompt"),
    "another model": (asked(model="gpt-5"), 404, "model_not_found", "gpt-5"),
    "a long body": (json.dumps({"prompt": "a" * 10_000_000}), 413, "body_too_large", "5000 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_requests_are_refused_with_the_cause(served, name):
    body, status, code, cause = WRONG[name]
    path = "completions" if '"prompt"' in body else "chat/completions"
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{served.url}/v1/{path}", content=body, headers=headers, timeout=20)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert cause in error["message"]
    assert chat(served.client, max_tokens=2).usage.completion_tokens <= 2  # the next request is answered


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "nowhere", 404), ("GET", "v1/completions", 405)])
def test_unknown_addresses_and_methods_are_refused(served, method, path, status):
    reply = httpx.request(method, f"{served.url}/{path}")
    assert reply.status_code == status
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_fields_without_effect_are_accepted(served):
    nothing = {"response_format": {"type": "text"}, "tools": [], "store": False, "user": "me", "top_p": None}
    assert chat(served.client, max_tokens=2, extra_body=nothing).choices


def test_the_api_key_is_required():
    with serving(tiny_decoder(), api_key="secret") as served:
        assert chat(served.client, max_tokens=2).choices
        served.key = "wrong"
        with pytest.raises(openai.AuthenticationError) as refused:
            chat(served.client)
        assert refused.value.code == "invalid_api_key"
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.parametrize("streaming", [True, False], ids=["streamed", "whole"])
def test_a_client_that_disconnects_cancels_its_request(streaming):
    decoder = tiny_decoder()
    decoder.on_step = lambda *_: time.sleep(0.05)
    with serving(decoder) as served:
        if streaming:
            stream = chat(served.client, stream=True, **LONG)
            next(stream)
            stream.close()
        else:
            with pytest.raises(openai.APITimeoutError):
                chat(served.client.with_options(timeout=0.5), **LONG)
        assert until(lambda: served.engine.running == 0, 3)  # all 400 tokens would take more than ten seconds
        assert 'outcome="cancelled"} 1.0' in httpx.get(f"{served.url}/metrics").text


def test_a_waiting_client_that_disconnects_cancels_its_request(held, gate):
    with serving(held, max_samples=1) as served:
        asking = threading.Thread(target=lambda: chat(served.client, max_tokens=5))
        asking.start()
        assert until(lambda: served.engine.running == 1)
        with pytest.raises(openai.APITimeoutError):
            chat(served.client.with_options(timeout=0.3), max_tokens=5)
        assert served.engine.waiting == 1
        gate.set()
        asking.join(20)
        assert until(lambda: served.engine.waiting == 0)
        counted = httpx.get(f"{served.url}/metrics").text
        assert 'outcome="cancelled"} 1.0' in counted
        assert 'outcome="finished"} 1.0' in counted


def test_a_full_queue_says_when_to_retry(held, gate):
    with serving(held, max_samples=1, max_waiting=1) as served:
        replies = []
        asking = [threading.Thread(target=lambda: replies.append(chat(served.client, max_tokens=3))) for _ in range(2)]
        for count, thread in enumerate(asking, 1):
            thread.start()
            assert until(lambda count=count: served.engine.running + served.engine.waiting == count)
        with pytest.raises(openai.RateLimitError) as refused:
            chat(served.client)
        assert refused.value.code == "queue_full"
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        gate.set()
        for thread in asking:
            thread.join(20)
        assert len(replies) == 2
        assert chat(served.client, max_tokens=3).choices


def test_many_clients_are_answered_or_told_to_retry():
    async def crowd(url):
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=200)) as client:
            body = {"prompt": "abc", "max_tokens": 2, "seed": 1}
            return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for _ in range(150)))

    with serving(tiny_decoder(), max_waiting=20) as served:
        replies = asyncio.run(crowd(served.url))
        assert {reply.status_code for reply in replies} == {200, 429}
        assert len({reply.json()["choices"][0]["text"] for reply in replies if reply.status_code == 200}) == 1
        assert (served.engine.running, served.engine.waiting) == (0, 0)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streamed"])
def test_nan_fails_only_its_own_request(streaming):
    decoder = poisoned_decoder()
    banned = {str(decoder.target.tokenizer.convert_tokens_to_ids("9")): -100}
    with serving(decoder) as served:
        sound = {"seed": 1, "max_tokens": 60, "logit_bias": banned}
        expected = chat(served.client, **sound).choices[0].message.content
        replies = []
        asking = threading.Thread(target=lambda: replies.append(chat(served.client, **sound)))
        asking.start()
        with pytest.raises(openai.InternalServerError) as failure:
            chat(served.client, [{"role": "user", "content": "9"}], stream=streaming)
        assert failure.value.code == "not_finite"
        asking.join(20)
        assert replies[0].choices[0].message.content == expected
        assert httpx.get(f"{served.url}/health").status_code == 200


def test_a_failure_during_a_stream_is_an_event_of_the_stream():
    decoder = poisoned_decoder()
    nine = decoder.target.tokenizer.convert_tokens_to_ids("9")
    with serving(decoder) as served:
        said = []
        stream = chat(served.client, stream=True, temperature=0, logit_bias={str(nine): 100})
        with pytest.raises(openai.APIError, match="NaN"):
            said.extend(chunk.choices[0].delta.content for chunk in stream)
        assert said == ["9"]


def test_health_reports_an_engine_that_fails_repeatedly(served, monkeypatch):
    def status():
        return httpx.get(f"{served.url}/health").status_code

    monkeypatch.setattr(served.engine.decoder.stepper, "step", lambda state: 1 / 0)
    for expected in (200, 200, 503):
        with pytest.raises(openai.InternalServerError) as failure:
            chat(served.client)
        assert failure.value.code == "internal_error"
        assert "division" not in str(failure.value)  # details go to the log only
        assert status() == expected
    monkeypatch.undo()
    assert chat(served.client, max_tokens=2).choices
    assert status() == 200


def test_unexpected_errors_have_the_shape_of_an_api_error(served, monkeypatch):
    monkeypatch.setattr(served.server._service.metrics, "text", lambda: 1 / 0)
    reply = httpx.get(f"{served.url}/metrics")
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "division" not in reply.text


def test_shutdown_finishes_running_answers_and_refuses_new_requests(held, gate):
    with serving(held, grace=20) as served:
        asked, replies = served.client, []
        asking = threading.Thread(target=lambda: replies.append(chat(asked, seed=1, max_tokens=20)))
        asking.start()
        assert until(lambda: served.engine.running == 1)
        served.stop()
        assert until(lambda: httpx.get(f"{served.url}/health").status_code == 503)
        with pytest.raises(openai.InternalServerError) as refused:
            chat(served.client)
        assert (refused.value.status_code, refused.value.code) == (503, "shutting_down")
        gate.set()
        asking.join(20)
        assert replies[0].choices[0].finish_reason in ("length", "stop")
        served.thread.join(20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_answers_beyond_the_grace_period_end_with_an_error():
    decoder = tiny_decoder()
    decoder.on_step = lambda *_: time.sleep(0.05)
    with serving(decoder, grace=0.3) as served:
        stream = chat(served.client, stream=True, **LONG)
        next(stream)
        served.stop()
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "cause"),
    [
        (("model", 0), {}, ValueError, "default_tokens"),
        ((7, 10), {}, TypeError, "name"),
        (("model", 10), {"max_body": 0}, ValueError, "max_body"),
    ],
    ids=["default_tokens", "name", "max_body"],
)
def test_invalid_settings_are_refused(arguments, options, error, cause):
    engine = Engine(tiny_decoder(), max_cache_tokens=1000)
    with pytest.raises(error, match=cause):
        build_app(Service(engine, *arguments), **options)


def test_a_server_needs_a_tokenizer():
    target = RaggedModel(tiny(), kernels="torch", self_test=False)
    with pytest.raises(ValueError, match="tokenizer"):
        Service(Engine(SpeculativeDecoder(target, NGramDrafter())), "tiny", 10)
