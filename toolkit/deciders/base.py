"""What every decider is."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import nn

from arbordraft.deciders.decisions import Plan, Situation, StepView
from arbordraft.trees.verdict import Outcome


class Decider(nn.Module):
    """Decides, sample by sample, whether the nodes of the frontier get children.

    A decider sees only what exists before these children are drawn, so whether a token is verified never depends on
    that token or a later one, and the output law is preserved. A decider that looks further declares itself
    ``anticipating`` and is refused where that would bias the law: everywhere but under shared noise.

    What it remembers of a sample travels with the sample, so one decider serves many batches at once. Samples whose
    text does not depend on what is drafted, greedy ones and those with shared noise, are shown together and may be
    weighed against each other. Others are shown one by one, and what is decided about one must follow from its view and
    its memory alone: then a seeded text does not depend on what shares its batch, or was decoded before.
    """

    anticipating = False
    can_plan: bool = False
    """Whether :meth:`plan` is asked once per step, instead of :meth:`forward` before every level."""

    def start(self) -> Any:
        """What is remembered of a new sample; changed by :meth:`learn`, shown in ``view.memory``."""

    def learn(self, memory: Any, outcome: Outcome) -> None:
        """Learns what became of a sample's drafts, after every step."""

    def expect(self, tokens: int, hurry: Callable[[], bool] | None = None) -> None:
        """Is told while nothing is decoded how many tokens are wanted next: a moment for what takes seconds.

        Args:
            tokens: of all answers together, at most; 0 where nothing is wanted yet.
            hurry: whether something is wanted now, and the moment is over; ``None`` if the tokens are waited for.
        """

    def plan(self, situation: Situation) -> Plan:
        """How far trees go on, where numbers say it before anything is drafted: a drafter grows them in one call.

        It is asked if the class states ``can_plan = True``.
        """
        raise NotImplementedError

    def rests(self, memory: Any) -> bool:
        """Whether no drafter shall draft for a sample in this step, which saves asking for plans."""
        return False

    def forward(self, view: StepView) -> Sequence[bool]:
        """``[B]``: whether each sample goes on."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """The plain values that it was made with, by the names of its arguments."""
        own = {name: vars(self)[name] for name in signature(type(self)).parameters if name in vars(self)}
        return {name: value for name, value in own.items() if isinstance(value, int | float | tuple | None)}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings().items())


def check_answers(decider: Decider) -> None:
    """Raises TypeError if a class overrides an answer of a decider, and another answer would be taken instead."""
    kind = type(decider)
    names = ("can_plan", "forward", "plan", "rests")
    stated, forward, plan, rests = (
        next(level for level, base in enumerate(kind.__mro__) if name in vars(base)) for name in names
    )
    if not kind.can_plan and plan < stated:
        raise TypeError(f"{kind.__name__}.plan() would never be asked: state can_plan = True in the class")
    if kind.can_plan and forward < min(plan, stated):
        raise TypeError(
            f"plan() of {kind.__mro__[plan].__name__} would answer instead of {kind.__name__}.forward(): state "
            "can_plan = False in the class, or override plan(), too"
        )
    if kind.rests is not Decider.rests and rests > min(forward, plan):
        raise TypeError(
            f"rests() of {kind.__mro__[rests].__name__} would answer for {kind.__name__}, too: override rests()"
        )
