"""Runs a model whose layers take one call, without transformers' own code around the layers.

Checks of arguments, unused masks and output classes take a good part of a forward of one row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from arbordraft.target.attention import Forward
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model_view import active_hooks
from arbordraft.target.prepacked.prepacked_modules import PrepackedLayers
from arbordraft.target.prepacked.probing import vocabulary

_IDLE = (nn.ModuleList, nn.Dropout, nn.Identity)  # children of the layers' owner that compute nothing
_ROWS = 5  # rows of the forward that compares both ways
_LOGIT_SCALE = 64.0  # factor on the head's logits in the comparison, to reveal a cap of large ones; exact in binary


@dataclass(frozen=True)
class Shortcut:
    """Embeddings, rotations, all layers, the final norm and the head, run in sequence.

    Args:
        embedding: token embedding.
        rotary: module that makes the tables of positions for the layers.
        layers: all layers.
        norm: norm after the layers.
        head: head after the norm.
    """

    embedding: nn.Module
    rotary: nn.Module
    layers: PrepackedLayers
    norm: nn.Module
    head: nn.Module

    @classmethod
    def of(cls, model: Any, owner: nn.Module) -> "Shortcut | None":
        """Builds the shortcut of a model; ``None`` if the model has other parts or any bit of its logits differs.

        Args:
            model: a view of the model that runs prepacked layers.
            owner: the module that holds the layers.
        """
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        inside = [child for child in owner.children() if not isinstance(child, _IDLE) and child is not embedding]
        stacks = [part for part in owner.modules() if isinstance(part, PrepackedLayers) and part.layers]
        rotary = [part for part in inside if "RotaryEmbedding" in type(part).__name__]
        norms = [part for part in inside if part not in rotary]
        if not len(stacks) == len(rotary) == len(norms) == 1 or embedding is None or head is None:
            return None
        found = cls(embedding, rotary[0], stacks[0], norms[0], head)
        try:
            return found if found._agrees_with(model) else None
        except Exception:  # any error only means that a part is of another kind
            return None

    def __call__(self, tokens: Tensor, positions: Tensor, run: Forward, rows: Tensor | None) -> Tensor:
        """Returns ``[R, V]`` logits of the wanted rows of ``[1, T]`` tokens."""
        x = self.embedding(tokens)
        x = self.norm(self.layers.run(x, run, self.rotary(x, positions)))
        if (last := self.layers.indices.stop) in run.hidden:
            run.hidden[last] = x[0]
        logits: Tensor = self.head(x if rows is None else x[:, rows])[0]
        return logits

    def _agrees_with(self, model: Any) -> bool:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(vocabulary(model), (1, _ROWS), generator=generator)
        found = []
        scaling = self.head.register_forward_hook(lambda _, __, logits: logits * _LOGIT_SCALE)
        try:
            for use_model in (True, False):
                found.append(self._logits(tokens, model if use_model else None))
        finally:
            scaling.remove()
        return torch.equal(*found)

    def _logits(self, tokens: Tensor, model: Any) -> Tensor:
        """Returns the logits of one text, by ``model`` or, if it is ``None``, by the shortcut."""
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open(_ROWS)], [range(_ROWS)])
        run, positions = Forward(batch, cache, native=True), batch.positions[None]
        with torch.no_grad():
            if model is None:
                return self(tokens, positions, run, None)
            output = model(input_ids=tokens, position_ids=positions, use_cache=False, ragged=run)
        logits: Tensor = output.logits[0]
        return logits


def is_unhooked(model: nn.Module, layers: nn.Module) -> bool:
    """Returns whether the modules around a model's layers have no hooks and no replaced forwards."""
    inside = set(layers.modules())
    return not any(
        active_hooks(part._forward_hooks) or active_hooks(part._forward_pre_hooks) or "forward" in vars(part)
        for part in model.modules()
        if part not in inside
    )


__all__ = ["Shortcut", "is_unhooked"]
