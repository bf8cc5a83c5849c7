"""Many real schemas and a real model: every answer ends and is valid."""

import importlib
import itertools
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import torch
from support.models import PAYS

from arbordraft import RaggedModel, builders
from arbordraft.checkpoints.smollm2 import load_smollm2
from arbordraft.decoding.engine import Engine
from arbordraft.decoding.requests import Request
from arbordraft.grammars import Grammar

TOKENS = 320
OWN = [
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 6},
    {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"enum": ["größer", "日本語", "emoji 🎉", 'quoted "text"', "back\\slash"]},
    {"type": "object", "properties": {"größe": {"const": "ü"}, "名": {"type": "string", "maxLength": 9}}},
    {"anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"type": "string", "minLength": 3, "maxLength": 9}]},
    {"oneOf": [{"const": "a"}, {"type": "array", "prefixItems": [{"const": 1}, {"type": "boolean"}], "items": False}]},
    {"type": "number", "exclusiveMinimum": 1.5, "maximum": 7, "multipleOf": 0.5},
    {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3, "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}}}},
    {"type": "object", "patternProperties": {"^k[0-9]$": {"type": "boolean"}}, "maxProperties": 3},
    {"type": ["null", "boolean"]},
]  # fmt: skip


def bounded(schema: Any) -> Any:
    """Returns the schema with bounds on every part that a small model might continue for ever."""
    if isinstance(schema, list):
        return [bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: bounded(value) for key, value in schema.items()}
    if made.get("type") == "string" and not {"pattern", "format", "enum", "const"} & made.keys():
        made.setdefault("maxLength", 16)
    if made.get("type") == "integer":
        made = {"minimum": -999, "maximum": 999, **made}
    if made.get("type") == "number" and "multipleOf" not in made:
        made = {"type": "integer", "minimum": -999, "maximum": 999}
    if made.get("type") == "array":
        made.setdefault("maxItems", 2)
    if made.get("type") == "object" or "properties" in made:
        made["additionalProperties"] = False
    return made


def published() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields names and schemas of OpenAI's API types: nested, with unions, enumerations and defaults."""
    import pydantic
    from openai.types import chat, fine_tuning, graders, shared, vector_stores, webhooks

    parts = (chat, fine_tuning, graders, shared, vector_stores, webhooks)
    modules = [pkgutil.walk_packages(part.__path__, f"{part.__name__}.") for part in parts]
    for found in itertools.chain(*modules):
        module = importlib.import_module(found.name)
        for name, kind in sorted(vars(module).items()):
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel) and kind.__module__ == found.name:
                schema = kind.model_json_schema()
                if 150 < len(json.dumps(schema)) < 2000 and not loose(schema):
                    yield f"{found.name}.{name}", schema


def loose(schema: Any) -> bool:
    """Returns whether some part of a schema allows any value."""
    if isinstance(schema, list):
        return any(map(loose, schema))
    if not isinstance(schema, dict):
        return False
    known = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
    parts = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    parts += [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]
    return (
        any(isinstance(part, dict) and not known & part.keys() for part in parts)
        or isinstance(schema.get("additionalProperties"), dict)
        or (schema.get("type") == "array" and "items" not in schema)
        or (schema.get("type") == "object" and "properties" not in schema)
        or any(loose(value) for value in schema.values())
    )


def schemas() -> list[dict[str, Any]]:
    """Returns 75 bounded schemas: our own and published ones."""
    every = [schema for _, schema in published()]
    return [bounded(schema) for schema in (*OWN, *every[:: len(every) // (75 - len(OWN))])][:75]


@pytest.fixture(scope="module")
def target():
    return RaggedModel(*load_smollm2(torch.bfloat16, progress=False), kernels="auto")


@pytest.mark.soak
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batch", [1, 8])
def test_every_answer_is_valid(target, batch, temperature):
    """All 75 answers must end, too."""
    asked, tokenizer = schemas(), target.tokenizer
    engine = Engine(builders.lookup(target, PAYS), max_cache_tokens=16_000, max_samples=batch)
    streams = []
    for number, schema in enumerate(asked):
        chat = [{"role": "user", "content": f"Give an example of this, in JSON: {json.dumps(schema)[:300]}"}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        settings = {"max_new_tokens": TOKENS, "temperature": temperature, "seed": number}
        streams.append(engine.submit(Request(prompt=prompt, grammar=Grammar.json_schema(schema), **settings)))
    engine.run()
    for schema, stream in zip(asked, streams, strict=True):
        (answer,) = stream.result()
        text = tokenizer.decode(answer.tokens, skip_special_tokens=True)
        assert answer.finish_reason == "stop", f"no end: {text}"
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_the_schemas_are_of_all_kinds():
    """Grammars accept every schema; this needs no model."""
    asked = schemas()
    text = json.dumps(asked)
    assert len(asked) == 75
    for keyword in ("enum", "anyOf", "$ref", "maxItems", "pattern", "properties", "const"):
        assert f'"{keyword}"' in text
    for schema in asked:
        jsonschema.Draft202012Validator.check_schema(schema)
        assert Grammar.json_schema(schema)
