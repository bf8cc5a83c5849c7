"""Hints, echoed fields and values without effect are accepted; unsupported fields are refused by name."""

import json
import typing

import pytest
from fastapi.testclient import TestClient
from openai.types import chat as openai_chat
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError
from support.callers import caller
from support.models import EOS

from arbordraft.decoding.engine import Engine
from arbordraft.serving.api_request import StreamOptions
from arbordraft.serving.app import build_app
from arbordraft.serving.chats import ChatRequest
from arbordraft.serving.completions import CompletionRequest
from arbordraft.serving.errors import ApiError, invalid
from arbordraft.serving.fields import MESSAGE_NOTHING, REQUEST_HINTS, REQUEST_NOTHING
from arbordraft.serving.messages import Message, Part
from arbordraft.serving.service import Service
from arbordraft.serving.structure import Tool

USER = {"role": "user", "content": "hi"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "1"}
TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"enum": [12]}}, "required": ["a"]}}
TOOLS = {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "parallel_tool_calls": False}


@pytest.fixture(scope="module")
def http():
    app = build_app(Service(Engine(caller(), max_samples=4, max_cache_tokens=12_000), "tiny", 40))
    with TestClient(app) as client:
        yield client


def ask(http, path="chat/completions", **body):
    body = {"messages": [USER], "max_tokens": 4, "seed": 1, **body} if path.startswith("chat") else body
    return http.post(f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})


def refusal(kind, given):
    """Returns the error that a client gets for an invalid body, or ``None`` if the body is valid."""
    try:
        kind.model_validate(given)
    except ApiError as error:
        return error
    except ValidationError as error:
        return invalid([{**one, "loc": ("body", *one["loc"])} for one in error.errors()], "application/json")
    return None


def chat(**fields):
    return ChatRequest.model_validate({"messages": [USER], **fields})


# Per type: OpenAI's fields that would change the answer and are refused, and the fields that a body needs.
REFUSED = {
    ChatRequest: ({"audio": {"voice": "alloy"}, "moderation": {"model": "m"}}, {"messages": [USER]}),
    Message: ({"audio": {"id": "a"}, "function_call": {"name": "f", "arguments": "{}"}}, {"role": "assistant"}),
}
OPENAI = {
    "chat": (ChatRequest, [chat_create_params.CompletionCreateParamsBase]),
    "completions": (CompletionRequest, [completion_create_params.CompletionCreateParamsBase]),
    "messages": (
        Message,
        [
            openai_chat.ChatCompletionDeveloperMessageParam,
            openai_chat.ChatCompletionSystemMessageParam,
            openai_chat.ChatCompletionUserMessageParam,
            openai_chat.ChatCompletionAssistantMessageParam,
            openai_chat.ChatCompletionToolMessageParam,
            openai_chat.ParsedChatCompletionMessage,
        ],
    ),
    "parts": (
        Part,
        [openai_chat.ChatCompletionContentPartTextParam, openai_chat.ChatCompletionContentPartRefusalParam],
    ),
    "streams": (StreamOptions, [openai_chat.ChatCompletionStreamOptionsParam]),
    "tools": (Tool, [openai_chat.ChatCompletionFunctionToolParam]),
}


@pytest.mark.parametrize("name", OPENAI)
def test_every_field_of_openais_types_is_handled(name):
    ours, theirs = OPENAI[name]
    fields = {field for kind in theirs for field in getattr(kind, "model_fields", None) or typing.get_type_hints(kind)}
    refused, least = REFUSED.get(ours, ({}, {}))
    assert fields
    assert not fields - {*ours.model_fields, *ours.hints, *ours.nothing, *refused}, "support, ignore or refuse them"
    for field, value in refused.items():
        error = refusal(ours, {**least, field: value})
        assert (error.param, error.code) == (field, "unsupported")


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
def test_hints_and_values_without_effect_are_ignored(kind):
    least = {"messages": [USER]} if kind is ChatRequest else {"prompt": "a"}
    plain = kind.model_validate(least)
    for name in REQUEST_HINTS:
        for value in ("x", 5, True, {"a": 1}, None):
            assert kind.model_validate({**least, name: value}) == plain
    for name, values in REQUEST_NOTHING.items():
        for value in (None, *values):
            assert kind.model_validate({**least, name: value}) == plain
        if name not in kind.model_fields:
            error = refusal(kind, {**least, name: "something"})
            assert (error.param, error.code) == (name, "unsupported")
    assert refusal(kind, {**least, "temprature": 1}).param == "temprature"
    assert kind.model_validate({**least, "n": 3, "best_of": 3}).n == 3
    assert refusal(kind, {**least, "n": 2, "best_of": 3}).param == "best_of"


MESSAGES = {
    "names": [{"role": role, "content": "x", "name": "ada"} for role in ("system", "user", "assistant", "developer")],
    "a tool's name": [USER, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "name": "f"}],
    "indices of calls": [USER, {"role": "assistant", "tool_calls": [{**CALL, "index": 0}]}, RESULT],
    "parsed answers": [
        {"role": "assistant", "content": "{}", "parsed": {"a": 1}, "annotations": [{"type": "url_citation"}]},
        {"role": "assistant", "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {}}}]},
    ],
    "messages without content": [USER, {"role": "assistant"}, {"role": "assistant", "content": None, "audio": None}],
    "caches": [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {**USER, "cache_control": {"type": "ephemeral"}},
    ],
    "parts of the responses API": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
    ],
    "fields without effect": [{**USER, **{name: values[0] for name, values in MESSAGE_NOTHING.items()}}],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages_of_earlier_replies_are_accepted(http, name):
    reply = ask(http, messages=[*MESSAGES[name], USER])
    assert reply.status_code == 200, reply.text


def test_messages_are_converted_for_templates():
    shown = {
        "a name": ({**USER, "name": "ada"}, {**USER, "name": "ada"}),
        "no words": ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        "a refusal": ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        "a part that refuses": (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "way"}]},
            {"role": "assistant", "content": "no\nway"},
        ),
        **{
            name: (
                {"role": "assistant", "content": "x", name: "hm"},
                {"role": "assistant", "content": "x", "reasoning_content": "hm"},
            )
            for name in ("reasoning", "reasoning_content")
        },
    }
    for said, meant in shown.values():
        assert Message.model_validate(said).shown({}, quoted=False) == meant
    called = {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": ""}}]}
    (call,) = Message.model_validate(called).shown({}, quoted=False)["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {}}


UNCLEAR = {
    "many stops": ({"stop": ["a"] * 17}, "stop", "at most 16"),
    "a stop longer than answers": ({"stop": ["b", "a" * 10_000]}, "stop.1", "at most 4096 characters, got 10000"),
    "half a character": ({"stop": "\ud800"}, "stop.0", "surrogate"),
    "half a character in a name": ({"\ud800": 1}, None, "surrogate"),
    "a field of the second message": ({"messages": [USER, {**USER, "a": 1}]}, "messages.1.a", "not supported"),
    "a text that is null": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "messages.0.content.0",
        "the field text",
    ),
    "a user message without content": ({"messages": [{**USER, "content": None}]}, "messages.0", "content is missing"),
    "no object": ({"stream_options": 5}, "stream_options", "JSON object"),
    "no list": ({"tools": 5}, "tools", "a list"),
    "no number": ({"n": "x"}, "n", "whole number"),
    "a bias for a word": ({"logit_bias": {"a": 1}}, "logit_bias.a", "whole number"),
    "a negative temperature": ({"temperature": -1}, "temperature", "at least 0"),
    "a negative seed": ({"seed": -2}, "seed", "from 0 to"),
    "an argument of the template": (
        {"chat_template_kwargs": {"tokenize": True}},
        "chat_template_kwargs.tokenize",
        "no variable",
    ),
    "the messages of the template": (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
        "no variable",
    ),
    "a minimum above the maximum": ({"min_tokens": 5}, "min_tokens", "longest answer, 4 tokens, got 5"),
    "a minimum length with a stop": ({"min_tokens": 2, "stop": "a"}, "min_tokens", "one of the two"),
    "a minimum length with JSON": ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens", "JSON"),
    "a stop token with tools": ({"stop_token_ids": [5], **TOOLS}, "stop_token_ids", "tools"),
    "a stop token outside the vocabulary": ({"stop_token_ids": [10**6]}, "stop_token_ids", "vocabulary"),
    "a negative stop token": ({"stop_token_ids": [-1]}, "stop_token_ids.0", "greater than or equal to 0"),
    "continuing a message of the user": ({"continue_final_message": True}, "messages.0", "role assistant"),
    "continuing an answer in JSON": (
        {"continue_final_message": True, "response_format": {"type": "json_object"}},
        "continue_final_message",
        "cannot begin the answer",
    ),
    "continuing and beginning a turn": (
        {
            "messages": [{"role": "assistant", "content": "a"}],
            "continue_final_message": True,
            "add_generation_prompt": True,
        },
        "add_generation_prompt",
        "no turn begins",
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_errors_name_the_field_and_the_bound(http, name):
    body, param, cause = UNCLEAR[name]
    reply = ask(http, **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert cause in error["message"]
    assert not any(word in error["message"] for word in ("instance", "Sequence", "function-", "dictionary"))


@pytest.mark.parametrize("prompt", [[1, "a"], 5, [True], [1.5], [[1], "a", 2], "\ud800"], ids=repr)
def test_mixed_prompts_are_refused(http, prompt):
    reply = ask(http, "completions", prompt=prompt)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


def test_other_media_types_are_refused(http):
    """Protects against pages of other origins: browsers send their JSON only if the server allows it."""
    for kind in ({"Content-Type": "text/plain"}, {}):
        reply = http.post("/v1/completions", content='{"prompt": "a"}', headers=kind)
        assert reply.status_code == 400
        assert "Content-Type: application/json" in reply.json()["error"]["message"]


def test_logprobs_may_be_false_null_or_a_number(http):
    def logprobs(wanted):
        return ask(http, "completions", prompt="a", max_tokens=2, logprobs=wanted).json()["choices"][0]["logprobs"]

    assert logprobs(False) is None
    assert logprobs(None) is None
    assert len(logprobs(0)["token_logprobs"]) == 2
    assert ask(http, "completions", prompt="a", logprobs=True).json()["error"]["param"] == "logprobs"
    assert ask(http, logprobs=False).json()["choices"][0]["logprobs"] is None


def chunks(http, **body):
    lines = ask(http, stream=True, **body).text.splitlines()
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


def test_a_chunk_has_one_delta_per_call(http):
    called = chunks(http, **TOOLS, temperature=0, max_tokens=60)
    deltas = [chunk["choices"][0]["delta"].get("tool_calls", []) for chunk in called]
    assert sum(len(calls) for calls in deltas) > 1
    for calls in deltas:
        assert len({call["index"] for call in calls}) == len(calls)
    whole = ask(http, **TOOLS, temperature=0, max_tokens=60).json()["choices"][0]["message"]["tool_calls"][0]
    said = "".join(call["function"]["arguments"] for calls in deltas for call in calls)
    assert said == whole["function"]["arguments"]


def test_streams_report_usage_on_request(http):
    plain = chunks(http)
    *parts, last = chunks(http, stream_options={"include_usage": True, "include_obfuscation": True})
    assert all("usage" not in chunk for chunk in plain)
    assert [chunk["usage"] for chunk in parts] == [None] * len(parts)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    counted = [chunk["usage"] for chunk in chunks(http, stream_options={"continuous_usage_stats": True})]
    assert counted[-1] == last["usage"]
    written = [usage["completion_tokens"] for usage in counted]
    assert written == sorted(written)


def test_answers_end_where_the_request_says(http):
    def finished(**fields):
        reply = ask(http, max_tokens=30, seed=1, logit_bias={str(EOS): 12}, **fields).json()
        return reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]

    length, reason = finished()
    assert (length < 9, reason) == (True, "stop")
    assert finished(min_tokens=9)[0] >= 9
    free = {"prompt": "a", "max_tokens": 30, "ignore_eos": True, "seed": 1}
    for ends, (length, reason) in {(): (30, "length"), tuple(range(350)): (1, "stop")}.items():
        reply = ask(http, "completions", **free, stop_token_ids=ends).json()
        assert (reply["usage"]["completion_tokens"], reply["choices"][0]["finish_reason"]) == (length, reason)


def prompt(tokenizer, **fields):
    return tokenizer.decode(chat(**fields).encode(tokenizer, None, len)[0])


def test_templates_get_their_variables():
    tokenizer = caller().target.tokenizer
    tokenizer.chat_template = (
        "{% for said in messages %}{{ said.role + ': ' + said.content + '<eos>' }}{% endfor %}"
        "{% if reasoning_effort is defined %}{{ 'effort ' + reasoning_effort }}{% endif %}"
        "{% if enable_thinking is defined and not enable_thinking %}{{ ' no thoughts ' }}{% endif %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    asked = "user: hi<eos>"
    assert prompt(tokenizer) == f"{asked}assistant: "
    assert prompt(tokenizer, chat_template_kwargs={"enable_thinking": False}) == f"{asked} no thoughts assistant: "
    assert prompt(tokenizer, chat_template_kwargs={"enable_thinking": True}) == f"{asked}assistant: "
    assert prompt(tokenizer, reasoning_effort="low") == f"{asked}effort lowassistant: "
    assert prompt(tokenizer, reasoning_effort="none") == f"{asked}effort none no thoughts assistant: "
    assert prompt(tokenizer, add_generation_prompt=False) == asked
    begun = [USER, {"role": "assistant", "content": "He "}]
    assert prompt(tokenizer, messages=begun) == f"{asked}assistant: He <eos>assistant: "
    for turn in (None, False):
        continued = prompt(tokenizer, messages=begun, continue_final_message=True, add_generation_prompt=turn)
        assert continued == f"{asked}assistant: He "
