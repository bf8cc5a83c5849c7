"""Base class of drafters whose slots hold the target's hidden states, with their own cache and pending states.

Shapes: F hidden states side by side.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from arbordraft.drafters.base import HeadDrafter, num_unprefilled, within_positions
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.model_drafter import ModelState
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel

_FEW = 64  # most rows of states that are kept without a copy


@dataclass
class SlotState(ModelState):
    """State of a batch.

    Args:
        target: the target's cache.
        pending: by sample, target states whose slots the cache lacks, ``[n, F]`` each, within ``max_positions``.
        slots: by sample, the number of slots that are filled or pending.
        last: by sample, ``[n, F]`` states whose last row belongs to the last filled slot.
    """

    target: RaggedKVCache = field(kw_only=True)
    pending: dict[int, list[Tensor]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    last: dict[int, Tensor] = field(default_factory=dict)


class SlotDrafter(HeadDrafter):
    """Base class of drafters whose slot j holds the target's hidden states of token j, together with token j + 1.

    Args:
        head: the trained network, or an exported one.
        target: the model it drafts for.
    """

    max_positions: int  # longest text, drafts included, that it can process
    layers = "midlayer"  # the part of the head that holds its layers
    state_class: type[SlotState] = SlotState
    _network: Any

    def __init__(self, head: Any, target: RaggedModel) -> None:
        super().__init__(head, target, leave=self.layers)  # layers are prepacked as a whole if possible
        self.hidden_layers = tuple(head.config.hidden_layers or ())
        self.max_positions = head.config.max_position_embeddings

    def open(self, target_cache: RaggedKVCache) -> Any:
        self._network.refresh()
        return self.state_class(target_cache.beside(self), target=target_cache)

    def add(self, state: Any, sample: int, tokens: Sequence[int], handle: int) -> None:
        state.handles[sample] = state.cache.open(state.target.capacity(handle))
        state.pending[sample], state.slots[sample] = [], 0

    def share(self, state: Any, source: int, sample: int, tokens: int) -> None:
        filled = state.cache.reusable(state.handles[source], tokens)
        state.cache.share(state.handles[source], state.handles[sample], filled)
        state.slots[sample] = min(tokens, state.slots[source])
        if filled < state.slots[sample]:
            state.pending[sample] = [torch.cat(state.pending[source])[: state.slots[sample] - filled]]

    def depths(self, state: Any, context: DraftContext) -> list[int]:
        # A text of one token has no hidden state yet: the target goes first.
        known = within_positions(super().depths(state, context), context, self.max_positions)
        return [limit if limit and len(context.tokens(sample)) > 1 else 0 for sample, limit in enumerate(known)]

    def remove(self, state: Any, sample: int) -> None:
        state.cache.close(state.handles.pop(sample))
        del state.pending[sample], state.slots[sample]
        state.last.pop(sample, None)

    def missing(self, state: Any, context: DraftContext, sample: int) -> tuple[Sequence[int], Tensor]:
        """Returns the tokens and target states of a sample's missing slots, and clears its pending states."""
        handle, tokens = state.handles[sample], context.tokens(sample)
        if not state.pending[sample]:  # a repeated step has already filled the last slot
            state.cache.shorten(handle, len(tokens) - 2)
            state.pending[sample] = [state.last[sample][-1:]]
        pending = state.pending[sample]
        states = pending[0] if len(pending) == 1 else torch.cat(pending)
        # A copy of the last row frees a prompt's states; a step has only a few.
        state.pending[sample], state.last[sample] = [], states if states.shape[0] <= _FEW else states[-1:].clone()
        return tokens[state.cache.length(handle) + 1 :], states

    def take_hidden(self, state: Any, hidden: Mapping[int, Tensor]) -> None:
        for sample, states in hidden.items():
            count, room = states.shape[0], self.max_positions - state.slots[sample]
            if kept := min(count, room):
                state.pending[sample].append(states if kept == count else states[:kept])
                state.slots[sample] += kept

    def rollback(self, state: Any) -> None:
        state.drop()  # the target's states replace the slots of drafts

    def lag(self, state: Any, context: DraftContext) -> Sequence[int]:
        return num_unprefilled(state.cache, state.handles, context, 1)
