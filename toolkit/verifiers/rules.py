"""Rules: decisions among the children of one node.

A rule does not sample. It returns the law of its outcome, for the sub-stochastic target ``weight * target`` plus a null
token of mass ``1 - weight``. With ``weight = 1`` this is the ordinary rule. A tree verifier samples the law.

Shapes: V vocabulary, k children.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arbordraft.sampling.laws import DraftLaw
from arbordraft.sampling.noise import residual
from arbordraft.trees.verdict import Exactness
from arbordraft.utils.checks import check_instance


@dataclass(frozen=True)
class NodeLaw:
    """The joint law of a rule's outcome at one node; ``sum(accept) + stop.sum() + reject = 1``.

    Args:
        accept: probability of continuing with each child.
        stop: ``[V]`` probability of ending here with each token; 0 for tokens that are children.
        reject: probability of the null token, which means that this prefix gives its mass back.
    """

    accept: list[float]
    stop: Tensor
    reject: float


class Rule(nn.Module):
    """Couples the drafted children of a node with the target, for one family of draft laws."""

    exactness = Exactness.EXACT
    rejects_in_turn = False  # whether its law is that of recursive rejection, which a device runs for all trees at once

    def supports(self, law: DraftLaw) -> bool:
        """Returns whether the rule is valid for children drawn by ``law``."""
        raise NotImplementedError

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        """Implements the rule; may leave stop mass on drafted tokens, must not write to its inputs."""
        raise NotImplementedError

    def forward(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        """Returns the law of the outcome at one node.

        Args:
            target: ``[V]`` target probabilities.
            weight: share of the target's mass that this prefix still has to emit, in [0, 1].
            draft: ``[V]`` draft row that the children were drawn from; ``None`` for deterministic laws.
            tokens: the children in the order of drawing; IID draws and certain children may repeat a token.
            law: the law that drew the children.

        Raises:
            ValueError: if the draft row is missing, or is evidently not the one that the children were drawn from.

        Examples:
            >>> from arbordraft.sampling.laws import IID
            >>> target, draft = torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75])
            >>> law = RecursiveRejection()(target, 1.0, draft, [1], IID(1))
            >>> round(law.accept[0], 4), [round(mass, 4) for mass in law.stop.tolist()]
            (0.6667, [0.3333, 0.0])
        """
        node = self.node_law(target, weight, draft, tokens, law)
        accept = list(node.accept)
        for child, token in enumerate(tokens):
            # To emit a drafted token is to continue with its child (the first one, if the token is repeated).
            accept[child] += node.stop[token].item()
            node.stop[token] = 0
        return NodeLaw(accept, node.stop, node.reject)


class Matching(Rule):
    """Draws one token from the target and continues if it is among the children: valid for any draft law.

    Source: SpecInfer's naive sampling; EAGLE-2's verification with draft probability 1.
    """

    def supports(self, law: DraftLaw) -> bool:
        return True

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        return NodeLaw([0.0] * len(tokens), target * weight, 1 - weight)


class RecursiveRejection(Rule):
    """Tries the children one after the other, each against the residual that the earlier ones left.

    With IID draws this is SpecInfer's multi-step sampling. With draws without replacement, it is the sampling of RSD,
    MCSD and Sequoia. The law supplies the proposal of every child, so the two cannot be mixed up.
    """

    rejects_in_turn = True

    def supports(self, law: DraftLaw) -> bool:
        return True

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        return reject_in_turn(target, weight, tokens, law.proposals(draft, tokens))


class TopTailRule(Rule):
    """Applies recursive rejection to the tail tokens; each top is accepted with its mass in the residual.

    Its law equals that of :class:`RecursiveRejection`, but it needs no pass over the vocabulary per top. Tails go
    first: trying the certain tokens first is lossless, too, but accepts less. With one tail, it reaches the optimum of
    its draft law.

    Source: for one tail, Hu et al. (ICLR 2025).
    """

    rejects_in_turn = True

    def supports(self, law: DraftLaw) -> bool:
        return not law.replacement and law.tails > 0

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        tails = [proposal for proposal in law.proposals(draft, tokens) if proposal is not None]
        tail_law = reject_in_turn(target, weight, tokens[: len(tails)], tails)
        return NodeLaw(tail_law.accept + [0.0] * (len(tokens) - len(tails)), tail_law.stop, tail_law.reject)


class Remembered(Rule):
    """Caches the node laws of a rule, for enumerations that repeat the same node.

    Raises:
        TypeError: if ``rule`` is not a :class:`Rule`.
    """

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        check_instance("rule", rule, Rule)
        self.rule = rule
        self._answers: dict[object, NodeLaw] = {}
        self._rows: dict[object, tuple[Tensor, tuple[torch.dtype, bytes]]] = {}

    def supports(self, law: DraftLaw) -> bool:
        return self.rule.supports(law)

    def forward(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        rows = [None if row is None else self._content(row) for row in (target, draft)]
        key = (*rows, weight, tuple(tokens), type(law), law.extra_repr())
        if key not in self._answers:
            self._answers[key] = self.rule(target, weight, draft, tokens, law)
        return self._answers[key]

    def _content(self, row: Tensor) -> tuple[torch.dtype, bytes]:
        """Returns the numbers of a row; they are read once, as long as the row stays as it is."""
        if row.is_inference():  # such a row may change without a trace
            return _numbers(row)
        place = (row.data_ptr(), row._version, row.dtype, row.shape, row.stride())
        if place not in self._rows:  # the row is kept, so that no other takes its place in memory
            self._rows[place] = row, _numbers(row)
        return self._rows[place][1]


def _numbers(row: Tensor) -> tuple[torch.dtype, bytes]:
    return row.dtype, row.cpu().numpy().tobytes()


def reject_in_turn(target: Tensor, weight: float, tokens: Sequence[int], proposals: Iterable[Tensor | None]) -> NodeLaw:
    """Returns the law of rejection sampling, child by child; the proposal of a certain child is ``None``."""
    accept: list[float] = []
    # `rest` and `null` are the law of the emitted token, given that all children so far were rejected.
    rest, null, left = target * weight, 1 - weight, 1.0
    for token, proposal in zip(tokens, proposals, strict=True):
        chance = rest[token].item()
        ratio = min(1.0, chance if proposal is None else chance / drafted(proposal, token))
        accept.append(left * ratio)
        left *= 1 - ratio
        mass = 0.0
        if left > 0:
            if proposal is None:
                rest[token] = 0
            else:
                rest = residual(rest, proposal)
            mass = rest.sum().item() + null
        if mass <= 0:  # rejection has probability 0
            accept += [0.0] * (len(tokens) - len(accept))
            return NodeLaw(accept, torch.zeros_like(target), 0.0)
        rest, null = rest.div_(mass), null / mass
    return NodeLaw(accept, rest.mul_(left), null * left)


def drafted(draft: Tensor, token: int) -> float:
    """Returns the probability with which a token was drafted; raises ValueError if it is not positive."""
    probability = draft[token].item()
    if not probability > 0:
        raise ValueError(
            f"token {token} was drafted with probability {probability}: the draft row is not the one sampled"
        )
    return probability


def scaled(stop: Tensor, null: float, mass: float) -> tuple[Tensor, float]:
    """Splits ``mass`` among the tokens (in place) and the null token in proportion to their current masses."""
    total = stop.sum().item() + null
    scale = mass / total if total > 0 else 0.0
    return stop.mul_(scale), null * scale
