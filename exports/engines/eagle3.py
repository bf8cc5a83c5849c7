"""EAGLE-3 heads in the layout of their authors, and in that of the ``speculators`` library.

Block heads of P-EAGLE's form are EAGLE-3 heads with a mask: vLLM reads them in either layout, and drafts in parallel.

Both engines compute the same as :class:`~arbordraft.heads.eagle.EagleHead`. The embedding and the fused states are
normed separately, and the residual is taken before that norm. The layer's own output before the last norm feeds the
next step. Token embeddings are the target's.

Every program numbers the target's hidden states differently. Ours are the numbers of transformers: state i is the
output of i layers, and the last one has passed the final norm. In vLLM, which uses the same numbers, the last state is
taken before that norm. SGLang uses the number of the layer that a state comes out of, i - 1.

Shapes: D draft vocabulary, F hidden states side by side, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from arbordraft.exports.engines.layout import Layout, Shapes, dtype_name
from arbordraft.exports.engines.target import Target, check_fit
from arbordraft.heads.block import BlockHead
from arbordraft.heads.dflash import DFlashHead
from arbordraft.heads.eagle import EagleConfig, EagleHead
from arbordraft.heads.layers import LayeredHead

SPECULATORS_VERSION = "0.9.0"  # of the library whose format this is
SGLANG_STATES = 3  # hidden states that its fusing layer takes


def eagle3(head: EagleHead, target: Target, engine: str, card: str) -> Layout:
    """Returns the layout of EAGLE-3 checkpoints, which both engines load; they number hidden states differently.

    Raises:
        ValueError: if the engine does not compute such a network.
    """
    states, tensors = _tensors(head, target, engine, "midlayer.")
    ids = [number - 1 for number in states] if engine == "sglang" else states
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_llama(head, target),
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": head.config.target_hidden_size,
        "norm_before_residual": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True},
    }
    if engine == "vllm":
        config |= {"eagle_aux_hidden_state_layer_ids": ids, "num_aux_hidden_states": len(ids)}
    if isinstance(head, BlockHead):
        config["pard_token"] = head.config.mask_token_id
    return Layout(config, tensors, eagle3_shapes(config, "midlayer."), card)


def speculators(head: EagleHead, target: Target, speculative_tokens: int, card: str) -> Layout:
    """Returns the layout of the ``speculators`` library, which vLLM loads; it names the target, so one path is enough.

    Raises:
        ValueError: if vLLM does not compute such a network.
    """
    ids, tensors = _tensors(head, target, "vllm", "layers.0.")
    algorithm, architecture = ("peagle", "PEagle") if isinstance(head, BlockHead) else ("eagle3", "Eagle3")
    config = {
        "architectures": [f"{architecture}Speculator"],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": None,  # as large as the head's own
        "eagle_aux_hidden_state_layer_ids": ids,
        "norm_before_residual": False,  # vLLM takes it for true by default
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": dtype_name(head.dtype),
        "transformer_layer_config": _llama(head, target) | {"num_aux_hidden_states": len(ids)},
        "speculators_config": proposal(algorithm, target, speculative_tokens),
    }
    if isinstance(head, BlockHead):
        config["mask_token_id"] = head.config.mask_token_id
    return Layout(config, tensors, eagle3_shapes(config, "layers.0."), card)


def proposal(algorithm: str, target: Target, speculative_tokens: int) -> dict[str, Any]:
    """Returns the entry of the ``speculators`` library on the use of a drafter."""
    method = {"proposal_type": "greedy", "speculative_tokens": speculative_tokens, "verifier_accept_k": 1}
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": target.name, "architectures": target.architectures},
    }


def eagle3_shapes(config: dict[str, Any], layer: str) -> Shapes:
    """Returns the tensor shapes that an engine builds for a ``config.json``; the layer's names begin with ``layer``."""
    llama = config.get("transformer_layer_config", config)
    hidden, inner, vocabulary = llama["hidden_size"], llama["intermediate_size"], llama["vocab_size"]
    heads, kv_heads = (llama[name] * llama["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    ids = config.get("eagle_aux_hidden_state_layer_ids") or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    states, drafted = len(ids) * (config["target_hidden_size"] or hidden), config["draft_vocab_size"]
    shapes: Shapes = {"fc.weight": (hidden, states), "norm.weight": (hidden,), "lm_head.weight": (drafted, hidden)}
    if {"mask_token_id", "pard_token"} & config.keys():
        shapes["mask_hidden"] = (1, 1, states)
    if drafted != vocabulary:
        shapes |= {"d2t": (drafted,), "t2d": (vocabulary,)}
    inside = {
        "self_attn.q_proj": (heads, 2 * hidden),
        "self_attn.k_proj": (kv_heads, 2 * hidden),
        "self_attn.v_proj": (kv_heads, 2 * hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "hidden_norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    return shapes | {f"{layer}{name}.weight": shape for name, shape in inside.items()}


def _tensors(head: EagleHead, target: Target, engine: str, layer: str) -> tuple[list[int], dict[str, Tensor]]:
    """Returns the numbers of the hidden states that are read, ascending, and the weights under an engine's names."""
    config: EagleConfig = head.config
    config.check_plain("the export")
    check_fit(config, target)
    if config.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"engines norm embeddings and states of one size, the head has {config.target_hidden_size} and "
            f"{config.hidden_size}"
        )
    states, fc, mask = ascending(head)
    check_states(states, target, engine)
    tensors = {name.replace("midlayer.", layer): tensor for name, tensor in head.state_dict().items()}
    tensors["fc.weight"] = fc
    if mask is not None:
        tensors["mask_hidden"] = mask[None, None]
    if config.draft_vocab_size == config.vocab_size:  # engines take no map then
        del tensors["d2t"], tensors["t2d"]
    return states, tensors


def ascending(head: EagleHead | DFlashHead) -> tuple[list[int], Tensor, Tensor | None]:
    """Orders the hidden states as engines collect them, each once.

    Returns:
        Their numbers, the columns ``[H, F]`` that read them, and a mask's own states ``[F]``.
    """
    numbers, weight = list(head.config.hidden_layers or ()), head.fc.weight.detach()
    mask = head.mask_hidden.detach() if isinstance(head, BlockHead) else None
    order = sorted(set(numbers))
    if numbers == order:
        return order, weight, mask
    size = head.config.target_hidden_size
    if mask is not None:
        if len(order) < len(numbers):
            raise ValueError(f"the head reads hidden states {numbers}, engines give each once: train a head on others")
        parts = mask.split(size)
        mask = torch.cat([parts[numbers.index(number)] for number in order])
    blocks = weight.float().split(size, dim=1)
    columns = [torch.stack([b for b, n in zip(blocks, numbers, strict=True) if n == number]).sum(0) for number in order]
    return order, torch.cat(columns, dim=1).to(weight.dtype), mask


def check_states(states: list[int], target: Target, engine: str) -> None:
    """Raises ValueError if an engine cannot give a head the target's hidden states of these numbers."""
    if not states:
        raise ValueError("the head reads no hidden states of the target, and engines give it nothing else")
    first = 1 if engine == "sglang" else 0  # SGLang cannot give the embeddings themselves
    layers = target.config.num_hidden_layers
    if not first <= states[0] <= states[-1] < layers:
        raise ValueError(
            f"the head reads hidden states {states}, {engine} gives {first} to {layers - 1} of {target.name}: "
            "the last one has passed the final norm, which engines leave out. Train a head on other layers"
        )
    if engine == "sglang" and len(states) != SGLANG_STATES:
        raise ValueError(f"SGLang fuses {SGLANG_STATES} hidden states, the head reads {states}; vLLM takes it as it is")


def _llama(head: EagleHead, target: Target) -> dict[str, Any]:
    """Describes the layer as a Llama model of its own."""
    return layer_config(head, target, "llama") | {"num_hidden_layers": 1, "mlp_bias": False}


def layer_config(head: LayeredHead, target: Target, kind: str) -> dict[str, Any]:
    """Describes a head's layers as a model of the type ``kind``, with new and old names of its rotary settings."""
    config, name = head.config, dtype_name(head.dtype)
    return {
        "model_type": kind,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "pad_token_id": target.config.pad_token_id,
        "dtype": name,
        "torch_dtype": name,  # its older name
    }
