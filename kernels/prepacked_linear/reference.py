"""Prepacked matrices in plain PyTorch: the layout, and the definition of the product.

Shapes: O outputs, I inputs, ... any leading dimensions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from arbordraft.kernels.prepacked_linear.blocks import LANES, is_float, restore_blocks
from arbordraft.kernels.prepacked_linear.groups import quantize_rows

WEIGHTS = ("int4", "int8", "int8-weight-only")
ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def prepack(weight: Tensor) -> Tensor:
    """Lays ``[O, I]`` out for the kernels, padded with zeros to 16 outputs and 2 inputs.

    Returns:
        ``[O/16, I, 16]`` for float32, ``[O/16, I/2, 16, 2]`` for bfloat16 and int8.
    """
    pairs = weight.dtype != torch.float32
    outputs, inputs = weight.shape
    padded = F.pad(weight.detach(), (0, inputs % 2 if pairs else 0, 0, -outputs % LANES))
    if pairs:
        return padded.unflatten(0, (-1, LANES)).unflatten(2, (-1, 2)).permute(0, 2, 1, 3).contiguous()
    return padded.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()


def restore(prepacked: Tensor, outputs: int, inputs: int) -> Tensor:
    """Returns the ``[O, I]`` matrix that was prepacked."""
    dense = prepacked.permute(0, 2, 1, 3).flatten(2) if prepacked.ndim == 4 else prepacked.transpose(1, 2)
    return dense.flatten(0, 1)[:outputs, :inputs].contiguous()


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Interleaves blocks of 16 rows of two ``[O, ...]`` tensors: the halves of a gated activation."""
    blocks = [half.unflatten(0, (-1, LANES)) for half in (gate, up)]
    return torch.stack(blocks, dim=1).flatten(0, 2)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises a matrix to ``[O, I]`` int8 and ``[O]`` float32 scales: symmetric, one scale per output."""
    scale = weight.detach().float().abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight.detach().float() / scale[:, None]).round().to(torch.int8), scale


def check_weights(weights: str | None) -> None:
    """Raises ValueError if ``weights`` is not None and names no kind of weights."""
    if weights is not None and weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)} or None, got {weights!r}")


def multiply_panels(x: Tensor, packed: Tensor, outputs: int) -> Tensor:
    """Multiplies ``[..., I]`` with panels to ``[..., O]`` float64; all but rows in 8 bits, for codes, is exact."""
    weight = restore_blocks(packed, outputs).double()
    x = F.pad(x, (0, weight.shape[1] - x.shape[-1]))
    codes, steps = quantize_rows(x)
    rounded = (codes * steps.double()[..., None]).flatten(-2)
    return torch.where(is_float(packed)[:outputs], x.double() @ weight.T, rounded @ weight.T)


def prepacked_linear_reference(
    x: Tensor, prepacked: Tensor, scale: Tensor | None, bias: Tensor | None, outputs: int, activation: str | None = None
) -> Tensor:
    """See :func:`arbordraft.kernels.prepacked_linear.prepacked_linear`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if prepacked.dtype == torch.uint8:
        y = multiply_panels(x, prepacked, outputs).to(wide)
    else:
        y = x.to(wide) @ restore(prepacked, outputs, x.shape[-1]).to(wide).T
    if scale is not None:
        y = y * scale
    if bias is not None:
        y = y + bias
    if activation is not None:
        gate, up = y.unflatten(-1, (-1, 2, LANES)).unbind(-2)
        y = ACTIVATIONS[activation](gate.flatten(-2)) * up.flatten(-2)
    return y.to(x.dtype)
