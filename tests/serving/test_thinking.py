"""Thoughts are separated from answers by the marks of the chat template; grammars begin after the thoughts."""

import json

import jsonschema
import pytest
from fastapi.testclient import TestClient
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from support.callers import MARKS, TAGGED, TEMPLATES, caller_tokenizer, follows, speaker
from support.models import EOS

from arbordraft.decoding.engine import Engine
from arbordraft.serving.app import build_app
from arbordraft.serving.calls import call_format, embedded
from arbordraft.serving.reasoning import ReasoningFormat, ReasoningParser, reasoning_format_of
from arbordraft.serving.service import Service

EVENT = TypeAdapter(ResponseStreamEvent)
_TURN = "{{ 'assistant: ' }}"
assert _TURN in TAGGED
# Like Qwen3: the model begins its thoughts itself, unless thinking is turned off.
FREE = TAGGED.replace(
    _TURN,
    _TURN + "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)
# Like DeepSeek-R1: the template begins the thoughts.
BEGUN = TAGGED.replace(_TURN, _TURN + "{{ '<think>\n' }}").replace(
    "{{ said.content }}", "{{ said.content.split('</think>') | last }}"
)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
USER = {"role": "user", "content": "hi"}


def tokenizer_of(template, *, marked=True, special=True):
    return caller_tokenizer(template, [*(["</think>"] if marked else []), *MARKS["tagged"]], special=special)


@pytest.mark.parametrize(
    ("text", "opening", "closing"),
    [
        (FREE, "<think>", "</think>"),
        (BEGUN, "<think>", "</think>"),
        ("{{ '[THINK]' + t + '[/THINK]' }}", "[THINK]", "[/THINK]"),
        ("{{ '<seed:think>' + t + '</seed:think>' }}", "<seed:think>", "</seed:think>"),
        ("{{ '◁think▷' + t + '◁/think▷' }}", "◁think▷", "◁/think▷"),
        ("{{ '<|START_THINKING|>' + t + '<|END_THINKING|>' }}", "<|START_THINKING|>", "<|END_THINKING|>"),
    ],
)
def test_the_marks_of_thoughts_are_found_in_the_template(text, opening, closing):
    found = reasoning_format_of(tokenizer_of(text), [EOS])
    assert (found.opening, found.closing) == (opening, closing)


def test_templates_without_thoughts_have_no_marks():
    for template in (*TEMPLATES.values(), None):
        assert reasoning_format_of(tokenizer_of(template), [EOS]) is None


def test_the_prompt_decides_whether_thoughts_have_begun():
    thinking = reasoning_format_of(tokenizer_of(FREE), [EOS])
    assert not thinking.for_prompt("user: <think>hi<eos>assistant: ").begun
    assert thinking.for_prompt("assistant: <think>\n").begun
    assert thinking.for_prompt("assistant: <think>\n\n</think>\n\n") is None
    assert thinking.for_prompt("assistant: <think>\nSo", "<think>\nSo").begun
    assert thinking.for_prompt("assistant: So", "So") is None
    assert thinking.for_prompt("assistant: <think>a</think>So", "<think>a</think>So") is None


TEXTS = {
    "thoughts": ("<think>\nWell, <b> </thin\n\nk.\n</think>\n\nYes.\n", "Well, <b> </thin\n\nk.", "Yes.\n"),
    "blanks before thoughts": ("\n <think>hm</think>a", "hm", "a"),
    "empty thoughts": ("<think>\n\n</think>\n\nYes", "", "Yes"),
    "no thoughts": ("\n<thing> </think> yes", "", "\n<thing> </think> yes"),
    "blanks alone": ("  ", "", "  "),
    "cut off": ("<think>\nWell, </thi", "Well, </thi", ""),
    "cut off at once": ("<thi", "", "<thi"),
    "thoughts twice": ("<think>a</think><think>b</think>", "a", "<think>b</think>"),
}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", TEXTS)
def test_thoughts_are_read_from_pieces_of_any_size(name, size):
    text, thoughts, words = TEXTS[name]
    for begun in (False, True) if text.startswith("<think>") else (False,):
        reader = ReasoningParser(ReasoningFormat("<think>", "</think>", {}, begun))
        rest = text.removeprefix("<think>") if begun else text
        told = [reader.add(rest[place : place + size]) for place in range(0, len(rest), size)] + [reader.end()]
        assert "".join(part for part, _ in told) == thoughts
        assert "".join(part for _, part in told) == words


def test_tokens_of_thoughts_are_counted():
    for begun, count in ((False, 5), (True, 4)):
        reader = ReasoningParser(ReasoningFormat("<think>", "</think>", {}, begun))
        for text in [*([] if begun else ["<think>"]), "\n", "a", " b", "</think>", "\n\n", "c"]:
            reader.add(text)
        assert reader.tokens == count


@pytest.mark.parametrize("marked", [True, False], ids=["marks as tokens", "marks as texts"])
def test_grammars_begin_after_thoughts(marked):
    tokenizer = tokenizer_of(FREE, marked=marked)
    free, answer = reasoning_format_of(tokenizer, [EOS]), '{"a": 1, "b": true}'
    assert ("</think>" in free.added) == marked
    grammar = free.grammar(f"start: %json {embedded(SCHEMA)}")
    begun = free.for_prompt("<think>").grammar(f"start: %json {embedded(SCHEMA)}")
    thoughts = ["\nSo <tool_call> {", "<tool_call>", " <b>\n", "</think>", "\n\n"]
    assert follows(tokenizer, grammar, [answer])
    assert follows(tokenizer, grammar, ["<think>", *thoughts, answer])
    assert follows(tokenizer, begun, [*thoughts, answer])
    assert follows(tokenizer, begun, ["</think>", answer])
    assert not follows(tokenizer, begun, [answer])
    assert not follows(tokenizer, grammar, ["<think>", *thoughts])
    assert not follows(tokenizer, grammar, ["<think>", "So"])
    assert not follows(tokenizer, grammar, ["So", answer])
    assert not follows(tokenizer, grammar, ["<think>", "</think>", "So", answer])
    assert not marked or not follows(tokenizer, grammar, ["<think>", "</thi", "nk>", answer])


def test_calls_inside_thoughts_are_ignored():
    tokenizer = tokenizer_of(FREE)
    thinking, calls = reasoning_format_of(tokenizer, [EOS]), call_format(tokenizer, [EOS])
    asked = {"required": False, "parallel": True, "answer": None}
    free = calls.without(thinking.opening, thinking.closing)
    grammar = thinking.grammar(free.grammar({"look": SCHEMA}, **asked))
    call = ["<tool_call>", '\n{"name": "look", "arguments": {"a": 1, "b": true}}\n', "</tool_call>"]
    assert follows(tokenizer, grammar, ["<think>", "a ", "<tool_call>", " b", "</think>", "\n\nYes."])
    assert follows(tokenizer, grammar, ["<think>", "a", "</think>", "\n\n", *call])
    assert follows(tokenizer, grammar, ["Yes.\n", *call])
    assert not follows(tokenizer, grammar, ["<think>", "a", "</think>", "Yes ", "<tool_call>", " b"])
    assert not follows(tokenizer, grammar, ["<think>", "a ", *call])


@pytest.fixture(scope="module", params=[FREE, BEGUN], ids=["free", "begun"])
def served(request):
    decoder = speaker(tokenizer_of(request.param))
    service = Service(Engine(decoder, max_samples=8, max_cache_tokens=12_000), "tiny", 200)
    with TestClient(build_app(service)) as http:
        yield http, service


def asking(service, **fields):
    """Returns a request with a bias, without which random models neither begin nor end their thoughts."""
    words = ["<think>", "</think>", "a", "b", "c", "d"]
    bias = {str(service.tokenizer.convert_tokens_to_ids(word)): 63 if word == "<think>" else 60 for word in words}
    return {"messages": [USER], "seed": 3, "n": 6, "temperature": 2, "logit_bias": bias, **fields}


def ask(http, **body):
    reply = http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_json_comes_after_thoughts(served):
    http, service = served
    reply = ask(http, **asking(service, response_format=FORM))
    assert any(choice["message"].get("reasoning_content") for choice in reply["choices"])
    for choice in reply["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert choice["finish_reason"] == "stop"
    usage = reply["usage"]
    assert 4 <= usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_calls_come_after_thoughts(served):
    http, service = served
    called = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for choice in ask(http, **asking(service, **called))["choices"]:
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")


def test_streams_carry_thoughts_apart_from_the_answer(served):
    http, service = served
    body = asking(service, max_tokens=40)
    whole = ask(http, **body)
    text = http.post(
        "/v1/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}}
    ).text
    *chunks, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    for index, choice in enumerate(whole["choices"]):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        said = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")}
        message = choice["message"]
        assert said == {"reasoning_content": message.get("reasoning_content", ""), "content": message["content"]}
    assert last["usage"]["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    assert any(choice["message"].get("reasoning_content") for choice in whole["choices"])


def test_responses_have_thoughts_as_items(served):
    http, service = served
    asked = asking(service, max_tokens=20)
    expected = [choice["message"] for choice in ask(http, **asked)["choices"]]
    body = {"input": "hi", "temperature": 2, "logit_bias": asked["logit_bias"], "max_output_tokens": 20}
    body["include"] = ["message.output_text.logprobs"]
    chosen = sorted(enumerate(expected, 3), key=lambda known: "reasoning_content" not in known[1])[:3]
    assert "reasoning_content" in chosen[0][1]
    for seed, message in chosen:
        whole = http.post("/v1/responses", json={**body, "seed": seed}).json()
        thoughts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "reasoning"]
        words = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
        assert "".join(thoughts) == message.get("reasoning_content", "")
        assert "".join(words) == message["content"]
        text = http.post("/v1/responses", json={**body, "seed": seed, "stream": True}).text
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
        for event in events:
            EVENT.validate_python(event)
        for kind, told in (("reasoning_text", thoughts), ("output_text", words)):
            deltas = [event["delta"] for event in events if event["type"] == f"response.{kind}.delta"]
            assert "".join(deltas) == "".join(told)
        known = [item["content"][0]["logprobs"] for item in whole["output"] if item["type"] == "message"]
        assert ["".join(one["token"] for one in of).lstrip() for of in known] == words
        deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
        assert [one for of in deltas for one in of] == [one for of in known for one in of]
        assert events[-1]["response"]["usage"] == whole["usage"]
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] >= bool(thoughts)
        back = http.post("/v1/responses", json={**body, "input": [USER, *whole["output"], USER]})
        assert back.status_code == 200


def test_no_thoughts_after_a_prompt_that_ended_them(served):
    http, service = served
    said = [USER, {"role": "assistant", "content": "So"}]
    wishes = [{"messages": said, "continue_final_message": True}]
    if "enable_thinking" in service.tokenizer.chat_template:
        wishes.append({"chat_template_kwargs": {"enable_thinking": False}})
    for wish in wishes:
        reply = ask(http, **asking(service, max_tokens=20, **wish))
        assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
        assert all("reasoning_content" not in choice["message"] for choice in reply["choices"])
    for choice in ask(http, **asking(service, response_format=FORM, **wishes[1]))["choices"] if wishes[1:] else ():
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_thoughts_can_be_continued(served):
    http, service = served
    if "split" in service.tokenizer.chat_template:
        said = [USER, {"role": "assistant", "content": "So</think>"}]
        reply = http.post("/v1/chat/completions", json={"messages": said, "continue_final_message": True})
        assert reply.status_code == 400
        assert "cannot be continued" in reply.json()["error"]["message"]
        return
    said = [USER, {"role": "assistant", "content": "<think>\nSo"}]
    reply = ask(http, **asking(service, max_tokens=20, messages=said, continue_final_message=True))
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] > 6
    assert any(choice["message"].get("reasoning_content") for choice in reply["choices"])


def test_reasoning_off_leaves_thoughts_in_the_answer(served):
    http, service = served
    body = asking(service, max_tokens=20, n=1)
    message = ask(http, **body)["choices"][0]["message"]
    with TestClient(build_app(Service(Engine(service.engine.decoder), "tiny", reasoning=False))) as plain:
        left = ask(plain, **body)
    assert "reasoning_content" not in left["choices"][0]["message"]
    assert left["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    told = [message.get("reasoning_content", "") + message["content"], left["choices"][0]["message"]["content"]]
    assert len({text.replace("<think>", "").replace("</think>", "") for text in told}) == 1
