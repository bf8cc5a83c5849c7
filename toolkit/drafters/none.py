"""Plain decoding as a drafter."""

from arbordraft.drafters.base import Drafter
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.trees.topology import TreeTopology


class NoDrafter(Drafter):
    """Proposes nothing: every step emits one token, as plain decoding does."""

    max_levels = 0

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(0)

    def default_law(self, width: int) -> DraftLaw:
        return Fixed(width)
