"""Losses that distil a target model into a drafter, and their sum over a vocabulary too large to hold.

The teacher is the target, the student the drafter. Both are compared on the *draft vocabulary*, all of the target's or
a part of it. A teacher row is not renormalised to that part: what it lacks to 1 is the mass of the other tokens, which
can never be drafted, and only with it is the acceptance the one that decoding will show.

Shapes: N positions, D draft vocabulary, H hidden size of the drafter, T of the target. Teacher rows p ``[N, D]`` hold
probabilities with a sum of at most 1, student rows log q ``[N, D]`` finite log-probabilities, whose exponentials sum
to 1. Losses are ``[N]``, differentiable in log q only.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LossFunction = Callable[[Tensor, Tensor], Tensor]  # (target_probs [N, D], draft_log_probs [N, D]) -> [N]

_FLOOR = torch.finfo(torch.float32).tiny  # a softmax in float32 underflows to 0 about here


def acceptance(target_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """``[N]`` Σ min(p, q), the chance that rejection sampling accepts a draft from q (Leviathan et al., ICML 2023)."""
    return torch.minimum(target_probs, draft_log_probs.exp()).sum(dim=-1)


def forward_kl(target_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """``[N]`` Σ p (log p - log q), the cross entropy of soft labels less the constant that makes it 0 at q = p.

    At least S log S for a teacher row of sum S, reached by q = p / S: never negative if S = 1, but negative for less.
    For drafters see DistillSpec (Zhou et al., ICLR 2024), also for the reverse and the total variation.
    """
    return (torch.xlogy(target_probs, target_probs) - target_probs * draft_log_probs).sum(dim=-1)


def reverse_kl(target_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """``[N]`` Σ q (log q - log p), which drives q away from tokens that the target would not choose.

    It is infinite where p = 0 < q. There p is floored at the smallest normal float32, which costs 87 nats per unit of q
    and thus keeps the loss and its gradient finite. Least, -log S, at q = p / S for a teacher row of sum S.
    """
    return (draft_log_probs.exp() * (draft_log_probs - target_probs.clamp_min(_FLOOR).log())).sum(dim=-1)


def cross_entropy(target_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """``[N]`` -log q of the most probable token of the teacher row."""
    return F.nll_loss(draft_log_probs, target_probs.argmax(dim=-1), reduction="none")


def total_variation(target_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """``[N]`` in [0, 1]: 1 - Σ min(p, q), the total variation between both rows once the missing mass is a token too.

    Its gradient vanishes where q has little in common with p; start from another loss, or from a trained drafter.
    """
    return 1 - acceptance(target_probs, draft_log_probs)


def lk_nla(target_probs: Tensor, draft_log_probs: Tensor) -> Tensor:
    """``[N]`` -log Σ min(p, q), the negative log acceptance; at least -log S for a teacher row of sum S.

    Its gradient is that of the total variation divided by the acceptance, and alive however small that is, as all is
    done in logarithms. A row without any mass, which nothing can improve, counts 87 instead of infinitely much.
    Source: LK losses (Samarin et al., 2026, arXiv 2602.23881).
    """
    log_overlap = torch.minimum(target_probs.log(), draft_log_probs).logsumexp(dim=-1)
    return -log_overlap.masked_fill(log_overlap.isneginf(), math.log(_FLOOR))


def lk_hybrid(target_probs: Tensor, draft_log_probs: Tensor, eta: float = 3.0) -> Tensor:
    """``[N]`` w KL + (1 - w) TV with w = exp(-eta α): from the forward KL to the total variation as acceptance α grows.

    The weight is that of the position itself, and no gradient flows through it.
    Source: LK losses (Samarin et al., 2026, arXiv 2602.23881).
    """
    alpha = acceptance(target_probs, draft_log_probs)
    weight = (-eta * alpha.detach()).exp()
    return weight * forward_kl(target_probs, draft_log_probs) + (1 - weight) * (1 - alpha)


def topk_distillation(target_probs: Tensor, draft_log_probs: Tensor, k: int = 10) -> Tensor:
    """``[N]`` -Σ p log q over the ``k`` tokens that the target finds most probable, or all if there are fewer.

    Source: HASS (Zhang et al., 2024; ICLR 2025).
    """
    probs, tokens = target_probs.topk(min(k, target_probs.shape[-1]), dim=-1)
    return -(probs * draft_log_probs.gather(-1, tokens)).sum(dim=-1)


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
    """The loss that a configuration file calls ``name``.

    Raises:
        ValueError: if there is none of that name.
    """
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r}; choose one of {', '.join(LOSSES)}")
    return LOSSES[name]


def position_decay(steps: int, decay: float) -> Tensor:
    """``[steps]`` float32 weights ``decay ** s`` (Medusa: Cai et al., ICML 2024), as later drafts are tried less often.

    Raises:
        ValueError: if there is no step, or ``decay`` is not in (0, 1].
    """
    if steps < 1 or not 0 < decay <= 1:
        raise ValueError(f"expected at least one step and a decay in (0, 1], got {steps} and {decay}")
    return torch.tensor([decay**step for step in range(steps)])


class DistillationResult(NamedTuple):
    """What :func:`distillation_loss` returns; only the loss carries a gradient.

    Attributes:
        loss: scalar, the mean.
        acceptance: ``[N]`` see :func:`acceptance`.
        agreement: ``[N]`` bool, whether both find the same token most probable.
    """

    loss: Tensor
    acceptance: Tensor
    agreement: Tensor


def distillation_loss(
    hidden: Tensor,
    head: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    teacher_logits: Callable[[Tensor], Tensor],
    loss: LossFunction,
    chunk: int,
) -> DistillationResult:
    """Mean of a loss over positions, without ever holding more than ``chunk`` rows of logits.

    Gradients of ``hidden``, ``head`` and ``bias`` are computed in the forward pass, chunk by chunk, and only scaled in
    the backward pass, which saves computing all logits twice. Matmuls run in autocast's type where autocast is on, else
    in the type of the head; all else in float32, or float64 if the drafter's head is. Teacher rows are normalised over
    the draft vocabulary: the target given that it says such a token.

    Args:
        hidden: ``[N, H]`` what the drafter puts into its head. Without any, the loss and its gradients are 0.
        head: ``[D, H]`` weight of that head.
        bias: ``[D]`` of that head.
        teacher_hidden: ``[N, T]`` what the target puts into its own.
        teacher_head: ``[D, T]`` weight of the target's head, the rows of the draft vocabulary.
        teacher_logits: maps the float32 products with ``teacher_head`` to the target's final logits: bias, soft-cap.
        loss: one of :data:`LOSSES`, or a function of the same kind.
        chunk: positions per chunk. All losses hold 5 to 9 times ``chunk * D`` numbers, besides the gradients.
    """
    teacher = teacher_head.detach().to(_matmul_type(teacher_head))

    def evaluate(rows: slice, draft_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            products = F.linear(teacher_hidden[rows].to(teacher.dtype), teacher)
            target_probs = teacher_logits(products.to(draft_logits.dtype)).softmax(dim=-1)
        draft_log_probs = draft_logits.log_softmax(dim=-1)
        agreement = draft_logits.argmax(dim=-1) == target_probs.argmax(dim=-1)
        return loss(target_probs, draft_log_probs), acceptance(target_probs, draft_log_probs.detach()), agreement

    # Without a graph to belong to, the gradients would be computed in vain.
    inputs = [t if t is None or torch.is_grad_enabled() else t.detach() for t in (hidden, head, bias)]
    total, accepted, agreement = _ChunkedSum.apply(*inputs, chunk, evaluate)
    return DistillationResult(total / max(1, len(hidden)), accepted, agreement)


class _ChunkedSum(torch.autograd.Function):
    """Sum of a function of ``hidden @ head.T + bias``, which also returns two detached values per row.

    Not the mean: gradients are stored before the division, lest they underflow in float16.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        chunk: int,
        evaluate: Callable[[slice, Tensor], tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor, Tensor]:
        narrow, wide = _matmul_type(head), torch.promote_types(head.dtype, torch.float32)
        matrix, offset = head.to(narrow), None if bias is None else bias.to(narrow)
        needed = ctx.needs_input_grad[:3]
        # Wide, as every chunk adds to them; autograd itself brings them to the type of what they belong to.
        grad_hidden, grad_head, grad_bias = (
            torch.zeros_like(source, dtype=wide) if source is not None and wanted else None
            for source, wanted in zip((hidden, head, bias), needed, strict=True)
        )
        total = torch.zeros((), dtype=wide, device=head.device)
        accepted = torch.zeros(len(hidden), dtype=wide, device=head.device)
        agreement = torch.zeros(len(hidden), dtype=torch.bool, device=head.device)

        def add(rows: slice) -> None:  # a function, for its logits to be freed before those of the next chunk
            features = hidden[rows].to(narrow)
            logits = F.linear(features, matrix, offset).to(wide).requires_grad_(any(needed))
            with torch.enable_grad():
                losses, accepted[rows], agreement[rows] = evaluate(rows, logits)
                part = losses.sum()
            total.add_(part.detach())
            if not any(needed):
                return
            (slope,) = torch.autograd.grad(part, logits)
            if grad_bias is not None:
                grad_bias.add_(slope.sum(dim=0))
            slope = slope.to(narrow)
            if grad_hidden is not None:
                grad_hidden[rows] = (slope @ matrix).to(wide)
            if grad_head is not None and wide == narrow:
                grad_head.addmm_(slope.T, features)  # spares a matrix of the size of the head
            elif grad_head is not None:
                grad_head.add_(slope.T @ features)

        with torch.autocast(head.device.type, enabled=False):
            for start in range(0, len(hidden), chunk):
                add(slice(start, start + chunk))
        ctx.save_for_backward(grad_hidden, grad_head, grad_bias)
        ctx.mark_non_differentiable(accepted, agreement)
        return total, accepted, agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if grad is None else grad * slope for grad in ctx.saved_tensors), None, None)


def _matmul_type(weight: Tensor) -> torch.dtype:
    """Type in which autocast, if it is on, would multiply with ``weight``."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
