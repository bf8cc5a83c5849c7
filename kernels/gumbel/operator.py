"""The shared noise and draws with it as operators of torch, which can be traced.

Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from arbordraft.kernels.choice import interpreted
from arbordraft.kernels.gumbel import cpu


@torch.library.custom_op("arbordraft::gumbel_noise", mutates_args=())
def noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel`."""
    if seeds.is_cuda or interpreted():
        from arbordraft.kernels.gumbel.triton import launch_noise

        return launch_noise(seeds, positions, vocabulary)
    return cpu.noise(seeds, positions, vocabulary)


@torch.library.custom_op("arbordraft::gumbel_draw", mutates_args=())
def argmax(scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, lowest: Tensor | None) -> Tensor:
    """See :func:`arbordraft.kernels.gumbel.gumbel_argmax`; of float64 scores the kernel would lose digits."""
    if (scores.is_cuda or interpreted()) and scores.dtype != torch.float64:
        from arbordraft.kernels.gumbel.triton import launch_draw

        highest, tokens = launch_draw(scores, seeds, positions, temperature, lowest)
        return tokens.gather(1, highest.max(dim=-1, keepdim=True).indices)[:, 0]
    return cpu.argmax(scores, seeds, positions, temperature, lowest)


@noise.register_fake
def _(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    return seeds.new_empty(seeds.shape[0], vocabulary, dtype=torch.float64)


@argmax.register_fake
def _(scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float, lowest: Tensor | None) -> Tensor:
    return scores.new_empty(scores.shape[0], dtype=torch.int64)
