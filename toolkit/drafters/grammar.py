"""A drafter of the tokens that a grammar forces, without a model or noise."""

from arbordraft.drafters.base import Lookup
from arbordraft.trees.topology import TreeTopology


class GrammarDrafter(Lookup):
    """Proposes forced tokens, the only ones that a sample's grammar allows; they are always accepted.

    It proposes nothing for samples without a grammar, or if the grammar allows several tokens. To combine it with
    another drafter, put it first in a :class:`~arbordraft.HybridDrafter`. Where texts do not depend on drafts, forced
    tokens are drafted before those of any drafter; lookups also draft them after other tokens.

    A token is forced only if the grammar's mask has one bit. If several tokens can spell a forced text, the target
    chooses among them.

    Source: fast-forward tokens of guidance (Microsoft) and jump-forward decoding of SGLang (Zheng et al., 2024), as
    drafts that the target reads in its ordinary forward.
    """

    max_levels = 0

    def default_topology(self) -> TreeTopology:
        return TreeTopology.chain(12)
