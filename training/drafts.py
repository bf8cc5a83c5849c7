"""Lets a drafter draft along text of the target; describes every draft as deciders see it in decoding.

The target wrote the text, so a draft that follows it is accepted. Its later steps have the inputs that they have in
decoding, and count as often as decoding reaches them.

Shapes: B sequences, L tokens, R rows, G drafting steps, M drafts, H hidden size of the drafter or 0, K highest
probabilities of a row. A draft begins at every token of an answer at which one can begin.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from arbordraft import RaggedModel
from arbordraft.deciders.learned import UNLIKELY
from arbordraft.training.batches import Batch
from arbordraft.training.features import TeacherHead
from arbordraft.training.shards import ANSWER
from arbordraft.training.students.base import Prediction, Student

_ROWS = 256  # rows of logits at a time
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Drafts:
    """The drafts of a batch.

    Args:
        places: ``[G, M, 3]``, see :meth:`arbordraft.LearnedDecider.logits`.
        statistics: ``[G, M, 1 + K]``, see there.
        hidden: ``[G, M, H]``, see there.
        labels: ``[G, M]`` 1 - TV of target and draft row, both at the temperature of the text. At temperature 0 both
            rows are one-hot, and the target's token is the text's.
        passes: ``[G, M]`` chance that the text's token passes if those before it did, ``min(1, q(x) / p(x))``.
        ranks: ``[G, M]`` int64: how many draft tokens are more probable than the text's.
        weights: ``[G, M]`` chance that the draft reaches this step: the product of earlier ``passes``.
        valid: ``[G, M]`` bool: whether the answer reaches this step. If not, ``passes`` and ``weights`` are 0,
            ``ranks`` are the size of the vocabulary, and the other fields are undefined.
        sequences: ``[M]`` index of the sequence in the batch.
        answers: ``[M]`` number of the answer in the batch. Drafts come in the order in which they begin.
    """

    places: Tensor
    statistics: Tensor
    hidden: Tensor
    labels: Tensor
    passes: Tensor
    ranks: Tensor
    weights: Tensor
    valid: Tensor
    sequences: Tensor
    answers: Tensor


@torch.no_grad()
def follow(
    student: Student,
    batch: Batch,
    target: RaggedModel,
    teacher: TeacherHead,
    steps: int,
    top_k: int = 0,
    hidden_size: int = 0,
) -> Drafts:
    """Lets the student draft along a batch.

    Args:
        student: student with its network.
        batch: batch of the target's text.
        target: the target.
        teacher: the target's head.
        steps: G; steps beyond the student's own depth are not valid.
        top_k: K.
        hidden_size: H, or 0 to leave hidden states out.
    """
    predictions = list(student.unroll(batch, target, min(steps, batch.tokens.shape[1] - 2)))
    by_token = _rows(student, batch, teacher, predictions, top_k)
    if student.steps_alike:
        predictions, by_token = predictions * steps, by_token.expand(steps, -1, -1, -1)
    by_token = functional.pad(by_token, (0, 0, 0, 0, 0, 0, 0, steps - len(by_token)))
    rows = torch.stack([_earlier(step_rows, step) for step, step_rows in enumerate(by_token)])
    sequences, first = rows[0, ..., 0].nonzero(as_tuple=True)
    rows = rows[:, sequences, first]
    real, labels, passes, own, ranks = rows[..., :5].unbind(-1)
    valid = real.cumprod(dim=0)
    hidden = rows.new_zeros(*valid.shape, hidden_size)
    if hidden_size:
        for step, prediction in enumerate(predictions):
            slots = (first + step - prediction.ahead).clamp(max=prediction.hidden.shape[1] - 1)
            hidden[step] = prediction.hidden[sequences, slots, :hidden_size].float()
    depths = torch.arange(steps, device=rows.device)[:, None].expand_as(valid)
    reach = _before(own.clamp(min=UNLIKELY).log(), 0.0).cumsum(dim=0)
    greedy = (batch.temperatures[sequences] == 0).expand_as(valid)
    return Drafts(
        places=torch.stack([depths, reach, greedy], dim=-1),
        statistics=rows[..., 5:],
        hidden=hidden,
        labels=labels,
        passes=passes * valid,
        ranks=ranks.where(valid > 0, len(teacher.weight)).long(),
        weights=_before(passes, 1.0).cumprod(dim=0) * valid,
        valid=valid.bool(),
        sequences=sequences,
        answers=functional.pad(((sequences.diff() != 0) | (first.diff() != 1)).cumsum(dim=0), (1, 0)),
    )


def _rows(
    student: Student, batch: Batch, teacher: TeacherHead, predictions: Sequence[Prediction], top_k: int
) -> Tensor:
    """Computes ``[G, B, L, 6 + K]`` figures of the rows that predict tokens of answers, at these tokens.

    The last axis holds 1 if there is such a row, its label, the chance that the token passes, the token's draft
    probability and rank, the row's entropy and its highest probabilities.
    """
    count, length = batch.tokens.shape
    vocabulary = student.tokens
    rows = torch.zeros(len(predictions), count * length, 6 + top_k, device=batch.tokens.device)
    for part in (batch.roles == ANSWER).flatten().nonzero()[:, 0].split(_ROWS):
        sequences, at = part // length, part % length
        text = batch.tokens[sequences, at]
        greedy = batch.temperatures[sequences] == 0
        temperature = batch.temperatures[sequences].masked_fill(greedy, 1.0)[
            :, None
        ]  # as in decoding, greedy drafts at 1
        # One target row serves all drafting steps.
        target = (teacher(batch.final[sequences, at - 1]).float() / temperature).softmax(dim=-1)
        likely = target.gather(1, text[:, None])[:, 0].clamp(min=_TINY)
        known, place = torch.ones_like(greedy), text
        if vocabulary is not None:  # other tokens have probability 0
            target, place = target[:, vocabulary], torch.searchsorted(vocabulary, text).clamp(max=len(vocabulary) - 1)
            known = vocabulary[place] == text
        for step, prediction in enumerate(predictions):
            slots = at - prediction.ahead
            hidden = prediction.hidden[sequences, slots.clamp(min=0)].to(prediction.head.dtype)
            logits = functional.linear(hidden, prediction.head, prediction.bias)
            draft = (logits.float() / temperature).softmax(dim=-1)
            own = draft.gather(1, place[:, None])[:, 0] * known
            rank = (draft > own[:, None]).sum(dim=-1)
            matches = ((draft.argmax(dim=-1) == place) & known).float()
            label = torch.where(greedy, matches, torch.minimum(target, draft).sum(dim=-1).clamp(max=1))
            passes = torch.where(greedy, matches, (own / likely).clamp(max=1))
            entropy = torch.special.entr(draft).sum(dim=-1)
            row = torch.stack([torch.ones_like(own), label, passes, own, rank, entropy], dim=-1)
            row = torch.cat([row, draft.topk(min(top_k, draft.shape[-1])).values], dim=-1)
            rows[step, part, : row.shape[-1]] = row * (slots >= prediction.first)[:, None]
    return rows.unflatten(1, (count, length))


def _earlier(x: Tensor, by: int) -> Tensor:
    """Shifts ``[B, L, C]``: place j gets the values of j + by."""
    return functional.pad(x[:, by:], (0, 0, 0, min(by, x.shape[1])))


def _before(x: Tensor, start: float) -> Tensor:
    """Shifts ``[G, M]``: step s gets the values of step s - 1, the first step gets ``start``."""
    return torch.cat([torch.full_like(x[:1], start), x[:-1]])
