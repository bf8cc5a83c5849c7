"""Compares a drafter's model with its target on a short text, before anything is decoded."""

from collections.abc import Sequence

import torch

from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel

_ROWS = 128  # most tokens of the text
_TEXT = """The river had risen in the night, and by morning the lower road was gone. Three people stood on the bridge \
and talked about what to do: one wanted to wait, one wanted to walk round by the mill, and the third said nothing.

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: A train leaves at 9:40 and takes 85 minutes. When does it arrive?
Answer: 20 minutes are left until 10:00, and 65 minutes later it is 11:05. It arrives at 11:05."""


def agreement(target: RaggedModel, model: RaggedModel) -> float:
    """Returns how often two models find the same next token most probable, by one forward of each.

    They read a short text, or random tokens if the target has no tokenizer. Places count by the probability of the
    target's token, since its own texts go on where it is sure. Qwen2.5-Coder 0.5B agrees with 1.5B in 67 % of all
    places, and in 80 % of the weighted ones. In a text by 1.5B, it agrees in 78 %.
    """
    if target.tokenizer is None:
        source = torch.Generator().manual_seed(0)
        tokens = torch.randint(min(target.vocab_size, model.vocab_size), (_ROWS,), generator=source)
    else:
        tokens = torch.tensor(target.tokenizer(_TEXT)["input_ids"])[:_ROWS]
    tokens = tokens[: min(each.max_positions or _ROWS for each in (target, model))]
    rows = []
    for each in (target, model):
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open(len(tokens))], [range(len(tokens))])
        rows.append(each(tokens, batch, cache).float())
    sure, best = rows[0].softmax(dim=-1).max(dim=-1)
    agreed = best == rows[1].argmax(dim=-1)
    return float((sure * agreed).sum() / sure.sum())


def acceptance_at(agreed: float, rates: Sequence[float]) -> tuple[float, ...]:
    """Scales usual rates of acceptance by rank to a rate of agreement; the other ranks share its misses."""
    likely, *others = rates
    missed = (1 - agreed) / (1 - likely)
    return (agreed, *(rate * missed for rate in others))


__all__ = ["acceptance_at", "agreement"]
