"""Inputs and outputs of deciders.

Shapes: V vocabulary, H hidden size of a drafter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from arbordraft.kernels.draft_tree import Limits, Verification

TOP = 10  # number of highest probabilities of a draft row that deciders receive


@dataclass(frozen=True, eq=False)
class Origin:
    """The draft row that the children of a node were drawn from; siblings share it.

    Args:
        read: returns the ``[V]`` draft row, which may have to be computed first; ``None`` if there was no row.
        hidden: ``[H]`` hidden state that the drafter's head turned into the row, if the drafter shows it.
    """

    read: Callable[[], Tensor] | None = None
    hidden: Tensor | None = None

    @cached_property
    def row(self) -> Tensor | None:
        """``[V]`` draft row; ``None`` if there was none."""
        return None if self.read is None else self.read()

    @cached_property
    def entropy(self) -> float:
        """Entropy of the row in nats; 0 if there was none."""
        return 0.0 if self.row is None else torch.special.entr(self.row).sum().item()

    @cached_property
    def top(self) -> list[float]:
        """The ``TOP`` highest probabilities of the row, descending, padded with 0."""
        top = [] if self.row is None else self.row.topk(min(TOP, len(self.row))).values.tolist()
        return [*top, *[0.0] * (TOP - len(top))]


class Draw(NamedTuple):
    """Draft probability and origin of a drafted token.

    Args:
        probability: draft probability of the token.
        origin: the row that it was drawn from.
    """

    probability: float
    origin: Origin


@dataclass(frozen=True)
class StepView:
    """Inputs of a decider before the children of the nodes at ``depth`` are drawn.

    Every list has one entry per sample; the inner ones have one entry per frontier node (those at ``depth``).

    Args:
        depth: depth of the frontier, 0 for the roots.
        paths: the draws that led from the root to each frontier node; none for a root.
        memory: the decider's memory of each sample, see :meth:`~arbordraft.deciders.Decider.start`.
        pathwise: whether drafts cannot change the texts, see :class:`DraftContext`.
        batch: number of samples that the target's forward will serve, those that stopped drafting included.
        planned: rows of that forward so far, for all samples, roots included.
        alike: number of samples of the batch that each shown sample stands for. A pathwise view shows all samples that
            go on, each for itself. Any other view shows one sample, which stands for a whole batch of equal samples.
            This sample decides alone, so that its text does not depend on the other samples of the batch.
        source: kind of the drafter, as in :class:`Situation`.
        acceptance: expected rates of the drafter, as in :class:`Situation`.
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
        """``[V]`` draft row that each frontier node was drawn from; ``None`` if there was none."""
        return [[path[-1].origin.row if path else None for path in nodes] for nodes in self.paths]

    @property
    def entropy(self) -> list[list[float]]:
        """Entropy in nats of the row that each frontier node was drawn from; 0 if there was none."""
        return [[path[-1].origin.entropy if path else 0.0 for path in nodes] for nodes in self.paths]


@dataclass(frozen=True)
class Situation:
    """Inputs of a decider's limits for one group of samples, known before drafting.

    Args:
        max_depth: greatest useful depth of every sample's tree.
        memory: the decider's memory of each sample, see :meth:`~arbordraft.deciders.Decider.start`.
        alike: number of samples that each sample stands for, as in :class:`StepView`.
        source: kind of the drafter, so that experience with one drafter is not applied to another.
        acceptance: expected rates, before any experience, at which the drafter's most probable token, its second and so
            on is the next token.
        free: whether a level takes almost no time compared with the target's forward, as with lookups.
        lag: by sample, the number of committed tokens that the drafter would have to read first; none if empty.
        left: by sample, the number of tokens that it may still get, if the batch ends with its last sample; else empty.
        remaining: by sample, the number of tokens that it may still get; unknown if empty.
        emitted: by sample, the number of tokens that it has got; none if empty.
        extra_rows: rows of the target's forward besides those of these samples, independent of the plan.
        informative: whether draft probabilities distinguish drafts that will be accepted from others. If not, the
            levels have to limit the trees, since the drafts will not show where to stop.
        drafts: drafts that the topology has room for in all trees of the group.
        pathwise: whether drafts cannot change the texts, as in :class:`StepView`. If they can, a plan must not depend
            on the clock.
    """

    max_depth: Sequence[int]
    memory: Sequence[Any]
    alike: int = 1
    source: str = ""
    acceptance: Sequence[float] = (0.5,)
    free: bool = False
    lag: Sequence[int] = ()
    left: Sequence[int] = ()
    remaining: Sequence[int] = ()
    emitted: Sequence[int] = ()
    extra_rows: int = 0
    informative: bool = True
    drafts: int = 64
    pathwise: bool = False


__all__ = ["TOP", "Draw", "Limits", "Origin", "Situation", "StepView", "Verification"]
