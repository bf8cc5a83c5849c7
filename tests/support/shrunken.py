"""Small random models of any architecture of transformers."""

from dataclasses import fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from support.models import VOCAB

# Small values for all names of sizes in configurations.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_token"), VOCAB),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim", "lru_width"), 32
    ),
    **dict.fromkeys(("attention_hidden_size", "dim_model", "emb_dim", "attention_dim", "d_embed"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "n_inner_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "dense_intermediate_size", "dim_ff", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("head_dim", "dim_head", "attention_head_size", "kv_channels", "swa_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "router_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "num_kv_shared_layers"), 1),
    **dict.fromkeys(("moe_layer_freq", "num_dense_layers", "num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input", "laurel_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("v_head_dim", "index_head_dim", "indexer_head_dim", "swa_v_head_dim"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("index_topk", "index_topk_blocks", "sliding_window", "attention_window_size"), 4),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("index_block_size",), 2),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("n_groups", "mamba_n_groups", "mamba_ngroups"), 1),
    "image_size": 28,
    "patch_size": 14,
    "is_decoder": True,
}


def shrunken_config(kind: type[PreTrainedConfig], **options: Any) -> PreTrainedConfig:
    """Builds a small configuration of two layers, of different kinds if the architecture has several."""
    known = {field.name for field in fields(kind)}
    sizes = {name: value for name, value in SIZES.items() if name in known}
    for name, part in kind.sub_configs.items():
        if name in known and part is not None and hasattr(part, "sub_configs") and part is not PreTrainedConfig:
            sizes[name] = shrunken_config(part).to_dict()
    for name in {"layer_types", "layers_block_type", "mlp_layer_types"} & known:
        if kinds := list(dict.fromkeys(getattr(kind(), name, None) or ())):
            sizes[name] = [kinds[0], kinds[-1]]
    return kind(**{**sizes, **options})


def shrunken(architecture: str, **options: Any) -> PreTrainedModel:
    """Builds a small random model in eval mode, with matrices large enough for every token to matter."""
    torch.manual_seed(0)
    config = shrunken_config(CONFIG_MAPPING[architecture], **options)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > 1e7:
        raise ValueError(f"{size} parameters")
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1 and weight.is_floating_point():
                weight.normal_(std=weight.shape[-1] ** -0.5)
    return model


BOTH = ["sliding_attention", "full_attention"]
SHARED = {"num_hidden_layers": 4, "layer_types": 2 * BOTH, "num_kv_shared_layers": 2}
CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
LINEAR = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "olmo_hybrid": LINEAR,
    "kimi_linear": {**LINEAR, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "granitemoehybrid": LINEAR,
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "sliding_window": None,
    },
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
OPTIONS = {
    **RECURRENT,
    "gemma3n_text": {**SHARED, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": SHARED,
    "gemma4_unified_text": {"layer_types": BOTH, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "moshi": {"audio_vocab_size": 61},
    "zaya": {"num_experts_per_tok": 1},
}
