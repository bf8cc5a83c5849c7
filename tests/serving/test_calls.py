"""Call formats: found in chat templates, enforced by grammars, and read back from answers."""

import json
import random

import pytest
from support import callers
from support.callers import BARE, LISTED, MARKS, TAGGED, TEMPLATES, TOKENS, caller_tokenizer
from support.chats import CHATML, chat_tokenizer
from support.models import EOS

from arbordraft.decoding.streams import Event
from arbordraft.grammars import Grammar, GrammarCompiler
from arbordraft.serving.calls import call_format
from arbordraft.serving.deltas import AnswerDetokenizer
from arbordraft.serving.tool_parsing import ToolCallParser

X = {"type": "object", "properties": {"x": {"type": "integer"}, "s": {"type": "string"}}, "required": ["x"]}
TOOLS = {"look": X, "look-up": {"type": "object", "properties": {}, "additionalProperties": False}}
CALLS = [("look", '{"x": -12, "s": "a}\\"é\\n"}'), ("look-up", "{}"), ("look", '{"x": 3}')]
WORDS = 'So: {"name" < <tool [TOOL <calls'
NAMES = {
    "tagged": ('<tool_call>\n{"name": "', '", "arguments": ', '}\n</tool_call>\n<tool_call>\n{"name": "'),
    "bare": ('{"name": "', '", "parameters": ', None),
    "listed": ('[TOOL_CALLS][{"name": "', '", "arguments": ', ', "id": "\0"}, {"name": "'),
    "tokens": ("<calls><call>", "<sep>", "</call><call>"),
}
HOW = {"special": True, "added": False, "spelt": None}  # how the tokenizer knows the marks of calls


def tokenizer_of(style, special):
    return caller_tokenizer(TEMPLATES[style], [] if special is None else MARKS[style], special=bool(special))


def written(form, calls, words=""):
    """Returns words followed by calls in the given format; ``calls`` may be empty."""
    text = words
    for place, (name, arguments) in enumerate(calls):
        text += (form.separator if place else form.opening) + name + form.middle + arguments
    return (text + (form.closing if calls else "")).replace("\0", "abcdefghi")


def follows(tokenizer, text, **asked):
    """Returns whether the format's grammar accepts a whole text; the texts of a list are tokenised one by one."""
    settings = {"required": False, "parallel": True, "answer": None, **asked}
    grammar = call_format(tokenizer, [EOS]).grammar(TOOLS, **settings)
    return callers.follows(tokenizer, grammar, [text] if isinstance(text, str) else text)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("style", TEMPLATES)
def test_the_call_format_is_found_in_the_template(style, how):
    form = call_format(tokenizer_of(style, HOW[how]), [EOS])
    assert (form.opening, form.middle, form.separator) == NAMES[style]
    assert form.quoted == (style == "tokens")
    assert form.anywhere == (style in ("tagged", "tokens") or (style == "listed" and how != "spelt"))
    assert len(form.marks) == (0 if how == "spelt" else len(MARKS[style]))


def test_thoughts_before_calls_are_no_part_of_the_format():
    thoughtful = TAGGED.replace("{{ said.content }}", "{{ '<think>\n\n</think>\n\n' + said.content }}")
    assert thoughtful != TAGGED
    form = call_format(caller_tokenizer(thoughtful, MARKS["tagged"]), [EOS])
    assert (form.opening, form.middle, form.separator) == NAMES["tagged"]


REFUSED = {
    "no template": (None, "no chat template"),
    "no tools": (CHATML, "knows no tools"),
    "an error of the template": ("{{ raise_exception('never') }}", "refuses tools: never"),
    "tools without calls": (
        "{{ tools | tojson }}{% for said in messages %}{{ said.content }}{% endfor %}",
        "leaves out the names",
    ),
    "arguments that are no JSON": (
        TOKENS.replace("+ call.function.arguments +", "+ call.function.arguments | string | replace('\"', '') +"),
        "arguments are not written as JSON",
    ),
    "names twice": (TOKENS.replace("+ '<sep>'", "+ ':' + call.function.name + '<sep>'"), "more than once"),
    "nothing before calls": (
        BARE.replace('{"name": "', "").replace("said.role + ': '", "''").replace("'assistant: '", "''"),
        "nothing shows",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_templates_are_refused(name):
    template, reason = REFUSED[name]
    tokenizer = chat_tokenizer()
    if template is None or template is CHATML:
        tokenizer.chat_template = template
    else:
        tokenizer = caller_tokenizer(template)
    with pytest.raises(ValueError, match=reason):
        call_format(tokenizer, [EOS])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("style", TEMPLATES)
def test_grammars_enforce_the_format(style, how):
    tokenizer = tokenizer_of(style, HOW[how])
    form = call_format(tokenizer, [EOS])
    several = form.separator is not None
    one, two = (written(form, CALLS[:count]) for count in (1, 2 if several else 1))
    assert follows(tokenizer, one)
    assert follows(tokenizer, one, required=True, parallel=False)
    assert follows(tokenizer, WORDS)
    behind = written(form, CALLS[:1], "So.\n")
    assert follows(tokenizer, behind)  # plain words, if the format allows no words before calls
    assert follows(tokenizer, behind.replace("look", "luck")) == (not form.anywhere)
    assert follows(tokenizer, two, required=True)
    if style != "bare":
        assert follows(tokenizer, '{"x": 4}', answer=X)
        assert follows(tokenizer, one, answer=X)
        assert not follows(tokenizer, WORDS, answer=X)
    # everything else is refused
    assert not follows(tokenizer, WORDS, required=True)
    assert not follows(tokenizer, "", required=True)
    assert not follows(tokenizer, one.replace("look", "luck"))
    assert not follows(tokenizer, one.replace("-12", '"-12"'))
    assert not follows(tokenizer, one[: -len(form.closing)])
    assert not (several and follows(tokenizer, two, parallel=False))


@pytest.mark.parametrize("how", HOW)
def test_the_opening_mark_always_begins_a_call(how):
    tokenizer = tokenizer_of("tagged", HOW[how])
    assert follows(tokenizer, ["So <tool_", "call", " or <think>", "<tool_"])
    assert not follows(tokenizer, ["So <tool_", "call>", " or not"])
    assert not follows(tokenizer, ["So<think>", "<tool_", "call>", " or not"])


@pytest.mark.parametrize("text", ["a<think>b</think>", "<bos><pad>", "\ufffd\n\n", "x" * 50], ids=repr)
def test_plain_words_are_unrestricted(text):
    for style in TEMPLATES:
        assert follows(tokenizer_of(style, True), text)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("words", ["", WORDS, "two lines\n\n"], ids=["no words", "words", "lines"])
@pytest.mark.parametrize("style", TEMPLATES)
def test_calls_are_read_from_pieces_of_any_size(style, words, size):
    form = call_format(tokenizer_of(style, True), [EOS])
    for count in range(4 if form.separator is not None else 2):
        text = written(form, CALLS[:count], words)
        reader = ToolCallParser(form, TOOLS)
        said, calls, shown = "", {}, 0
        for place in range(0, len(text), size):
            more, pieces = reader.add(text[place : place + size])
            said += more
            for piece in pieces:
                assert (piece.name is None) == (piece.index in calls)
                name, arguments = calls.get(piece.index, (piece.name, ""))
                calls[piece.index] = (name, arguments + piece.arguments)
            shown = max(shown, len(pieces))
        said += reader.end()
        only_words = bool(words) and not form.anywhere
        assert reader.called == (count > 0 and not only_words)
        assert list(calls.values()) == ([] if only_words else CALLS[:count])
        assert said == (text if only_words else words.rstrip("\n") if count else words)
        assert shown <= 1 or size > 1


def test_arguments_are_passed_on_before_they_are_complete():
    form = call_format(tokenizer_of("tagged", True), [EOS])
    reader = ToolCallParser(form, TOOLS)
    assert reader.add('<tool_call>\n{"name": "look') == ("", ())
    (begun, part) = reader.add('-up", "arguments": {"a": "{}')[1]
    assert (begun.name, begun.arguments, part.arguments) == ("look-up", "", '{"a": "{}')
    assert not reader.called
    (rest,) = reader.add('}"}}\n</tool_')[1]
    assert json.loads(part.arguments + rest.arguments) == {"a": "{}}"}
    assert reader.called
    assert reader.end() == ""


@pytest.mark.parametrize(
    "texts",
    [["\n"] * 500, ["Well.\n\n"] * 500, ['<tool_call>\n{"name": "look', '", "arguments": {"s": "', *['{}]\\"'] * 500]],
    ids=["line breaks", "words and line breaks", "arguments"],
)
def test_a_reader_keeps_a_bounded_amount_of_text(texts):
    """The work per piece must not grow with the number of earlier pieces."""
    reader, said = ToolCallParser(call_format(tokenizer_of("tagged", True), [EOS]), TOOLS), ""
    for text in texts:
        said += reader.add(text)[0]
        assert sum(len(kept) for kept in vars(reader).values() if isinstance(kept, str)) < 50
    assert said + reader.end() == ("" if "arguments" in "".join(texts) else "".join(texts))


@pytest.mark.parametrize("end", ["", "]", '"', "\\\\", '\\"}', "[{}]"])
def test_arguments_end_at_their_closing_brace(end):
    reader = ToolCallParser(call_format(tokenizer_of("tagged", True), [EOS]), TOOLS)
    arguments = json.dumps({"s": end, "deep": [{"}": ["{", {}]}]})
    shown = ""
    for letter in f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>':
        shown += "".join(piece.arguments for piece in reader.add(letter)[1])
        assert reader.called is (shown == arguments)
    assert shown == arguments


def test_an_unfinished_call_is_shown_as_text():
    form = call_format(tokenizer_of("tagged", True), [EOS])
    reader = ToolCallParser(form, TOOLS)
    assert reader.add("Well.\n<tool_call>\n") == ("Well.", ())
    assert reader.end() == "\n<tool_call>\n"
    assert not reader.called


def test_calls_in_plain_json_cannot_be_combined_with_json_answers():
    form = call_format(tokenizer_of("bare", True), [EOS])
    with pytest.raises(ValueError, match="tools or for JSON"):
        form.grammar(TOOLS, required=False, parallel=True, answer=X)
    assert form.grammar(TOOLS, required=True, parallel=True, answer=X)


def test_grammars_enforce_the_length_of_call_ids():
    tokenizer = caller_tokenizer(LISTED, MARKS["listed"])
    text = written(call_format(tokenizer, [EOS]), CALLS[:2])
    assert follows(tokenizer, text)
    assert not follows(tokenizer, text.replace("abcdefghi", "abcdefgh"))


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_tokens_of_words_are_counted_apart_from_calls(size):
    tokenizer = tokenizer_of("tagged", None)
    words, call = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("So: <b>", "\n<tool_call>\n"))
    rest = tokenizer('{"name": "look", "arguments": {"x": 1}}\n</tool_call>', add_special_tokens=False)["input_ids"]
    speller, tokens = (
        AnswerDetokenizer(tokenizer, (), 1, False, call_format(tokenizer, [EOS]), TOOLS),
        [*words, *call, *rest],
    )
    pieces = [speller(Event(0, tokens[place : place + size])) for place in range(0, len(tokens), size)]
    whole = sum([*pieces[1:], speller(Event(0, finish_reason="stop"))], pieces[0])
    assert (whole.text, whole.finish_reason, whole.words) == ("So: <b>", "tool_calls", (0, len(words)))


@pytest.mark.parametrize("style", TEMPLATES)
def test_required_calls_are_complete_within_the_limit(style):
    """A model that never ends a list by itself."""
    tokenizer, draws = tokenizer_of(style, False), random.Random(0)
    items = {"type": "object", "properties": {"items": {"type": "array", "items": {"type": "integer"}}}}
    items |= {"required": ["items"], "additionalProperties": False}
    form = call_format(tokenizer, [EOS])
    text = form.grammar({"look": items}, required=True, parallel=True, answer=None)
    ends = {token for token in range(len(tokenizer)) if "]" in tokenizer.decode([token])} | {EOS}
    for bounded in (True, False):
        state = GrammarCompiler(tokenizer, len(tokenizer))(Grammar.lark(text, bounded=bounded), [EOS], 120).fork()
        tokens = []
        while len(tokens) < 120 and EOS not in tokens:
            allowed = state.allowed().tokens()
            tokens.append(draws.choice([token for token in allowed if token not in ends] or allowed))
            state.accept(tokens[-1])
        assert (tokens[-1] == EOS) == bounded
