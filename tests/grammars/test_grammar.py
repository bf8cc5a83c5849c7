"""Grammars as values, and their compiled form: refusals, and allowed next tokens."""

import json

import pytest
from support.models import EOS, tiny_tokenizer
from support.spellers import SPEAKER_VOCAB, speller, speller_tokenizer

from arbordraft import NoDrafter, Request, SpeculativeDecoder
from arbordraft.decoding.engine import Engine
from arbordraft.grammars import Grammar, GrammarCompiler

LARGE = json.dumps({"enum": [f"value number {number}" for number in range(60_000)]})
DEEP = json.dumps({"properties": {f"key {number}": {"enum": [f"v{number}"]} for number in range(30_000)}})


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        pytest.param(lambda: Grammar.json_schema("{"), ValueError, "is no JSON", id="no JSON"),
        pytest.param(lambda: Grammar.json_schema("[1]"), ValueError, "mapping", id="no schema"),
        pytest.param(lambda: Grammar.json_schema(3), TypeError, "mapping", id="a number as schema"),
        pytest.param(lambda: Grammar.json_schema({"type": {1, 2}}), ValueError, "cannot be written", id="a set"),
        pytest.param(lambda: Grammar.json_schema({"type": "text"}), ValueError, "Invalid type: text", id="type"),
        pytest.param(lambda: Grammar.json_schema({"not": {}}), ValueError, "not cannot be held", id="keyword"),
        pytest.param(lambda: Grammar.json_schema({"$ref": "#/a"}), ValueError, "does not exist", id="reference"),
        pytest.param(lambda: Grammar.json_schema(DEEP), ValueError, "too large", id="a megabyte"),
        pytest.param(
            lambda: Grammar.json_schema({"type": "integer", "minimum": 2, "maximum": 1}),
            ValueError,
            "minimum",
            id="no value fits",
        ),
        pytest.param(lambda: Grammar.regex("a("), ValueError, "invalid regex", id="regex"),
        pytest.param(lambda: Grammar.regex("(?=a)b"), ValueError, "look-around", id="look-around"),
        pytest.param(lambda: Grammar.regex(3), TypeError, "pattern", id="a number as regex"),
        pytest.param(lambda: Grammar.lark('start: "a" missing'), ValueError, "missing", id="rule"),
        pytest.param(lambda: Grammar.choice([]), ValueError, "at least one", id="no choices"),
        pytest.param(lambda: Grammar.choice("yes"), TypeError, "list of texts", id="a text as choices"),
    ],
)
def test_invalid_grammars_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Grammar.json_schema(LARGE), id="large schema"),
        pytest.param(lambda: Grammar.json_schema(DEEP), id="many keys"),
        pytest.param(lambda: Grammar.regex("((a{1,500}){1,500}){1,500}"), id="repetitions"),
        pytest.param(lambda: Grammar.regex("(a|a?)+" * 200 + "b"), id="ambiguities"),
        pytest.param(lambda: Grammar.regex("(.*a.{200}){20}"), id="states"),
    ],
)
def test_hostile_grammars_take_bounded_time(make):
    """They are refused or followed, within the time limit."""
    try:
        state = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)(make(), [EOS])
        for letter in "aaaa":
            state.accept(speller_tokenizer().convert_tokens_to_ids(letter))
            state.allowed()
    except ValueError as error:
        assert str(error)  # noqa: PT017


def test_a_grammar_is_a_value():
    one, other = (Grammar.json_schema({"type": "integer"}) for _ in range(2))
    assert one == other
    assert len({one, other, Grammar.json()}) == 2
    compiler = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)
    assert compiler(one, [EOS]) is compiler(other, [EOS])
    assert compiler(one, [EOS]) is not compiler(one, [EOS, 0])


def spelled(grammar, text=""):
    """Returns the characters and special tokens that may follow a text."""
    tokenizer = speller_tokenizer()
    state = GrammarCompiler(tokenizer, SPEAKER_VOCAB)(grammar, [EOS]).fork()
    for token in tokenizer(text).input_ids:
        assert token in state.allowed(), tokenizer.decode([token])
        state.accept(token)
    return {tokenizer.decode([token]) for token in range(len(tokenizer)) if token in state.allowed()}


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (Grammar.choice(["yes", "no"]), "yes", {"<eos>"}),
        (Grammar.choice(["ab", "ac"]), "a", {"b", "c"}),
        (Grammar.regex("[xy]z?"), "", {"x", "y"}),
        (Grammar.regex("[xy]z?"), "x", {"z", "<eos>"}),
        (Grammar.lark('start: "(" start? ")"'), "()", {"<eos>"}),
        (Grammar.json_schema({"const": 7}), "", {"7"}),
    ],
    ids=["must end", "branch", "begin", "may end", "nested", "forced"],
)
def test_allowed_next_tokens(grammar, text, expected):
    assert spelled(grammar, text) == expected


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GrammarCompiler(None, 9), ValueError, "need a tokenizer"),
        (lambda: GrammarCompiler(object(), 9), TypeError, "fast tokenizer"),
        (lambda: GrammarCompiler(speller_tokenizer(), 9), ValueError, "the target 9"),
        (lambda: GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)(Grammar.json(), []), ValueError, "end token"),
        (lambda: GrammarCompiler(tiny_tokenizer(), 61)(Grammar.json(), [EOS]), ValueError, "tokenizer"),
    ],
    ids=["no tokenizer", "slow tokenizer", "too large tokenizer", "no end token", "tokens are words"],
)
def test_grammars_need_a_suitable_tokenizer_and_an_end_token(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "text", ['start: "b" "a" <eos> "b"', 'start: "b" "a" "<eos>" "b"'], ids=["token", "its spelling"]
)
def test_an_end_token_in_the_middle_is_refused(text):
    with pytest.raises(ValueError, match="end token in the middle"):
        spelled(Grammar.lark(text), "ba")
    state = GrammarCompiler(speller_tokenizer(), SPEAKER_VOCAB)(Grammar.lark(text), [EOS]).fork()
    for letter in "ba":
        state.accept(speller_tokenizer().convert_tokens_to_ids(letter))
    for _ in range(2):  # every call must raise, as drafting calls first
        with pytest.raises(ValueError, match="end token in the middle"):
            state.allowed()


def test_a_failed_request_affects_no_other():
    engine = Engine(SpeculativeDecoder(speller(), NoDrafter()), max_cache_tokens=4000)
    prompt = speller_tokenizer()("yes").input_ids
    good = engine.submit(Request(prompt=prompt, grammar=Grammar.choice(["yes", "no"])))
    with pytest.raises(ValueError, match="end token"):
        engine.submit(Request(prompt=prompt, grammar=Grammar.json(), ends=()))
    # the processor forbids the only token that the grammar allows
    stuck = engine.submit(Request(prompt=prompt, grammar=Grammar.choice(["a"]), ends=[EOS], processors=[Nothing()]))
    short = engine.submit(Request(prompt=prompt, grammar=Grammar.regex("[a-z]{30}"), max_new_tokens=5))
    engine.run()
    assert speller_tokenizer().decode(good.result()[0].tokens[:-1]) in ("yes", "no")
    assert good.result()[0].finish_reason == "stop"
    assert short.result()[0].finish_reason == "length"
    with pytest.raises(ValueError, match="no token may come next"):
        stuck.result()


class Nothing:
    """Forbids all tokens."""

    def __call__(self, input_ids, scores):
        return scores - float("inf")
