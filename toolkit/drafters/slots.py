"""What drafters share whose slots hold the target's hidden states: a cache of their own, and states not read yet.

Shapes: F hidden states side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from arbordraft.drafters.base import HeadDrafter, unread
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.types import DraftContext, DraftTree, Verdict


@dataclass
class SlotState:
    """Of a batch.

    Args:
        cache: the drafter's slots.
        handles: the samples' handles in it.
        pending: target states whose slots the cache lacks, ``[n, F]`` each.
    """

    cache: RaggedKVCache
    handles: list[int]
    pending: dict[int, list[Tensor]]


class SlotDrafter(HeadDrafter):
    """A drafter whose slot j holds the target's hidden states of token j, together with token j + 1.

    Args:
        head: the trained network, or an exported one in its place.
        target: the model it drafts for.
    """

    state_class: type[SlotState] = SlotState

    def __init__(self, head: Any, target: RaggedModel) -> None:
        super().__init__(head, target, leave="midlayer")  # its layer, which is prepacked as a whole if it can be
        self.hidden_layers = tuple(head.config.hidden_layers or ())
        self.max_positions = head.config.max_position_embeddings

    def start(self, tokens: Sequence[Sequence[int]], target_cache: RaggedKVCache, handles: Sequence[int]) -> Any:
        cache = RaggedKVCache(target_cache.max_tokens)
        ours = [cache.open(target_cache.capacity(handle)) for handle in handles]
        return self.state_class(cache, ours, {sample: [] for sample in range(len(tokens))})

    def take_hidden(self, state: Any, hidden: Mapping[int, Tensor]) -> None:
        for sample, states in hidden.items():
            if sample in state.pending:
                state.pending[sample].append(states)

    def behind(self, state: Any, context: DraftContext) -> Sequence[int]:
        return unread(state.cache, state.handles, context.tokens, 1)

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        for sample, (handle, judged) in enumerate(zip(state.handles, verdict.samples, strict=True)):
            if judged is None and handle in state.cache:
                state.cache.close(handle)
                del state.pending[sample]
