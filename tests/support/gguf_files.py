"""Tiny GGUF files, written as llama.cpp writes them."""

import gguf
import torch

from support.blocks import ordinary_blocks

LETTERS = [*"abcdefghijklmnopqrstuvwxyz", "ab"]
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def file_name(name):
    """Returns the name of a parameter in the file."""
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return name


def write_gguf(file, model, kinds=()):
    """Writes a model whose tokens are letters.

    Args:
        file: path of the file.
        model: a Llama, Qwen2 or Qwen3.
        kinds: pairs of a part of a parameter's name and a type of blocks; the first pair that fits counts.
    """
    config = model.config
    writer = gguf.GGUFWriter(file, config.model_type)
    for add, value in {
        "context_length": 128, "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size, "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads, "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": 10000.0, "vocab_size": config.vocab_size, "tokenizer_model": "gpt2", "token_list": LETTERS,
        "token_types": [1] * len(LETTERS), "token_merges": ["a b"], "bos_token_id": 1, "eos_token_id": 2,
    }.items():  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    if head := getattr(config, "head_dim", None):
        writer.add_key_length(head)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if config.model_type == "llama" and part in name:  # rotated pairs become neighbours
                tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        kind = next((kind for part, kind in kinds if part in name), None)
        if kind is None or tensor.ndim < 2:
            writer.add_tensor(file_name(name), tensor.contiguous().numpy())
        else:
            kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(file_name(name), blocks_like(tensor, kind), raw_dtype=kind)
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


def dequantised(file):
    """Returns every tensor of a file, dequantised by the gguf package."""
    reader = gguf.GGUFReader(str(file))
    return {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}
