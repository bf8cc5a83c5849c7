"""/v1/responses gives the answers of a chat, as items and events that OpenAI's own client reads."""

import json
from typing import Literal

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter
from support.callers import caller
from support.served import chat, serving

from arbordraft.serving.responses import ResponsesRequest

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "tags": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["kind", "tags"],
    "additionalProperties": False,
}
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture(scope="module")
def served():
    with serving(caller(), max_tokens=12_000, default_tokens=60) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client


def respond(client, input="hello there", **settings):
    own = {name: settings.pop(name) for name in ("seed", "stop", "ignore_eos") if name in settings}
    return client.responses.create(model="tiny", input=input, extra_body=own, **settings)


def items(output):
    """Returns items as dictionaries, without the ids that are new in every call."""
    return [item.to_dict() | {"id": "", **({"call_id": ""} if item.type == "function_call" else {})} for item in output]


ASKED = {
    "words": ({"seed": 3}, {"seed": 3}),
    "greedy": ({"temperature": 0, "max_output_tokens": 9}, {"temperature": 0, "max_tokens": 9}),
    "truncated": ({"seed": 5, "top_p": 0.6, "stop": ["z"]}, {"seed": 5, "top_p": 0.6, "stop": ["z"]}),
    "a schema": (
        {"seed": 4, "text": {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}},
        {"seed": 4, "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}},
    ),
    "an object": (
        {"seed": 2, "max_output_tokens": 12, "text": {"format": {"type": "json_object"}}},
        {"seed": 2, "max_tokens": 12, "response_format": {"type": "json_object"}},
    ),
    "calls": (
        {"seed": 6, "tools": FLAT, "tool_choice": "required"},
        {"seed": 6, "tools": TOOLS, "tool_choice": "required"},
    ),
    "one call": (
        {"seed": 1, "tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False},
        {"seed": 1, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "a named function": (
        {"seed": 7, "tools": FLAT, "tool_choice": {"type": "function", "name": "now"}},
        {"seed": 7, "tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "now"}}},
    ),
    "a call that is cut off": (
        {"seed": 1, "tools": FLAT, "tool_choice": "required", "max_output_tokens": 30},
        {"seed": 1, "tools": TOOLS, "tool_choice": "required", "max_tokens": 30},
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_answers_are_those_of_a_chat(client, name):
    asked, same = ASKED[name]
    reply, whole = respond(client, **asked), chat(client, **same)
    (expected,) = whole.choices
    calls = [item for item in reply.output if item.type == "function_call"]
    assert reply.output_text == (expected.message.content or "")
    known = [(call.function.name, call.function.arguments) for call in expected.message.tool_calls or ()]
    assert [(call.name, call.arguments) for call in calls] == known
    cut = expected.finish_reason == "length"
    assert reply.status == ("incomplete" if cut else "completed")
    assert (reply.incomplete_details.reason if cut else reply.incomplete_details) == (
        "max_output_tokens" if cut else None
    )
    assert [item.status for item in reply.output] == ["completed"] * (len(reply.output) - 1) + [reply.status]
    assert reply.error is None
    Response.model_validate(reply.to_dict())
    usage, known = reply.usage, whole.usage
    assert (usage.input_tokens, usage.output_tokens) == (known.prompt_tokens, known.completion_tokens)
    assert usage.total_tokens == known.total_tokens
    assert usage.output_tokens_details.target_forwards == known.completion_tokens_details.target_forwards


@pytest.mark.parametrize("name", ASKED)
def test_streams_build_up_the_whole_response(client, name):
    asked, _ = ASKED[name]
    whole, events = respond(client, **asked), list(respond(client, stream=True, **asked))
    for event in events:
        EVENT.validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"]
    assert kinds[-1] == whole.status
    assert items(events[-1].response.output) == items(whole.output)
    assert events[-1].response.usage == whole.usage
    for index, item in enumerate(events[-1].response.output):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        is_call = item.type == "function_call"
        delta = "function_call_arguments.delta" if is_call else "output_text.delta"
        parts = [] if is_call else ["content_part.added"]
        ends = ["function_call_arguments.done"] if is_call else ["output_text.done", "content_part.done"]
        shown = [event.type.removeprefix("response.") for event in own]
        assert [kind for kind in shown if kind != delta] == ["output_item.added", *parts, *ends, "output_item.done"]
        assert shown.index(delta) == 1 + len(parts)
        said = "".join(event.delta for event in own if event.type == f"response.{delta}")
        assert said == (item.arguments if is_call else item.content[0].text)
        assert own[-1].item == item
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}


def test_the_clients_own_helper_assembles_streams(client):
    asked = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}
    with client.responses.stream(model="tiny", input="hello there", **asked, extra_body={"seed": 1}) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    (call,) = respond(client, seed=1, **asked).output
    assert (final.output[0].name, final.output[0].arguments) == (call.name, call.arguments)
    assert "response.function_call_arguments.done" in kinds


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)


def test_answers_parse_as_pydantic_models(client):
    reply = client.responses.parse(model="tiny", input="hello", text_format=Animal, extra_body={"seed": 3})
    assert isinstance(reply.output_parsed, Animal)
    assert reply.text.format.name == "Animal"


def test_log_probabilities_are_included_on_request(client):
    asked = {"seed": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 8}
    expected = chat(client, seed=3, logprobs=True, top_logprobs=2, max_tokens=8).choices[0].logprobs.content
    (part,) = respond(client, **asked).output[0].content
    deltas = [event.logprobs for event in respond(client, stream=True, **asked) if event.type.endswith("text.delta")]
    for found in (part.logprobs, [known for delta in deltas for known in delta]):
        assert [known.to_dict() for known in found] == [known.to_dict() for known in expected]


CALL = {"type": "function_call", "call_id": "callnumb1", "name": "now", "arguments": "{}"}
CONVERSATIONS = {
    "a text": ("hi", [{"role": "user", "content": "hi"}]),
    "messages": (
        [
            {"role": "developer", "content": "be short"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}] * 2},
            {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "three", "annotations": [], "logprobs": []}]},
            {"role": "user", "content": "four"},
        ],
        [
            {"role": "developer", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "one"}] * 2},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four"},
        ],
    ),
    "calls": (
        [
            {"role": "user", "content": "when?"},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "in short"}],
             "content": [{"type": "reasoning_text", "text": "let me see"}], "encrypted_content": "x"},
            {"role": "assistant", "content": "I look."},
            {**CALL, "id": "fc_1", "status": "completed"},
            {**CALL, "call_id": "callnumb2"},
            {"type": "function_call_output", "call_id": "callnumb1", "output": "noon"},
            {"type": "function_call_output", "call_id": "callnumb2", "output": [{"type": "input_text", "text": "x"}]},
        ],
        [
            {"role": "user", "content": "when?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "let me see", "tool_calls": [
                {"id": f"callnumb{n}", "type": "function", "function": {"name": "now", "arguments": "{}"}}
                for n in (1, 2)
            ]},
            {"role": "tool", "tool_call_id": "callnumb1", "content": "noon"},
            {"role": "tool", "tool_call_id": "callnumb2", "content": "x"},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_items_are_converted_to_messages(served, client, name):
    given, messages = CONVERSATIONS[name]
    tokenizer = served.engine.decoder.target.tokenizer
    asked = ResponsesRequest.model_validate({"input": given, "tools": FLAT}).chat()
    known = asked.model_validate({"messages": messages, "tools": TOOLS})
    calls = served.server._service._calls
    assert asked.encode(tokenizer, calls, len) == known.encode(tokenizer, calls, len)
    assert [said.reasoning_content for said in asked.messages] == [said.reasoning_content for said in known.messages]
    reply = respond(client, given, seed=3, tools=FLAT, max_output_tokens=5)
    (expected,) = chat(client, messages, seed=3, tools=TOOLS, max_tokens=5).choices
    assert reply.output_text == (expected.message.content or "")


@pytest.mark.parametrize("begun", [[], [{"role": "system", "content": "in verse"}]], ids=["alone", "before others"])
def test_instructions_are_the_first_message(begun):
    asked = ResponsesRequest(input=[*begun, {"role": "user", "content": "hi"}], instructions="be short").chat()
    assert [said.role for said in asked.messages] == ["system", "user"]
    assert asked.messages[0].text == "\n".join(["be short", *(said["content"] for said in begun)])


def test_effort_reaches_the_chat_template():
    assert ResponsesRequest(input="hi", reasoning={"effort": "low"}).chat().reasoning_effort == "low"


def test_output_items_can_be_sent_back_as_input(client):
    said = [{"role": "user", "content": "hello there"}]
    for turn in range(2):
        reply = respond(client, said, seed=6 + turn, tools=FLAT, tool_choice="required")
        said += [item.to_dict() for item in reply.output]
        calls = [item for item in reply.output if item.type == "function_call"]
        said += [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"} for call in calls]
        assert calls


def test_hints_and_fields_without_effect_are_accepted(client):
    nothing = {
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "metadata": {"run": "7"},
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "reasoning": {"effort": None, "summary": "auto"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "stream_options": {"include_obfuscation": False},
        "text": {"verbosity": "low"},
        "tools": [],
        "truncation": "disabled",
        "user": "me",
    }
    reply = respond(client, seed=3, **nothing)
    assert reply.output_text == respond(client, seed=3).output_text
    assert reply.metadata == {"run": "7"}
    assert reply.store is False  # no response is stored


REFUSED = {
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_id"),
    "a conversation": ({"conversation": "conv_1"}, "conversation", "conversation"),
    "a stored prompt": ({"prompt": {"id": "p"}}, "prompt", "prompt"),
    "a background response": ({"background": True}, "background", "background"),
    "automatic truncation": ({"truncation": "auto"}, "truncation", "truncation"),
    "a tool of the provider": ({"tools": [{"type": "web_search"}]}, "tools.0", "web_search"),
    "a choice of a provider's tool": ({"tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
    "an image": (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.type",
        "input_image",
    ),
    "another item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "item_reference"),
    "no item": ({"input": []}, "input", "entry"),
    "no role": ({"input": [{"content": "x"}]}, "input.0", "role is missing"),
    "a field of another item": ({"input": [{**CALL, "output": "x"}]}, "input.0", "output is no field"),
    "arguments that are no object": (
        {"input": [{**CALL, "arguments": "[1]"}]},
        "input.0.arguments",
        "JSON text of an object",
    ),
    "an unknown call": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input.0.call_id",
        "send that item",
    ),
    "no such function": ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "no f among"),
    "a chat's field": ({"max_tokens": 3}, "max_tokens", "max_tokens is not supported"),
    "no tokens": ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
    "too many tokens": ({"max_output_tokens": 9999}, None, "lower max_output_tokens"),
    "a temperature that is a word": ({"temperature": "hot"}, "temperature", "number"),
    "a negative temperature": ({"temperature": -1}, "temperature", "temperature"),
    "an invalid schema": (
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}},
        "text.format.schema",
        "text.format.schema",
    ),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format", "name and schema"),
    "a tool's schema": (
        {"tools": [{"type": "function", "name": "f", "parameters": {"type": "nothing"}}]},
        "tools.0.parameters",
        "tools.0.parameters",
    ),
    "alternatives without log-probabilities": ({"top_logprobs": 2}, "top_logprobs", "include"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_and_invalid_fields_are_refused_by_name(served, name):
    fields, param, cause = REFUSED[name]
    reply = httpx.post(f"{served.url}/v1/responses", json={"input": "hi", **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param)
    assert cause in error["message"]


def test_a_failure_during_a_stream_is_its_last_event(served, client, monkeypatch):
    steps, step = [], served.engine.decoder.stepper.step

    def stumbles(state):
        steps.append(None)
        if len(steps) > 2:
            raise MemoryError("no more")
        return step(state)

    monkeypatch.setattr(served.engine.decoder.stepper, "step", stumbles)
    events = list(respond(client, seed=3, ignore_eos=True, stream=True))
    monkeypatch.undo()
    EVENT.validate_python(events[-1].to_dict())
    assert (events[-1].type, events[-1].response.status) == ("response.failed", "failed")
    assert events[-1].response.error.code == "server_error"
    assert "no more" not in events[-1].response.error.message
    assert events[-1].response.output[0].content[0].text == "".join(
        event.delta for event in events if event.type == "response.output_text.delta"
    )


def test_a_failure_before_a_stream_has_a_status(client):
    with pytest.raises(openai.BadRequestError):
        respond(client, stream=True, max_output_tokens=9999)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-5", input="hi")


def test_events_are_written_as_openai_writes_them(served):
    body = {"input": "hi", "stream": True, "max_output_tokens": 2}
    lines = httpx.post(f"{served.url}/v1/responses", json=body).text.strip().split("\n")
    named = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert named == [event["type"] for event in data]
