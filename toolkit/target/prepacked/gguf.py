"""Loads a causal LM from a GGUF file whose matrices stay in the file's own blocks."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arbordraft.checkpoints.reader import load_causal_lm, load_network
from arbordraft.target.prepacked.gguf_blocks import FRACTIONS, READABLE, FileBlocks, check_kind, halves, holds_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Architectures whose files store every tensor as transformers does, except for the order of rows in these matrices. For
# others, transformers makes the numbers, which then identify the blocks they came from.
_HALVED: dict[str, tuple[str, ...]] = {"llama": ("attn_q.", "attn_k."), "qwen2": (), "qwen3": ()}


def load_blocks(file: Path, dtype: torch.dtype) -> "PreTrainedModel":
    """Returns the model of a GGUF file in eval mode; its matrices are :class:`FileBlocks`, all else is in memory.

    Args:
        file: the GGUF file, which stays in use as long as the model.
        dtype: dtype of tensors in memory and of numbers dequantised from blocks.

    Raises:
        ValueError: if the file is damaged or incomplete, or has no blocks that kernels read.
    """
    tensors, architecture = _contents(file)
    kinds = {tensor.tensor_type.name for tensor in tensors.values()}
    for kind in sorted(kinds - FRACTIONS.keys()):
        try:
            check_kind(kind)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
    if kinds <= FRACTIONS.keys():
        raise ValueError(
            f"{file} holds {', '.join(sorted(kinds))} and no blocks: choose weights='int8' or 'int4', which quantise "
            "the model, or leave weights out"
        )
    if architecture in _HALVED:
        model = _mapped(file, tensors, architecture, dtype)
    else:
        model = _as_transformers_has_them(file, tensors, architecture, dtype)
    return model


def _contents(file: Path) -> tuple[dict[str, Any], str]:
    """Returns memory-mapped tensors by name, and the architecture; frees the reader's copy of the vocabulary."""
    import gguf

    try:
        reader = gguf.GGUFReader(str(file))
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{file} is truncated or damaged ({error}): copy it again") from error
    field = reader.get_field("general.architecture")
    return {tensor.name: tensor for tensor in reader.tensors}, field.contents() if field else ""


def _mapped(file: Path, tensors: dict[str, Any], architecture: str, dtype: torch.dtype) -> "PreTrainedModel":
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config)
    name_of = _names(architecture, shapes)
    heads = {"attn_q.": config.num_attention_heads, "attn_k.": config.num_key_value_heads}
    weights = {}
    for name, parameter in shapes.named_parameters():
        if (tensor := tensors.get(name_of(name))) is not None:
            part = next((part for part in _HALVED[architecture] if part in tensor.name), None)
            order = None if part is None else halves(len(parameter), heads[part])
            weights[name] = _held(tensor, dtype, order)

    def read(_: str, gguf_file: str, **options: Any) -> Any:
        return type(shapes).from_pretrained(None, config=config, state_dict=weights, **options)

    model: PreTrainedModel = load_network(read, file.parent, gguf_file=file.name, dtype=dtype)
    model.name_or_path = model.config.name_or_path = str(file.parent)
    return model


def _held(tensor: Any, dtype: torch.dtype, order: Tensor | None) -> Tensor:
    """Returns a tensor of the file: quantised matrices in their blocks, all else as numbers."""
    from gguf import dequantize

    shape, kind = [int(size) for size in reversed(tensor.shape)], tensor.tensor_type.name
    if len(shape) == 2 and kind not in FRACTIONS:
        return FileBlocks(tensor.data, kind, (shape[0], shape[1]), dtype, order)
    dense = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).to(dtype)
    return dense if order is None else dense[order]


def _as_transformers_has_them(
    file: Path, tensors: dict[str, Any], architecture: str, dtype: torch.dtype
) -> "PreTrainedModel":
    """Loads a model with transformers; replaces each matrix that equals blocks of the file, in any known row order."""
    model = load_causal_lm(file.parent, dtype, gguf_file=file.name)
    name_of = _names(architecture, model)
    config: Any = model.config.get_text_config()
    heads = [0, config.num_attention_heads, getattr(config, "num_key_value_heads", 0) or 0]
    for name, parameter in model.named_parameters():
        tensor = tensors.get(name_of(name))
        if tensor is None or parameter.ndim != 2 or tensor.tensor_type.name not in READABLE:
            continue
        for number in heads:
            if number and len(parameter) % (2 * number):
                continue
            order = halves(len(parameter), number) if number else None
            held = _held(tensor, dtype, order)
            if held.shape == parameter.shape and torch.equal(held, parameter):
                _exchange(model, parameter, nn.Parameter(held, requires_grad=False))
                break
    if not holds_blocks(model):
        raise ValueError(
            f"{file}: no matrix of the model equals blocks of this file, whose architecture is {architecture!r}; "
            "choose weights='int8' or 'int4', which quantise the model anew"
        )
    return model


def _exchange(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Replaces a parameter in all its places: a tied one has several."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is old:
                module._parameters[name] = new


def _names(architecture: str, model: "PreTrainedModel") -> Callable[[str], str]:
    """Returns a function from a parameter's name in the model to its name in the file."""
    import gguf

    kind = next((key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None:
        return lambda name: ""
    known = gguf.get_tensor_name_map(kind, model.config.get_text_config().num_hidden_layers)
    return lambda name: known.get_name(name, try_suffixes=(".weight", ".bias")) or ""


__all__ = ["load_blocks"]
