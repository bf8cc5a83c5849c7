"""Tokens become text one by one: pieces join to the decoding of all, stops are found early, work is linear."""

import random
from collections.abc import Sequence

import pytest
from support.spellings import KINDS, OnlyDecodes, byte_level, byte_tokens, drawn, ids_of

from arbordraft.decoding.detokenizing import DecodedToken, IncrementalDetokenizer, TokenDecoder
from arbordraft.decoding.generate import Stopping, StopTexts
from arbordraft.decoding.stops import Stops


def decoded(tokenizer, tokens: Sequence[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def joined(parts: Sequence[DecodedToken]) -> tuple[str, bytes]:
    return "".join(part.text for part in parts), b"".join(part.data for part in parts)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def test_pieces_join_to_the_decoding_of_all_tokens(tokenizer):
    source, spelling = random.Random(0), TokenDecoder(tokenizer)
    for _ in range(150):
        tokens, pieces, parts = drawn(tokenizer, source), IncrementalDetokenizer(spelling), list[DecodedToken]()
        at = 0
        while at < len(tokens):
            size = source.randint(1, 3)
            parts += pieces.decode(tokens[at : at + size])
            at += size
        parts += pieces.flush()
        text, data = joined(parts)
        assert text == decoded(tokenizer, tokens), tokens
        assert len(parts) == len(tokens), tokens
        if "\ufffd" not in text:
            assert data == text.encode(), tokens


def test_a_stop_ends_the_text_with_the_token_that_completes_it(tokenizer):
    """For any pieces, the answer ends with that token, and its text ends before the stop."""
    source, spelling = random.Random(1), TokenDecoder(tokenizer)
    found = 0
    for _ in range(150):
        tokens = drawn(tokenizer, source)
        text = decoded(tokenizer, tokens)
        if not text or "\ufffd" in text:
            continue
        place = source.randrange(len(text))
        stops = [text[place : place + source.randint(1, 3)], source.choice(["zz", "\n", "\u672c"])]
        pieces, ends, parts = (
            IncrementalDetokenizer(spelling, stops),
            Stopping([StopTexts(spelling, stops)]),
            list[DecodedToken](),
        )
        for used, token in enumerate(tokens, 1):
            parts += pieces.decode([token])
            assert ends(token, list) is pieces.ended
            whole = decoded(tokenizer, tokens[:used])
            assert pieces.ended is any(stop in whole for stop in stops), (tokens, stops)
            if pieces.ended:
                break
        parts += pieces.flush()
        whole = decoded(tokenizer, tokens[:used])
        ended = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
        expected = whole[: sum(min(ended))] if ended else whole
        assert joined(parts) == (expected, expected.encode()), (tokens, stops)
        at_once = IncrementalDetokenizer(spelling, stops)
        assert at_once.add(tokens) + at_once.end() == expected
        found += bool(ended)
    assert found > 20


@pytest.mark.parametrize("make", [byte_level, byte_tokens, OnlyDecodes])
def test_bytes_that_form_no_character_have_constant_cost(make):
    class Counted:
        """Counts the tokens that are decoded."""

        def __init__(self) -> None:
            self.tokenizer, self.tokens = make(), 0
            self.convert_ids_to_tokens = getattr(self.tokenizer, "convert_ids_to_tokens", lambda token: "")

        def decode(self, tokens, **options):
            self.tokens += len(tokens)
            return self.tokenizer.decode(tokens, **options)

    for data in (b"\xff", b"\xe6", b"\xe6\x97", b"\xf0\x9f\x98\x80"):
        tokenizer, count = Counted(), 2000
        tokens = ids_of(tokenizer.tokenizer, data) * (count // len(data))
        pieces = IncrementalDetokenizer(tokenizer, ["\n", "stop"])
        text = "".join([pieces.add([token]) for token in tokens]) + pieces.end()
        assert text == decoded(tokenizer.tokenizer, tokens)
        assert tokenizer.tokens < 20 * count


def test_text_that_no_token_can_change_is_emitted_at_once():
    tokenizer = byte_level()
    replaced = tokenizer.convert_tokens_to_ids("\u00ef\u00bf\u00bd")  # U+FFFD itself
    assert tokenizer.decode([replaced]) == "\ufffd"
    pieces = IncrementalDetokenizer(tokenizer)
    assert [pieces.add([replaced]) for _ in range(3)] == ["\ufffd"] * 3
    pieces = IncrementalDetokenizer(tokenizer)
    broken = ids_of(tokenizer, b"\xff\xe6a")
    assert [pieces.add([token]) for token in broken] == ["\ufffd", "", "\ufffda"]
    assert pieces.end() == ""


def test_tokens_have_their_own_bytes_and_blanks():
    spelling = TokenDecoder(byte_tokens())
    word, byte = (spelling[token] for token in byte_tokens().convert_tokens_to_ids(["\u2581the", "<0xE6>"]))
    assert (word.text, word.first, word.data, word.byte) == (" the", "the", b" the", False)
    assert (byte.text, byte.data, byte.byte) == ("\ufffd", b"\xe6", True)
    tokenizer = byte_level()
    spelling = TokenDecoder(tokenizer)
    for token in range(len(tokenizer)):
        known = spelling[token]
        assert known.data is not None
        assert known.text == known.data.decode(errors="replace") == tokenizer.decode([token])
    assert spelling[tokenizer.eos_token_id].hidden


def test_characters_belong_to_the_token_that_completes_them():
    tokenizer = byte_level()
    tokens = ids_of(tokenizer, "\u65e5".encode() + b"\xe6\x97a")
    pieces = IncrementalDetokenizer(tokenizer)
    parts = pieces.decode(tokens) + pieces.flush()
    assert [(part.text, part.data) for part in parts] == [
        *(("", b"\xe6"), ("", b"\x97"), ("\u65e5", b"\xa5")),
        *(("", b"\xe6"), ("\ufffd", b"\x97"), ("a", b"a")),
    ]


@pytest.mark.parametrize("stop", ["\u65e5", "\u65e5z", "b\u65e5"])
def test_a_stop_takes_the_bytes_of_its_characters(stop):
    """This includes bytes in tokens before the one that completes its first character."""
    tokenizer = byte_level()
    tokens = ids_of(tokenizer, b"ab" + "\u65e5z".encode())
    pieces = IncrementalDetokenizer(tokenizer, [stop])
    parts = pieces.decode(tokens) + pieces.flush()
    expected = "ab\u65e5z".partition(stop)[0]
    assert joined(parts) == (expected, expected.encode())
    assert len(parts) == len(tokens)


class CountedText(str):
    """Counts how often a letter is read."""

    looks = 0

    def __getitem__(self, place):
        CountedText.looks += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(("stop", "text"), [("x" * 100_000, "x" * 300 + "y"), ("ab" * 50_000, "ab" * 150 + "a")])
def test_the_length_of_a_stop_costs_nothing(stop, text):
    CountedText.looks = 0
    stops = Stops([CountedText(stop)])
    assert not any(stops.add(letter) for letter in text * 3)
    assert CountedText.looks < 12 * 3 * len(text)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["aab"], "aaab", 4),
        (["abab", "bac"], "ababac", 4),
        (["abcd", "cd", "zz"], "xabcd", 5),
        (["aabaaa"], "aabaabaaa", 9),
    ],
)
def test_stops_that_overlap_themselves_and_each_other(stops, text, expected):
    matcher = Stops(stops)
    ends = [place for place, letter in enumerate(text, 1) if matcher.add(letter)]
    assert ends[0] == expected
    pieces = IncrementalDetokenizer(OnlyDecodes(), stops)
    longest = max((stop for stop in stops if text[:expected].endswith(stop)), key=len)
    assert pieces.add(text.encode()) + pieces.end() == text[: expected - len(longest)]
