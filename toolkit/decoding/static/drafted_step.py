"""A draft and the target's step after it in one run: the drafts are not downloaded in between.

All nodes of the topology down to the drafted levels are rows of the step. The device finds out which of them the plan
keeps. The tokens of the others become -1, which is never accepted.

Shapes: S samples that draft, N nodes of the topology down to the drafted levels, T rows of the step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from arbordraft.decoding.static.bucket import Bucket
from arbordraft.decoding.static.cache import Memory
from arbordraft.decoding.static.draft import DraftBucket, DraftStep
from arbordraft.decoding.static.step import StaticStep
from arbordraft.utils.table import Table


@dataclass(frozen=True)
class DraftedBucket(Table):
    """The shapes of a draft and of the step after it.

    Args:
        draft: shapes of the draft.
        step: shapes of the step.
        nodes: N.
        trims: whether some drafts may be dropped.
    """

    reals: ClassVar = frozenset({"prices"})

    draft: DraftBucket
    step: Bucket
    nodes: int
    trims: bool

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """Both tables, and two further parts.

        - By row of the step: the place of its token among the S N drafts; -1 for a token in the step's own table.
        - By number of drafts: the tokens that they must bring together to be verified.
        """
        return {
            "draft": (self.draft.size,),
            "step": (self.step.size,),
            "source": (self.step.rows,),
            "prices": (self.draft.samples * (self.nodes - 1) + 1 if self.trims else 0,),
        }


class DraftedStep(nn.Module):
    """The device's part of a draft and the step after it.

    Args:
        draft: grows the trees.
        step: runs the target and verifies.
        bucket: the shapes.
        pools: number of the target's pools of rows, which come before those of the drafter.
    """

    operator = "static_step"

    def __init__(self, draft: DraftStep, step: StaticStep, bucket: DraftedBucket, pools: int) -> None:
        super().__init__()
        self.draft, self.step, self.bucket, self.pools = draft, step, bucket, pools
        self.title = f"{step.title} behind {draft.title}"

    def forward(self, table: Tensor, states: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Drafts, then runs the step.

        Args:
            table: the tables of both, and the places of the step's tokens among the drafts.
            states: see :meth:`DraftStep.forward`.
            memory: memory of the target's cache, with the rows of the drafter's behind its own.

        Returns:
            One float64 row: the result of :meth:`DraftStep.forward` without drafts that are not verified, then the
            samples' integers from :meth:`StaticStep.forward`. And the hidden states of the latter.
        """
        part = self.bucket.read(table)
        trees, broken = self.draft.grow(self.bucket.draft.read(part["draft"]), states, memory.rows[self.pools :])
        tokens = trees.token
        if self.bucket.trims:
            below = torch.where(kept(trees.reach[:, 1:], part["prices"]), tokens[:, 1:], -1)
            tokens = torch.cat([tokens[:, :1], below], dim=1)
        given, source = self.bucket.step.read(part["step"]), part["source"]
        own = given["tokens"]
        drafted = torch.where(source < 0, own, tokens.flatten()[source.clamp(min=0)])
        # Not token 0: without a mask, models warn about tokens that look like padding.
        inputs = torch.where(drafted < 0, own[0], drafted)
        nothing = states.new_empty(0, 0)
        own_memory = memory._replace(rows=memory.rows[: self.pools])
        said, hidden = self.step.run(given | {"tokens": drafted}, nothing, own_memory, inputs)
        found = [tokens, torch.cat([broken[:, None], trees.chance[:, 1:]], dim=1), said]
        return torch.cat([part.flatten().double() for part in found]), hidden


def kept(reach: Tensor, prices: Tensor) -> Tensor:
    """Returns ``[S, N - 1]``: whether each node below the roots is verified; the likeliest are, as many as pay.

    Among equally likely nodes, the first in the topology takes precedence, then that of the first sample.

    Args:
        reach: ``[S, N - 1]`` reach of the nodes below the roots; -1 where there is none.
        prices: ``[S (N - 1) + 1]`` tokens that 0, 1, 2, ... drafts must bring.
    """
    likely, order = reach.T.flatten().sort(descending=True, stable=True)
    worth = likely.clamp(min=0).cumsum(0) - prices[1:]
    worth = torch.cat([-prices[:1], torch.where(likely < 0, -torch.inf, worth)])
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return (rank < worth.argmax()).view(reach.shape[1], -1).T


__all__ = ["DraftedBucket", "DraftedStep", "kept"]
