"""Noise and draws where no Triton kernel runs: by the C++ kernels if they may and know the types, else by definition.

Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from arbordraft.kernels import choice, native
from arbordraft.kernels.gumbel.reference import gumbel_argmax_reference, gumbel_reference


def noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel`."""
    if seeds.is_cpu and choice.wants_native() and native.load():
        return torch.ops.arbordraft.gumbel(seeds.contiguous(), positions.contiguous(), vocabulary)
    return gumbel_reference(seeds, positions, vocabulary)


def argmax(scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, lowest: Tensor | None) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel_argmax`."""
    known = scores.is_cpu and scores.dtype in (torch.float32, torch.bfloat16) and lowest is None
    if known and choice.wants_native() and native.load():
        keys = seeds.contiguous(), positions.contiguous()
        return torch.ops.arbordraft.gumbel_argmax(scores.contiguous(), *keys, temperature)
    return gumbel_argmax_reference(scores, seeds, positions, temperature, lowest)
