"""What every decider is."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import nn

from arbordraft.deciders.decisions import Plan, Situation, StepView
from arbordraft.trees.draft_tree import Outcome


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

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls).keys()  # whoever answers otherwise has other plans, too, and rests at other times
        if "forward" in own and "plan" not in own:
            cls.plan = Decider.plan  # type: ignore[method-assign]
        if {"forward", "plan"} & own and "rests" not in own:
            cls.rests = Decider.rests  # type: ignore[method-assign]

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

    def plan(self, situation: Situation) -> Plan | None:
        """How far trees go on, if that follows from numbers: a drafter can then grow them in one go.

        By default it does not, and :meth:`forward` is asked before every level.
        """
        return None

    def rests(self, memory: Any) -> bool:
        """Whether nothing is to be drafted for a sample in this step, whoever would: it saves asking for plans."""
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
