"""A prepacked module that replaces ``nn.Linear``.

Shapes: O outputs, I inputs.
"""

import torch
from torch import Tensor, nn

from arbordraft.kernels import native
from arbordraft.kernels.prepacked_linear import check_weights, pack, prepacked_linear


class PrepackedLinear(nn.Module):
    """Computes an ``nn.Linear`` by a C++ kernel, from a second copy of its weights that is laid out for the processor.

    It holds the linear's own parameters under their own names, so the state dict does not change. If the version
    counter of a parameter shows a later write, the weights are prepacked again. Writes through ``.data`` go unnoticed.

    Args:
        linear: the replaced module, or an object with its ``weight`` and ``bias``; on the CPU, in float32 or bfloat16.
        weights: kind of reduced weights, see :func:`~arbordraft.kernels.prepacked_linear.pack_rows`; they change the
            output.
        packed: these weights as :func:`~arbordraft.kernels.prepacked_linear.pack` returns them, if they exist already;
            used until the weights are written to.
        transposed: whether the linear keeps ``[I, O]`` instead of ``[O, I]``.

    Raises:
        ValueError: if the kernel cannot be used for this linear.
    """

    def __init__(
        self,
        linear: nn.Linear,
        *,
        weights: str | None = None,
        packed: tuple[Tensor, Tensor | None] | None = None,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        if weights != "file":
            check_weights(weights)
        problem = native.problem()
        if problem is None and linear.weight.dtype not in (torch.float32, torch.bfloat16):
            problem = f"weights must be float32 or bfloat16, got {linear.weight.dtype}"
        if problem is None and not linear.weight.is_cpu:
            problem = f"weights must be on the CPU, got {linear.weight.device}"
        if problem is not None:
            raise ValueError(f"this linear cannot be prepacked: {problem}")
        self.weights, self.transposed = weights, transposed
        self.weight, self.bias = linear.weight, linear.bias
        self.out_features, self.in_features = self._rows().shape
        self._prepack(packed)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[..., I]`` to ``[..., O]``."""
        if self._state != self._current():
            self._prepack()
        return prepacked_linear(x, self._prepacked, self._scale, self._wide_bias, outputs=self.out_features)

    @property
    def prepacked(self) -> tuple[Tensor, Tensor | None]:
        """The current weights in the layout of the kernels, and their scales."""
        if self._state != self._current():
            self._prepack()
        return self._prepacked, self._scale

    def _current(self) -> tuple[int, ...]:
        return tuple(version_of(tensor) for tensor in (self.weight, self.bias) if tensor is not None)

    def _rows(self) -> Tensor:
        weight = self.weight.detach()
        return weight.T if self.transposed else weight

    def _prepack(self, packed: tuple[Tensor, Tensor | None] | None = None) -> None:
        self._state = self._current()
        self._prepacked, self._scale = packed or pack(self._rows(), self.weights)
        self._wide_bias = None if self.bias is None else self.bias.detach().float()

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, weights={self.weights}"


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to; 0 for inference tensors, which have no version counter."""
    return 0 if tensor.is_inference() else tensor._version
