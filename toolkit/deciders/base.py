"""The interface of deciders."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import nn

from arbordraft.deciders.decisions import Limits, Situation, StepView
from arbordraft.deciders.running_costs import StepTimes
from arbordraft.trees.verdict import Causality, Outcome


class Decider(nn.Module):
    """Decides, sample by sample, whether the nodes of the frontier get children.

    A decider sees only values that exist before these children are drawn. Whether a token is verified then never
    depends on that token or a later one, so most verifiers preserve the output law. :attr:`growth` states on which
    drafts decisions depend. Decoders refuse a decider that looks further than their verifier allows.

    The memory of a sample travels with the sample, so one decider serves many batches at once. Some texts do not depend
    on the drafts: greedy ones, and those with shared noise. Their samples are shown together and may be weighed against
    each other. Other samples are shown one by one, and a decision must depend only on the sample's view and memory. So
    a seeded text depends neither on the other samples of its batch nor on earlier ones.
    """

    growth = Causality.CAUSAL
    """Drafts of a step on which decisions depend; a subclass that decides anew has to state ``FIXED`` anew."""
    can_plan: bool = False
    """Whether :meth:`plan` is asked once per step, instead of :meth:`forward` before every level."""

    def start(self) -> Any:
        """Returns the memory of a new sample; :meth:`learn` changes it, ``view.memory`` shows it."""

    def learn(self, memory: Any, outcome: Outcome) -> None:
        """Updates a sample's memory from the acceptance of its drafts, after every step."""

    def stepped(self, drafts: int, seconds: float) -> None:
        """Counts a step of a batch, in which ``drafts`` drafts were verified, and its seconds."""

    def timed(self, times: StepTimes) -> None:
        """Receives the seconds of a step's parts, for plans of texts that do not depend on drafts."""

    def expect(self, tokens: int, hurry: Callable[[], bool] | None = None) -> None:
        """Receives, while nothing is decoded, the number of tokens wanted next; work that takes seconds fits here.

        Args:
            tokens: greatest number of tokens of all answers together; 0 if none is wanted yet.
            hurry: returns whether tokens are wanted now, so that the work must end; ``None`` if the caller waits.
        """

    def plan(self, situation: Situation) -> Limits:
        """Decides before drafting how far trees go on, in arrays, so that a network can grow them in one call.

        It is called if the class states ``can_plan = True``.
        """
        raise NotImplementedError

    def worth_reading(self, situation: Situation) -> Sequence[bool]:
        """Returns, by sample, whether a draft model reads its prompt at once, since drafts promise to pay for that.

        Otherwise it reads the prompt when it first drafts.

        Args:
            situation: texts that have just begun, without memories. ``lag`` holds the tokens of their prompts.
        """
        return [True] * len(situation.memory)

    def rests(self, memory: Any) -> bool:
        """Returns whether no drafter shall draft for a sample in this step; plans are then not asked for."""
        return False

    def pauses(self, samples: int) -> bool:
        """Returns whether nothing shall be drafted in this step of some samples whose texts do not depend on drafts.

        So samples that have just joined do not make all others weigh their drafts anew.
        """
        return False

    def forward(self, view: StepView) -> Sequence[bool]:
        """Returns ``[B]``: whether each sample goes on."""
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """Returns the plain values that the decider was made with, by argument name."""
        own = {name: vars(self)[name] for name in signature(type(self)).parameters if name in vars(self)}
        return {name: value for name, value in own.items() if isinstance(value, int | float | tuple | None)}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings().items())


def growth_of(decider: Decider) -> Causality:
    """Returns on which drafts a decider's decisions depend.

    If a class overrides a decision without stating its growth anew, its decisions may depend on more than those of its
    base class.
    """
    kind = type(decider)
    if decider.growth > Causality.FIXED or "growth" in vars(decider):
        return decider.growth
    stated, *decisions = (
        next(level for level, base in enumerate(kind.__mro__) if name in vars(base))
        for name in ("growth", "forward", "plan")
    )
    return decider.growth if stated <= min(decisions) else Causality.CAUSAL


def check_answers(decider: Decider) -> None:
    """Raises TypeError if a class overrides a method of a decider, but another method would answer instead."""
    kind = type(decider)
    names = ("can_plan", "forward", "plan", "rests", "pauses")
    stated, forward, plan, *others = (
        next(level for level, base in enumerate(kind.__mro__) if name in vars(base)) for name in names
    )
    if not kind.can_plan and plan < stated:
        raise TypeError(f"{kind.__name__}.plan() would never be asked: state can_plan = True in the class")
    if kind.can_plan and forward < min(plan, stated):
        raise TypeError(
            f"plan() of {kind.__mro__[plan].__name__} would answer instead of {kind.__name__}.forward(): state "
            "can_plan = False in the class, or override plan(), too"
        )
    for name, level in zip(names[3:], others, strict=True):
        if getattr(kind, name) is not getattr(Decider, name) and level > min(forward, plan):
            raise TypeError(
                f"{name}() of {kind.__mro__[level].__name__} would answer for {kind.__name__}, too: override {name}()"
            )
