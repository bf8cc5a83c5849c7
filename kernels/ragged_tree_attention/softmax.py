"""Running softmax and matrix precision of all Triton kernels of ragged tree attention."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scores(
    q,
    k,
    visible,
    scale,
    softcap,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Returns scores in units of log2, ``-inf`` if a key is not visible."""
    if UPCAST:  # the interpreter cannot multiply bfloat16
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    s = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP:
        x = s / softcap
        # tanh without a library: not every backend has libdevice, nor does the interpreter.
        e = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(x))
        t = (1.0 - e) / (1.0 + e)
        s = softcap * tl.where(x < 0, -t, t)
    s = s * 1.4426950408889634
    return tl.where(visible, s, -float("inf"))


@triton.jit
def accumulate(s, v, m, total, acc, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Adds a tile of scores and values to the running softmax."""
    new = tl.maximum(m, tl.max(s, 1))
    safe = tl.where(new == -float("inf"), 0.0, new)  # a row that has seen no key yet
    p = tl.exp2(s - safe[:, None])
    rescale = tl.exp2(m - safe)
    acc = acc * rescale[:, None]
    if UPCAST:
        acc = tl.dot(p, v.to(tl.float32), acc, input_precision=PRECISION)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return new, total * rescale + tl.sum(p, 1), acc


@triton.jit
def arrived(CELL, parts, FENCED: tl.constexpr):
    """Counts this program's arrival, after its stores; returns whether it is the last of ``parts`` programs.

    The last one sets the counter to 0 again, for the next launch. It may read the stores of all of them.

    On AMD's GPUs, a barrier does not wait for stores. If ``FENCED``, each wave adds 0 first, which does.
    """
    if FENCED:
        thread = tl.arange(0, 512)  # at least one per thread of up to eight waves
        tl.atomic_add(CELL + 0 * thread, 0 * thread, sem="release", scope="gpu")
    tl.debug_barrier()  # the stores of all threads come first
    last = tl.atomic_add(CELL, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(CELL, 0)
    return last


def precision(dtype: torch.dtype, hip: bool) -> str:
    """Returns the precision of matrix products; NVIDIA's matrix units need three passes for float32."""
    return "tf32x3" if dtype == torch.float32 and not hip else "ieee"


def numbers(tensor: Tensor) -> dict[str, bool | str]:
    """Returns the constants for matrix products of a tensor's type, on its device."""
    upcast = tensor.dtype == torch.bfloat16 and not tensor.is_cuda
    return {"UPCAST": upcast, "PRECISION": precision(tensor.dtype, torch.version.hip is not None)}


__all__ = ["accumulate", "arrived", "numbers", "precision", "scores"]
