"""Checks lengths: of prompts against the target's positions, and of texts before slow tokenisation."""

from functools import cached_property
from typing import TYPE_CHECKING

from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLANKS = "\u2581\u0120\u010a\u0109\u010d"  # blanks and line breaks in SentencePiece and byte-level vocabularies
_UNKNOWN_CHARACTERS = "\U0010fffd" * 64  # a private-use character, which no token contains
_MARGIN = 64  # bytes that may change near the cut of a text


def check_positions(target: RaggedModel, prompt: int, budget: int) -> None:
    """Raises ValueError if prompt and new tokens exceed the target's positions; the last token needs none."""
    limit = target.max_positions
    if limit is not None and prompt + budget - 1 > limit:
        raise ValueError(
            f"a prompt of {prompt} tokens and {budget} new ones exceed the target's {limit} positions; "
            "shorten the prompt or lower max_new_tokens"
        )


class TextTooLong(ValueError):
    """A text has too many tokens, however it is tokenised."""


class LengthCheck:
    """Refuses texts that certainly have too many tokens, before they are tokenised.

    No token spells more bytes than its name has. Blanks are not counted, since some tokenizers drop or join them. The
    remaining characters are counted after the tokenizer's normalisation. Some tokenizers map any stretch of unknown
    characters to one token. For these no text is refused.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, most: int) -> None:
        """Refuses a text whose length proves that it has more than ``most`` tokens.

        Raises:
            TextTooLong: if the text is too long; the message states its characters and ``most``.
        """
        if len(text) <= most or (longest := self._longest) is None:
            return
        bytes_that_fit = most * longest + _MARGIN
        if 4 * len(text) <= bytes_that_fit:
            return
        start = text[: 2 * bytes_that_fit]  # the rest could only add tokens
        normalizer = self._tokenizer.backend_tokenizer.normalizer
        if normalizer is not None:
            start = normalizer.normalize_str(start)
        if len("".join(start.replace(_BLANKS[0], " ").split()).encode()) > bytes_that_fit:
            raise TextTooLong(
                f"a prompt of {len(text)} characters is too long, at most {most} tokens fit: shorten the prompt"
            )

    @cached_property
    def _longest(self) -> int | None:
        """Most bytes, without blanks, that a token spells; ``None`` if no bound is known."""
        tokenizer = self._tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return None
        if len(tokenizer(_UNKNOWN_CHARACTERS, add_special_tokens=False)["input_ids"]) < len(_UNKNOWN_CHARACTERS):
            return None
        names = tokenizer.get_vocab()
        blanks = [blank for blank in _BLANKS if blank in names and not str(tokenizer.decode([names[blank]])).strip()]
        without = str.maketrans(dict.fromkeys(blanks, ""))
        return max(4, max(len(name.translate(without).encode()) for name in names))


__all__ = ["LengthCheck", "TextTooLong", "check_positions"]
