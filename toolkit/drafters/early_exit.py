"""The target's own first layers as drafter."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from arbordraft.cache import RaggedKVCache
from arbordraft.drafters.base import Drafter, Garden, grow, plan_level
from arbordraft.laws import DraftLaw
from arbordraft.target import RaggedModel
from arbordraft.types import DraftContext, DraftTree


@dataclass
class _State:
    cache: RaggedKVCache
    handles: Sequence[int]
    fed: dict[int, list[int]] = field(default_factory=dict)


class EarlyExitDrafter(Drafter):
    """Drafts with the first layers of the target, its final norm and its head.

    The keys and values of these layers are the target's own, so the drafter reads the target's cache, writes its tree
    behind the committed tokens and leaves nothing to roll back: verification overwrites it.

    Args:
        model: the target.
        layers: number of layers to run.

    Raises:
        ValueError: if ``layers`` does not leave out any layer.
        UnsupportedModel: if the architecture does not let its depth be shortened.
    """

    def __init__(self, model: RaggedModel, layers: int) -> None:
        super().__init__()
        if not 1 <= layers < model.num_layers:
            raise ValueError(f"layers must lie in 1..{model.num_layers - 1} for this target, got {layers}")
        self.model = model
        self.layers = layers
        probe = RaggedKVCache()
        model.prefill({probe.open(1): [0]}, probe, layers=layers)  # an architecture that cannot do it says so now

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if target is not self.model:
            raise ValueError("EarlyExitDrafter must be built from the target that it drafts for")

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> _State:
        return _State(target_cache, handles)

    def propose(self, state: _State, context: DraftContext) -> DraftTree:
        state.fed = {sample: [] for sample in range(len(state.handles))}
        tree = grow(context, lambda garden, frontier: self._run(state, garden, frontier))
        state.cache.drop([state.handles[sample] for sample, nodes in state.fed.items() if nodes])
        return tree

    def _run(self, state: _State, garden: Garden, frontier: dict[int, list[int]]) -> Tensor:
        tokens, batch = plan_level(garden, frontier, state.cache, state.handles, state.fed)
        return self.model(tokens, batch, state.cache, layers=self.layers)

    def extra_repr(self) -> str:
        return f"layers={self.layers}"
