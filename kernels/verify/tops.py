"""The certain tokens of draft rows, found on the device of the rows.

Shapes: D draft rows, V vocabulary, M tops.
"""

import torch
from torch import Tensor


def take_tops(draft: Tensor, most: Tensor, threshold: Tensor, rounds: int) -> Tensor:
    """Takes the most probable tokens from every row; their probabilities become 0, in place.

    Args:
        draft: ``[D, V]`` draft probabilities.
        most: ``[D]`` int64 maximum number of tops of a row.
        threshold: ``[D]`` minimum probability of a top.
        rounds: M, the maximum of ``most``.

    Returns:
        ``[D, M]`` int64 tokens, -1 after the last one. Among equally probable tokens the first is taken first.
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
