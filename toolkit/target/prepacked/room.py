"""Compares the memory that decoding with a checkpoint takes with the memory that is there, before anything is read."""

import logging
import os
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from arbordraft.checkpoints.gguf_file import FRACTIONS, GgufFile
from arbordraft.checkpoints.reader import read_config, stored_tensors
from arbordraft.kernels.machine import available_memory
from arbordraft.utils.errors import UserError

# Bytes of a packed weight, with scales and minima of groups.
BYTES_EACH = {"int4": 0.5625, "int8": 1.0625, "int8-weight-only": 1.0}
CACHE_TOKENS = 2048  # rows of the KV cache that are counted if the cache has no bound
_WORKING = 256 << 20  # bytes of hidden states, logits and the libraries
_MATRICES = 4  # bytes per weight of the largest matrix while it is packed
_CLOSE = 0.9  # share of the available memory from which on a warning is logged
_SETTINGS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
}
_WITHOUT_ROWS = frozenset({"conv", "linear_attention", "mamba", "mlp", "moe"})  # layers without keys and values
_TABLES = ("embed_tokens.weight", "wte.weight", "token_embd.weight")
_HEADS = ("lm_head.weight", "output.weight")


class NotEnoughMemory(UserError, MemoryError):
    """A model does not fit into memory; the message gives the numbers and remedies."""


def needed_memory(
    source: "str | os.PathLike[str] | GgufFile",
    dtype: torch.dtype,
    weights: str | None = None,
    tokens: int | None = None,
) -> dict[str, int]:
    """Returns the bytes that decoding with packed weights takes, from the header of a checkpoint.

    Mapped files do not count: the system drops their pages where memory is short.

    Args:
        source: a folder with safetensors, or a GGUF file.
        dtype: dtype of weights that are not quantised, and of the KV cache.
        weights: see :class:`~arbordraft.RaggedModel`.
        tokens: rows of the KV cache; by default 2048.

    Returns:
        Bytes of ``packed weights``, ``converted weights``, ``cache`` and ``working memory``.

    Raises:
        ValueError: if the checkpoint is damaged.
    """
    if isinstance(source, GgufFile):
        config = _settings(source)
        matrices = [(t.name, t.shape, t.kind, t.raw.nbytes) for t in source.tensors.values() if len(t.shape) > 1]
        converted = 0
    else:
        config = read_config(source)
        config = config.get("text_config") or config
        stored = stored_tensors(source)
        matrices = [(name, shape, "F32", 0) for name, (_, shape) in stored.items() if len(shape) > 1]
        converted = dtype.itemsize * sum(_converted(stored, _STORED[dtype]))
    packed = sum(_packed(matrices, bool(config.get("tie_word_embeddings")), dtype, weights))
    largest = max((prod(shape) for _, shape, _, _ in matrices), default=0)
    return {
        "packed weights": packed,
        "converted weights": converted,
        "cache": cache_bytes(config, dtype, tokens or CACHE_TOKENS),
        "working memory": _WORKING + _MATRICES * largest,
    }


def _converted(stored: Mapping[str, tuple[str, tuple[int, ...]]], own: str) -> Iterator[int]:
    """Yields the numbers of each tensor that is converted in memory; see :mod:`.mapped` for those that stay."""
    one_kind = len({kind for kind, _ in stored.values()}) == 1
    for name, (kind, shape) in stored.items():
        stays = one_kind and len(shape) == 2 and ".experts." not in name
        if kind in FRACTIONS and kind != own and not stays:
            yield prod(shape)


def _settings(file: GgufFile) -> dict[str, Any]:
    """Returns the sizes of a file's model under transformers' names; of sizes that differ by layer, the largest."""
    found: dict[str, Any] = {"tie_word_embeddings": "output.weight" not in file.tensors}
    for ours, name in _SETTINGS.items():
        value = file.setting(name)
        found[ours] = max(value) if isinstance(value, list) else value
    heads = file.setting("attention.head_count_kv")
    if isinstance(heads, list):  # recurrent layers have none
        found["num_hidden_layers"] = sum(map(bool, heads))
    elif interval := file.setting("full_attention_interval"):
        found["num_hidden_layers"] = found["num_hidden_layers"] // interval
    return found


_STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def _packed(
    matrices: list[tuple[str, tuple[int, ...], str, int]], tied: bool, dtype: torch.dtype, weights: str | None
) -> Iterator[int]:
    """Yields the packed bytes of each matrix; a table of tokens is packed if it is the head, too."""
    for name, shape, kind, stored in matrices:
        if name.endswith(_TABLES) and not tied:
            continue
        if weights in (None, "file") and kind not in FRACTIONS:
            yield stored
        else:  # in 4 bits, heads alone have 8
            bits = "int8" if weights == "int4" and name.endswith(_HEADS + _TABLES) else weights or ""
            yield int(prod(shape) * BYTES_EACH.get(bits, dtype.itemsize))


def cache_bytes(config: Mapping[str, Any], dtype: torch.dtype, tokens: int) -> int:
    """Returns the bytes of keys and values of some tokens; 0 if the configuration does not tell its sizes.

    States of recurrent layers are left out: a cache with a bound holds them in place of tokens.
    """
    layers, heads = _attention_layers(config), config.get("num_attention_heads")
    if not layers or not heads or not (hidden := config.get("hidden_size")):
        return 0
    size = (config.get("num_key_value_heads") or heads) * (config.get("head_dim") or hidden // heads)
    return int(2 * layers * size * tokens * dtype.itemsize)


def _attention_layers(config: Mapping[str, Any]) -> int | None:
    """Returns how many layers have keys and values; ``None`` if the configuration does not tell."""
    from transformers import CONFIG_MAPPING

    if (kind := str(config.get("model_type"))) in CONFIG_MAPPING:
        kinds = getattr(CONFIG_MAPPING[kind].from_dict(dict(config)), "layer_types", None)
        if kinds is not None:
            return sum(one not in _WITHOUT_ROWS for one in kinds)
    return config.get("num_hidden_layers")


def check_room(name: str, needed: Mapping[str, int]) -> None:
    """Raises NotEnoughMemory if a model does not fit into memory; logs a warning if little would be left."""
    free, total = available_memory(), sum(needed.values())
    if free is None or total <= _CLOSE * free:
        return
    parts = ", ".join(f"{size / 2**30:.1f} GiB of {part}" for part, size in needed.items() if size)
    text = f"{name} needs {total / 2**30:.1f} GiB of memory ({parts}), and {free / 2**30:.1f} GiB are free"
    advice = "weights='int4' or a file of fewer bits need less, as does a smaller max_cache_tokens"
    if total > free:
        raise NotEnoughMemory(f"{text}: {advice}; kernels='native' tries anyway, kernels='torch' packs no weights")
    logging.getLogger("arbordraft").warning("%s: %s", text, advice)


__all__ = ["BYTES_EACH", "NotEnoughMemory", "cache_bytes", "check_room", "needed_memory"]
