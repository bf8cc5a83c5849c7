"""The certain tokens of draft rows, found where the rows lie.

Shapes: D draft rows, V vocabulary, M tops.
"""

import torch
from torch import Tensor


def take_tops(draft: Tensor, most: Tensor, threshold: Tensor, rounds: int) -> Tensor:
    """The most probable tokens of every row, which can no longer be drawn: their probabilities become 0, in place.

    Args:
        draft: ``[D, V]`` draft probabilities.
        most: ``[D]`` int64 how many tokens of a row are tops at most.
        threshold: ``[D]`` probability below which no token of a row is one.
        rounds: M, the greatest number in ``most``.

    Returns:
        ``[D, M]`` int64 tokens, -1 behind the last one. Of equally probable ones the first is taken first.
    """
    tops = most.new_full((len(draft), rounds), -1)
    if rounds == 0:
        return tops
    count = torch.minimum((draft >= threshold.to(draft.dtype)[:, None]).sum(dim=1), most)
    for index in range(rounds):
        token = draft.argmax(dim=1, keepdim=True)
        chance = draft.gather(1, token)
        top = (index < count)[:, None] & (chance > 0)
        tops[:, index : index + 1] = torch.where(top, token, -1)
        draft.scatter_(1, token, torch.where(top, 0.0, chance))
    return tops


__all__ = ["take_tops"]
