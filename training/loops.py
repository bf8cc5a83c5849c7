"""Finds where a text runs into a loop, as texts of small models do, and stops it there.

A loop teaches a drafter nothing past its first round: lookups draft the repetitions for free.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

_LONGEST = 40  # tokens of a round
_LEAST = 24  # repeated tokens: fewer also occur in good text, in lists, code and tables
_SAME = 0.9  # share of them that must be equal, since the numbers of list items may count on
_LAST_EQUAL = 3  # last tokens, which must be equal a round before; otherwise nothing needs counting


def loop_start(tokens: Sequence[int]) -> int | None:
    """Returns where the loop at the end of a text first repeats itself; ``None`` if the text ends in no loop.

    A text ends in a loop of ``p <= 40`` tokens if nine in ten of its last ``max(24, p)`` tokens equal the token p
    places before. The last three must be among them.
    """
    end = len(tokens)
    for period in range(1, min(_LONGEST, end - _LEAST) + 1):
        begin = end - max(_LEAST, period)
        if begin < period or tokens[end - _LAST_EQUAL :] != tokens[end - _LAST_EQUAL - period : end - period]:
            continue
        same = [place for place in range(begin, end) if tokens[place] == tokens[place - period]]
        if len(same) >= _SAME * (end - begin):
            return same[0]
    return None


def before_loop(tokens: Sequence[int]) -> Sequence[int]:
    """Returns a text up to where its first loop repeats itself, or all of a text without loops."""
    starts = (loop_start(tokens[:end]) for end in range(len(tokens) + 1))
    return tokens[: next((start for start in starts if start is not None), len(tokens))]


class LoopCriteria(StoppingCriteria):
    """Stops a text that runs into a loop.

    It also sees the prompt, whose words an answer may repeat. If the chat template puts five tokens between the two,
    they are enough to tell such a repetition from a loop.
    """

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Returns ``[B]`` bool: whether ``[B, L]`` texts end in a loop."""
        tails = input_ids[:, -2 * _LONGEST :].tolist()
        return torch.tensor([loop_start(tail) is not None for tail in tails], device=input_ids.device)
