"""Rules: what happens among the children of one node.

A rule does not sample. It returns its law, for the sub-stochastic target ``weight * target`` plus a null
token of mass ``1 - weight``; with ``weight = 1`` this is the ordinary rule. A tree verifier samples the law.

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
        stop: ``[V]`` probability of ending here with that token; 0 for tokens that are children.
        reject: probability of the null token: this prefix gives its mass back.
    """

    accept: list[float]
    stop: Tensor
    reject: float


class Rule(nn.Module):
    """Couples the drafted children of a node with the target, for one family of draft laws."""

    exactness = Exactness.EXACT
    rejects_in_turn = False  # whether its outcome has the law of recursive rejection, which a device does for all trees

    def supports(self, law: DraftLaw) -> bool:
        """Whether the rule is valid for children drawn by ``law``."""
        raise NotImplementedError

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        """The rule itself: may leave stop mass on drafted tokens, must not write to its inputs."""
        raise NotImplementedError

    def forward(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        """Law of the outcome at one node.

        Args:
            target: ``[V]`` target probabilities.
            weight: in [0, 1]: the share of the target's mass that this prefix still has to emit.
            draft: ``[V]`` draft row the children were drawn from; ``None`` for deterministic laws.
            tokens: the children in the order of drawing; IID draws and certain children may repeat a token.
            law: the law that drew them.

        Raises:
            ValueError: if the row that the children were drawn from is missing or is evidently another one.

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
            # Emitting a token that is drafted anyway means continuing with it (with the first, if repeated).
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
    """Tries the children one after the other, each against the residual that the ones before it left.

    With IID draws this is SpecInfer's multi-step sampling, without replacement that of RSD, MCSD and Sequoia.
    The law supplies the proposal of every child, so with- and without-replacement cannot be mixed up.
    """

    rejects_in_turn = True

    def supports(self, law: DraftLaw) -> bool:
        return True

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        return reject_in_turn(target, weight, tokens, law.proposals(draft, tokens))


class TopTailRule(Rule):
    """Recursive rejection among the tail tokens; the tops take what the residual gives them.

    The same law as :class:`RecursiveRejection`, without a pass over the vocabulary per top. Tails go first:
    trying the certain tokens first is lossless too, but accepts less. With one tail it reaches the optimum of
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
    """A rule that works out its answer to the same question once, for enumerations that ask often.

    Raises:
        TypeError: if ``rule`` is no :class:`Rule`.
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
        place = (row.data_ptr(), row._version, row.dtype, row.shape, row.stride())
        if place not in self._rows:  # the row is kept, so that no other takes its place in memory
            self._rows[place] = row, (row.dtype, row.cpu().numpy().tobytes())
        return self._rows[place][1]


def reject_in_turn(target: Tensor, weight: float, tokens: Sequence[int], proposals: Iterable[Tensor | None]) -> NodeLaw:
    """Rejection sampling of one child after the other; ``None`` is the proposal of a certain child."""
    accept: list[float] = []
    # If all children so far were rejected, `rest` and `null` are the law of what is still to be emitted.
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
    """Probability with which a token was drafted; raises ValueError if it could not have been."""
    probability = draft[token].item()
    if not probability > 0:
        raise ValueError(
            f"token {token} was drafted with probability {probability}: the draft row is not the one sampled"
        )
    return probability


def scaled(stop: Tensor, null: float, mass: float) -> tuple[Tensor, float]:
    """Shares ``mass`` between the tokens (in place) and the null token in proportion to what they hold."""
    total = stop.sum().item() + null
    scale = mass / total if total > 0 else 0.0
    return stop.mul_(scale), null * scale
