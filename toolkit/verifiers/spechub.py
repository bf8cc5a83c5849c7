"""SpecHub: the closed form for one drawn token and the hub."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from arbordraft.sampling.laws import DraftLaw, given
from arbordraft.sampling.noise import residual
from arbordraft.verifiers.rules import NodeLaw, Rule, drafted, reject_in_turn, scaled


class SpecHub(Rule):
    """Verifies the pair of SpecHub: the hub (the most probable draft token) and one token drawn besides it.

    Args:
        order: ``"set"`` treats the pair as a set and tries the drawn token first, in one pass over the
            vocabulary. ``"paper"`` follows the order in which the paper draws the pair, averaged over that
            order: independent of the pair, the hub comes first with probability ``q(hub)``. Both emit the
            target's law and accept equally often at a single node. Lifted over a tree, ``"set"`` accepts more.

    Raises:
        ValueError: if ``order`` is neither of these.

    Source: SpecHub (Sun et al., EMNLP 2024), section 4.
    """

    def __init__(self, order: Literal["set", "paper"] = "set") -> None:
        super().__init__()
        if order not in ("set", "paper"):
            raise ValueError(f'order must be "set" or "paper", got {order!r}')
        self.order = order
        self.rejects_in_turn = order == "set"

    def supports(self, law: DraftLaw) -> bool:
        return (law.tops, law.tails, law.replacement) == (1, 1, False)

    def node_law(
        self, target: Tensor, weight: float, draft: Tensor | None, tokens: Sequence[int], law: DraftLaw
    ) -> NodeLaw:
        if len(tokens) < 2:  # one child was planned, or the draft row holds nothing besides the hub
            return reject_in_turn(target, weight, tokens, law.proposals(draft, tokens))
        couple = _by_set if self.order == "set" else _by_order
        return couple(target, weight, given(draft), tokens[0], tokens[1])

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def _by_set(target: Tensor, weight: float, q: Tensor, drawn: int, hub: int) -> NodeLaw:
    p = target if weight == 1 else target * weight
    tail_mass = _mass_besides(q, hub)
    ratio = min(1.0, p[drawn].item() / (drafted(q, drawn) / tail_mass))
    if ratio == 1:  # never rejected, so the law of a rejection is not needed
        return NodeLaw([1.0, 0.0], torch.zeros_like(q), 0.0)
    rest = torch.addcdiv(p, q, q.new_tensor(tail_mass), value=-1).clamp_min_(0)  # (p - q / tail_mass)+
    rest[hub] = p[hub]  # the tail never draws the hub, so the residual keeps all of its mass
    stop, null = scaled(rest, 1 - weight, 1 - ratio)
    return NodeLaw([ratio, 0.0], stop, null)


def _by_order(target: Tensor, weight: float, q: Tensor, drawn: int, hub: int) -> NodeLaw:
    p = target * weight
    q_hub, tail_mass = q[hub].item(), _mass_besides(q, hub)
    hub_first, hub_second = q_hub / (q_hub + tail_mass), tail_mass / (q_hub + tail_mass)
    # Joint law of the ordered pair: Q(x, hub) = tail(x) (1 - q(hub)) = q(x) and Q(hub, x) = tail(x) q(hub).
    tail = q / tail_mass
    tail[hub] = 0
    before, after = tail * hub_first, tail * hub_second
    left = residual(p, after)  # target mass that the pairs (x, hub) leave after taking x
    left[hub] = 0
    unserved_before = residual(before, left).sum().item()
    unserved_after = residual(after, p).sum().item()
    to_before = min(p[hub].item(), unserved_before)
    to_after = min(p[hub].item() - to_before, unserved_after)

    p_drawn, q_drawn = p[drawn].item(), drafted(q, drawn) / tail_mass
    accept_drawn = accept_hub = rejected = 0.0
    for share, wanted, served, unserved in (
        (hub_second, p_drawn, to_after, unserved_after),
        (hub_first, max(p_drawn - q_drawn * hub_second, 0.0), to_before, unserved_before),
    ):
        ratio = min(1.0, wanted / (q_drawn * share))
        hub_ratio = min(1.0, served / unserved) if unserved > 0 else 0.0
        accept_drawn += share * ratio
        accept_hub += share * (1 - ratio) * hub_ratio
        rejected += share * (1 - ratio) * (1 - hub_ratio)
    stop, null = scaled(residual(left, before), 1 - weight, rejected)
    return NodeLaw([accept_drawn, accept_hub], stop, null)


def _mass_besides(q: Tensor, hub: int) -> float:
    """Returns ``1 - q(hub)``; for a dominant hub without the cancellation that would swallow the tail."""
    q_hub = q[hub].item()
    return 1 - q_hub if q_hub < 0.5 else q[:hub].sum().item() + q[hub + 1 :].sum().item()
