"""What a grammar leaves no choice about, as drafter: no model, no noise."""

from arbordraft.drafters.base import Drafter
from arbordraft.trees.topology import TreeTopology


class GrammarDrafter(Drafter):
    """Proposes the tokens that have to follow, as their sample's grammar allows no other: they are always accepted.

    It proposes nothing for samples without a grammar, and where there is a choice; put it in front of another drafter
    with :class:`~arbordraft.HybridDrafter`. Lookups need none in front: before any drafter that chooses its tokens
    itself such tokens are drafted, and lookups draft them also behind what they look up.

    A token is forced only where the grammar's mask has one bit: which tokens spell a text is as much the target's
    choice as the text.

    Source: fast-forward tokens of guidance (Microsoft) and jump-forward decoding of SGLang (Zheng et al., 2024), as
    drafts that the target reads in its ordinary forward.
    """

    certain = True
    free = True
    max_levels = 0

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(12)
