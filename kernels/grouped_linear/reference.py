"""Products of rows with weights of 4 bits in plain PyTorch: the definition.

Shapes: T rows, I inputs, O outputs, P panels of 16 outputs.
"""

import torch
from torch import Tensor

from arbordraft.kernels.fused_layers.reference import gated_activation_reference
from arbordraft.kernels.grouped_linear.panels import restore_panels
from arbordraft.kernels.prepacked_linear.blocks import LANES


def grouped_linear_reference(
    x: Tensor, panels: Tensor, bias: Tensor | None, outputs: int, activation: str | None, kind: str
) -> Tensor:
    """See :func:`arbordraft.kernels.grouped_linear.grouped_linear`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide) @ restore_panels(panels, kind, outputs, x.shape[-1]).to(wide).T
    y = (y if bias is None else y + bias.to(wide)).to(x.dtype)
    if activation is None:
        return y
    gate, up = (half.flatten(-2) for half in y.unflatten(-1, (-1, 2, LANES)).unbind(-2))
    return gated_activation_reference(gate, up, activation)
