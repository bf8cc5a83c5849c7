"""A drafter that runs Medusa heads.

Shapes: R nodes of a depth, F hidden states side by side, H hidden size, V vocabulary.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arbordraft.drafters.base import HeadDrafter, check_ragged, expect
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.onnx_networks import OnnxMedusa
from arbordraft.kernels.draft_tree import TreesToGrow, draft_from_rows
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from arbordraft.heads.medusa import MedusaHead


@dataclass
class _State:
    seen: dict[int, Tensor] = field(default_factory=dict)  # ``[H]`` states of every sample's last observed token
    prepared: dict[int, Tensor] = field(default_factory=dict)  # inputs of the heads in this step


class MedusaDrafter(HeadDrafter):
    """Drafts with Medusa heads: one per depth, all from the hidden state of the token before the root.

    A head's prediction does not depend on drafted tokens, so all nodes of a depth share one row. The number of
    heads bounds the depth of trees.

    Args:
        head: the trained network, which is cast to the target's dtype, or an exported one.
        target: the model it drafts for.

    Raises:
        TypeError: if the head or the target has another type.
        ValueError: if the heads are damaged, or were made or trained for another target.

    Source: Medusa (Cai et al., 2024).
    """

    def __init__(self, head: "MedusaHead | OnnxMedusa", target: RaggedModel) -> None:
        from arbordraft.heads.medusa import MedusaHead

        super().__init__(head if isinstance(head, OnnxMedusa) else expect(MedusaHead, head), target)
        self.hidden_layers, self.max_levels = (target.num_layers,), self.head.config.num_heads

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> "MedusaDrafter":
        """Loads heads that were saved with ``save_pretrained``, from a folder or a hub.

        Args:
            path: folder or hub name.
            target: the model they draft for.
            **kwargs: passed on to ``MedusaHead.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged, or the heads were made or trained for another target.
        """
        from arbordraft.heads.medusa import MedusaHead

        check_ragged(target)
        return cls(MedusaHead.from_pretrained(path, dtype=target.model.dtype, **kwargs), target)

    def open(self, target_cache: RaggedKVCache) -> _State:
        return _State()

    def remove(self, state: _State, sample: int) -> None:
        state.seen.pop(sample, None)

    def take_hidden(self, state: _State, hidden: Mapping[int, Tensor]) -> None:
        state.seen |= {sample: states[-1] for sample, states in hidden.items()}

    def depths(self, state: _State, context: DraftContext) -> list[int]:
        # A text of one token has no hidden state yet: the target goes first.
        known = super().depths(state, context)
        return [limit if sample in state.seen else 0 for sample, limit in enumerate(known)]

    @torch.no_grad()
    def scores(self, state: _State, frontier: Frontier) -> Tensor:
        """Returns ``[R, V]`` logits: the row of every sample, repeated for each of its nodes."""
        by_sample = frontier.by_sample
        samples = list(by_sample)
        if frontier.depth == 0:
            prepared = self.head.prepare(torch.stack([state.seen[sample] for sample in samples]))
            state.prepared |= zip(samples, prepared, strict=True)
        rows = self.head.logits(torch.stack([state.prepared[sample] for sample in samples]), frontier.depth)
        wide: Tensor = self.head.widen(rows)
        shares = zip(wide.split(1), by_sample.values(), strict=True)
        return torch.cat([row.expand(len(nodes), -1) for row, nodes in shares])  # indexing would upload the index

    @torch.no_grad()
    def grow_natively(self, state: _State, context: DraftContext, trees: TreesToGrow) -> int | None:
        if self.target.backend != "native" or isinstance(self.head, OnnxMedusa):
            return None
        prepared = self.head.prepare(torch.stack([state.seen[sample] for sample in trees.slots]))
        levels = int(trees.limits.levels[trees.slots].max())
        rows = [self.head.logits(prepared, depth).float() for depth in range(levels)]
        trimmed = self.head.config.draft_vocab_size != self.head.config.vocab_size
        vocabulary = self.head.tokens if trimmed else None
        return draft_from_rows(torch.stack(rows, dim=1), trees, vocabulary=vocabulary)

    def rollback(self, state: _State) -> None:
        state.prepared = {}
