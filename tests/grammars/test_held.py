"""Random walks through schemas of all kinds: every finished answer is valid by the whole schema."""

import itertools
import json
import random
from contextlib import suppress

import jsonschema
import pytest
from support.models import EOS
from support.spellers import SPEAKER_VOCAB, speller_tokenizer

from arbordraft.grammars import Grammar, GrammarCompiler, productive

TEXT = {"type": "string"}
CLOSED = {"additionalProperties": False}
HELD = {
    "anything": {},
    "open object": {"type": "object", "properties": {"a": {"type": "integer"}, "ab": {"const": 1}}},
    "open object, required": {"type": "object", "required": ["b"], "properties": {"a": {"type": "null"}}},
    "others of a kind": {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {"type": "boolean"}},
    "names by expression": {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"const": 1}},
        "minProperties": 1,
        **CLOSED,
    },
    "all of": {
        "allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": TEXT}, "required": ["a"]}],
        "type": "object",
    },
    "any of": {"anyOf": [{"type": "array", "maxItems": 1}, {"type": "integer", "minimum": 7, "maximum": 15}]},
    "one of": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
    "above whole": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "below whole": {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
    "above one": {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
    "huge, above": {"type": "integer", "exclusiveMinimum": 2**53 + 1, "maximum": 10**25},
    "huge, below": {"type": "number", "minimum": -(10**25), "maximum": -(2**59)},
    "steps": {"type": "integer", "multipleOf": 7, "minimum": -30, "maximum": 30},
    "letters": {"type": "string", "minLength": 1, "maxLength": 2},
    "pattern": {"type": "string", "pattern": "^[a-c]*.?$"},
    "format": {"type": "string", "format": "date"},
    "values": {"enum": ["é/", "\u0001", 'q"\\', 1.5, -0.0, [1, {"a": None}], {"b": [True]}]},
    "list": {"type": "array", "prefixItems": [{"const": 1}], "items": {"type": "boolean"}, "maxItems": 3},
    "tree": {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "x": {"enum": [1, 2]}},
        "required": ["x"],
        **CLOSED,
    },
    "counts as floats": {"type": "array", "maxItems": 2.0, "items": {"type": "null"}},
}


@pytest.fixture(scope="module")
def compiler():
    return GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)


def answers(compiler, grammar, walks, seed=0, steps=60):
    """Yields finished answers, written with random choices among the allowed tokens."""
    tokenizer, chance = speller_tokenizer(), random.Random(seed)
    closing = {token for token in range(len(tokenizer)) if tokenizer.decode([token])[:1] in ('"', "}", "]", ",")}
    for _ in range(walks):
        state, said = compiler(grammar, [EOS]).fork(), []
        for _ in range(steps):
            tokens = state.allowed().tokens()
            token = EOS if EOS in tokens and chance.random() < 0.5 else chance.choice(tokens)
            if (closers := closing & {*tokens}) and chance.random() < 0.4:
                token = chance.choice(sorted(closers))
            if token == EOS:
                yield tokenizer.decode(said)
                break
            state.accept(token)
            said.append(token)


def check(compiler, schema, walks, seed=0):
    """Checks that all finished answers are valid; returns their number."""
    grammar = Grammar.json_schema(schema)
    validator, count = jsonschema.Draft202012Validator(schema), 0
    for text in answers(compiler, grammar, walks, seed):
        validator.validate(json.loads(text))
        assert grammar.check(text).valid
        count += 1
    return count


@pytest.mark.parametrize("name", HELD)
def test_finished_answers_are_valid(compiler, name):
    assert check(compiler, HELD[name], walks=8)


def generated():
    """Yields numbers with systematic bounds, and unions, objects, arrays and intersections of pairs of schemas."""
    bounds = [None, -1, -0.5, 0, 0.25, 1, 10, 99.5]
    for low, high, kind in itertools.product(bounds, bounds, ("number", "integer")):
        for least, most in itertools.product(("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if low is None or high is None or low < high:
                given = {least: low, most: high}
                yield {"type": kind, **{key: bound for key, bound in given.items() if bound is not None}}
    parts = [schema for name, schema in HELD.items() if name != "tree"]
    for one, other in itertools.combinations(parts, 2):
        yield {"anyOf": [one, other]}
        yield {"type": "object", "properties": {"a": one, "b": other}, "required": ["b"]}
        yield {"type": "array", "prefixItems": [one], "items": other, "minItems": 2, "maxItems": 3}
        yield {"allOf": [one, other]}


@pytest.mark.soak
def test_finished_answers_are_valid_for_hundreds_of_schemas(compiler):
    finished, fitting = 0, []
    for number, schema in enumerate(generated()):
        with suppress(ValueError):  # some joined schemas admit no value
            Grammar.json_schema(schema)
            fitting.append((number, schema))
    for number, schema in fitting:
        finished += check(compiler, schema, walks=6, seed=number)
    assert finished > 2000


def allows(compiler, schema, text):
    state = compiler(Grammar.json_schema(schema), [EOS]).fork()
    for token in speller_tokenizer()(text).input_ids:
        if token not in state.allowed():
            return False
        state.accept(token)
    return EOS in state.allowed()


def test_escaped_names_do_not_evade_their_schema(compiler):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "": {"const": 1}}}
    for text, right in {
        r'{"\u0061": "x"}': False,
        '{"a": "x"}': False,
        '{"a": 1, "aa": "x", "b": null}': True,
        '{"": 2}': False,
    }.items():
        assert allows(compiler, schema, text) == right, text
    by_pattern = {"type": "object", "patternProperties": {"^a": {"type": "integer"}}}
    for others in ({}, {"additionalProperties": TEXT}):
        assert allows(compiler, by_pattern | others, '{"a": 1, "b": "x"}')
        assert not allows(compiler, by_pattern | others, r'{"\u0061": "x"}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "would have to hold itself"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "would have to hold itself"),
        ({"type": "integer", "minimum": 10**20}, "minimum cannot be held"),
        ({"const": 10**20 + 1}, "too many digits"),
        ({"type": "object", "minProperties": 2}, "minProperties cannot be held"),
        ({"type": "string", "pattern": "a("}, "is no regular expression"),
        ({"properties": [1]}, "properties must be an object"),
        ({"required": [1]}, "Expected string for 'required' item"),
    ],
)
def test_unsupported_schemas_are_refused_with_the_cause(schema, message):
    with pytest.raises(ValueError, match=message):
        Grammar.json_schema(schema)


@pytest.mark.parametrize("last", [{"minimum": 2}, {"$ref": "#/$defs/a0"}], ids=["ends in a schema", "ends in itself"])
def test_references_that_multiply_are_followed_a_bounded_number_of_times(last, monkeypatch):
    asked, target = [], productive._target
    monkeypatch.setattr(productive, "_target", lambda *given: asked.append(given) or target(*given))
    doubled = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]} for i in range(40)}
    productive.productive({"$ref": "#/$defs/a0", "$defs": {**doubled, "a40": last}})
    assert len(asked) <= 20_000


LOOSE = {
    "uniqueItems": ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, "[1, 2]", "[1, 1]"),
    "not": ({"type": "integer", "not": {"const": 3}}, "4", "3"),
    "pattern": ({"type": "string", "pattern": "^(?!no)"}, '"yes"', '"no"'),
    "format: ipv9": ({"type": "string", "format": "ipv9"}, '"x"', None),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 3}]}, "1", "4"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "[1]", "[2]"),
    "propertyNames": ({"type": "object", "propertyNames": {"maxLength": 1}}, '{"a": 1}', '{"ab": 1}'),
    "minimum": ({"type": "integer", "minimum": 10**20}, str(10**21), "5"),
}


@pytest.mark.parametrize("keyword", LOOSE)
def test_keywords_that_cannot_be_held_are_checked(compiler, keyword):
    schema, right, wrong = LOOSE[keyword]
    with pytest.raises(ValueError, match=f"{keyword} cannot be held"):
        Grammar.json_schema(schema)
    grammar = Grammar.json_schema(schema, strict=False)
    assert grammar.unenforced == (keyword,)
    assert grammar.check(right) == ((keyword,), True, None)
    if wrong is not None:
        assert not grammar.check(wrong).valid
        assert grammar.check(wrong).reason
    for text in answers(compiler, grammar, walks=4):
        assert json.loads(text) is not ...


def test_checks_are_bounded_and_fetch_nothing():
    far = Grammar.json_schema({"not": {"$ref": "http://127.0.0.1:9/a.json"}}, strict=False)
    assert "could not be checked" in far.check("1").reason
    doubled = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {"minimum": 2}}
    deep = Grammar.json_schema({"not": {"$ref": "#/$defs/a0"}, "$defs": doubled}, strict=False)
    assert "keywords were evaluated" in deep.check("5").reason
    with pytest.raises(TypeError, match="only grammars of JSON schemas"):
        Grammar.choice(["a"]).check("a")
