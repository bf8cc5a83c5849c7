"""Small random models with recurrent layers, and their tokens without a cache and without a tree."""

from collections.abc import Sequence
from functools import cache
from typing import Any

from transformers import PreTrainedModel

from arbordraft import RaggedModel
from support.models import next_logits
from support.shrunken import RECURRENT, shrunken

# Transformers' own decoding differs from its forwards of whole texts.
UNEVEN = ("nemotron_h", "recurrent_gemma", "zamba2")
QUICK = [name for name in RECURRENT if name != "kimi_linear"]  # in which transformers takes seconds for a text
# Sizes that native kernels run, without experts: rows have the same bits in every batch.
MAMBA2 = {"hidden_size": 64, "mamba_n_heads": 4, "mamba_d_head": 32}
ROW_WISE: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 64},
    "qwen3_5_text": {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "olmo_hybrid": {"hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "mamba2": {"hidden_size": 64, "head_dim": 16},
    "granitemoehybrid": {**MAMBA2, "num_local_experts": 0},
    "bamba": MAMBA2,
    "falcon_h1": {"hidden_size": 64, "mamba_rms_norm": True},  # before the gates: these layers are not fused
    "nemotron_h": {"head_dim": 16},
}
FALCON_FACTORS: dict[str, Any] = {
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.6,
    "mlp_multipliers": [0.7, 1.3],
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.5, 0.8, 1.1, 0.6, 1.4],
    "ssm_out_multiplier": 0.9,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 2.0,
}
NO_ROTATION = {"rope_type": "default", "rope_theta": None}
# All layers of these run in one native call.
FUSED: dict[str, dict[str, Any]] = {
    **ROW_WISE,
    "olmo_hybrid": {**ROW_WISE["olmo_hybrid"], "rope_parameters": NO_ROTATION},  # else, its layers take turns
    "granitemoehybrid": {**MAMBA2, "residual_multiplier": 0.3},
    "falcon_h1": {"hidden_size": 64, **FALCON_FACTORS},
    "nemotron_h": {
        **ROW_WISE["nemotron_h"],
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
        "moe_shared_expert_intermediate_size": 48,
        "routed_scaling_factor": 2.5,
    },
    "lfm2_moe": {"hidden_size": 64, "routed_scaling_factor": 2.5},
    "qwen3_next": ROW_WISE["qwen3_5_text"],
    "qwen3_5_moe_text": ROW_WISE["qwen3_5_text"],
}
# The rows of these depend on others in transformers' functions: experts, products of weights that are no linears, GELU.
OTHERS = [name for name in QUICK if name not in ROW_WISE]


def recurrent(architecture: str, **options: Any) -> PreTrainedModel:
    """Returns a small random model whose layers are of several kinds, if it has several."""
    return shrunken(architecture, **{**RECURRENT[architecture], **options})


def own_greedy(model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Returns the most probable tokens after each prompt, by forwards of the whole text.

    Transformers' own decoding with a cache gives other logits for Nemotron-H and Zamba2. In RecurrentGemma, it goes on
    from the states of the text before, if a prompt has one token.
    """
    found = []
    for prompt in prompts:
        text = list(prompt)
        while len(text) < len(prompt) + count:
            text.append(int(next_logits(model, text).argmax()))
        found.append(text[len(prompt) :])
    return found


@cache
def recurrent_target(architecture: str, kernels: str = "torch") -> RaggedModel:
    """Returns a wrapped model that all tests share; they must not change it."""
    return RaggedModel(recurrent(architecture), kernels=kernels)
