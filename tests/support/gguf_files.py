"""Tiny GGUF files, written as llama.cpp's converter writes them."""

from functools import cache

import gguf
import numpy as np
import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from support.blocks import ordinary_blocks

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "ab"]
ARCHITECTURES = {
    "falcon_mamba": "mamba",
    "gemma3_text": "gemma3",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
}
_ONE_MORE = ("gemma2", "gemma3", "qwen35", "qwen35moe")  # their norms are stored with 1 added
_FLOATS = ("conv.weight", "conv1d.weight", "ssm_a")  # llama.cpp quantises no such matrices
_TRANSPOSED = ("c_attn", "c_proj", "c_fc")  # of GPT-2


def architecture_of(model):
    """Returns GGUF's name of a model's architecture."""
    return ARCHITECTURES.get(model.config.model_type, model.config.model_type)


@cache
def names_of(architecture):
    """Returns GGUF's map of names, which takes longer to make than a tiny file."""
    kind = next(key for key, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    return gguf.get_tensor_name_map(kind, 64)


def file_name(name, architecture="llama"):
    """Returns the name of a parameter in the file."""
    name = name.replace(".dt_bias", ".dt_proj.bias")
    return names_of(architecture).get_name(name, try_suffixes=(".weight", ".bias"))


def stored(model):
    """Returns the parameters of a model by their names in the file, as they are stored there."""
    config, architecture, found = model.config, architecture_of(model), {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            layer = name.split(".")[2]
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                found[f"blk.{layer}.ffn_{part}_exps.weight"] = half
            continue
        if name.endswith("experts.down_proj"):
            found[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = tensor
            continue
        if architecture == "llama":
            for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
                if part in name:  # rotated pairs become neighbours
                    tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        if architecture in _ONE_MORE and name.endswith("norm.weight") and "linear_attn" not in name:
            tensor = tensor + 1
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if name.endswith((".conv1d.weight", ".conv.conv.weight")):
            tensor = tensor.squeeze(1)
        if ".linear_attn." in name and not name.endswith("linear_attn.norm.weight"):
            tensor = tiled(tensor, name, config)
        if architecture == "gpt2" and name.endswith(".weight") and any(part in name for part in _TRANSPOSED):
            tensor = tensor.T
        if name.endswith("shared_expert_gate.weight"):
            tensor = tensor[0]
        found[file_name(name, architecture)] = tensor
    return found


def tiled(tensor, name, config):
    """Returns a tensor whose value heads lie as in files: the first ones of all key heads, then the second ones."""
    heads, groups = config.linear_num_value_heads, config.linear_num_key_heads
    order = torch.tensor(
        [group * (heads // groups) + head for head in range(heads // groups) for group in range(groups)]
    )
    if "out_proj" in name:
        return tensor.unflatten(1, (heads, -1))[:, order].flatten(1)
    keys = 2 * groups * config.linear_key_head_dim if "qkv" in name or "conv1d" in name else 0
    return torch.cat([tensor[:keys], tensor[keys:].unflatten(0, (heads, -1))[order].flatten(0, 1)])


def recurrent_settings(config):
    """Returns the settings of a model with recurrent layers that other models lack or have otherwise."""
    kind = config.model_type
    if kind == "lfm2":
        heads = [config.num_key_value_heads * (layer == "full_attention") for layer in config.layer_types]
        return {
            "attention.head_count_kv": heads,
            "shortconv.l_cache": config.conv_L_cache,
            "attention.layer_norm_rms_epsilon": config.norm_eps,
        }
    if kind in ("mamba", "falcon_mamba"):
        return {
            "context_length": 2**20,
            "feed_forward_length": 0,
            "attention.head_count": 0,
            "attention.head_count_kv": None,
            "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
            "ssm.conv_kernel": config.conv_kernel,
            "ssm.inner_size": config.intermediate_size,
            "ssm.state_size": config.state_size,
            "ssm.time_step_rank": config.time_step_rank,
            "ssm.dt_b_c_rms": kind == "falcon_mamba",
        }
    if kind.startswith("qwen3_5"):
        return {
            "full_attention_interval": config.layer_types.index("full_attention") + 1,
            "rope.dimension_sections": [11, 11, 10, 0],
            "ssm.conv_kernel": config.linear_conv_kernel_dim,
            "ssm.state_size": config.linear_key_head_dim,
            "ssm.group_count": config.linear_num_key_heads,
            "ssm.time_step_rank": config.linear_num_value_heads,
            "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        }
    return {}


def settings_of(config):
    """Returns the settings of an architecture, as llama.cpp's converter writes them."""
    heads, hidden = getattr(config, "num_attention_heads", 0), config.hidden_size
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    found = {
        "context_length": getattr(config, "max_position_embeddings", None),
        "embedding_length": hidden,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", heads),
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None),
        "attention.layer_norm_epsilon": next(
            (
                getattr(config, name)
                for name in ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
                if hasattr(config, name)
            ),
            None,
        ),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
        "rope.freq_base": rope.get("rope_theta"),
        "vocab_size": config.vocab_size,
        "expert_count": getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }
    if rope:
        dim = getattr(config, "head_dim", None) or hidden // heads
        found["rope.dimension_count"] = int(dim * (rope.get("partial_rotary_factor") or 1))
    found |= recurrent_settings(config)
    return {name: value for name, value in found.items() if value is not None}


def write_gguf(file, model, kinds=(), tokens=LETTERS, fields=(), tensors=()):
    """Writes a model whose tokens are letters.

    Args:
        file: path of the file.
        model: a causal LM of an architecture that is read from such files.
        kinds: pairs of a part of a parameter's name in the file and a type; the first pair that fits a matrix counts.
        tokens: the vocabulary.
        fields: further fields by name, or other values of them; ``None`` leaves one out.
        tensors: further float32 tensors by name.
    """
    writer = gguf.GGUFWriter(file, architecture_of(model))
    known = {f"{architecture_of(model)}.{name}": value for name, value in settings_of(model.config).items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for name, value in (known | dict(fields)).items():
        if value is not None:
            add_field(writer, name, value)
    for name, tensor in (stored(model) | dict(tensors)).items():
        kind = next((kind for part, kind in kinds if part in name), None)
        if kind is None or tensor.ndim < 2 or name.endswith(_FLOATS):
            writer.add_tensor(name, tensor.contiguous().float().numpy())
        else:
            kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, blocks_like(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def blocks_like(tensor, kind):
    """Quantises a matrix; kinds that the gguf package does not write get random blocks of the same size of weights."""
    numbers = tensor.contiguous().float()
    try:
        return gguf.quants.quantize(numbers.numpy(), kind)
    except NotImplementedError:
        return ordinary_blocks(kind.name, *numbers.shape, torch.Generator().manual_seed(0)).numpy()


def add_field(writer, name, value):
    """Adds a field of the type of its value."""
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    else:
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](name, value)


def byte_tokens():
    """Returns a vocabulary that spells every text, byte by byte."""
    return [*bytes_to_unicode().values()]


def dequantised(file):
    """Returns every tensor of a file, dequantised by the gguf package."""
    reader = gguf.GGUFReader(str(file))
    return {t.name: torch.tensor(np.array(gguf.quants.dequantize(t.data, t.tensor_type))) for t in reader.tensors}
