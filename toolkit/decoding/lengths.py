"""Refuses texts that are too long: for the target's positions, and before they are tokenised, which takes long."""

from functools import cached_property
from typing import TYPE_CHECKING

from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLANKS = "\u2581\u0120\u010a\u0109\u010d"  # how SentencePiece and byte-level tokenizers write blanks and line breaks
_STRANGE = "\U0010fffd" * 64  # for private use: no token has it
_MARGIN = 64  # bytes that may change where a text is cut


def check_positions(target: RaggedModel, prompt: int, budget: int) -> None:
    """Raises ValueError if a prompt of some tokens with its answer is too long; the last token needs no position."""
    limit = target.max_positions
    if limit is not None and prompt + budget - 1 > limit:
        raise ValueError(
            f"a prompt of {prompt} tokens and {budget} new ones exceed the target's {limit} positions; "
            "shorten the prompt or lower max_new_tokens"
        )


class TextTooLong(ValueError):
    """A text has more tokens than fit, however it is tokenised."""


class LengthCheck:
    """Refuses texts of which it is certain that they have too many tokens.

    No token spells more bytes than its name has. Blanks do not count, since some tokenizers drop or join them, and
    the rest counts as the tokenizer normalises it. A tokenizer that makes one token of a whole stretch that it does not
    know refuses nothing: no length is too long for it.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, most: int) -> None:
        """Refuses a text of more than ``most`` tokens if its length tells.

        Raises:
            TextTooLong: with the numbers of characters and of tokens.
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
        """Most bytes, without blanks, that a token spells; ``None`` if there is no such number."""
        tokenizer = self._tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            return None
        if len(tokenizer(_STRANGE, add_special_tokens=False)["input_ids"]) < len(_STRANGE):
            return None
        names = tokenizer.get_vocab()
        blanks = [blank for blank in _BLANKS if blank in names and not str(tokenizer.decode([names[blank]])).strip()]
        without = str.maketrans(dict.fromkeys(blanks, ""))
        return max(4, max(len(name.translate(without).encode()) for name in names))


__all__ = ["LengthCheck", "TextTooLong", "check_positions"]
