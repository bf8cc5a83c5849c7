r"""Every spelling of JSON's strings, names and numbers: the grammars follow an oracle, up to named limits.

The oracle reads a text with Python's ``json`` and validates the value with ``jsonschema``. A spelling that it approves
is allowed, unless the schema's limit names it. A limit that names nothing any more fails, too.
"""

import json
import re
from functools import cache

import jsonschema
import pytest
from support.models import EOS
from support.spellers import letter_tokenizer

from arbordraft.grammars import Grammar, GrammarCompiler

LETTERS = ["a", "/", "é", "😀", "\x7f", "\ue000"]
ESCAPES = [r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t"]
CODES = [
    *(r"\u0061", r"\u0041", r"\u00e9", r"\u00E9", r"\uFFFF", r"\u0000", r"\u0009", r"\u000a", r"\u001F", r"\u007f"),
    *(r"\u0022", r"\u005c", r"\u005C", r"\u002f", r"\ud83d\ude00", r"\uD83D\uDE00", r"\uD83d\udE00", r"\uD7FF"),
]
HALVES = [r"\ud83d", r"\uDE00", r"\ude00\ud83d", r"\ud83dx"]
NO_STRINGS = [
    *("a", '"a', "'a'", '""a"', '"\n"', '"\t"', '"\x00"'),
    *(r'"\x61"', r'"\U0061"', r'"\u61"', r'"\u006g"', r'"\'"'),
]
STRINGS = ['""', *(f'"{one}"' for one in (*LETTERS, *ESCAPES, *CODES, *HALVES, "ab", r"a\u0062", r"\n\n"))]
DATES = ['"2020-01-31"', r'"2020\u002d01-31"', r'"\u0032020-01-31"', '"2020-13-31"']
NUMBERS = [
    *("0", "-0", "1", "-1", "3", "5", "7", "10", "-5", "99", "100", "12345678901234567890"),
    *("0.0", "-0.0", "1.0", "1.00", "1.5", "1.50", "0.5", "-0.5", "7.5", "10.50", "-1.0", "5.0", "100.0", "1.005"),
    *("1e0", "1E0", "1e+0", "1E-0", "0e0", "-0e0", "1e2", "1E+2", "1e+02", "1.0e2", "100e-2", "1e-2", "5e-1", "50e-1"),
]
NO_NUMBERS = ["", "-", "+1", "01", "-01", "00", "1.", ".5", "1.e2", "1e", "1e+", "0x1", "1_0", "NaN", "Infinity", "٣"]
NAMES = [
    *("a", r"\u0061", "b", r"\u0062", "k1", r"\u006b1", "/", r"\/"),
    *(r"\"\\", r"\n", r"\u0001", "é", r"\u00e9", r"\ud83d"),
]
OBJECTS = ["{}", *(f'{{"{name}": {value}}}' for name in NAMES for value in ("1", '"x"', r'"\u0078"'))]

TEXT, OBJECT, WHOLE = {"type": "string"}, {"type": "object"}, {"type": "integer"}
CLOSED = {"additionalProperties": False}
# Limits, as expressions that find a right spelling which is refused: the engine has no rule for it.
SLASH, HALF, DELETE = r"\\/", r"\\ud83d(?!\\ude)|\"\\uDE00\"|\\ude00\\ud83d", "\x7f"
ANY_TEXT = f"{SLASH}|{HALF}|{DELETE}"
CODE = rf"{ANY_TEXT}|\\u(?!00[01]|007f)"  # letters but control letters; (?!...) excludes these
EXPONENT, FRACTION, ZERO = "[eE]", r"\.", r"^-0(\.0)?$"
TABLE = {
    "anything": ({}, STRINGS + NUMBERS + OBJECTS, ANY_TEXT),
    "a text": (TEXT, STRINGS, ANY_TEXT),
    "one letter": ({**TEXT, "minLength": 1, "maxLength": 1}, STRINGS, ANY_TEXT),
    "two letters": ({**TEXT, "minLength": 2}, STRINGS, ANY_TEXT),
    "a pattern": ({**TEXT, "pattern": "^(.|\\n)*$"}, STRINGS, CODE),
    "a pattern with a length": ({**TEXT, "pattern": ".", "maxLength": 1}, STRINGS, CODE),
    "a pattern without letters": ({**TEXT, "pattern": "^[^a-z]*$"}, STRINGS, CODE),
    "a format": ({**TEXT, "format": "date"}, DATES, CODE),
    "a constant": ({"const": "a"}, STRINGS, CODE),
    "constants with escapes": ({"enum": ['"', "\\", "/", "\b", "\n", "\x1f", "\x00", "é", "😀"]}, STRINGS, CODE),
    "a number": ({"type": "number"}, NUMBERS, None),
    "a number from 0": ({"type": "number", "minimum": 0}, NUMBERS, f"{EXPONENT}|{ZERO}"),
    "a number between": ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 8}, NUMBERS, f"{EXPONENT}|{ZERO}"),
    "halves": ({"type": "number", "multipleOf": 0.5}, NUMBERS, rf"{EXPONENT}|\.\d0"),
    "hundredths": ({"type": "number", "multipleOf": 0.01}, NUMBERS, EXPONENT),
    "a whole number": (WHOLE, NUMBERS, f"{EXPONENT}|{FRACTION}"),
    "a whole number from 0": ({**WHOLE, "minimum": 0}, NUMBERS, f"{EXPONENT}|{FRACTION}|{ZERO}"),
    "a whole number between": ({**WHOLE, "minimum": -5, "maximum": 10}, NUMBERS, f"{EXPONENT}|{FRACTION}"),
    "fives": ({**WHOLE, "multipleOf": 5}, NUMBERS, f"{EXPONENT}|{FRACTION}"),
    "constant numbers": ({"enum": [1, 7.5, 100, 1.5]}, NUMBERS, rf"{EXPONENT}|\.\d*0$"),
    "a negative zero": ({"enum": [-0.0, 1.0]}, NUMBERS, f"{EXPONENT}|{FRACTION}|{ZERO}"),
    "any object": (OBJECT, OBJECTS, ANY_TEXT),
    "names of any kind": ({**OBJECT, "additionalProperties": TEXT}, OBJECTS, ANY_TEXT),
    "a listed name": ({**OBJECT, "properties": {"a": TEXT}, **CLOSED}, OBJECTS, r'"\\u0061":'),
    "a listed name and others": ({**OBJECT, "properties": {"a": WHOLE}}, OBJECTS, r'"\\[/nu][^"]*":'),
    "a required name": ({**OBJECT, "required": ["b"]}, OBJECTS, r'"\\u0062":'),
    "names by a pattern": ({**OBJECT, "patternProperties": {"^k": WHOLE}, **CLOSED}, OBJECTS, r"\\u006b"),
    # Without \u in the whole schema, as another spelling of a name would evade the name's schema.
    "names by a pattern and others": ({**OBJECT, "patternProperties": {"^[ak]": WHOLE}}, OBJECTS, rf"\\u|{SLASH}"),
    "others of a kind": (
        {**OBJECT, "patternProperties": {"^[ak]": WHOLE}, "additionalProperties": TEXT},
        OBJECTS,
        rf"\\u|{SLASH}",
    ),
    "names in parts": (
        {**OBJECT, "properties": {"a": WHOLE}, "allOf": [{"properties": {"b": WHOLE}}]},
        OBJECTS,
        rf"\\[un]|{SLASH}",
    ),
}


def right(schema, text):
    """Returns whether a text is JSON that is valid by a schema."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).is_valid(value)


@cache
def compiler():
    return GrammarCompiler(letter_tokenizer(), len(letter_tokenizer()))


def allows(grammar, text):
    """Returns whether a grammar's masks allow each byte of a text, and then its end."""
    state = compiler()(grammar, [EOS]).fork()
    for token in letter_tokenizer()(text).input_ids:
        if token not in state.allowed():
            return False
        state.accept(token)
    return EOS in state.allowed()


@pytest.mark.parametrize("name", TABLE)
def test_spellings_are_allowed_as_the_oracle_says(name):
    schema, texts, limit = TABLE[name]
    grammar = Grammar.json_schema(schema)
    approved = {text for text in (*texts, *NO_STRINGS, *NO_NUMBERS) if right(schema, text)}
    beyond = {text for text in approved if limit is not None and re.search(limit, text)}
    assert approved - beyond
    assert bool(beyond) == (limit is not None), "the limit names no spelling any more: delete it, also in the docs"
    assert {text for text in {*texts, *NO_STRINGS, *NO_NUMBERS} if allows(grammar, text)} == approved - beyond


def number(digits):
    """Returns the number that JSON writes without a fraction where it can."""
    value = float(digits)
    return int(value) if value.is_integer() else value


def plain(text):
    """Returns the plainest spelling of a text's value."""
    return json.dumps(json.loads(text, parse_float=number), ensure_ascii=False).replace("\x7f", r"\u007f")


@pytest.mark.parametrize("name", [name for name, (_, texts, _) in TABLE.items() if texts is not OBJECTS])
def test_limits_refuse_spellings_and_no_values(name):
    """Halves of surrogate pairs are no text."""
    schema, texts, _ = TABLE[name]
    grammar = Grammar.json_schema(schema)
    for text in texts:
        if right(schema, text) and not re.search(HALF, text):
            assert allows(grammar, plain(text)), text


def test_fixed_text_is_forced():
    """Listed names and constants have a single spelling, so that their tokens are drafted without a model."""
    schema = {**OBJECT, "properties": {"a/é": {"const": "b"}, "n": {"const": 7}}, "required": ["a/é", "n"], **CLOSED}
    state = compiler()(Grammar.json_schema(schema), [EOS]).fork()
    for token in letter_tokenizer()('{"a/é": "b", "n": 7}').input_ids:
        assert state.allowed().tokens() == [token]
        state.accept(token)
    assert state.allowed().tokens() == [EOS]
