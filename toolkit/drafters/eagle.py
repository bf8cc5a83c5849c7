"""An EAGLE-type drafter: one layer that continues the target's hidden states.

Shapes: T packed rows, F hidden states side by side, H hidden size.
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.drafters.base import check_ragged, expect
from arbordraft.drafters.model_drafter import ModelDrafter
from arbordraft.drafters.native_models import matrix_of, norm_of
from arbordraft.drafters.network import DraftNetwork, HeadLayers, Outputs
from arbordraft.drafters.onnx_networks import OnnxEagle
from arbordraft.drafters.slots import SlotDrafter, SlotState
from arbordraft.kernels.draft_tree import DraftRun, DraftWeights
from arbordraft.target.attention import Attending
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.gguf_blocks import in_memory

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

    def __init__(self, head: "EagleHead | OnnxEagle", target: RaggedModel) -> None:
        from arbordraft.heads.eagle import EagleHead

        super().__init__(head if isinstance(head, OnnxEagle) else expect(EagleHead, head), target)
        self._network = head if isinstance(head, OnnxEagle) else EagleNetwork(self.head, target)

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

    def take_hidden(self, state: SlotState, hidden: Mapping[int, Tensor]) -> None:
        super().take_hidden(state, {sample: self._network.normed(states) for sample, states in hidden.items()})


class EagleNetwork(DraftNetwork):
    """An EAGLE head with borrowed embeddings, and a borrowed output matrix if it has none.

    Args:
        head: in the target's dtype.
        target: the model it drafts for.
    """

    def __init__(self, head: "EagleHead", target: RaggedModel) -> None:
        config = head.config
        super().__init__(head, config.vocab_size)
        self.states = len(config.hidden_layers or ()) * config.target_hidden_size
        self.head, self.target = head, target
        self._layers = HeadLayers(head, target)
        self.vocabulary, self.native_attention = self._layers.vocabulary, self._layers.native_attention
        self._native = self._convert()

    @property
    def native(self) -> DraftRun | None:
        return self._native

    def _convert(self) -> DraftRun | None:
        if (fused := self._layers.fused) is None:
            return None
        head, config = self.head, self.head.config
        frequencies, factor = head.frequencies()
        return DraftRun(
            DraftWeights(
                embedding=in_memory(self._layers.embeddings.weight),
                fuse=matrix_of(head.fc),
                layers=fused.layers,
                norm=norm_of(head.norm),
                head=matrix_of(head.lm_head),
                outputs=config.draft_vocab_size,
                vocabulary=self.vocabulary,
                frequencies=frequencies[None].contiguous(),
                factors=[factor],
                epsilon=config.rms_norm_eps,
                input_norm=norm_of(head.midlayer.hidden_norm) if config.norm_before_residual else None,
                norm_output=config.norm_output,
            )
        )

    def recorded(self) -> "EagleNetwork | None":
        return self if self._layers.fused is None else None

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        return self._layers.pools(cache)

    def refresh(self) -> None:
        if self._layers.refresh():
            self._native = self._convert()

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
    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> Outputs:
        assert hidden is not None
        embeddings = self._layers.embeddings(tokens).to(hidden.dtype)
        out = self._layers.run(self.head.enter(embeddings, hidden), positions, ragged, embeddings)
        out = out if rows is None else out[rows]
        return Outputs(*self.head.predict(out, self.target.model.get_output_embeddings()))

    def widen(self, logits: Tensor) -> Tensor:
        return self.head.widen(logits)
