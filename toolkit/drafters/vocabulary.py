"""The tokens of a large vocabulary that drafts of a text are chosen from.

Of a small draft model's bytes, a head of 150,000 tokens is a quarter, and most texts use few of these. A tokenizer's
first tokens are the most frequent ones of the texts that it was made from. So drafts of a text are chosen
from these, and from the tokens that the text has used already. Drafts are guesses, so the text stays the same.

Source: drafts of frequent tokens alone are from FR-Spec (Zhao et al., 2025) and VocabTrim (Goel et al., 2025). Both
count tokens in a corpus.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 16  # tokens that kernels score together
FREQUENT = 2**15  # first tokens, which every text may use
LARGE = 2**16  # tokens of a vocabulary from which most of them can be left out
_RECENT = 1 / 64  # weight of the last token in the share of missed ones
_MOST_MISSED = 1 / 32  # share of a text's tokens from which all of them are scored, as the text has another script


class TextVocabulary:
    """The tokens that drafts of one text are chosen from.

    Args:
        text: committed tokens, prompt included, which grow.

    Attributes:
        missed: share of the recent tokens that drafts could not have been.
        rare: blocks of the text's tokens beyond the frequent ones.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self._text, self._read = text, 0
        self.missed = 0.0
        self.rare: set[int] = set()

    def follow(self) -> None:
        """Reads the tokens that the text has gained."""
        for token in self._text[self._read :]:
            block = token // BLOCK
            missed = token >= FREQUENT and block not in self.rare
            if missed:
                self.rare.add(block)
            self.missed += _RECENT * (missed - self.missed)
        self._read = len(self._text)


def blocks_of(texts: Iterable[TextVocabulary]) -> Tensor | None:
    """Returns the ascending blocks of tokens that drafts of some texts are chosen from; ``None`` for all tokens."""
    rare: set[int] = set()
    for text in texts:
        text.follow()
        if text.missed > _MOST_MISSED:
            return None
        rare |= text.rare
    own = np.array(sorted(rare), dtype=np.int64)
    return torch.from_numpy(np.concatenate([np.arange(FREQUENT // BLOCK), own]))


__all__ = ["BLOCK", "FREQUENT", "LARGE", "TextVocabulary", "blocks_of"]
