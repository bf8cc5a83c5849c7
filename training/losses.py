"""Losses that distil a target model into a drafter, and their sum over a vocabulary too large to hold.

The teacher is the target, the student the drafter. Both are compared on the *draft vocabulary*, all of the target's or
a part of it. A teacher row is not renormalised to that part: what it lacks to 1 is the mass of the other tokens, which
can never be drafted, and only with it is the acceptance the one that decoding will show.

A loss gives its gradient along with its value, in closed form: on rows of this size autograd would cost as much as the
matrices. Every ``LossFunction`` takes teacher rows and the student's logits and returns losses ``[N]`` and gradients
``[N, D]`` by these logits.

Shapes: G drafting steps, N positions, D draft vocabulary, H hidden size of the drafter. Teacher rows p ``[N, D]`` hold
probabilities with a sum S of at most 1; student rows q ``[N, D]`` are the softmax of finite logits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class TeacherRows(NamedTuple):
    """What losses read of teacher rows, computed once for all drafting steps.

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
        """From ``[N, D]`` finite log-probabilities."""
        probs = log_probs.exp()
        return cls(log_probs, probs, probs.sum(dim=-1), torch.linalg.vecdot(probs, log_probs))


LossFunction = Callable[[TeacherRows, Tensor], tuple[Tensor, Tensor]]


def acceptance(teacher: TeacherRows, logits: Tensor) -> Tensor:
    """``[N]`` Σ min(p, q), the chance that rejection sampling accepts a draft from q (Leviathan et al., ICML 2023)."""
    return torch.minimum(teacher.probs, logits.softmax(dim=-1)).sum(dim=-1)


def forward_kl(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Σ p (log p - log q), the cross entropy of soft labels less the constant that makes it 0 at q = p.

    At least S log S, reached by q = p / S: never negative if S = 1, but negative for less.
    For drafters see DistillSpec (Zhou et al., ICLR 2024), also for the reverse and the total variation.
    """
    q, normaliser = _softmax(logits)
    losses = teacher.negentropy - torch.linalg.vecdot(teacher.probs, logits) + teacher.mass * normaliser
    return losses, q.mul_(teacher.mass[:, None]).sub_(teacher.probs)


def reverse_kl(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Σ q (log q - log p), which drives q away from tokens that the target would not choose.

    Least, -log S, at q = p / S.
    """
    log_q = logits.log_softmax(dim=-1)
    ratios = log_q - teacher.log_probs
    q = log_q.exp_()
    losses = torch.linalg.vecdot(q, ratios)
    return losses, ratios.sub_(losses[:, None]).mul_(q)


def cross_entropy(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """-log q of the most probable token of the teacher row."""
    tokens = teacher.probs.argmax(dim=-1, keepdim=True)
    return _sparse_cross_entropy(torch.ones_like(tokens, dtype=logits.dtype), tokens, logits)


def total_variation(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """1 - Σ min(p, q) in [0, 1]: the total variation between both rows once the missing mass is a token too.

    Its gradient vanishes where q has little in common with p; start from another loss, or from a trained drafter.
    """
    q = logits.softmax(dim=-1)
    alpha, below = _overlap(teacher, q)
    return 1 - alpha, q.mul_(below.sum(dim=-1, keepdim=True)).sub_(below)


def lk_nla(teacher: TeacherRows, logits: Tensor) -> tuple[Tensor, Tensor]:
    """-log Σ min(p, q), the negative log acceptance; at least -log S.

    Its gradient is that of the total variation divided by the acceptance, and alive however small that is, as all is
    done in logarithms. Source: LK losses (Samarin et al., 2026, arXiv 2602.23881).
    """
    log_q = logits.log_softmax(dim=-1)
    shares = torch.minimum(teacher.log_probs, log_q)
    log_alpha = shares.logsumexp(dim=-1)
    shares = shares.sub_(log_alpha[:, None]).exp_().mul_(log_q < teacher.log_probs)
    return -log_alpha, log_q.exp_().mul_(shares.sum(dim=-1, keepdim=True)).sub_(shares)


def lk_hybrid(teacher: TeacherRows, logits: Tensor, eta: float = 3.0) -> tuple[Tensor, Tensor]:
    """w KL + (1 - w) TV with w = exp(-eta α): from the forward KL to the total variation as acceptance α grows.

    The weight is that of the position itself, and no gradient flows through it.
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
    """-Σ p log q over the ``k`` tokens that the target finds most probable, or all if there are fewer.

    Source: HASS (Zhang et al., 2024; ICLR 2025).
    """
    return _sparse_cross_entropy(*teacher.probs.topk(min(k, teacher.probs.shape[-1]), dim=-1), logits)


def _sparse_cross_entropy(weights: Tensor, tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """-Σ w log q over ``[N, k]`` tokens."""
    q, normaliser = _softmax(logits)
    mass = weights.sum(dim=-1)
    losses = mass * normaliser - (weights * logits.gather(-1, tokens)).sum(dim=-1)
    return losses, q.mul_(mass[:, None]).scatter_add_(-1, tokens, -weights)


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """q and the ``[N]`` log-sum-exp of the logits, without the pass that log q would take."""
    q = logits.softmax(dim=-1)
    return q, logits.amax(dim=-1) - q.amax(dim=-1).log()


def _overlap(teacher: TeacherRows, q: Tensor) -> tuple[Tensor, Tensor]:
    """``[N]`` acceptance, and q where it is below p, which is all that the acceptance gains or loses by q; else 0."""
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


class DraftRows(NamedTuple):
    """The rows of one drafting step, before they are multiplied out.

    Args:
        hidden: ``[N, H]`` what the drafter puts into its head.
        head: ``[D, H]`` weight of that head; steps may share it.
        bias: ``[D]`` of that head.
        partial: whether many positions weigh 0, which are then left out of the computation.
    """

    hidden: Tensor
    head: Tensor
    bias: Tensor | None = None
    partial: bool = False


class DistillationResult(NamedTuple):
    """What :func:`distillation_loss` returns; only the loss carries a gradient.

    Attributes:
        loss: scalar, the weighted sum.
        acceptance: ``[G, N]`` see :func:`acceptance`; ``None`` if it was not asked for.
        agreement: ``[G, N]`` bool, whether both find the same token most probable; likewise.
    """

    loss: Tensor
    acceptance: Tensor | None
    agreement: Tensor | None


def distillation_loss(
    steps: Sequence[DraftRows],
    teacher: Callable[[slice], Tensor],
    weights: Tensor,
    loss: LossFunction,
    chunk: int,
    *,
    measure: bool = False,
) -> DistillationResult:
    """Weighted sum of a loss over drafting steps and positions, with only ``chunk`` rows of logits in memory.

    Teacher rows of a chunk are computed once and serve all drafting steps. Gradients of hidden states, heads and biases
    are computed in the forward pass, chunk by chunk, and only scaled in the backward pass, which saves computing all
    logits twice. Matmuls run in autocast's type where autocast is on, else in the type of the head; all else in
    float32, or float64 if the drafter's head is.

    Args:
        steps: what every drafting step predicts at the N positions. Without any position, the loss and its gradients
            are 0.
        teacher: gives the ``[R, D]`` target's log-probabilities of the draft vocabulary at some positions.
        weights: ``[G, N]`` of the losses, not negative.
        loss: one of :data:`LOSSES`, or a function of the same kind.
        chunk: positions per chunk. All losses hold 5 to 9 times ``chunk * D`` numbers, besides the gradients.
        measure: return acceptance and agreement, which cost a quarter of the time that the losses do.
    """
    # Steps share parameters, whose gradients then add up in one place.
    shared = {id(t): t for step in steps for t in (step.head, step.bias) if t is not None}
    inputs = [*shared.values(), *(step.hidden for step in steps)]
    if not torch.is_grad_enabled():  # without a graph to belong to, the gradients would be computed in vain
        inputs = [tensor.detach() for tensor in inputs]
    at = {key: place for place, key in enumerate(shared)}
    places = [_Place(len(at) + g, at[id(s.head)], at.get(id(s.bias)), s.partial) for g, s in enumerate(steps)]
    # The largest weight is 1 until the end, lest gradients underflow in float16.
    scale = weights.max().clamp_min(torch.finfo(weights.dtype).tiny) if weights.numel() else weights.new_ones(())
    work = _Work(places, teacher, weights / scale, loss, chunk, measure)
    total, accepted, agreement = _ChunkedSum.apply(work, *inputs)
    return DistillationResult(total * scale, accepted, agreement)


class _Place(NamedTuple):
    """Where among the inputs of :class:`_ChunkedSum` the parts of :class:`DraftRows` are."""

    hidden: int
    head: int
    bias: int | None
    partial: bool


class _Work(NamedTuple):
    """What :class:`_ChunkedSum` does."""

    places: list[_Place]
    teacher: Callable[[slice], Tensor]
    weights: Tensor
    loss: LossFunction
    chunk: int
    measure: bool


class _ChunkedSum(torch.autograd.Function):
    """Weighted sum of losses of ``hidden @ head.T + bias``, with what was measured, detached, or None."""

    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        head = inputs[work.places[0].head]
        narrow, wide = _matmul_type(head), torch.promote_types(head.dtype, torch.float32)
        weights = work.weights.to(wide)
        rounded = [tensor.to(narrow) for tensor in inputs[: work.places[0].hidden]]
        # Wide, as every chunk adds to them; autograd itself brings them to the type of what they belong to.
        grads = [
            torch.zeros_like(tensor, dtype=wide) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        total = torch.zeros((), dtype=wide, device=head.device)
        accepted = torch.zeros_like(weights) if work.measure else None
        agreement = torch.zeros_like(weights, dtype=torch.bool) if work.measure else None

        def add(step: int, part: slice, teacher: TeacherRows) -> None:  # frees its logits before those of the next
            at, head_at, bias_at, partial = work.places[step]
            matrix, offset = rounded[head_at], None if bias_at is None else rounded[bias_at]
            rows: slice | Tensor = part
            if partial:
                kept = (weights[step, part] > 0).nonzero()[:, 0]
                rows, teacher = part.start + kept, TeacherRows(*(values[kept] for values in teacher))
            features, weight = inputs[at][rows].to(narrow), weights[step, rows]
            logits = F.linear(features, matrix, offset).to(wide)
            if accepted is not None and agreement is not None:
                accepted[step, rows] = acceptance(teacher, logits)
                agreement[step, rows] = logits.argmax(dim=-1) == teacher.probs.argmax(dim=-1)
            losses, slopes = work.loss(teacher, logits)
            total.add_(losses @ weight)
            slopes = slopes.to(narrow)
            if (grad := grads[at]) is not None:
                grad[rows] = (slopes @ matrix).to(wide) * weight[:, None]
            features = features * weight[:, None].to(narrow)
            if (grad := grads[head_at]) is not None and wide == narrow:
                grad.addmm_(slopes.T, features)  # spares a matrix of the size of the head
            elif grad is not None:
                grad.add_(slopes.T @ features)
            if bias_at is not None and (grad := grads[bias_at]) is not None:
                grad.add_(weight.to(narrow) @ slopes)

        with torch.autocast(head.device.type, enabled=False):
            for start in range(0, weights.shape[1], work.chunk):
                rows = slice(start, start + work.chunk)
                teacher = TeacherRows.of(work.teacher(rows).to(wide))
                for step in range(len(work.places)):
                    add(step, rows, teacher)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(*(tensor for tensor in (accepted, agreement) if tensor is not None))
        return total, accepted, agreement

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *(None if grad is None else grad * slope for grad in ctx.saved_tensors))


def _matmul_type(weight: Tensor) -> torch.dtype:
    """Type in which autocast, if it is on, would multiply with ``weight``."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
