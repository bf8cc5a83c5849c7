"""What a grammar leaves no choice about, as drafter: no model, no noise."""

from typing import Any

from arbordraft.drafters.base import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.grower import TreeGrower
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology


class GrammarDrafter(Drafter):
    """Proposes the tokens that have to follow, as their sample's grammar allows no other: they are always accepted.

    It proposes nothing for samples without a grammar, and where there is a choice; put it in front of another drafter
    with :class:`~arbordraft.HybridDrafter`. Lookups need none in front: they draft such tokens themselves, also behind
    what they look up.

    A token is forced only where the grammar's mask has one bit: which tokens spell a text is as much the target's
    choice as the text.

    Source: fast-forward tokens of guidance (Microsoft) and jump-forward decoding of SGLang (Zheng et al., 2024), as
    drafts that the target reads in its ordinary forward.
    """

    free = True

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(12)

    def default_law(self, width: int) -> DraftLaw:
        return Fixed(width)

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if not law.deterministic:
            raise ValueError(f"forced tokens are certain, not drawn by {law}; couple them as Fixed({law.k})")

    def propose(self, state: Any, context: DraftContext) -> DraftTree:
        grower = TreeGrower(context, Fixed(context.law.k), self)
        grower.add_forced_tokens()
        return grower.tree()
