"""Models with recurrent layers and random weights, and attention models beside them."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Class names of transformers, and settings. Models are cut to a few layers of each kind where they are large.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2-350m": (
        "Lfm2",
        {
            "vocab_size": 65536,
            "hidden_size": 1024,
            "intermediate_size": 4608,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "conv_L_cache": 3,
            "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        },
    ),
    "granite-4-h-micro": (
        "GraniteMoeHybrid",
        {
            "vocab_size": 16384,
            "hidden_size": 2048,
            "shared_intermediate_size": 8192,
            "layer_types": ["linear_attention"] * 5 + ["full_attention"],
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 64,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "position_embedding_type": "nope",
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.015625,
            "logits_scaling": 8.0,
        },
    ),
    "qwen3-next-dense": (
        "Qwen3Next",
        {
            "vocab_size": 16384,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "mlp_only_layers": list(range(8)),
        },
    ),
    "falcon-h1-0.5b": (
        "FalconH1",
        {
            "vocab_size": 32784,
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "mamba_d_ssm": 1536,
            "mamba_n_heads": 24,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "embedding_multiplier": 5.656854249492381,
            "lm_head_multiplier": 0.0390625,
            "key_multiplier": 0.390625,
            "attention_out_multiplier": 0.9375,
            "mlp_multipliers": [0.8838834764831844, 0.5859375],
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
            "ssm_out_multiplier": 0.23570226039551587,
        },
    ),
    "tiny-lfm2": (
        "Lfm2",
        {
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 96,
            "block_auto_adjust_ff_dim": False,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "full_attn_idxs": [1],
        },
    ),
}


def random_model(
    kind: str, settings: dict[str, Any], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> "PreTrainedModel":
    """Returns a model of random weights, which emits no end of its text."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    config.eos_token_id = None
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model: Any = getattr(transformers, f"{kind}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    made: PreTrainedModel = model.to(dtype).eval()
    return made


def attention_settings(model: "PreTrainedModel") -> dict[str, Any]:
    """Returns settings of a Llama with as many layers, as wide, whose weights take about as many bytes."""
    config: Any = model.config
    hidden, layers, heads = config.hidden_size, config.num_hidden_layers, config.num_attention_heads
    kv_heads = config.num_key_value_heads
    matrices = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    attention = 2 * hidden * hidden * (heads + kv_heads) // heads
    inner = round(((matrices - hidden * config.vocab_size) / layers - attention) / (3 * hidden) / 32) * 32
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": max(32, inner),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


__all__ = ["HYBRIDS", "attention_settings", "random_model"]
