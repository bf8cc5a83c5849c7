"""Small tokenizers of every kind of spelling, and random tokens that are often parts of characters."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

TEXTS = ("\u65e5\u672c", "\U0001f600", "\u00e9", "a", " ", "\n", "\ufffd")
_WORDS = ("\u2581", "\u2581a", "b", "\u2581the", "\u00e9", "\u65e5", "\ufffd", "\u2581\ufffd", "\u2581\u2581", ".")


def _fast(model: Any, decoder: Any, end: str, **options: object) -> PreTrainedTokenizerFast:
    inner = Tokenizer(model)
    inner.decoder = decoder
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.add_special_tokens([end])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=end, **options)


def byte_tokens(unigram: bool = False, strip: bool = True) -> PreTrainedTokenizerFast:
    """Returns a tokenizer like Llama 2's, or Gemma's without ``strip``: bytes spell characters without a token."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    if unigram:
        model = models.Unigram([(token, -1.0) for token in tokens], unk_id=0, byte_fallback=True)
    else:
        ids = {token: number for number, token in enumerate(tokens)}
        model = models.BPE(ids, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return _fast(model, decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])]), "</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like GPT-2's: some tokens begin or end in the middle of a character, or both."""

    def letters(text: str) -> str:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]

    sun = letters("\u65e5")
    merged = [
        sun[:2],
        sun[2] + sun[:2],
        "a" + sun[0],
        sun[2] + "b",
        letters("\ufffd"),
        letters(" the"),
        letters("\u65e5\u672c"),
    ]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]
    model = models.BPE({token: number for number, token in enumerate(tokens)}, [])
    tokenizer = _fast(model, decoders.ByteLevel(), "<|end|>")
    tokenizer.backend_tokenizer.normalizer = None
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_tokens(["\u00fcber", "<0x41>"])
    return tokenizer


def metaspace() -> PreTrainedTokenizerFast:
    """Returns a tokenizer that drops the first blank, and blanks before punctuation if cleaning up is on."""
    model = models.Unigram([(token, -1.0) for token in ("<unk>", *_WORDS)], unk_id=0)
    return _fast(model, decoders.Metaspace(), "</s>", clean_up_tokenization_spaces=True)


def word_pieces() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like BERT's: blanks stand between words, and no token has them."""
    tokens = ["[UNK]", "a", "##b", "##ing", "!", "n't", "\u65e5", "##\u672c"]
    ids = {token: number for number, token in enumerate(tokens)}
    return _fast(models.WordPiece(ids, unk_token="[UNK]"), decoders.WordPiece(), "[SEP]")


class OnlyDecodes:
    """Decodes UTF-8 bytes; its tokens have no names."""

    def __len__(self) -> int:
        return 256

    def decode(self, tokens: Sequence[int], **_: object) -> str:
        return bytes(tokens).decode(errors="replace")


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "byte tokens": byte_tokens,
    "byte tokens, unigram": lambda: byte_tokens(unigram=True),
    "byte tokens, first blank kept": lambda: byte_tokens(strip=False),
    "metaspace": metaspace,
    "word pieces": word_pieces,
    "slow": ByT5Tokenizer,
    "only decodes": OnlyDecodes,
}


def ids_of(tokenizer: Any, data: bytes) -> list[int]:
    """Returns the tokens of single bytes; bytes without such a token are left out."""
    if isinstance(tokenizer, OnlyDecodes):
        return list(data)
    names = tokenizer.get_vocab()
    if "<0x00>" in names:
        return [names[f"<0x{byte:02X}>"] for byte in data]
    if isinstance(tokenizer, ByT5Tokenizer):
        return [names[chr(byte)] for byte in data]
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = {**{byte: chr(byte) for byte in visible}, **{byte: chr(256 + at) for at, byte in enumerate(others)}}
    return [names[letters[byte]] for byte in data if letters[byte] in names]


def drawn(tokenizer: Any, source: random.Random) -> list[int]:
    """Returns random tokens: whole and broken characters, special tokens, and ids without a token."""
    tokens: list[int] = []
    for _ in range(source.randint(1, 8)):
        data = source.choice(TEXTS).encode()
        kind = source.randrange(4)
        if kind == 0:
            tokens.append(source.randrange(len(tokenizer)))
        elif kind == 1 and not isinstance(tokenizer, OnlyDecodes | ByT5Tokenizer):
            tokens.append(source.randrange(len(tokenizer) + 2))
        else:
            broken = source.random() < 0.3
            tokens += ids_of(tokenizer, data[source.randint(0, broken) : len(data) - broken])
    return tokens
