"""Sums a loss over drafting steps and positions in chunks, since all rows of logits would not fit into memory.

Shapes: G drafting steps, N positions, D draft vocabulary, H hidden size of the drafter.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from arbordraft.training.losses import LossFunction, TeacherRows, acceptance


class DraftRows(NamedTuple):
    """The factors of one drafting step's rows of logits.

    Args:
        hidden: ``[N, H]`` inputs of the drafter's head.
        head: ``[D, H]`` weight of the head; steps may share it.
        bias: ``[D]`` bias of the head.
        partial: whether many positions have weight 0; they are then left out of the computation.
    """

    hidden: Tensor
    head: Tensor
    bias: Tensor | None = None
    partial: bool = False


class DistillationResult(NamedTuple):
    """Result of :func:`distillation_loss`; only the loss carries a gradient.

    Attributes:
        loss: scalar, the weighted sum.
        acceptance: ``[G, N]`` see :func:`~arbordraft.training.losses.acceptance`; ``None`` if not measured.
        agreement: ``[G, N]`` bool, whether both models find the same token most probable; ``None`` if not measured.
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
    """Sums a weighted loss over drafting steps and positions, with only ``chunk`` rows of logits in memory.

    Teacher rows of a chunk are computed once and serve all drafting steps. Gradients of hidden states, heads and biases
    are computed in the forward pass, chunk by chunk. The backward pass only scales them, which saves computing all
    logits twice. Matmuls run in autocast's type if autocast is on, else in the type of the head. All else runs in
    float32, or in float64 if the drafter's head does.

    Args:
        steps: rows of every drafting step at the N positions. Without any position, the loss and its gradients are 0.
        teacher: returns the target's ``[R, D]`` log-probabilities of the draft vocabulary at some positions.
        weights: ``[G, N]`` weights of the losses, not negative.
        loss: one of :data:`~arbordraft.training.losses.LOSSES`, or a function of the same kind.
        chunk: positions per chunk. It alone bounds the numbers that are held besides the gradients: 8 times
            ``chunk * D``, or 11 times for partial steps.
        measure: whether to return acceptance and agreement, which take a sixth of the time in addition.
    """
    # Steps may share parameters, whose gradients then add up in one place.
    shared = {id(t): t for step in steps for t in (step.head, step.bias) if t is not None}
    inputs = [*shared.values(), *(step.hidden for step in steps)]
    if not torch.is_grad_enabled():  # without a graph to belong to, the gradients would be computed in vain
        inputs = [tensor.detach() for tensor in inputs]
    at = {key: place for place, key in enumerate(shared)}
    places = [_Place(len(at) + g, at[id(s.head)], at.get(id(s.bias)), s.partial) for g, s in enumerate(steps)]
    # The largest weight is 1 until the end, so that gradients do not underflow in float16.
    scale = weights.max().clamp_min(torch.finfo(weights.dtype).tiny) if weights.numel() else weights.new_ones(())
    work = _Work(places, teacher, weights / scale, loss, chunk, measure)
    total, accepted, agreement = _ChunkedSum.apply(work, *inputs)
    return DistillationResult(total * scale, accepted, agreement)


class _Place(NamedTuple):
    """Places of the parts of :class:`DraftRows` among the inputs of :class:`_ChunkedSum`."""

    hidden: int
    head: int
    bias: int | None
    partial: bool


class _Work(NamedTuple):
    """Arguments of :class:`_ChunkedSum` that carry no gradient."""

    places: list[_Place]
    teacher: Callable[[slice], Tensor]
    weights: Tensor
    loss: LossFunction
    chunk: int
    measure: bool


class _ChunkedSum(torch.autograd.Function):
    """Weighted sum of losses of ``hidden @ head.T + bias``; with detached measurements, or None."""

    @staticmethod
    def forward(ctx: Any, work: _Work, *inputs: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        head = inputs[work.places[0].head]
        narrow, wide = _matmul_type(head), torch.promote_types(head.dtype, torch.float32)
        weights = work.weights.to(wide)
        rounded = [tensor.to(narrow) for tensor in inputs[: work.places[0].hidden]]
        # Wide, since every chunk adds to them; autograd itself casts them to the type of their inputs.
        grads = [
            torch.zeros_like(tensor, dtype=wide) if needed else None
            for tensor, needed in zip(inputs, ctx.needs_input_grad[1:], strict=True)
        ]
        total = torch.zeros((), dtype=wide, device=head.device)
        accepted = torch.zeros_like(weights) if work.measure else None
        agreement = torch.zeros_like(weights, dtype=torch.bool) if work.measure else None

        def add(step: int, part: slice, teacher: TeacherRows) -> None:  # frees its logits on return
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
    """Returns the type in which ``weight`` is multiplied: autocast's if autocast is on, else its own."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
