"""Float32 arithmetic whose bits are defined: IEEE 754 rounds every operation, and their order is fixed.

Exponentials of libraries differ in the last place. Torch's softplus and sigmoid even round a number by its place in a
tensor. Here, nothing depends on shapes, threads, instruction sets or devices.
"""

import torch
from torch import Tensor

from arbordraft.kernels.gumbel.reference import logarithm

# Cephes' polynomial for the exponential of half of ln 2 at most, and ln 2 in two parts of which the first has few bits.
_POLYNOMIAL = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
)  # fmt: skip
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_LINEAR = 2.0**-24  # below, ln(1 + e) is e in float32


def exp(x: Tensor) -> Tensor:
    """Computes exponentials of float32 numbers within 2 units in the last place; from -104 down, they are 0."""
    x = x.clamp(-110.0, 89.0)
    power = (x * _LOG2_E).round()
    rest = x - power * _LN2_HIGH - power * _LN2_LOW
    value = torch.full_like(rest, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        value = value * rest + coefficient
    value = value * (rest * rest) + (rest + 1.0)
    exponent = power.nan_to_num().int()
    half = exponent >> 1  # in two steps, so that powers of two stay normal numbers
    return value * _power_of_two(half) * _power_of_two(exponent - half)


def _power_of_two(exponent: Tensor) -> Tensor:
    return ((exponent + 127) << 23).view(torch.float32)


def sigmoid(x: Tensor) -> Tensor:
    """Computes ``1 / (1 + exp(-x))``."""
    return 1.0 / (exp(-x) + 1.0)


def silu(x: Tensor) -> Tensor:
    """Computes ``x / (1 + exp(-x))``."""
    return x / (exp(-x) + 1.0)


def softplus(x: Tensor) -> Tensor:
    """Computes ``ln(1 + exp(x))``."""
    e = exp(-x.abs())
    return x.clamp(min=0.0) + torch.where(e < _LINEAR, e, logarithm(1.0 + e.double(), torch).float())


def sqrt(x: Tensor) -> Tensor:
    """Computes square roots, rounded correctly: torch's own in float32 are not."""
    return x.double().sqrt().float()


def pairwise_sum(x: Tensor, dim: int) -> Tensor:
    """Sums along a dimension: neighbours in pairs, then neighbouring pairs, and so on; an odd last one stays alone."""
    x = x.movedim(dim, 0)
    while (count := len(x)) > 1:
        even = count // 2 * 2
        x = torch.cat([x[0:even:2] + x[1:even:2], x[even:]])
    return x[0]


__all__ = ["exp", "pairwise_sum", "sigmoid", "silu", "softplus", "sqrt"]
