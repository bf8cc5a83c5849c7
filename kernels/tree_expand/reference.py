"""Children of a level of draft trees in plain PyTorch: the truth for the Triton kernel.

Shapes: R nodes, V vocabulary, k children, W ancestor words.
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_WORD_BITS = 64


def tree_expand_reference(
    scores: Tensor, k: int, words: Tensor | None, first_child: Tensor | None, seeds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """See :func:`arbordraft.kernels.tree_expand.tree_expand`."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    keys = wide if seeds is None else perturb(wide, uniforms(seeds, scores.shape[1]))
    # One is found much faster than several.
    tokens = keys.argmax(dim=-1, keepdim=True) if k == 1 else keys.topk(k, dim=-1).indices
    found = wide.softmax(dim=-1).gather(1, tokens).log()  # on a CPU much faster than a logarithm of a sum
    return tokens, found.float(), child_words(words, first_child, k, scores)


def child_words(words: Tensor | None, first_child: Tensor | None, k: int, like: Tensor) -> Tensor:
    """``[R * k, W]`` ancestor words of the children: those of their parents and their own bit."""
    if words is None or first_child is None:
        return torch.empty(0, 0, dtype=torch.int64, device=like.device)
    node = (first_child[:, None] + torch.arange(k, device=like.device)).flatten()
    place = torch.arange(words.shape[1], device=like.device)
    own = torch.where(place == (node // _WORD_BITS)[:, None], 1 << (node % _WORD_BITS)[:, None], 0)
    return words.repeat_interleave(k, dim=0) | own


def perturb(scores: Tensor, uniform: Tensor) -> Tensor:
    """Scores plus Gumbel noise, ``-log E`` for exponential E.

    ``-log(-log u)`` would lose the likely winners in float32, where u is near 1; E is small for them and exact.
    """
    small = uniform * (1 + uniform * (0.5 + uniform / 3))
    exponential = torch.where(uniform < 0.01, small, -torch.log(1 - uniform))
    return scores - torch.log(exponential)


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """``[R, count]`` float32 in (0, 1): number ``i`` of a seed is the first word of Philox-4x32-10 at counter ``i``.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: any of them can be had without the others.
    """
    zero = torch.zeros(len(seeds), count, dtype=torch.int64, device=seeds.device)
    c0, c1, c2, c3 = zero + torch.arange(count, device=seeds.device), zero, zero, zero
    k0, k1 = (seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None]
    for _ in range(10):
        high_a, low_a = _product(0xD2511F53, c0)
        high_b, low_b = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    signed = torch.where(c0 >= 1 << 31, _MASK - c0, c0)  # 31 bits, as Triton folds them
    return (signed.float() * 4.6566127342e-10).clamp(min=2.0**-32)


def _product(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low words of a product of 32-bit words, in int64."""
    high = ((constant >> 16) * x + (((constant & 0xFFFF) * x) >> 16)) >> 16
    return high, (constant * x) & _MASK
