"""Growth of a level in plain PyTorch: the rule of all growers on tensors."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.draft_tree import reference as rule
from arbordraft.kernels.draft_tree.limits import Limits, Trees


class _Level(NamedTuple):
    """See :class:`arbordraft.kernels.draft_tree.reference.Level`."""

    inner: Tensor
    below: slice
    parent: Tensor
    rank: Tensor


def grow_level_reference(
    token: Tensor,
    chance: Tensor,
    reach: Tensor,
    broken: Tensor,
    levels: Tensor,
    calibration: Tensor,
    expected: Tensor,
    costs: Tensor,
    budget: Tensor,
    inner: Tensor,
    parent: Tensor,
    rank: Tensor,
    fed: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    vocabulary: Tensor | None,
    depth: int,
    below: int,
) -> Tensor:
    """See :func:`arbordraft.kernels.grow_level.grow_level`."""
    trees = Trees(token, chance, reach)
    limits = Limits(levels, calibration, expected, None, costs[0], costs[1], budget)
    level = _Level(inner, slice(below, below + len(parent)), parent, rank)
    named = tokens if vocabulary is None else vocabulary[tokens]
    lacking = (0, len(parent))  # children of rank k or more: no topology has a rank above this
    named = F.pad(named, lacking, value=-1).unflatten(0, (len(token), -1))
    chances = F.pad(log_probs.exp().double(), lacking).unflatten(0, (len(token), -1))
    going = rule.going(trees, limits, level, depth)
    broken.add_((going & ~chances[:, :, 0].isfinite()).sum(dim=1))
    rule.add(trees, limits, level, depth, going, torch.where(chances > 0, named, -1), chances)
    following = token[:, fed]
    return torch.where(following < 0, token[:, :1], following).flatten()
