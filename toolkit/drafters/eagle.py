"""An EAGLE-type drafter: one layer that continues the target's hidden states.

Shapes: T packed rows, R rows whose predictions are wanted, F hidden states side by side, H hidden size, V vocabulary.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.drafters.base import DraftNetwork, check_ragged, expect
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.model_drafter import ModelDrafter, Outputs
from arbordraft.drafters.native_models import NativeEagle, runs_natively
from arbordraft.drafters.slots import SlotDrafter, SlotState
from arbordraft.kernels.draft_tree import DraftRun
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.onnx.networks import OnnxEagle
from arbordraft.target.attention import Attending, AttentionCall, Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import prepack_linears

if TYPE_CHECKING:
    from arbordraft.heads.eagle import EagleHead


class EagleDrafter(SlotDrafter, ModelDrafter):
    """Drafts with an EAGLE-3 head, whose layers read the target's hidden states and then their own.

    The slots of tokens that the target has read are filled from its states. The slots of draft trees are dropped after
    every step, because the target's states replace them.

    Args:
        head: the trained network, which is cast to the target's dtype, or an exported one.
        target: the model it drafts for.

    Raises:
        TypeError: if the head or the target has another type.
        ValueError: if the head is damaged, or was made or trained for another target.

    Source: EAGLE-3 (Li et al., 2025).
    """

    keeps = False

    def __init__(self, head: "EagleHead | OnnxEagle", target: RaggedModel) -> None:
        from arbordraft.heads.eagle import EagleHead

        super().__init__(head if isinstance(head, OnnxEagle) else expect(EagleHead, head), target)
        self._network: Any = head if isinstance(head, OnnxEagle) else on_rows(self.head, target)
        self.chunk = self._network.chunk

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> "EagleDrafter":
        """Loads a head that was saved with ``save_pretrained``, from a folder or a hub.

        Args:
            path: folder or hub name.
            target: the model it drafts for.
            **kwargs: passed on to ``EagleHead.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged, or the head was made or trained for another target.
        """
        from arbordraft.heads.eagle import EagleHead

        check_ragged(target)
        return cls(EagleHead.from_pretrained(path, dtype=target.model.dtype, **kwargs), target)

    def open(self, target_cache: RaggedKVCache) -> SlotState:
        if isinstance(self._network, NativeEagle):
            self._network.refresh()
        state: SlotState = super().open(target_cache)
        return state

    def run(
        self, state: SlotState, tokens: Tensor, hidden: Tensor | None, batch: RaggedBatch, rows: Tensor | None = None
    ) -> Outputs:
        return Outputs(*self._network(tokens, hidden, batch, state.cache, rows))

    def take_hidden(self, state: SlotState, hidden: Mapping[int, Tensor]) -> None:
        if isinstance(self._network, NativeEagle | HeadOnRows):  # exported graphs norm states themselves
            hidden = {sample: self._network.normed(states) for sample, states in hidden.items()}
        super().take_hidden(state, hidden)

    def fuse(self, states: Tensor) -> Tensor:
        fused: Tensor = self._network.fuse(states)
        return fused

    def native(self, context: DraftContext) -> DraftRun | None:
        return self._network.run if isinstance(self._network, NativeEagle) else None

    def network(self, context: DraftContext) -> DraftNetwork | None:
        return self._network if isinstance(self._network, HeadOnRows) else None


def on_rows(head: "EagleHead", target: RaggedModel) -> "NativeEagle | HeadOnRows":
    """Returns the fastest runner of a head."""
    if runs_natively(head, target):
        return NativeEagle(head, target)
    if target.backend == "native":
        for layer in head.layers:
            prepack_linears(layer)
    return HeadOnRows(head, target)


class HeadOnRows:
    """Runs an EAGLE head on the packed rows of a ragged batch, with borrowed embeddings and attention."""

    chunk = 2048  # most rows of a run, to bound its memory

    def __init__(self, head: "EagleHead", target: RaggedModel) -> None:
        self.head, self.target = head, target
        config = head.config
        self.states = len(config.hidden_layers or ()) * config.target_hidden_size
        self.vocab_size = config.vocab_size
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self._attention = AttentionCall(heads, kv_heads, dim, dim, dim**-0.5, None, None, None)

    def __repr__(self) -> str:
        return type(self.head).__name__

    @property
    def device(self) -> torch.device:
        """Device of the head."""
        return self.head.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head."""
        return self.head.dtype

    @property
    def vocabulary(self) -> Tensor | None:
        """``[D]`` tokens that can be drafted; ``None`` for all."""
        return None if len(self.head.d2t) == self.vocab_size else self.head.tokens

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        """Returns the key and value pools of the head's layers."""
        shape, like = (
            (self._attention.kv_heads, self._attention.dim),
            torch.empty(0, dtype=self.dtype, device=self.device),
        )
        return [pool for layer in range(len(self.head.layers)) for pool in cache.pools(layer, shape, like)]

    @torch.no_grad()
    def normed(self, states: Tensor) -> Tensor:
        """Norms ``[T, F]`` hidden states of the target for :meth:`fuse`."""
        return self.head.normed(states)

    @torch.no_grad()
    def fuse(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` normed states of the target into ``[T, H]``."""
        states = states.to(self.head.dtype)
        return states if self.head.config.first_generation else self.head.fc(states)

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, hidden: Tensor, batch: RaggedBatch, cache: RaggedKVCache, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ``[R, V]`` logits, the ``[R, H]`` states before them and those that the next step reads."""
        batch, (tokens, *wanted) = batch.upload(hidden.device, tokens, *(() if rows is None else (rows,)))
        ragged = Forward(batch, cache, self.target.backend == "native")
        out = self._layer(tokens, hidden, batch.positions, ragged, wanted[0] if wanted else None)
        logits, final, following = self.head.predict(out, self.target.model.get_output_embeddings())
        return self.head.widen(logits), final, following

    @torch.no_grad()
    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs packed rows, see :class:`~arbordraft.drafters.model_drafter.DraftNetwork`."""
        assert hidden is not None
        out = self._layer(tokens, hidden, positions, ragged, rows)
        logits, _, following = self.head.predict(out, self.target.model.get_output_embeddings())
        return logits, following

    def _layer(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, ragged: Attending, rows: Tensor | None
    ) -> Tensor:
        embed = self.head.embed_tokens or self.target.model.get_input_embeddings()
        embeddings, rotary = embed(tokens).to(hidden.dtype), self.head.rotary(positions, hidden.dtype)
        hidden = self.head.enter(embeddings, hidden)
        for layer in range(len(self.head.layers)):
            query, key, value = self.head.queries_keys_values(embeddings, hidden, rotary, layer)
            attended = ragged.attend(layer, query, key, value, self._attention)
            hidden = self.head.finish(hidden, attended.flatten(1), layer)
        return hidden if rows is None else hidden[rows]
