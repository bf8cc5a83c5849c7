"""Muon for the matrices inside a drafter, AdamW for everything else, as one optimizer."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from arbordraft.kernels.precision import fast_dtype


class Muon32(Muon):
    """Torch's Muon with iterations in float32 instead of bfloat16, for devices that are slow in bfloat16."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Updates the parameters; ignores the closure, which :class:`MuonAdamW` calls."""
        for group in self.param_groups:
            found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
            self._init_group(group, *found)
            for parameter, gradient, buffer in zip(*found, strict=True):
                buffer.lerp_(gradient, 1 - group["momentum"])
                update = gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                scale = 0.2 * math.sqrt(max(parameter.shape))  # match_rms_adamw
                parameter.add_(_orthogonal(update.float(), group), alpha=-group["lr"] * scale)


def _orthogonal(update: Tensor, group: dict[str, Any]) -> Tensor:
    """Returns the update with all singular values near 1, by Newton-Schulz iterations."""
    a, b, c = group["ns_coefficients"]
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if update.shape[0] > update.shape[1] else x


class MuonAdamW(Optimizer):
    """Steps Muon on inner matrices, and AdamW on embeddings, output matrices, norms and biases.

    Args:
        network: the network to train; matrices of its ``lm_head`` or ``lm_heads`` count as output matrices.
        lr: learning rate of AdamW, and of Muon scaled to updates of the same size.

    Muon orthogonalises in bfloat16, like torch's own, and in float32 on devices without instructions for bfloat16.

    Source: Muon (Jordan et al., 2024), with the scale of Liu et al., 2025.
    """

    def __init__(self, network: nn.Module, lr: float = 1e-3) -> None:
        tables = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
        inner: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                by_token = id(parameter) in tables or any(part.startswith("lm_head") for part in name.split("."))
                (others if parameter.dim() != 2 or by_token else inner).append(parameter)
        self.parts: list[Optimizer] = []
        if inner:
            kind = Muon if fast_dtype(inner[0].device) == torch.bfloat16 else Muon32
            self.parts.append(kind(inner, lr=lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"))
        if others:
            self.parts.append(AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()
        self.set_lr(lr)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate, with the meaning that it has in the constructor."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = 2 * lr if isinstance(part, Muon) else lr

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Makes the parts share this optimizer's groups and state, which schedulers and checkpoints see."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
