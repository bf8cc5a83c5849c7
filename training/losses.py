"""Losses that distil a target model into a drafter.

The teacher is the target, the student the drafter. Both are compared on the *draft vocabulary*, all of the target's or
a part of it. A teacher row is not renormalised to that part: its missing mass is that of tokens that can never be
drafted. This makes the acceptance equal to that of decoding.

A loss returns its gradient along with its value, in closed form. On rows of this size, autograd would cost as much as
the matrix products. Every ``LossFunction`` takes teacher rows and the student's logits. It returns losses ``[N]`` and
gradients ``[N, D]`` by these logits.

Shapes: N positions, D draft vocabulary. Teacher rows p ``[N, D]`` hold probabilities with a sum S of at most 1; student
rows q ``[N, D]`` are the softmax of finite logits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class TeacherRows(NamedTuple):
    """Teacher rows as losses read them, computed once for all drafting steps.

    Args:
        log_probs: ``[N, D]`` log p, finite.
        probs: ``[N, D]`` p.
        mass: ``[N]`` S = Σ p.
        negentropy: ``[N]`` Σ p log p.
    """

    log_probs: Tensor
    probs: Tensor
    mass: Tensor
    negentropy: Tensor

    @classmethod
    def of(cls, log_probs: Tensor) -> "TeacherRows":
        """Builds teacher rows from ``[N, D]`` finite log-probabilities."""
        probs = log_probs.exp()
        return cls(log_probs, probs, probs.sum(dim=-1), torch.linalg.vecdot(probs, log_probs))


LossFunction = Callable[[TeacherRows, Tensor], tuple[Tensor, Tensor]]


def acceptance(teacher: TeacherRows, logits: Tensor) -> Tensor:
    """Computes ``[N]`` Σ min(p, q), the chance that rejection sampling accepts a draft from q.

    Source: Leviathan et al., ICML 2023.
    """
    return torch.minimum(teacher.probs, logits.softmax(dim=-1)).sum(dim=-1)


def forward_kl(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes Σ p (log p - log q), the cross entropy of soft labels less the constant that makes it 0 at q = p.

    Its least value is S log S, at q = p / S: 0 if S = 1, negative if S < 1.
    For drafters see DistillSpec (Zhou et al., ICLR 2024), also for the reverse and the total variation.
    """
    q, normaliser = _softmax(logits)
    losses = teacher.negentropy - torch.linalg.vecdot(teacher.probs, logits) + teacher.mass * normaliser
    return losses, q.mul_(teacher.mass[:, None]).sub_(teacher.probs)


def reverse_kl(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes Σ q (log q - log p), which drives q away from tokens that the target would not choose.

    Its least value is -log S, at q = p / S.
    """
    log_q = logits.log_softmax(dim=-1)
    ratios = log_q - teacher.log_probs
    q = log_q.exp_()
    losses = torch.linalg.vecdot(q, ratios)
    return losses, ratios.sub_(losses[:, None]).mul_(q)


def cross_entropy(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes -log q of the most probable token of the teacher row."""
    tokens = teacher.probs.argmax(dim=-1, keepdim=True)
    return _sparse_cross_entropy(torch.ones_like(tokens, dtype=logits.dtype), tokens, logits)


def total_variation(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes 1 - Σ min(p, q) in [0, 1]: the total variation of both rows if the missing mass is a token, too.

    Its gradient vanishes where q has little in common with p; start from another loss, or from a trained drafter.
    """
    q = logits.softmax(dim=-1)
    alpha, below = _overlap(teacher, q)
    return 1 - alpha, q.mul_(below.sum(dim=-1, keepdim=True)).sub_(below)


def lk_nla(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes -log Σ min(p, q), the negative log acceptance; at least -log S.

    Its gradient is that of the total variation divided by the acceptance. It does not vanish however small the
    acceptance is, since all is done in logarithms. Source: LK losses (Samarin et al., 2026, arXiv 2602.23881).
    """
    log_q = logits.log_softmax(dim=-1)
    shares = torch.minimum(teacher.log_probs, log_q)
    log_alpha = shares.logsumexp(dim=-1)
    shares = shares.sub_(log_alpha[:, None]).exp_().mul_(log_q < teacher.log_probs)
    return -log_alpha, log_q.exp_().mul_(shares.sum(dim=-1, keepdim=True)).sub_(shares)


def lk_hybrid(teacher: TeacherRows, logits: Tensor, eta: float = 3.0) -> tuple[Tensor, Tensor]:
    """Computes w KL + (1 - w) TV with w = exp(-eta α): from forward KL to total variation as acceptance α grows.

    Every position has its own weight, and no gradient flows through it.
    Source: LK losses (Samarin et al., 2026, arXiv 2602.23881).
    """
    q, normaliser = _softmax(logits)
    kl = teacher.negentropy - torch.linalg.vecdot(teacher.probs, logits) + teacher.mass * normaliser
    alpha, below = _overlap(teacher, q)
    weight = (-eta * alpha).exp()
    slopes = q.mul_((weight * teacher.mass + (1 - weight) * below.sum(dim=-1))[:, None])
    slopes = slopes.sub_(below.mul_(1 - weight[:, None])).addcmul_(teacher.probs, -weight[:, None])
    return weight * kl + (1 - weight) * (1 - alpha), slopes


def topk_distillation(teacher: TeacherRows, logits: Tensor, k: int = 10) -> tuple[Tensor, Tensor]:
    """Computes -Σ p log q over the ``k`` tokens that the target finds most probable, or all if there are fewer.

    Source: HASS (Zhang et al., 2024; ICLR 2025).
    """
    return _sparse_cross_entropy(*teacher.probs.topk(min(k, teacher.probs.shape[-1]), dim=-1), logits)


def _sparse_cross_entropy(weights: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes -Σ w log q over ``[N, k]`` tokens."""
    q, normaliser = _softmax(logits)
    mass = weights.sum(dim=-1)
    losses = mass * normaliser - (weights * logits.gather(-1, tokens)).sum(dim=-1)
    return losses, q.mul_(mass[:, None]).scatter_add_(-1, tokens, -weights)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Computes q and the ``[N]`` log-sum-exp of the logits, without the pass that log q would take."""
    q = logits.softmax(dim=-1)
    return q, logits.amax(dim=-1) - q.amax(dim=-1).log()


def _overlap(teacher: TeacherRows, q: Tensor) -> tuple[Tensor, Tensor]:
    """Computes the ``[N]`` acceptance, and q where it is below p, else 0: only there does q change the acceptance."""
    return torch.minimum(teacher.probs, q).sum(dim=-1), q * (q < teacher.probs)


LOSSES: dict[str, LossFunction] = {
    "kl": forward_kl,
    "reverse_kl": reverse_kl,
    "ce": cross_entropy,
    "tv": total_variation,
    "lk_nla": lk_nla,
    "lk_hybrid": lk_hybrid,
    "topk": topk_distillation,
}


def loss_named(name: str) -> LossFunction:
    """Returns the loss that a configuration file calls ``name``.

    Raises:
        ValueError: if there is no loss of that name.
    """
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def position_decay(steps: int, decay: float) -> Tensor:
    """Returns ``[steps]`` float32 weights ``decay ** s``, since later drafts are tried less often.

    Source: Medusa (Cai et al., ICML 2024).

    Raises:
        ValueError: if there is no step, or ``decay`` is not in (0, 1].
    """
    if steps < 1 or not 0 < decay <= 1:
        raise ValueError(f"expected at least one step and a decay in (0, 1], got {steps} and {decay}")
    return torch.tensor([decay**step for step in range(steps)])
