"""Tokens of log-probabilities join to the answer's text, and their bytes to its bytes, with any tokenizer."""

import random
from types import SimpleNamespace

import pytest
from openai.types.completion_usage import CompletionUsage
from support.spellings import KINDS, byte_level, byte_tokens, drawn, ids_of

from arbordraft.decoding.state import TokenLogprobs
from arbordraft.decoding.streams import Event
from arbordraft.serving.answers import ChatShape, Report, TextShape
from arbordraft.serving.deltas import AnswerDelta, AnswerDetokenizer

REPORT = Report(CompletionUsage(completion_tokens=0, prompt_tokens=0, total_tokens=0), {})


def answered(tokenizer, tokens, stop=(), source=None, others=()):
    """Yields pieces of one to three tokens, or of one without ``source``; token i has log-probability -i."""
    speller, at = AnswerDetokenizer(tokenizer, stop, 1, steps=False), 0
    while at < len(tokens):
        size = source.randint(1, 3) if source else 1
        numbers = range(at, min(at + size, len(tokens)))
        known = [TokenLogprobs(-float(i), tuple((other, -float(i)) for other in (tokens[i], *others))) for i in numbers]
        yield speller(Event(0, tokens[at : at + size], known))
        at += size
    yield speller(Event(0, finish_reason="stop"))


def shown(shape, pieces):
    """Returns the choice of the whole answer and the choices of its chunks."""
    service, question = SimpleNamespace(name="m", exactness="law"), SimpleNamespace(num_logprobs=1, functions={})
    whole = shape(service, question).response([sum(pieces[1:], pieces[0])], REPORT)
    stream = shape(service, question)
    return whole.choices[0], [chunk.choices[0] for piece in pieces if piece for chunk in stream.chunks(piece, {})]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_join_to_the_text(kind):
    tokenizer, source = KINDS[kind](), random.Random(0)
    for turn in range(40):
        tokens = drawn(tokenizer, source)
        text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        stop = [text[len(text) // 2 :][:2]] if turn % 2 and len(text) > 1 else []
        pieces = list(answered(tokenizer, tokens, stop, source))

        choice, chunks = shown(TextShape, pieces)
        told = choice.logprobs
        assert "".join(told.tokens) == choice.text
        assert ["".join(chunk.logprobs.tokens) for chunk in chunks] == [chunk.text for chunk in chunks]
        assert told.token_logprobs == [-float(i) for i in range(len(tokens))]
        assert told.text_offset == [len("".join(told.tokens[:at])) for at in range(len(tokens))]
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert getattr(told, name) == [one for chunk in chunks for one in getattr(chunk.logprobs, name)]

        choice, chunks = shown(ChatShape, pieces)
        content = choice.logprobs.content
        assert content == [one for chunk in chunks for one in chunk.logprobs.content]
        assert [one.token for one in content] == told.tokens
        data = b"".join(bytes(one.bytes) for one in content)
        assert "\ufffd" in choice.message.content or data == choice.message.content.encode()


def test_alternatives_are_spelt_for_the_position_of_the_answer():
    tokenizer = byte_tokens()
    word, end = tokenizer.convert_tokens_to_ids(["\u2581the", "</s>"])
    (part,) = ids_of(tokenizer, b"\xe6")
    pieces = list(answered(tokenizer, [word, word, end], others=(word, part, end)))
    choice, _ = shown(ChatShape, pieces)
    others = [[(one.token, bytes(one.bytes)) for one in known.top_logprobs[2:]] for known in choice.logprobs.content]
    assert others == [[("\ufffd", b"\xe6"), ("</s>", b"</s>")]] * 3
    first = [[one.token for one in known.top_logprobs[:2]] for known in choice.logprobs.content]
    assert first == [["the", "the"], [" the", " the"], ["</s>", " the"]]
    assert [(known.token, known.bytes) for known in choice.logprobs.content][2] == ("", [])


def test_alternatives_that_are_parts_of_characters_get_distinct_keys():
    tokenizer = byte_level()
    letter, *parts = ids_of(tokenizer, b"a\xe6\xe7")
    choice, _ = shown(TextShape, list(answered(tokenizer, [letter], others=parts)))
    assert choice.logprobs.top_logprobs == [{"a": 0.0, r"bytes:\xe6": 0.0, r"bytes:\xe7": 0.0}]


def test_a_token_waits_until_its_text_is_certain():
    tokenizer = byte_level()
    tokens = ids_of(tokenizer, "a\u65e5.".encode())
    pieces = list(answered(tokenizer, tokens, [".."]))
    assert [(piece.text, len(piece.logprobs)) for piece in pieces] == [
        *(("a", 1), ("", 0), ("", 0), ("\u65e5", 3)),
        *(("", 0), (".", 1)),
    ]
    assert sum(pieces[1:], pieces[0]).tokens == tuple(tokens)
    assert not AnswerDelta(0)
