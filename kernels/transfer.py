"""Moves several tensors between host and device in one transfer."""

import torch
from torch import Tensor


def upload(device: torch.device, *parts: Tensor) -> list[Tensor]:
    """Copies int64 and float64 tensors from the host to a device, in one transfer.

    Args:
        device: the destination; for the CPU the tensors themselves are returned.
        parts: contiguous tensors.
    """
    if device.type == "cpu":
        return list(parts)
    words = torch.cat([part.flatten().view(torch.int64) for part in parts]).to(device)
    return _taken_apart(words, parts)


def download(*parts: Tensor) -> list[Tensor]:
    """Copies tensors from a device to the host, in one transfer.

    Args:
        parts: int64, or floating-point tensors, which arrive as float64. CPU tensors are returned unchanged.
    """
    if parts[0].is_cpu:
        return list(parts)
    wide = [part if part.dtype == torch.int64 else part.double() for part in parts]
    words = torch.cat([part.flatten().view(torch.int64) for part in wide]).cpu()
    return _taken_apart(words, wide)


def _taken_apart(words: Tensor, like: "tuple[Tensor, ...] | list[Tensor]") -> list[Tensor]:
    parts = words.split([part.numel() for part in like])
    return [part.view(own.dtype).view(own.shape) for part, own in zip(parts, like, strict=True)]


__all__ = ["download", "upload"]
