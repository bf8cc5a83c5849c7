"""Maps tokens that two tokenizers spell alike, and translates texts between their tokens.

Shapes: I tokens that both have.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = 64  # tokens of a text that are translated together
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
# Byte-level tokenizers write each byte as one letter: visible ones as themselves, the others as those from U+0100 on.
BYTE_CHARS = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + number): byte for number, byte in enumerate(sorted({*range(0x100)} - {*_VISIBLE}))
}
_ANCHOR = "a"  # prefix for encoding a continuation, since tokenizers may encode the start of a text differently


def tokens_by_bytes(tokenizer: "PreTrainedTokenizerBase") -> dict[bytes, int]:
    """Maps spellings to tokens of a tokenizer, except special ones; the lowest token wins if several spell alike."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    blank = vocabulary.get("Ġ")
    byte_level = blank is not None and decoded(tokenizer, [blank], special=True) == " "  # "Ġ" itself otherwise
    found: dict[bytes, int] = {}
    for name, token in sorted(vocabulary.items(), key=lambda entry: entry[1]):
        if token in special or not name:
            continue
        if byte_level:
            if not all(char in BYTE_CHARS for char in name):
                continue  # an added token, which is not spelt in bytes
            data = bytes(BYTE_CHARS[char] for char in name)
        elif (byte := BYTE_TOKEN.fullmatch(name)) is not None:
            data = bytes([int(byte[1], 16)])
        else:
            data = name.replace("▁", " ").encode()
        found.setdefault(data, token)
    return found


def shared_tokens(
    ours: "PreTrainedTokenizerBase", theirs: "PreTrainedTokenizerBase", sizes: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Returns ``[I]`` and ``[I]`` ids of the tokens that both have, the first ascending; includes both EOS tokens.

    Args:
        ours: first tokenizer.
        theirs: second tokenizer.
        sizes: number of ids in the model of each.
    """
    mine, other = tokens_by_bytes(ours), tokens_by_bytes(theirs)
    pairs = {token: other[data] for data, token in mine.items() if data in other}
    if ours.eos_token_id is not None and theirs.eos_token_id is not None:
        pairs[ours.eos_token_id] = theirs.eos_token_id
    kept = sorted((a, b) for a, b in pairs.items() if a < sizes[0] and b < sizes[1])
    ids = torch.tensor(kept, dtype=torch.int64).reshape(-1, 2)
    return ids[:, 0].contiguous(), ids[:, 1].contiguous()


class Translation:
    """A text that grows token by token, in the tokens of another tokenizer.

    Each block of tokens is translated by itself, so that the result depends on the tokens alone, not on how many came
    at a time. A character that is split between two blocks is lost.

    Args:
        source: tokenizer of the text.
        target: tokenizer of the result; if it adds a BOS token, the result begins with it.
    """

    def __init__(self, source: "PreTrainedTokenizerBase", target: "PreTrainedTokenizerBase") -> None:
        self.source, self.target = source, target
        self._done: list[int] = []  # translation of whole blocks
        self._blocks = 0
        self._last: tuple[int, list[int]] = (0, [])

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Returns the translation of the whole text, which must extend the text of the previous call."""
        if self._last[0] != len(tokens):
            while (end := (self._blocks + 1) * _BLOCK) < len(tokens):
                self._done += self._encoded(tokens[end - _BLOCK : end], first=self._blocks == 0)
                self._blocks += 1
            rest = tokens[self._blocks * _BLOCK :]
            self._last = len(tokens), self._done + self._encoded(rest, first=self._blocks == 0)
        return self._last[1]

    def _encoded(self, tokens: Sequence[int], *, first: bool) -> list[int]:
        text = decoded(self.source, tokens, special=False)
        return list(self.target(text)["input_ids"]) if first else encoded(self.target, text)


def decoded(tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[int], *, special: bool) -> str:
    """Returns the text of tokens, with special ones or without; blanks before punctuation stay."""
    text: Any = tokenizer.decode(list(tokens), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def encoded(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Returns the tokens of a text that continues another one."""

    def ids(part: str) -> list[int]:
        return list(tokenizer(part, add_special_tokens=False)["input_ids"])

    before, both = ids(_ANCHOR), ids(_ANCHOR + text)
    return both[len(before) :] if both[: len(before)] == before else ids(text)


__all__ = ["Translation", "decoded", "encoded", "shared_tokens", "tokens_by_bytes"]
