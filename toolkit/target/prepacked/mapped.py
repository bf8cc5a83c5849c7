"""Leaves the matrices of a folder in its files, though the model computes in another dtype."""

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from arbordraft.checkpoints.reader import load_causal_lm, stored_tensors
from arbordraft.target.prepacked.gguf_blocks import TORCH_DTYPES, FileBlocks
from arbordraft.target.prepacked.memory import in_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_mapped(folder: str | os.PathLike[str], dtype: torch.dtype) -> "PreTrainedModel":
    """Loads a causal LM in eval mode; its matrices stay in the folder's files.

    Weights of ``dtype`` are mapped anyway. If all are stored in one other dtype, linears and tables of tokens read
    theirs through :class:`FileBlocks`, and all else is converted in memory. FileBlocks cannot be written to.

    Args:
        folder: the folder, whose files stay in use as long as the model.
        dtype: dtype of the model.

    Raises:
        ValueError: see :func:`~arbordraft.checkpoints.reader.load_network`.
    """
    kinds = {kind for kind, _ in stored_tensors(folder).values()}
    kind = kinds.pop() if len(kinds) == 1 else ""
    own = TORCH_DTYPES.get(kind, dtype)
    model = load_causal_lm(folder, own)
    if own == dtype:
        return model
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in found:
                stays = isinstance(module, (nn.Linear, nn.Embedding)) and name == "weight" and _mapped(weight)
                value = _held(weight.detach(), kind, dtype) if stays else weight.detach().to(dtype)
                found[id(weight)] = nn.Parameter(value, requires_grad=weight.requires_grad and not stays)
            module._parameters[name] = found[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == own and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(dtype)
    model.config.dtype = dtype
    return model


def _mapped(weight: Tensor) -> bool:
    """Returns whether a weight lies in a mapped file, of which one page is read for that."""
    weight.detach()[len(weight) // 2].sum()
    return in_file(weight.detach())


def _held(weight: Tensor, kind: str, dtype: torch.dtype) -> FileBlocks:
    return FileBlocks(weight.view(torch.uint8).numpy(), kind, tuple(weight.shape), dtype)


__all__ = ["load_mapped"]
