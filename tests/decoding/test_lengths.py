"""Long texts are refused before they are tokenised, but only if they have too many tokens."""

import random

import pytest
from support.chats import chat_tokenizer
from support.models import tiny_tokenizer
from support.spellings import KINDS, byte_level, byte_tokens, metaspace
from tokenizers import AddedToken, Regex, normalizers

from arbordraft.decoding.lengths import LengthCheck, TextTooLong
from arbordraft.decoding.text import encode


def joining(*normalizer):
    """Builds a tokenizer that first joins blanks and characters; one token takes all blanks around it."""
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Replace("x" * 50, "y")]
    )
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    return tokenizer


TOKENIZERS = {
    "joining": joining,
    "one letter each": chat_tokenizer,
    "a blank before": lambda: chat_tokenizer(spaced=True),
    **{name: make for name, make in KINDS.items() if name != "only decodes"},
}
PARTS = (
    "a",
    " the",
    "\u65e5\u672c",
    "\U0001f600",
    " " * 40,
    "\n" * 30,
    "e\u0301",
    "\U0001d400",
    "x" * 50,
    "  <mask>  ",
    "?",
)


def check(tokenizer, text, most):
    """Returns whether the text is refused."""
    try:
        LengthCheck(tokenizer)(text, most)
    except TextTooLong:
        return True
    return False


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_text_that_fits_is_never_refused(name):
    tokenizer, source = TOKENIZERS[name](), random.Random(0)
    for _ in range(100):
        parts = source.sample(PARTS, source.randint(1, 3))
        text = "".join(source.choices(parts, k=source.randint(1, 400)))
        tokens, most = len(tokenizer(text)["input_ids"]), source.randint(1, 60)
        assert tokens > most or not check(tokenizer, text, most), (parts, len(text))


@pytest.mark.parametrize("make", [byte_level, byte_tokens, joining, chat_tokenizer, tiny_tokenizer])
def test_a_text_that_is_far_too_long_is_not_tokenised(make, monkeypatch):
    tokenizer, asked = make(), []
    known = type(tokenizer).__call__
    monkeypatch.setattr(
        type(tokenizer), "__call__", lambda self, text, **_: asked.append(len(text)) or known(self, text, **_)
    )
    check = LengthCheck(tokenizer)
    for raw in (True, False):
        tokenizer.chat_template = None if raw else "{% for said in messages %}[{{ said.content }}]{% endfor %}"
        with pytest.raises(TextTooLong, match=r"20000\d characters .* at most 50 tokens fit: shorten"):
            encode(
                tokenizer, [{"role": "user", "content": "ab" * 100_000}], raw=raw, check=lambda text: check(text, 50)
            )
    assert sum(asked) < 100


def test_nothing_is_refused_if_length_does_not_bound_tokens():
    """The first tokenizer gives one token for an unknown stretch of any length."""
    tokenizer = metaspace()
    assert len(tokenizer("\u4e2d" * 100_000)["input_ids"]) < 10
    assert not check(tokenizer, "\u4e2d" * 100_000, 10)
    assert not check(KINDS["slow"](), "a" * 100_000, 10)
