"""What deciders see, say and learn.

Shapes: V vocabulary, H hidden size of a drafter.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import neg
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

TOP = 10  # highest probabilities of a draft row that deciders are told


@dataclass(frozen=True, eq=False)
class Origin:
    """What the children of a node were drawn from; siblings share it.

    Args:
        read: gives the ``[V]`` draft row, which may have to be computed first; ``None`` where there was none.
        hidden: ``[H]`` what the drafter's head made the row from, if the drafter shows it.
    """

    read: Callable[[], Tensor] | None = None
    hidden: Tensor | None = None

    @cached_property
    def row(self) -> Tensor | None:
        """``[V]`` draft row; ``None`` where there was none."""
        return None if self.read is None else self.read()

    @cached_property
    def entropy(self) -> float:
        """Entropy of the row in nats, 0 where there was none."""
        return 0.0 if self.row is None else torch.special.entr(self.row).sum().item()

    @cached_property
    def top(self) -> list[float]:
        """The ``TOP`` highest probabilities of the row, descending; 0 for what it lacks."""
        top = [] if self.row is None else self.row.topk(min(TOP, len(self.row))).values.tolist()
        return [*top, *[0.0] * (TOP - len(top))]


class Draw(NamedTuple):
    """How a drafted token came about.

    Args:
        probability: its draft probability.
        origin: what it was drawn from.
    """

    probability: float
    origin: Origin


@dataclass(frozen=True)
class StepView:
    """What a decider may look at before the children of the nodes at ``depth`` are drawn.

    Every list has one entry per sample; the inner ones have one entry per frontier node (those at ``depth``).

    Args:
        depth: depth of the frontier, 0 for the roots.
        paths: the draws that led from the root to each frontier node; none for a root.
        memory: what the decider remembers of each sample, see :meth:`~arbordraft.deciders.Decider.start`.
        pathwise: whether the text is the same whatever is drafted, see :class:`DraftContext`.
        batch: samples that the target's forward will serve, those that stopped drafting included.
        planned: rows of that forward so far, all samples, roots included.
        alike: samples of the batch that each one shown stands for. A pathwise view shows all that go on, each for
            itself. Any other shows a single sample, which stands for a whole batch of its like: it decides by itself
            alone, so that its text does not depend on what shares its batch.
    """

    depth: int
    paths: Sequence[Sequence[Sequence[Draw]]]
    memory: Sequence[Any]
    pathwise: bool = False
    batch: int = 1
    planned: int = 1
    alike: int = 1
    source: str = ""
    acceptance: Sequence[float] = (0.5,)

    @property
    def confidence(self) -> list[list[float]]:
        """Draft probability of each frontier node's token, 1 for a root."""
        return [[path[-1].probability if path else 1.0 for path in nodes] for nodes in self.paths]

    @property
    def rows(self) -> list[list[Tensor | None]]:
        """``[V]`` draft row that each frontier node was drawn from; ``None`` where there was none."""
        return [[path[-1].origin.row if path else None for path in nodes] for nodes in self.paths]

    @property
    def entropy(self) -> list[list[float]]:
        """Entropy in nats of the row each frontier node was drawn from, 0 where there was none."""
        return [[path[-1].origin.entropy if path else 0.0 for path in nodes] for nodes in self.paths]


@dataclass(frozen=True)
class Situation:
    """What is known before anything is drafted in a step, about samples that share what pays.

    Args:
        max_depth: greatest useful depth of every sample's tree.
        memory: what the decider remembers of each, see :meth:`~arbordraft.deciders.Decider.start`.
        alike: samples that each of them stands for, as in :class:`StepView`.
        source: the drafter by its kind, so that what is learned of one is not taken for another's.
        acceptance: how often its most probable token is the next one, its second, and so on, before anything is known.
        free: a level takes next to no time beside the target's forward, as lookups do.
        lag: committed tokens of every sample that the drafter would have to read first; none if empty.
        left: tokens that every sample may still get; no matter how many if empty.
        extra_rows: rows that the target's forward has besides those of these samples, whatever becomes of them.
        informative: whether draft probabilities tell drafts that will be accepted from others. If not, how far trees go
            has to be planned, as nothing that is drafted will say it.
    """

    max_depth: Sequence[int]
    memory: Sequence[Any]
    alike: int = 1
    source: str = ""
    acceptance: Sequence[float] = (0.5,)
    free: bool = False
    lag: Sequence[int] = ()
    left: Sequence[int] = ()
    extra_rows: int = 0
    informative: bool = True


@dataclass(frozen=True)
class RowPrices:
    """Keeps as many of the likeliest drafts as bring most, less the price of their rows.

    Args:
        price: tokens that the rows of so many drafts could bring elsewhere; by default less than nothing, so that all
            drafts are kept, even those that are sure to be wrong.
        most: most drafts; any number by default.
    """

    price: Callable[[int], float] = neg
    most: int | None = None

    def __call__(self, chances: Sequence[float]) -> int:
        """See :attr:`Plan.keep`."""
        gained = list(accumulate(chances[: self.most], initial=0.0))
        return max(range(len(gained)), key=lambda drafts: gained[drafts] - self.price(drafts))

    def table(self, drafts: int) -> list[float]:
        """The prices of none up to so many drafts; infinite beyond the most."""
        return [
            math.inf if self.most is not None and count > self.most else self.price(count)
            for count in range(drafts + 1)
        ]


@dataclass(frozen=True)
class Plan:
    """How far the trees of some samples go on, decided before they are drafted.

    The reach of a node, the chance that its path is accepted, is the product of the draft probabilities along it, each
    times the ``trust`` in it and 1 at most, times the weight of its sample. A node gets children if ``reach * next -
    row`` is not negative, and a level is drafted if the sum of that over its nodes is at least ``level``. Trees that
    were drawn at random are not pruned node by node, only ended, as verification would no longer be lossless.

    Args:
        levels: most levels, by sample; 0 drafts nothing.
        trust: by sample and depth of the parent, the last one for all that is deeper: how often drafts are accepted for
            every time that their draft probabilities say so.
        next: by sample and depth of the parent: how often some child is expected to be accepted.
        level: tokens that a level must gain besides.
        row: tokens that a node must gain for its rows.
        budget: most drafts of all the samples, the likeliest ones.
        keep: how many of the drafts with these reaches, descending, are verified; all by default. Only
            :class:`RowPrices` can be told to a device, which otherwise waits for the host in between.
        weights: by sample, what its tokens are worth to the batch; 1 by default.
        gains: by sample, tokens that drafting is expected to bring, less what its time could bring elsewhere; what is
            not said is not expected to beat other drafts.
    """

    levels: Sequence[int]
    trust: Sequence[Sequence[float]]
    next: Sequence[Sequence[float]]
    level: float = 0.0
    row: float = 0.0
    budget: int | None = None
    keep: Callable[[Sequence[float]], int] = RowPrices()
    weights: Sequence[float] = ()
    gains: Sequence[float] = ()

    @classmethod
    def everything(cls, levels: Sequence[int], **limits: Any) -> Self:
        """Drafts all that the topology offers down to these levels, at what the drafter says it is worth."""
        ones = [(1.0,)] * len(levels)
        return cls(levels, ones, ones, **limits)
