"""A drafter that runs the target's own first layers."""

import os
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.drafters.base import adopt, check_ragged, expect
from arbordraft.drafters.model_drafter import TargetCacheDrafter
from arbordraft.drafters.network import ModelNetwork
from arbordraft.sampling.laws import DraftLaw
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel

if TYPE_CHECKING:
    from arbordraft.heads.exit_adapter import ExitAdapter


class EarlyExitDrafter(TargetCacheDrafter):
    """Drafts with the first layers of the target, its final norm and its head.

    The keys and values of these layers are the target's own, so the drafter reads the target's cache. It writes its
    tree after the committed tokens, where verification overwrites it, so nothing is rolled back.

    Args:
        model: the target.
        layers: number of layers to run.
        adapter: a trained network between these layers and the norm; it is cast to the target's dtype.

    Raises:
        TypeError: if the target is not a RaggedModel, or the adapter has another type.
        ValueError: if ``layers`` is below 1 or leaves out no layer, or the adapter was made or trained for another
            target or another number of layers.
        UnsupportedModel: if the architecture cannot run fewer layers.
    """

    def __init__(self, model: RaggedModel, layers: int, adapter: "ExitAdapter | None" = None) -> None:
        super().__init__()
        check_ragged(model)
        if not 1 <= layers < model.num_layers:
            raise ValueError(f"layers must lie in 1..{model.num_layers - 1} for this target, got {layers}")
        self.model = model
        self.layers = layers
        self.adapter = None
        if adapter is not None:
            from arbordraft.heads.exit_adapter import ExitAdapter

            if expect(ExitAdapter, adapter).config.hidden_layers != [layers]:
                raise ValueError(f"the adapter was made for {adapter.config.hidden_layers} layers, not for {layers}")
            self.adapter = adopt(adapter, model)
        # One forward, to raise here if the architecture cannot run fewer layers.
        probe = RaggedKVCache()
        self._network = ModelNetwork(model, layers, self.adapter)
        self._network.run_batch(torch.zeros(1, dtype=torch.int64), None, probe.lay_out([probe.open(1)], [[0]]), probe)

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], target: RaggedModel, **kwargs: Any) -> "EarlyExitDrafter":
        """Loads an adapter that was saved with ``save_pretrained``; its settings give the number of layers.

        Args:
            path: folder or hub name.
            target: the model it drafts for.
            **kwargs: passed on to ``ExitAdapter.from_pretrained``.

        Raises:
            ValueError: if the checkpoint is damaged, or the adapter was made or trained for another target.
        """
        from arbordraft.heads.exit_adapter import ExitAdapter

        check_ragged(target)
        adapter = ExitAdapter.from_pretrained(path, dtype=target.model.dtype, **kwargs)
        return cls(target, adapter.layers, adapter)

    def effort(self, target: RaggedModel) -> float:
        return self.layers / target.num_layers

    def check(self, target: RaggedModel, law: DraftLaw) -> None:
        if target is not self.model:
            raise ValueError("EarlyExitDrafter must be built from the target that it drafts for")

    def extra_repr(self) -> str:
        return f"layers={self.layers}"
