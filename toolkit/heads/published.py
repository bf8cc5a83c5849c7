"""Reads published heads, in the layouts of speculators, SpecForge, SafeAILab and vLLM, as our heads.

Tensor names agree but for the layers of EAGLE-3, ``midlayer`` or ``layers.0``. Settings and the numbers of the target's
hidden states differ. Speculators and vLLM number states as we do: the output of i layers is state i. SpecForge, SGLang
and z-lab number the layer that outputs the state, i - 1.

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
from arbordraft.heads.base import DraftHead
from arbordraft.heads.block import BlockConfig, BlockHead
from arbordraft.heads.dflash import DFlashConfig, DFlashHead
from arbordraft.heads.eagle import EagleConfig, EagleHead, default_layers
from arbordraft.heads.medusa import MedusaConfig, MedusaHead
from arbordraft.target.prepacked.probing import vocabulary

_KINDS = {  # architectures of other programs
    "EagleLlamaForCausalLM": "EAGLE-1 and EAGLE-2",
    "LlamaForCausalLMEagle3": "EAGLE-3",
    "Eagle3LlamaForCausalLM": "EAGLE-3",
    "Eagle3Speculator": "EAGLE-3",
    "Eagle3DraftModel": "EAGLE-3",
    "PEagleSpeculator": "P-EAGLE",
    "PEagleDraftModel": "P-EAGLE",
    "DFlashSpeculator": "DFlash",
    "DFlashDraftModel": "DFlash",
    "DSparkSpeculator": "DSpark",
    "DSparkDraftModel": "DSpark",
    "Qwen3DSparkModel": "DSpark",
    "MedusaModel": "Medusa",
}
_UNREAD = {  # known, but not supported
    "EagleSpeculator": "EAGLE-1 in speculators' layout",
    "DFlash2Speculator": "DFlash 2",
    "DFlash2DraftModel": "DFlash 2",
    "DominoDraftModel": "Domino",
    "XPressSpeculator": "XPress",
    "MTPSpeculator": "speculators' MTP layer",
    "MTPDraftModel": "speculators' MTP layer",
}
_LAYERS = {"llama": False, "qwen3": True}  # kinds of layers, and whether they norm queries and keys
# Settings that change the computation of a head, and their only supported values.
_FIXED = {"hidden_act": ("silu",), "mlp_bias": (False, None), "sliding_window": (None,), "pretraining_tp": (1, None)}
_FIXED_DFLASH = {"shift_label": (False, None), "pure_draft_prefix_len": (0, None)}
_UNUSED = ("verifier_", "confidence_head.", "logit_head.confidence_head.")  # tensors that do not change drafts
_DEPTHS = 5  # depths of P-EAGLE heads that do not state theirs


def is_published(folder: str | os.PathLike[str]) -> bool:
    """Tells whether a folder holds a head in the layout of another program, supported or not."""
    try:
        config = json.loads((Path(folder) / CONFIG).read_text())
        return bool((_KINDS | _UNREAD).keys() & set(config.get("architectures") or ()))
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def published_head(folder: str | os.PathLike[str], model: PreTrainedModel) -> DraftHead:
    """Loads a published head from a folder, in eval mode and the dtype of its files.

    Embeddings and output matrices are kept only if they differ from the target's.

    Args:
        folder: a folder with ``config.json`` and safetensors.
        model: the target, which supplies missing settings.

    Returns:
        An :class:`~arbordraft.heads.eagle.EagleHead` of EAGLE-1, 2, 3 or 3.1, a
        :class:`~arbordraft.heads.block.BlockHead` of P-EAGLE, a :class:`~arbordraft.heads.dflash.DFlashHead` of DFlash
        or DSpark, or a :class:`~arbordraft.heads.medusa.MedusaHead`.

    Raises:
        ValueError: if the kind of head is not supported, settings are not understood, or files are pickled or damaged.
            It is also raised if tensors are missing, left over or of another shape, or the target has other sizes.
    """
    try:
        return _read(folder, model)
    except ValueError as error:
        if (other := _other_target(folder, model)) is not None:
            raise ValueError(
                f"{folder} holds a head for another target: {other}. Name the model it was made for"
            ) from error
        raise


def _read(folder: str | os.PathLike[str], model: PreTrainedModel) -> DraftHead:
    try:
        given = json.loads((Path(folder) / CONFIG).read_text())
        name = next(name for name in given["architectures"] if name in _KINDS | _UNREAD)
        if (unread := _UNREAD.get(name)) is not None:
            known = ", ".join(dict.fromkeys(_KINDS.values()))
            raise ValueError(f"it is one of {unread}; supported are {known}")
        kind = "P-EAGLE" if "pard_token" in given else _KINDS[name]
        tensors = {name: tensor for name, tensor in read_tensors(folder).items() if not name.startswith(_UNUSED)}
        make = {"EAGLE-1 and EAGLE-2": _eagle1, "EAGLE-3": _eagle, "P-EAGLE": _peagle, "Medusa": _medusa}.get(
            kind, _dflash
        )
        head = make(given, model, tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StopIteration) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{folder} holds no head that can be read: {reason}") from error
    last = model.config.get_text_config().num_hidden_layers
    if kind not in ("Medusa", "EAGLE-1 and EAGLE-2") and last in (head.config.hidden_layers or ()):
        raise ValueError(f"{folder} reads the output of layer {last} before the final norm, which is not available")
    _fill(head, tensors, folder)
    head.check()
    head.check_target(model)
    return head.eval()


def _other_target(folder: str | os.PathLike[str], model: PreTrainedModel) -> str | None:
    """Returns in which sizes the target differs from the one that a head was made for; ``None`` if in none."""
    try:
        given = json.loads((Path(folder) / CONFIG).read_text())
        layer = given.get("transformer_layer_config") or given
        made = layer.get("vocab_size"), given.get("target_hidden_size") or layer.get("hidden_size")
    except (OSError, ValueError, AttributeError):
        return None
    here = vocabulary(model), model.config.get_text_config().hidden_size
    names = "a vocabulary of {} tokens", "hidden states of size {}"
    differing = [
        f"it needs {name.format(size)}, this target has {own}"
        for name, size, own in zip(names, made, here, strict=True)
        if size is not None and size != own
    ]
    return " and ".join(differing) or None


def _eagle(given: Mapping[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]) -> EagleHead:
    return EagleHead(EagleConfig(**_eagle_settings(given, model, tensors)))


def _eagle1(given: Mapping[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]) -> EagleHead:
    settings = _eagle_settings(given, model, tensors)
    tensors.pop("lm_head.weight", None)  # a copy of the target's
    own = {"first_generation": True, "fc_bias": "fc.bias" in tensors}
    last = model.config.get_text_config().num_hidden_layers
    return EagleHead(EagleConfig(**settings | own | {"hidden_layers": [last]}))


def _peagle(given: Mapping[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]) -> BlockHead:
    settings = _eagle_settings(given, model, tensors)
    mask = given["mask_token_id"] if "mask_token_id" in given else given["pard_token"]
    tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    form = {"mask_token_id": mask, "markov_rank": 0, "block_size": _proposed(given) or _DEPTHS}
    return BlockHead(BlockConfig(**settings, **form))


def _medusa(given: Mapping[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]) -> MedusaHead:
    size = vocabulary(model)
    drafted = len(tensors["lm_heads.0.weight"])
    _add_vocabulary(tensors, drafted, size)
    return MedusaHead(
        MedusaConfig(
            vocab_size=size,
            draft_vocab_size=drafted,
            target_hidden_size=given["hidden_size"],
            hidden_layers=[model.config.get_text_config().num_hidden_layers],
            num_heads=given["num_heads"],
            num_hidden_layers=given.get("num_hidden_layers", 1),
        )
    )


def _dflash(given: dict[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]) -> DFlashHead:
    layer = _layer(given)
    own: dict[str, Any] = given.get("dflash_config") or {}
    if unsupported := _unsupported(own, _FIXED_DFLASH):
        raise ValueError(f"its settings are not understood: {unsupported}")
    for name in [name for name in tensors if name.startswith("logit_head.")]:  # early DSpark checkpoints
        tensors[name.removeprefix("logit_head.")] = tensors.pop(name)
    embedded = tensors.pop("embed_tokens.weight", None)
    if embedded is not None and not _same(embedded, model.get_input_embeddings().weight):
        raise ValueError("its embeddings are others than the target's")
    size = vocabulary(model)
    drafted = given.get("draft_vocab_size") or layer["vocab_size"]
    if "lm_head.weight" not in tensors and drafted != size:
        raise ValueError(f"it has no output matrix, and the target's is of {size} tokens, not {drafted}")
    head: Any = model.get_output_embeddings()
    if "lm_head.weight" in tensors and drafted == size and _same(tensors["lm_head.weight"], head.weight):
        del tensors["lm_head.weight"]
    _add_vocabulary(tensors, drafted, size)
    ids = given.get("aux_hidden_state_layer_ids")
    if ids is None:
        ids = [number + 1 for number in (given | own)["target_layer_ids"]]
    anchored = "Qwen3DSparkModel" in given["architectures"] and not given.get("dspark_bonus_anchor")
    mask = given.get("mask_token_id")
    markov = given if "markov_rank" in given else own
    rank = markov.get("markov_rank") or 0 if "markov_head.markov_w1.weight" in tensors else 0
    return DFlashHead(
        DFlashConfig(
            **_sizes(given, layer, model),
            draft_vocab_size=drafted,
            hidden_layers=list(ids),
            num_hidden_layers=layer["num_hidden_layers"],
            block_size=given["block_size"],
            from_anchor=bool(given.get("sample_from_anchor", anchored)),
            mask_token_id=own["mask_token_id"] if mask is None else mask,
            own_head="lm_head.weight" in tensors,
            markov_rank=rank,
            markov=markov.get("markov_head_type", "vanilla"),
        )
    )


def _eagle_settings(given: Mapping[str, Any], model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Translates EAGLE-3's ``config.json`` into our settings."""
    layer = _layer(given)
    if "speculators_model_type" not in given and "norm_output" in given:
        raise ValueError(
            f"its settings are not understood: norm_output={given['norm_output']!r}, which means one thing to "
            "SpecForge and another to vLLM"
        )
    _rename_layers(tensors)
    eagle = given.get("eagle_config") or {}
    own = tensors.get("embed_tokens.weight")
    own_embeddings = own is not None and not _same(own, model.get_input_embeddings().weight)
    if not own_embeddings:
        tensors.pop("embed_tokens.weight", None)
    drafted = given.get("draft_vocab_size") or layer["vocab_size"]
    _add_vocabulary(tensors, drafted, vocabulary(model))
    switches = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
    return {
        **_sizes(given, layer, model),
        "draft_vocab_size": drafted,
        "hidden_layers": _states(given, eagle, model.config.get_text_config().num_hidden_layers),
        "num_hidden_layers": 1 + len({name.split(".")[1] for name in tensors if name.startswith("deeper.")}),
        "own_embeddings": own_embeddings,
        **{name: bool(given.get(name) or eagle.get(name)) for name in switches},
    }


def _layer(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of the layers; raises ValueError if they are not understood."""
    layer: Mapping[str, Any] = given.get("transformer_layer_config") or given.get("model") or given
    kind = layer.get("model_type", "llama")
    if kind not in _LAYERS:
        raise ValueError(f"its layer is of type {kind!r}, known are {', '.join(_LAYERS)}")
    fixed = dict(_FIXED)
    windowed = "sliding_attention" in (layer.get("layer_types") or ())
    if layer.get("use_sliding_window") is False or ("layer_types" in layer and not windowed):
        fixed.pop("sliding_window")
    if unsupported := _unsupported(layer, fixed):
        raise ValueError(f"its settings are not understood: {unsupported}")
    if windowed:
        raise ValueError("its settings are not understood: layer_types with sliding_attention")
    return layer


def _unsupported(given: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]]) -> str:
    """Lists settings with values that are not understood."""
    return "; ".join(
        f"{name}={given[name]!r}" for name, known in fixed.items() if given.get(name, known[0]) not in known
    )


def _sizes(given: Mapping[str, Any], layer: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Translates the sizes of the layers into our settings."""
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    rope = dict(layer.get("rope_parameters") or layer.get("rope_scaling") or {})
    theta = rope.get("rope_theta") or layer.get("rope_theta") or 10000.0
    if "type" in rope:  # its former name
        rope["rope_type"] = rope.pop("type")
    return {
        "vocab_size": vocabulary(model),
        "target_hidden_size": given.get("target_hidden_size") or hidden,
        "hidden_size": hidden,
        "intermediate_size": layer["intermediate_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": layer.get("num_key_value_heads") or heads,
        "head_dim": layer.get("head_dim") or hidden // heads,
        "rms_norm_eps": layer.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_parameters": rope | {"rope_theta": theta} if rope.get("rope_type", "default") != "default" else None,
        "max_position_embeddings": layer.get("max_position_embeddings", 2048),
        "qk_norm": _LAYERS[layer.get("model_type", "llama")],
        "attention_bias": bool(layer.get("attention_bias")),
    }


def _states(given: Mapping[str, Any], eagle: Mapping[str, Any], count: int) -> list[int]:
    """Returns the target's hidden states that EAGLE-3 reads, by our numbers."""
    if (ids := given.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return list(ids)
    if (ids := eagle.get("eagle_aux_hidden_state_layer_ids")) is not None:
        return [number + 1 for number in ids]
    return list(default_layers(count))


def _proposed(given: Mapping[str, Any]) -> int | None:
    """Returns how many tokens a head proposes by the settings of speculators."""
    methods = (given.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens: int | None = methods[0].get("speculative_tokens")
    return tokens


def _add_vocabulary(tensors: dict[str, Tensor], drafted: int, size: int) -> None:
    """Adds ``d2t`` if the files lack it, and computes ``t2d`` from it."""
    if "d2t" not in tensors:
        if drafted != size:
            raise ValueError(f"it lacks d2t, which maps its {drafted} draft tokens to target ids")
        tensors["d2t"] = torch.zeros(drafted, dtype=torch.int64)
    tensors["d2t"] = tensors["d2t"].long()
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool)
    tokens = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    tensors["t2d"][tokens.clamp(0, size - 1)] = True


def _rename_layers(tensors: dict[str, Tensor]) -> None:
    """Renames the layers of EAGLE-3 as in our heads."""
    for name in [name for name in tensors if name.startswith("layers.")]:
        _, number, rest = name.split(".", 2)
        tensors[f"midlayer.{rest}" if number == "0" else f"deeper.{int(number) - 1}.{rest}"] = tensors.pop(name)


def _same(own: Tensor, theirs: Any) -> bool:
    return own.shape == theirs.shape and torch.equal(own.to(theirs.dtype), theirs.detach().to(own.device))


def _fill(head: DraftHead, tensors: Mapping[str, Tensor], folder: str | os.PathLike[str]) -> None:
    """Copies all tensors in their dtype; raises ValueError unless they are exactly those of the head."""
    floating = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)
    if floating is not None:
        nn.Module.to(head, floating)
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
