"""Small random models with recurrent layers, and their logits after a text, with no cache and no tree."""

from functools import cache
from typing import Any

from transformers import PreTrainedModel

from arbordraft import RaggedModel
from support.shrunken import OPTIONS, shrunken

CONV = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
LINEAR = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "qwen3_next": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": LINEAR,
    "olmo_hybrid": LINEAR,
    "kimi_linear": LINEAR,
    "granitemoehybrid": LINEAR,
    "bamba": {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": OPTIONS["falcon_h1"],
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"]},
    "mamba2": OPTIONS["mamba2"],
    "mamba": {},
    "falcon_mamba": {},
    "jamba": {"num_hidden_layers": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
}


def recurrent(architecture: str, **options: Any) -> PreTrainedModel:
    """Returns a small random model whose layers are of several kinds, if it has several."""
    return shrunken(architecture, **RECURRENT[architecture], **options)


@cache
def recurrent_target(architecture: str, kernels: str = "torch") -> RaggedModel:
    """Returns a wrapped model that all tests share; they must not change it."""
    return RaggedModel(recurrent(architecture), kernels=kernels)
