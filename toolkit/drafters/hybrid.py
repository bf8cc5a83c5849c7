"""A drafter of two: the cheap one drafts first, the other one if the cheap one proposes too little.

Shapes: F hidden states side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from arbordraft.drafters.base import Drafter
from arbordraft.sampling.laws import DraftLaw, Fixed
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.utils.checks import check_instance


@dataclass
class _State:
    first: Any
    otherwise: Any


class HybridDrafter(Drafter):
    """Drafts with ``first``, and with ``otherwise`` for samples for which ``first`` proposes nothing or too little.

    ``first`` proposes too little if ``otherwise`` is expected to bring more. Only deciders that plan know this
    expectation (:class:`~arbordraft.deciders.decisions.Limits`). The choice depends only on committed tokens, so the
    output law is preserved. If a text exceeds the positions of one drafter, the other one goes on.

    Args:
        first: proposes without noise of its own, as lookups do, or any drafter if noise is shared.
        otherwise: any drafter.

    Raises:
        TypeError: if one of them is not a drafter.
    """

    def __init__(self, first: Drafter, otherwise: Drafter) -> None:
        super().__init__()
        check_instance("first", first, Drafter)
        check_instance("otherwise", otherwise, Drafter)
        self.first = first
        self.otherwise = otherwise
        self.acceptance = otherwise.acceptance
        self.hidden_layers = tuple(dict.fromkeys((*first.hidden_layers, *otherwise.hidden_layers)))

    @property
    def reads_later(self) -> bool:  # type: ignore[override]
        """Whether both drafters read prompts themselves once they draft."""
        return self.first.reads_later and self.otherwise.reads_later

    def effort(self, target: RaggedModel) -> float:
        return self.otherwise.effort(target)

    def default_topology(self) -> TreeTopology:
        return self.otherwise.default_topology()

    def default_law(self, width: int) -> DraftLaw:
        return self.otherwise.default_law(width)

    def laws(self, law: DraftLaw) -> tuple[DraftLaw, ...]:
        return (*self.first.laws(law), *self.otherwise.laws(law))

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if any(not own.deterministic for own in self.first.laws(law)):
            raise ValueError(
                f"{self.first} draws its tokens by {law}, and the choice between two drafters would depend on them, "
                "which biases the output: draft first with lookups, such as NGramDrafter(), or couple them as "
                f"Coupling.shared({law.k})"
            )
        self.first.check(target, Fixed(law.k))
        self.otherwise.check(target, law)

    def stages(self, state: _State) -> list[tuple[Drafter, Any]]:
        return [stage for part, own in self._parts(state) for stage in part.stages(own)]

    def _parts(self, state: _State) -> tuple[tuple[Drafter, Any], tuple[Drafter, Any]]:
        return (self.first, state.first), (self.otherwise, state.otherwise)

    def open(self, target_cache: RaggedKVCache) -> _State:
        return _State(self.first.open(target_cache), self.otherwise.open(target_cache))

    def add(self, state: _State, sample: int, tokens: Sequence[int], handle: int) -> None:
        for part, own in self._parts(state):
            part.add(own, sample, tokens, handle)

    def share(self, state: _State, source: int, sample: int, tokens: int) -> None:
        for part, own in self._parts(state):
            part.share(own, source, sample, tokens)

    def prefill(self, state: _State, tokens: Mapping[int, Sequence[int]]) -> None:
        for part, own in self._parts(state):
            part.prefill(own, tokens)

    def remove(self, state: _State, sample: int) -> None:
        for part, own in self._parts(state):
            part.remove(own, sample)

    def take_hidden(self, state: _State, hidden: Mapping[int, Tensor]) -> None:
        count = len(self.hidden_layers)
        for part, own in self._parts(state):
            if part.hidden_layers == self.hidden_layers:  # nearly always: lookups read none
                part.take_hidden(own, hidden)
            elif part.hidden_layers:
                wanted = [self.hidden_layers.index(layer) for layer in part.hidden_layers]
                part.take_hidden(own, {s: h.unflatten(1, (count, -1))[:, wanted].flatten(1) for s, h in hidden.items()})

    def commit(self, state: _State, tree: DraftTree, verdict: Verdict) -> None:
        for part, own in self._parts(state):
            part.commit(own, tree, verdict)

    def rollback(self, state: _State) -> None:
        for part, own in self._parts(state):
            part.rollback(own)
