"""EAGLE-3 heads that others have published, in the layouts of speculators, SpecForge and SafeAILab, as our heads.

Layouts name the same tensors alike but for the layers, ``midlayer`` or ``layers.0``; their settings differ. Hidden
states of the target have other numbers, too: those of speculators and vLLM are ours, a state that i layers have made is
number i; SpecForge and SGLang name the layer that it comes out of, i - 1 (``eagle_config``).

Shapes: D draft vocabulary, V vocabulary.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from arbordraft.checkpoints.reader import CONFIG, few, read_tensors
from arbordraft.heads.eagle import EagleConfig, EagleHead, default_layers
from arbordraft.target.prepacked.probing import vocabulary

_ARCHITECTURES = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
_LAYERS = {"llama": False, "qwen3": True}  # kinds of layers, and whether they norm queries and keys
# Settings that would change what a head computes, and the only value that is understood.
_FIXED = {"hidden_act": ("silu",), "mlp_bias": (False, None), "sliding_window": (None,), "pretraining_tp": (1, None)}


def is_published(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder holds an EAGLE-3 head in a layout of others."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_text())
        named = config.get("speculators_model_type") == "eagle3"
        return named or bool(_ARCHITECTURES.intersection(config.get("architectures") or ()))
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def published_head(folder: str | os.PathLike[str], model: PreTrainedModel) -> EagleHead:
    """An EAGLE-3 or EAGLE-3.1 head of a folder, in eval mode and the dtype of its files.

    Embeddings are kept only where they are others than the target's.

    Args:
        folder: with ``config.json`` and safetensors.
        model: the target, which says what the settings leave open.

    Raises:
        ValueError: if settings are not understood, tensors are missing, left over or of another shape, files are
            pickled or damaged, or the head was made for a target of other sizes.
    """
    try:
        given = json.loads((Path(folder) / CONFIG).read_text())
        settings = _settings(given, model)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{folder} holds no EAGLE-3 head that can be read: {reason}") from error
    tensors = {_name(name): tensor for name, tensor in read_tensors(folder).items()}
    own = tensors.get("embed_tokens.weight")
    theirs: Tensor = model.get_input_embeddings().weight  # type: ignore[assignment]
    settings["own_embeddings"] = own is not None and not _same(own, theirs)
    if not settings["own_embeddings"]:
        tensors.pop("embed_tokens.weight", None)
    settings["num_hidden_layers"] = 1 + len({name.split(".")[1] for name in tensors if name.startswith("deeper.")})
    drafted = settings["draft_vocab_size"]
    if "d2t" not in tensors:
        if drafted != settings["vocab_size"]:
            raise ValueError(f"{folder} lacks d2t, which says what its {drafted} draft tokens are")
        tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)
    tensors["d2t"] = tensors["d2t"].long()
    tensors["t2d"] = torch.zeros(settings["vocab_size"], dtype=torch.bool)
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["t2d"][tokens.clamp(0, settings["vocab_size"] - 1)] = True
    head = EagleHead(EagleConfig(**settings))
    if (fuse := tensors.get("fc.weight")) is not None:
        nn.Module.to(head, fuse.dtype)
    _fill(head, tensors, folder)
    head.check()
    head.check_target(model)
    return head.eval()


def _settings(given: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """What ``config.json`` means in our words."""
    layer: Mapping[str, Any] = given.get("transformer_layer_config") or given
    kind = layer.get("model_type", "llama")
    if kind not in _LAYERS:
        raise ValueError(f"its layer is of type {kind!r}, known are {', '.join(_LAYERS)}")
    fixed = {name: known for name, known in _FIXED.items() if name in layer}
    if layer.get("use_sliding_window") is False:
        fixed.pop("sliding_window", None)
    strange = [f"{name}={layer[name]!r}" for name, known in fixed.items() if layer[name] not in known]
    if "speculators_model_type" not in given and "norm_output" in given:
        strange.append(f"norm_output={given['norm_output']!r}, which means one thing to SpecForge and another to vLLM")
    if strange:
        raise ValueError(f"its settings are not understood: {'; '.join(strange)}")
    eagle = given.get("eagle_config") or {}
    count = model.config.get_text_config().num_hidden_layers
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    theta = rope.get("rope_theta") or layer.get("rope_theta") or 10000.0
    if "type" in rope:  # as it was called before
        rope["rope_type"] = rope.pop("type")
    return {
        "vocab_size": vocabulary(model),
        "draft_vocab_size": given.get("draft_vocab_size") or layer["vocab_size"],
        "target_hidden_size": given.get("target_hidden_size") or hidden,
        "hidden_layers": _states(given, eagle, count),
        "hidden_size": hidden,
        "intermediate_size": layer["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or hidden // heads,
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_parameters": rope | {"rope_theta": theta} if rope.get("rope_type", "default") != "default" else None,
        "max_position_embeddings": layer.get("max_position_embeddings", 2048),
        "qk_norm": _LAYERS[kind],
        "attention_bias": bool(layer.get("attention_bias")),
        "fc_norm": bool(given.get("fc_norm") or eagle.get("fc_norm")),
        "norm_before_fc": bool(given.get("norm_before_fc") or eagle.get("norm_before_fc")),
        "norm_before_residual": bool(given.get("norm_before_residual") or eagle.get("norm_before_residual")),
        "norm_output": bool(given.get("norm_output") or eagle.get("norm_output")),
    }


def _states(given: Mapping[str, Any], eagle: Mapping[str, Any], count: int) -> list[int]:
    """The target's hidden states that it reads, by our numbers."""
    if (ids := given.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return list(ids)
    if (ids := eagle.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return [number + 1 for number in ids]
    return list(default_layers(count))


def _name(name: str) -> str:
    """Of a tensor in our head."""
    if name.startswith("layers."):
        number, rest = name.removeprefix("layers.").split(".", 1)
        return f"midlayer.{rest}" if number == "0" else f"deeper.{int(number) - 1}.{rest}"
    return name


def _same(own: Tensor, theirs: Tensor) -> bool:
    return own.shape == theirs.shape and torch.equal(own.to(theirs.dtype), theirs.detach().to(own.device))


def _fill(head: EagleHead, tensors: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Takes all tensors over; raises ValueError unless they are exactly those that the head has."""
    known = head.state_dict()
    problems = [
        f"{what}: {few(sorted(names))}"
        for what, names in (("missing", known.keys() - tensors.keys()), ("left over", tensors.keys() - known.keys()))
        if names
    ]
    problems += [
        f"{name} is {list(tensors[name].shape)} instead of {list(tensor.shape)}"
        for name, tensor in known.items()
        if name in tensors and tensors[name].shape != tensor.shape
    ]
    if problems:
        raise ValueError(f"{folder} does not hold the head that its {CONFIG} describes: {'; '.join(problems)}")
    head.load_state_dict(dict(tensors))


__all__ = ["is_published", "published_head"]
