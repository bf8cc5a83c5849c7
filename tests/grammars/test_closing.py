"""JSON is completed within the limit of its tokens, and drafts change no token of it."""

import json
from dataclasses import replace

import numpy as np
import pytest
from support.constrained import DECODERS, decoded
from support.models import EOS
from support.spellers import SPEAKER_VOCAB, speller, speller_tokenizer

from arbordraft import builders
from arbordraft.grammars import Grammar, GrammarCompiler


def record(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


TEXT, WHOLE = {"type": "string"}, {"type": "integer"}
LONG = record(kind={"const": "long"}, **{f"property_{number}": TEXT for number in range(12)})
SCHEMAS = {
    "any object": {"type": "object"},
    "number without bounds": record(count=WHOLE),
    "numbers with bounds": record(
        count={"type": "integer", "minimum": 1000}, share={"type": "number", "exclusiveMinimum": 0.5, "maximum": 0.7}
    ),
    "texts and lists": record(name=TEXT, tags={"type": "array", "items": TEXT}, ok={"type": "boolean"}),
    "least lengths": record(
        items={"type": "array", "minItems": 3, "items": WHOLE}, name={"type": "string", "minLength": 9}
    ),
    "expressions": record(
        name={"type": "string", "pattern": "^[a-z]{2,9}x$"}, mail={"type": "string", "format": "email"}
    ),
    "a choice": {"anyOf": [LONG, record(kind={"const": "short"})]},
    "a long option": {"type": "object", "properties": {"a": WHOLE, "b": LONG}, "additionalProperties": False},
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": record(at=WHOLE, below={"type": "array", "items": {"$ref": "#/$defs/node"}})},
    },
}


def walk(grammar, limit, seed):
    """Follows a grammar at random, ends as late as possible, and returns the text and whether it ended."""
    tokenizer, draws = speller_tokenizer(), np.random.default_rng(seed)
    state, tokens = GrammarCompiler(tokenizer, SPEAKER_VOCAB)(grammar, [EOS], limit).fork(), []
    while len(tokens) < limit and EOS not in tokens:
        allowed = state.allowed().tokens()
        tokens.append(int(draws.choice([token for token in allowed if token != EOS] or allowed)))
        state = state.fork()
        state.accept(tokens[-1])
    return tokenizer.decode(tokens, skip_special_tokens=True), tokens[-1] == EOS


def is_json(text):
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_text_is_completed_within_the_limit(name):
    grammar = Grammar.json_schema(SCHEMAS[name])
    for seed in range(2):
        text, ended = walk(grammar, 60, seed)
        assert is_json(text), text
        assert grammar.check(text).valid
        assert ended


def test_without_the_bound_texts_are_cut():
    free = replace(Grammar.json_schema(SCHEMAS["texts and lists"]), bounded=False)
    assert not any(is_json(walk(free, 60, seed)[0]) for seed in range(3))


def test_a_limit_that_only_the_text_fits_leaves_out_the_end_token():
    grammar = Grammar.json_schema({"const": [7, 8, 9]})
    length = len(speller_tokenizer()("[7, 8, 9]").input_ids)
    assert walk(grammar, length + 1, 0) == ("[7, 8, 9]", True)
    assert walk(grammar, length, 0) == ("[7, 8, 9]", False)
    assert walk(grammar, length - 1, 0)[0] == "[7, 8, 9"  # no closing fits: cut as without the bound


def test_far_from_the_limit_nothing_is_forbidden():
    grammar = Grammar.json_schema(SCHEMAS["texts and lists"])
    compiler = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)
    states = [compiler(grammar, [EOS], limit).fork() for limit in (None, 2000, 50)]
    differs = False
    for token in speller_tokenizer()('{"name": "' + "Ada Lovelace, " * 3).input_ids:
        free, far, near = (state.allowed().tokens() for state in states)
        assert far == free
        differs |= near != free
        for state in states:
            state.accept(token)
    assert differs


def test_limits_of_equal_grammars_are_kept_apart():
    compiler, grammar = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB), Grammar.json()
    assert compiler(grammar, [EOS], 40) is compiler(grammar, [EOS], 40)
    assert compiler(grammar, [EOS], 40) is not compiler(grammar, [EOS], 41)
    choice = Grammar.choice(["yes", "no"])
    assert compiler(choice, [EOS], 40) is compiler(choice, [EOS], 41)


@pytest.mark.parametrize("name", ["lookup, tree", "forced, else model"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(name, temperature):
    grammars = [Grammar.json_schema(SCHEMAS[name]) for name in ("texts and lists", "any object", "a tree")]
    plain, _ = decoded(builders.plain(speller()), temperature, grammars)
    drafted, stats = decoded(DECODERS[name](), temperature, grammars)
    assert drafted == plain
    assert sum(stats.forwards) < sum(stats.emitted)
    assert all(is_json(speller_tokenizer().decode(tokens, skip_special_tokens=True)) for tokens in plain)
    free, _ = decoded(builders.plain(speller()), temperature, [replace(one, bounded=False) for one in grammars])
    assert free != plain
