"""Reads models and tokenizers from folders, hubs and GGUF files alike."""

import os
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.checkpoints.gguf_file import GgufFile, is_gguf
from arbordraft.checkpoints.gguf_settings import gguf_tokenizer
from arbordraft.checkpoints.reader import load_causal_lm, load_tokenizer
from arbordraft.target.prepacked.gguf import load_gguf
from arbordraft.target.prepacked.mapped import load_mapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Source = str | os.PathLike[str] | GgufFile


def source_of(name: str | os.PathLike[str]) -> Source:
    """Returns a name itself, or the mapped file if it is that of a GGUF file, so that its header is parsed once.

    Raises:
        ImportError: if the package ``gguf`` is not installed.
        ValueError: if the file is missing, cut or damaged.
    """
    return GgufFile(name) if is_gguf(name) else name


def read_tokenizer(source: Source, **options: Any) -> "PreTrainedTokenizerBase | None":
    """Returns the tokenizer of a source, padding on the left; ``None`` if it has none.

    Args:
        source: see :func:`source_of`.
        **options: options of ``AutoTokenizer.from_pretrained``, for folders and hubs.

    Raises:
        ValueError: if the tokenizer is damaged.
    """
    return gguf_tokenizer(source) if isinstance(source, GgufFile) else load_tokenizer(source, **options)


def read_model(source: Source, dtype: torch.dtype, *, as_stored: bool = False, **options: Any) -> "PreTrainedModel":
    """Returns the causal LM of a source in eval mode.

    Args:
        source: see :func:`source_of`.
        dtype: dtype of the weights.
        as_stored: leave matrices of a GGUF file or a folder in the file, in its own blocks or dtype. Otherwise all that
            differ from ``dtype`` are converted in memory.
        **options: options of ``AutoModelForCausalLM.from_pretrained``, for folders and hubs.

    Raises:
        ValueError: if the model is no causal LM, or is damaged, incomplete or pickled.
    """
    if isinstance(source, GgufFile):
        return load_gguf(source, dtype, blocks=as_stored)
    if as_stored and not options and os.path.isdir(source):
        return load_mapped(source, dtype)
    return load_causal_lm(source, dtype, **options)


__all__ = ["Source", "read_model", "read_tokenizer", "source_of"]
