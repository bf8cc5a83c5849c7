"""Loads the target that drafters learn from."""

from dataclasses import dataclass

import torch

from arbordraft import RaggedModel
from arbordraft.kernels.precision import fast_dtype, warn_if_slow
from arbordraft.loading import load_model
from arbordraft.utils.choices import SMALL
from arbordraft.utils.files import read_text


@dataclass(frozen=True)
class Target:
    """The name of a target, and the settings that it runs with.

    Args:
        model: a name on the Hugging Face hub, a folder, or ``smollm2`` for the small model of the examples.
        revision: revision of the hub's repository.
        dtype: dtype of its weights: ``float32``, ``bfloat16`` or ``float16``; by default bfloat16 on devices that are
            fast at it, else float32.
        device: where it runs; ``auto`` for the device that this process trains on.
        kernels: how weights are read on a CPU, see :class:`~arbordraft.RaggedModel`.
        chat_template: file with a chat template, for base models, which bring none.
    """

    model: str = SMALL
    revision: str | None = None
    dtype: str | None = None
    device: str = "auto"
    kernels: str = "auto"
    chat_template: str | None = None

    def weight_type(self, device: torch.device | str) -> torch.dtype:
        """Returns the type of the weights on a device; raises ValueError if the dtype is unknown."""
        if self.dtype is None:
            return fast_dtype(device)
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")
        warn_if_slow(dtype, device, "data.target.dtype")
        return dtype

    def load(self, device: torch.device | str = "cpu") -> RaggedModel:
        """Loads the model with its tokenizer.

        Args:
            device: the device that ``auto`` stands for.

        Raises:
            OSError: if the chat template cannot be read.
            ValueError: if the dtype is unknown, the model is damaged, incomplete or no causal LM, or it has no
                tokenizer.
        """
        device = device if self.device == "auto" else self.device
        model, tokenizer = load_model(self.model, self.weight_type(device), self.revision)
        if tokenizer is None:
            raise ValueError(f"{self.model} has no tokenizer, which generating text needs: save it beside the model")
        if self.chat_template is not None:
            tokenizer.chat_template = read_text(self.chat_template)
        return RaggedModel(model.to(device), tokenizer, kernels=self.kernels)  # type: ignore[arg-type]
