"""Chooses the type of weights and products that a device is fast at; every default asks here."""

import logging
from functools import cache

import torch

from arbordraft.kernels import native
from arbordraft.kernels.machine import cpu_features

_FLOAT16 = {"avx512_fp16", "amx_fp16", "asimdhp"}  # names of /proc/cpuinfo


def fast_dtype(device: torch.device | str) -> torch.dtype:
    """Returns the default type of weights on a device: bfloat16 if its instructions multiply it, else float32."""
    if torch.device(device).type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = native.fast_bfloat16()
    return torch.bfloat16 if fast else torch.float32


def warn_if_slow(dtype: torch.dtype, device: torch.device | str, option: str) -> None:
    """Logs one line if a device lacks instructions for a type that a user chose; says the same only once.

    Args:
        dtype: the chosen type.
        device: where weights of this type are multiplied.
        option: the option that chose it.
    """
    device, fast = torch.device(device), fast_dtype(device)
    if dtype == torch.float16:
        slow = device.type == "cpu" and cpu_features().isdisjoint(_FLOAT16)
    else:
        slow = dtype == torch.bfloat16 != fast
    if slow:
        names = (str(each).removeprefix("torch.") for each in (dtype, fast))
        _warn(*names, "GPU" if device.type == "cuda" else "processor", option)


@cache
def _warn(dtype: str, fast: str, place: str, option: str) -> None:
    logging.getLogger("arbordraft").warning(
        "%s: %s is slow here, because this %s has no instructions for it; %s, the default, is faster",
        option,
        dtype,
        place,
        fast,
    )


__all__ = ["fast_dtype", "warn_if_slow"]
