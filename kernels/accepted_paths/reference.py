"""Accepted paths in plain PyTorch.

Shapes: T rows, B samples, P longest path.
"""

import torch
from torch import Tensor

from arbordraft.kernels.verify.reference import walk


def matching_ends_reference(
    tokens: Tensor, best: Tensor, parent: Tensor, roots: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """See :func:`arbordraft.kernels.accepted_paths.matching_ends`."""
    end = walk(tokens == best[parent.clamp(min=0)], parent, roots, depth)
    return end, best[end]


def accepted_paths_reference(
    end: Tensor, parent: Tensor, level: Tensor, slots: Tensor, home: Tensor, sample: Tensor, roots: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.accepted_paths.accepted_paths`."""
    path = end.new_full((len(end), depth + 1), -1)
    row = end
    for _ in range(depth + 1):
        path.scatter_(1, level[row][:, None], row[:, None])
        above = parent[row]
        row = torch.where(above < 0, row, above)
    taking = sample[roots] == torch.arange(len(end), device=end.device)
    kept = (path[:, 1:] >= 0) & taking[:, None]
    steps = torch.arange(1, depth + 1, device=end.device)
    source = torch.where(kept, slots[path[:, 1:].clamp(min=0)], home[:, None])
    destination = torch.where(kept, home[:, None] + steps, home[:, None])
    return path, source.flatten(), destination.flatten()
