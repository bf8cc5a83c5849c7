"""Loading the target that drafters learn from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from arbordraft import RaggedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMALL = "smollm2"


@dataclass(frozen=True)
class Target:
    """Which model, and how it runs.

    Args:
        model: a name on the Hugging Face hub, a folder, or ``smollm2`` for the small model of the examples.
        revision: of the hub's repository.
        dtype: of its weights: ``float32``, ``bfloat16`` or ``float16``.
        device: where it runs; ``auto`` for the device that this process trains on.
        linears: how weights are read on a CPU, see :class:`~arbordraft.RaggedModel`.
    """

    model: str = SMALL
    revision: str | None = None
    dtype: str = "bfloat16"
    device: str = "auto"
    linears: str = "packed"

    def load(self, device: torch.device | str = "cpu") -> RaggedModel:
        """The model with its tokenizer.

        Args:
            device: what ``auto`` stands for.

        Raises:
            ValueError: if the dtype is unknown.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
        model, tokenizer = self._load(dtype)
        device = device if self.device == "auto" else self.device
        return RaggedModel(model.eval().to(device), tokenizer, linears=self.linears)

    def _load(self, dtype: torch.dtype) -> "tuple[Any, PreTrainedTokenizerBase]":
        if self.model == SMALL:
            from arbordraft.pretrained import load_smollm2

            return load_smollm2(dtype)
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(self.model, revision=self.revision, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(self.model, revision=self.revision, padding_side="left")
