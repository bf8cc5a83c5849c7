"""Plain decoding as a drafter."""

from typing import Any

from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.topology import TreeTopology


class NoDrafter(Drafter):
    """Proposes nothing: every step emits one token, as plain decoding does."""

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(0)

    def default_law(self, width: int) -> DraftLaw:
        return Fixed(width)

    def propose(self, state: Any, context: DraftContext) -> DraftTree:
        return roots(context)


def roots(context: DraftContext) -> DraftTree:
    """The trees of a step in which nothing is drafted."""
    return DraftTree(
        tuple(
            None if max_depth is None else SampleTree(context.topology, context.law, {0: tokens[-1]})
            for max_depth, tokens in zip(context.max_depth, context.tokens, strict=True)
        )
    )
