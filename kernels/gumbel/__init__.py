"""Gumbel noise that target and drafter share: a pure function of a seed, a position and a token.

Sampling from a row takes the highest of ``log p + g``. With the seed and the position a drafter can repeat the draw.

Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor

from arbordraft.kernels.dispatch import NATIVE, SINGLE, Operator
from arbordraft.kernels.gumbel.reference import gumbel_argmax_reference, gumbel_reference

LOWEST_TEMPERATURE = torch.finfo(torch.float32).tiny

_noise = Operator(
    "gumbel(Tensor seeds, Tensor positions, int vocabulary) -> Tensor",
    gumbel_reference,
    lambda seeds, positions, vocabulary: seeds.new_empty(seeds.shape[0], vocabulary, dtype=torch.float64),
    triton="arbordraft.kernels.gumbel.triton:launch_noise",
    native=True,
)
_argmax = Operator(
    "gumbel_argmax(Tensor scores, Tensor seeds, Tensor positions, float temperature, Tensor? lowest) -> Tensor",
    gumbel_argmax_reference,
    lambda scores, *_: scores.new_empty(scores.shape[0], dtype=torch.int64),
    triton="arbordraft.kernels.gumbel.triton:launch_argmax",
    triton_takes=SINGLE,
    native=True,
    native_takes=NATIVE,
)


def gumbel(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Returns standard Gumbel noise, with the same bits from every implementation.

    Args:
        seeds: ``[R]`` int64; all 64 bits count.
        positions: ``[R]`` int64, 0 to 2**32 - 1.
        vocabulary: V.

    Returns:
        ``[R, V]`` float64, from -3.7 to 45.1; 64 bits resolve the upper tail.

    Raises:
        ValueError: if the shapes of seeds and positions differ.
    """
    _check_rows(len(seeds), positions=positions)
    return _noise(seeds.contiguous(), positions.contiguous(), vocabulary)


def gumbel_argmax(
    scores: Tensor, seeds: Tensor, positions: Tensor, temperature: float = 1.0, lowest: Tensor | None = None
) -> Tensor:
    """Draws a token from every row: the highest of ``scores / temperature + g``, the lowest of equal ones.

    Args:
        scores: ``[R, V]`` logits, without NaN.
        seeds: as for :func:`gumbel`.
        positions: as for :func:`gumbel`; those of the tokens to draw.
        temperature: above 0; scores are divided by it in float32 (float64 stays float64), the noise is not.
        lowest: ``[R]`` divided scores below which no token is drawn.

    Returns:
        ``[R]`` int64; -1 where no score is above -inf.

    Raises:
        ValueError: if the temperature is not positive or too low for float32, or if seeds, positions or lowest scores
            are not one per row.
    """
    if not temperature > 0:
        raise ValueError(f"the temperature must be positive, got {temperature}; without one, take the highest score")
    if temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"the temperature {temperature} is too low for float32; without one, take the highest score")
    _check_rows(len(scores), seeds=seeds, positions=positions, lowest=lowest)
    seeds, positions = seeds.contiguous(), positions.contiguous()
    lowest = None if lowest is None else lowest.to(torch.promote_types(scores.dtype, torch.float32)).contiguous()
    return _argmax(scores.contiguous(), seeds, positions, temperature, lowest)


def _check_rows(rows: int, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != (rows,):
            raise ValueError(f"{name} must be one number for each of the {rows} rows, got shape {list(tensor.shape)}")


__all__ = ["gumbel", "gumbel_argmax", "gumbel_argmax_reference", "gumbel_reference"]
