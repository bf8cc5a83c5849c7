"""Muon for the matrices inside a drafter, AdamW for everything else, as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer


class MuonAdamW(Optimizer):
    """Steps Muon on inner matrices, and AdamW on embeddings, output matrices, norms and biases.

    Args:
        network: what is trained; the matrices of its ``lm_head`` or ``lm_heads`` map to tokens.
        lr: of AdamW, and of Muon scaled to the same size of update.

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
            muon = Muon(inner, lr=lr, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
            self.parts.append(muon)
        if others:
            self.parts.append(AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()
        self.set_lr(lr)

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate, as at the beginning."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = 2 * lr if isinstance(part, Muon) else lr

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def _share(self) -> None:
        """Lets the parts work on the groups and the state that schedulers and checkpoints see."""
        groups = iter(self.param_groups)
        for part in self.parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state
