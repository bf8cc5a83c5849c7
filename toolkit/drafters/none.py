"""Plain decoding as a drafter."""

from typing import Any

from arbordraft.context import DraftContext
from arbordraft.drafters.base import Drafter
from arbordraft.drafters.garden import Garden
from arbordraft.laws import DraftLaw, Fixed
from arbordraft.topology import TreeTopology
from arbordraft.types import DraftTree


class NoDrafter(Drafter):
    """Proposes nothing: every step emits one token, as plain decoding does."""

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(0)

    def default_law(self, width: int) -> DraftLaw:
        return Fixed(width)

    def propose(self, state: Any, context: DraftContext) -> DraftTree:
        return Garden(context, Fixed(context.law.k), self).tree()
