"""JSON answers and tool calls, requested with OpenAI's own client."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from support.callers import MARKS, TEMPLATES, caller
from support.served import HELLO, answered_alone, chat, serving

from arbordraft.grammars import Grammar
from arbordraft.grammars import engine as grammar_engine

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["kind", "tags", "name"],
    "additionalProperties": False,
}
DAYS = {"type": "integer", "minimum": 1, "maximum": 9}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": DAYS},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
SCHEMAS = {"weather": WEATHER, "now": {"type": "object", "maxProperties": 0}}
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def served():
    with serving(caller(), max_tokens=12_000, default_tokens=200) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return served.client


def streamed(client, messages=HELLO, **settings):
    """Returns the completion that the client's own helper assembles, and the kinds of its events."""
    with client.chat.completions.stream(model="tiny", messages=messages, **settings) as stream:
        kinds = {event.type for event in stream}
        return stream.get_final_completion(), kinds


def json_format(schema, **others):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **others}}


def calls_of(choice):
    return [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or ()]


def alone(decoder, messages=HELLO, tools=None, **settings):
    tokenizer = decoder.target.tokenizer
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
    return answered_alone(decoder, prompt, **{"max_new_tokens": 200, **settings})


FORMATS = {
    "schema": (json_format(SCHEMA), SCHEMA),
    "strict": (json_format(SCHEMA, strict=True, description="an animal"), SCHEMA),
    "not strict": (json_format(SCHEMA, strict=False), SCHEMA),
    "no object": (json_format({"enum": ["a", "\u00e9\u4e2d", 3]}), {"enum": ["a", "\u00e9\u4e2d", 3]}),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("temperature", [0, 1])
def test_json_answers_are_those_of_the_engine(served, client, name, temperature):
    form, schema = FORMATS[name]
    settings = {"seed": 4, "temperature": temperature, "n": 3}
    answers, texts = alone(served.engine.decoder, grammar=Grammar.json_schema(schema), **settings)
    reply = chat(client, response_format=form, **settings)
    assert [choice.message.content for choice in reply.choices] == texts
    assert [choice.finish_reason for choice in reply.choices] == [answer.finish_reason for answer in answers]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
    chunks = list(chat(client, response_format=form, stream=True, **settings))
    said = ["".join(c.choices[0].delta.content for c in chunks if c.choices[0].index == i) for i in range(3)]
    assert said == texts


def test_without_a_format_answers_are_no_json(client):
    assert chat(client, response_format={"type": "text"}, seed=4).choices == chat(client, seed=4).choices
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(chat(client, seed=4).choices[0].message.content)


def test_json_object_begins_an_object(client):
    reply = chat(client, response_format={"type": "json_object"}, max_tokens=12, seed=2)
    assert isinstance(json.loads(reply.choices[0].message.content), dict)
    assert reply.choices[0].finish_reason == "stop"  # ended in time, which a random model hardly ever does by itself


class Animal(BaseModel):
    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)
    friends: list[Literal["fox", "owl"]] = Field(max_length=2)


class Feed(BaseModel):
    """Feeds an animal."""

    animal: Animal
    often: bool


def test_answers_parse_as_pydantic_models(client):
    asked = {"model": "tiny", "messages": HELLO, "response_format": Animal, "seed": 3, "n": 2}
    for choice in client.chat.completions.parse(**asked).choices:
        assert isinstance(choice.message.parsed, Animal)
    final, kinds = streamed(client, response_format=Animal, seed=3)
    assert isinstance(final.choices[0].message.parsed, Animal)
    assert "content.delta" in kinds


def test_calls_parse_as_pydantic_functions(client):
    tools = [openai.pydantic_function_tool(Feed)]
    asked = {"messages": HELLO, "tools": tools, "tool_choice": "required", "seed": 3}
    whole = client.chat.completions.parse(model="tiny", parallel_tool_calls=False, **asked)
    final, kinds = streamed(client, parallel_tool_calls=False, **asked)
    for reply in (whole, final):
        (call,) = reply.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Feed)
        assert reply.choices[0].message.content is None
    assert "tool_calls.function.arguments.delta" in kinds


def test_unfinished_answers_report_the_length_limit(client):
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Animal, max_tokens=4)
    asked = {"tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    length = chat(client, **asked).usage.completion_tokens
    choice = chat(client, **asked, max_tokens=length - 7).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert call.function.arguments.startswith("{")
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


@pytest.mark.parametrize("name", ["required", "named"])
@pytest.mark.parametrize("style", TEMPLATES)
def test_functions_are_called_as_asked(style, name):
    with serving(caller(style), max_tokens=12_000, default_tokens=200) as served:
        asked = {
            "tools": TOOLS,
            "tool_choice": "required" if name == "required" else NOW,
            "parallel_tool_calls": False,
            "seed": 3,
            "n": 3,
        }
        reply = chat(served.client, **asked)
    for choice in reply.choices:
        ((called, arguments),) = calls_of(choice)
        jsonschema.validate(arguments, SCHEMAS[called])
        assert called == "now" or name == "required"
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


@pytest.mark.parametrize("name", ["auto", "none"])
@pytest.mark.parametrize("style", TEMPLATES)
def test_answers_without_calls_are_those_without_a_grammar(style, name):
    """A random model hardly ever begins a call; the bias excludes bytes that are no characters."""
    decoder = caller(style)
    tokenizer = decoder.target.tokenizer
    bytes_only = {token: -100.0 for token in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([token])}
    tools = [TOOLS[0], NOW] if name == "auto" else None
    answers, texts = alone(decoder, tools=tools, seed=3, n=3, logit_bias=bytes_only, max_new_tokens=50)
    with serving(decoder, max_tokens=12_000, default_tokens=50) as served:
        reply = chat(served.client, tools=TOOLS, tool_choice=name, seed=3, n=3, logit_bias=bytes_only)
    marks = {*tokenizer.convert_tokens_to_ids(MARKS[style])}
    wordy = [index for index, answer in enumerate(answers) if name == "none" or not marks & {*answer.tokens}]
    assert wordy
    for index in wordy:
        assert reply.choices[index].message.content == texts[index]
        assert reply.choices[index].finish_reason == answers[index].finish_reason
        assert reply.choices[index].message.tool_calls is None


def test_keywords_beyond_the_grammar_are_checked_and_reported(client):
    """``strict`` is off, as by OpenAI's default; the grammar enforces the other keywords."""
    pairs = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    asked = {"response_format": json_format(pairs), "seed": 3, "n": 12, "temperature": 1.5}
    seen = set()
    for choice in chat(client, **asked).choices:
        value, told = json.loads(choice.message.content), choice.arbordraft["schema"]
        assert len(value) == 2
        assert (told["checked"], told["valid"]) == (["uniqueItems"], value[0] != value[1])
        assert (told["reason"] is None) == told["valid"]
        seen.add(told["valid"])
    assert seen == {True, False}
    chunks = [chunk.choices[0] for chunk in chat(client, **{**asked, "n": 1}, stream=True)]
    assert [hasattr(chunk, "arbordraft") for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    held = chat(client, response_format=json_format({"enum": [1]}), seed=3).choices[0]
    assert not hasattr(held, "arbordraft")


def complete(client, prompt, stream=False, **settings):
    return client.completions.create(model="tiny", prompt=prompt, stream=stream, extra_body=settings)


@pytest.mark.parametrize("name", FORMATS)
def test_completions_follow_a_format(served, client, name):
    """The answers to each prompt are those of an engine with the same grammar."""
    form, schema = FORMATS[name]
    prompts, settings = ["hello there", "a cat"], {"seed": 4, "temperature": 1, "n": 2}
    tokenizer, expected = served.engine.decoder.target.tokenizer, []
    for prompt in prompts:
        limits = {"grammar": Grammar.json_schema(schema), "max_new_tokens": 200}
        expected += answered_alone(served.engine.decoder, tokenizer(prompt)["input_ids"], **limits, **settings)[1]
    asked = {"response_format": form, "max_tokens": 200, **settings}
    assert [choice.text for choice in complete(client, prompts, **asked).choices] == expected
    said = dict.fromkeys(range(4), "")
    for chunk in complete(client, prompts, stream=True, **asked):
        said[chunk.choices[0].index] += chunk.choices[0].text
    assert [*said.values()] == expected
    for text in expected:
        jsonschema.validate(json.loads(text), schema)


def test_completions_begin_an_object_or_are_free(client):
    prompt, settings = "hello there", {"max_tokens": 12, "seed": 4}
    free = complete(client, prompt, **settings).choices[0].text
    assert complete(client, prompt, response_format={"type": "text"}, **settings).choices[0].text == free
    assert not free.startswith("{")
    ended = complete(client, prompt, response_format={"type": "json_object"}, **settings).choices[0]
    assert (type(json.loads(ended.text)), ended.finish_reason) == (dict, "stop")


def test_completions_are_checked_by_keywords_beyond_the_grammar(client):
    pairs = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    asked = {"seed": 3, "n": 6, "temperature": 1.5, "max_tokens": 60}
    for choice in complete(client, ["a", "b"], response_format=json_format(pairs), **asked).choices:
        value, told = json.loads(choice.text), choice.arbordraft["schema"]
        assert (told["checked"], told["valid"]) == (["uniqueItems"], value[0] != value[1])


UNFIT = {
    "an echo": ({"echo": True}, "echo", "no JSON"),
    "no end": ({"ignore_eos": True}, "ignore_eos", "able to end"),
    "a minimum length": ({"min_tokens": 2}, "min_tokens", "JSON"),
    "a stop token": ({"stop_token_ids": [5]}, "stop_token_ids", "JSON"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_completions_refuse_fields_that_conflict_with_a_format(client, name):
    wishes, param, cause = UNFIT[name]
    with pytest.raises(openai.BadRequestError, match=cause) as refusal:
        complete(client, "a", **{"response_format": {"type": "json_object"}, **wishes})
    assert refusal.value.param == param


def test_a_schema_is_compiled_once_for_all_prompts(client, monkeypatch):
    made, build = [], Grammar.json_schema
    monkeypatch.setattr(
        Grammar, "json_schema", lambda *given, **options: made.append(given) or build(*given, **options)
    )
    complete(client, ["a", "b", "c"], response_format=json_format({"enum": [1]}), max_tokens=9)
    assert len(made) == 1


OPEN = {"type": "boolean"}
LOOSE = {
    "anything": {},
    "no type": {"properties": {"a": OPEN}, "required": ["a"], "additionalProperties": False},
    "an object or null": {"type": ["object", "null"], "properties": {"a": OPEN}, "additionalProperties": False},
    "one of several types": {"anyOf": [{"type": "array"}, {"type": "object", "maxProperties": 0}]},
    "an enumeration": {"enum": [3, {"a": [True]}, None]},
    "a definition": {"$ref": "#/$defs/a", "$defs": {"a": {"type": ["object", "string"], "maxProperties": 0}}},
}


@pytest.mark.parametrize("name", LOOSE)
def test_arguments_are_objects_even_if_the_schema_allows_more(client, name):
    """Finished calls can be sent back."""
    tool = {"type": "function", "function": {"name": "f", "parameters": LOOSE[name]}}
    asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 40, "n": 8}
    for choice in chat(client, **asked, seed=1).choices:
        (call,) = choice.message.tool_calls
        assert call.function.arguments.startswith("{")
        if choice.finish_reason == "tool_calls":
            jsonschema.validate(json.loads(call.function.arguments), LOOSE[name])
            back = [*HELLO, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
    if name != "anything":  # a random model hardly ever ends such an object
        assert chat(client, back, max_tokens=1).choices


def biased(served, **tokens):
    """Returns a logit bias for the mark of a call and for the end token."""
    known = {"call": "<tool_call>", "end": "<eos>"}
    tokenizer = served.engine.decoder.target.tokenizer
    return {str(tokenizer.convert_tokens_to_ids(known[name])): bias for name, bias in tokens.items()}


def test_a_model_that_begins_a_call_has_to_end_it(served, client):
    asked = {"tools": TOOLS, "logit_bias": biased(served, call=5, end=3), "seed": 1, "n": 16}
    whole, (final, _) = chat(client, **asked), streamed(client, **asked)
    both = 0
    for one, other in zip(whole.choices, final.choices, strict=True):
        assert ((one.message.content or None), one.finish_reason) == (other.message.content, other.finish_reason)
        assert calls_of(one) == calls_of(other)
        for called, arguments in calls_of(one):
            jsonschema.validate(arguments, SCHEMAS[called])
        assert (one.finish_reason == "tool_calls") == bool(one.message.tool_calls)
        assert "<tool_call>" not in (one.message.content or "")
        both += bool(one.message.tool_calls and one.message.content)
    assert both


def test_several_calls_have_their_own_ids(client):
    asked = {"tools": TOOLS, "tool_choice": "required", "seed": 1, "n": 4}
    whole, (final, _) = chat(client, **asked), streamed(client, **asked)
    assert [calls_of(choice) for choice in whole.choices] == [calls_of(choice) for choice in final.choices]
    assert any(len(calls_of(choice)) > 1 for choice in whole.choices)
    for choice in (*whole.choices, *final.choices):
        ids = [call.id for call in choice.message.tool_calls]
        assert len({*ids}) == len(ids)
        assert all(len(name) == 9 and name.isalnum() for name in ids)
    single = chat(client, **asked, parallel_tool_calls=False)
    assert [len(calls_of(choice)) for choice in single.choices] == [1, 1, 1, 1]


def test_an_answer_is_a_call_or_json(served, client):
    form = json_format({"enum": ["left", "right"]})
    asked = {"tools": TOOLS, "response_format": form, "seed": 5, "n": 4}
    for choice in chat(client, **asked, logit_bias=biased(served, call=-100)).choices:
        assert choice.message.content in ('"left"', '"right"')
    for choice in chat(client, **asked, logit_bias=biased(served, call=100)).choices:
        assert calls_of(choice)
        assert choice.message.content is None


def test_logprobs_steps_and_usage_cover_calls(client):
    asked = {"tools": TOOLS, "tool_choice": NOW, "parallel_tool_calls": False, "logprobs": True, "top_logprobs": 1}
    reply = chat(client, **asked, extra_body={"arbordraft": {"steps": True}})
    (choice,), usage = reply.choices, reply.usage
    assert len(choice.logprobs.content) == usage.completion_tokens
    assert sum(step["emitted"] for step in choice.arbordraft["steps"]) == usage.completion_tokens
    *chunks, last = chat(client, **asked, stream=True, stream_options={"include_usage": True})
    assert last.usage == usage
    assert sum(len(chunk.choices[0].logprobs.content) for chunk in chunks) == usage.completion_tokens
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant", *[None] * (len(chunks) - 1)]


@pytest.mark.parametrize("style", TEMPLATES)
def test_conversations_remember_calls(style):
    decoder = caller(style)
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "snow"}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    arguments = '{"city": "Oslo"}' if style == "tokens" else {"city": "Oslo"}
    shown = [
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "weather", "arguments": arguments}}],
        },
        {**result, "name": "weather"},
    ]
    _, expected = alone(decoder, shown, seed=3, max_new_tokens=30)
    with serving(decoder, max_tokens=12_000, default_tokens=30) as served:
        assert [choice.message.content for choice in chat(served.client, messages, seed=3).choices] == expected
        forgotten = chat(served.client, [*HELLO, {**messages[1], "tool_calls": [], "content": ""}], seed=3)
        assert forgotten.choices[0].message.content != expected[0]
        # a reply can be sent back unchanged
        asked = {"tools": TOOLS, "tool_choice": NOW, "parallel_tool_calls": False, "max_tokens": 60}
        reply = chat(served.client, **asked).choices[0].message
        back = [*HELLO, reply, {**result, "tool_call_id": reply.tool_calls[0].id}]
        assert chat(served.client, back, max_tokens=2).choices


CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
WRONG = {
    "an unknown choice": ({"tools": TOOLS, "tool_choice": "often"}, "tool_choice.type", "'required'"),
    "an unknown function": ({"tools": TOOLS, "tool_choice": {**NOW, "function": {"name": "g"}}}, "tool_choice", "no g"),
    "a choice without tools": ({"tool_choice": "required"}, "tool_choice", "no tools"),
    "a name with a blank": ({"tools": [{**NOW, "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
    "a custom tool": ({"tools": [{"type": "custom"}]}, "tools.0.type", "'function'"),
    "two tools of one name": ({"tools": [NOW, NOW]}, "tools", "several have the name now"),
    "an invalid schema of arguments": (
        {"tools": [NOW, {**NOW, "function": {"name": "g", "parameters": {"type": "thing"}}}]},
        "tools.1.function.parameters",
        "Invalid type",
    ),
    "arguments of no object": (
        {"tools": [NOW, {**NOW, "function": {"name": "g", "parameters": {"enum": [3]}}}]},
        "tools.1.function.parameters",
        "admits no object",
    ),
    "arguments of another type": (
        {"tools": [{**NOW, "function": {"name": "g", "parameters": {"type": ["array", "null"]}}}]},
        "tools.0.function.parameters",
        "its type is ['array', 'null']",
    ),
    "an unknown format": ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "goes with"),
    "a format without a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
        "required",
    ),
    "a keyword that cannot be held": (
        {"response_format": json_format({"type": "array", "uniqueItems": True}, strict=True)},
        "response_format.json_schema.schema",
        "uniqueItems cannot be held",
    ),
    "a keyword of arguments": (
        {"tools": [{**NOW, "function": {"name": "g", "parameters": {"minProperties": 1, "not": {}}}}]},
        "tools.0.function.parameters",
        "not cannot be held while text is written: leave it out",
    ),
    "a large pattern": (
        {"response_format": json_format({"type": "string", "pattern": "^a{1000000}$"})},
        "response_format",
        "simplify the schema",
    ),
    "half a character": (
        {"response_format": json_format({"const": "\ud800"})},
        "response_format.json_schema.schema",
        "surrogate",
    ),
    "half a character of a tool": (
        {"tools": [{**NOW, "function": {"name": "f", "parameters": {"description": "\ud800"}}}], "tool_choice": "auto"},
        None,
        "the conversation holds half of a surrogate pair",
    ),
    "a pattern that the server would run": (
        {"response_format": json_format({"not": {"pattern": "(a+)+$"}})},
        "response_format.json_schema.schema",
        "the server would have to run",
    ),
    "a schema that holds itself": (
        {"response_format": json_format({"$ref": "#"})},
        "response_format.json_schema.schema",
        "hold itself",
    ),
    "a schema's name": (
        {"response_format": json_format({}, name="a b")},
        "response_format.json_schema.name",
        "pattern",
    ),
    "tools without an end token": ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos", "able to end"),
    "a result without a call": (
        {"messages": [*HELLO, {"role": "tool", "content": "x", "tool_call_id": "a"}]},
        "messages.1.tool_call_id",
        "no call a",
    ),
    "arguments that are no object": (
        {"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1]"}}]}]},
        "messages.0.tool_calls.0.function.arguments",
        "JSON text of an object",
    ),
    "a user's call": ({"messages": [{**HELLO[0], "tool_calls": [CALL]}]}, "messages.0", "assistant"),
    "old functions": ({"functions": [{"name": "f"}]}, "functions", "not supported"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_formats_and_tools_are_refused_by_name(served, name):
    body, param, cause = WRONG[name]
    headers = {"Content-Type": "application/json"}
    content = json.dumps({"messages": HELLO, **body})
    reply = httpx.post(f"{served.url}/v1/chat/completions", content=content, headers=headers, timeout=20)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert cause in error["message"]


def test_all_kinds_share_a_batch(served, client):
    """Each request gets the answer that it gets alone; a refused request affects no other."""
    kinds = [
        {"response_format": json_format(SCHEMA)},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"max_tokens": 30},
        {"response_format": json_format({"type": "array", "uniqueItems": True}, strict=True)},
        {"tools": TOOLS, "max_tokens": 30},
    ]

    def ask(number):
        try:
            reply = chat(client, seed=number, temperature=number % 3 / 2, **kinds[number % len(kinds)])
        except openai.BadRequestError as error:
            return error.param
        message = reply.choices[0].message
        return message.content, [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]

    expected = [ask(number) for number in range(15)]
    with ThreadPoolExecutor(15) as pool:
        assert list(pool.map(ask, range(15))) == expected
    assert expected[3] == "response_format.json_schema.schema"
    assert len({repr(one) for one in expected}) > 9


def test_a_grammar_that_becomes_too_complex_fails_its_own_answer(client, monkeypatch):
    """The answer ends with an error, and never continues without a grammar."""
    monkeypatch.setattr(grammar_engine, "_PARTS", 100)
    wide = {"type": "object", "properties": {f"k{i}": {"const": i} for i in range(40)}, "additionalProperties": False}
    late = {"properties": {"name": {"enum": ["cat", "dog"]}, "wide": wide}, "required": ["name", "wide"]}
    asked = {"response_format": json_format({"type": "object", **late, "additionalProperties": False}), "seed": 1}
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(chat, client, seed=4, max_tokens=40)
        with pytest.raises(openai.BadRequestError, match="too many parts") as caught:
            chat(client, **asked)
        assert caught.value.code == "grammar_failed"
        chunks = chat(client, **asked, stream=True)
        said = next(chunks).choices[0].delta.content
        assert said
        assert '{"name": "cat", "wide": {'.startswith(said[:10])
        with pytest.raises(openai.APIError, match="too many parts"):
            list(chunks)
        assert beside.result().choices == chat(client, seed=4, max_tokens=40).choices
