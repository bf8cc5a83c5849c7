"""Translates the fields of a GGUF file into a configuration, generation settings and a tokenizer of transformers.

Transformers' own tables give most names. They leave out settings that change outputs; these are added here or refused.
"""

from typing import TYPE_CHECKING, Any, cast

from arbordraft.checkpoints.gguf_file import GgufFile

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

# Architectures whose names, settings and tensors are known to be read completely, with transformers' name of each.
ARCHITECTURES = {
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gpt2": "gpt2",
    "lfm2": "lfm2",
    "llama": "llama",
    "mamba": "mamba",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "qwen3moe": "qwen3_moe",
    "starcoder2": "starcoder2",
}
_TEXT_ONLY = {"gemma3": "gemma3_text"}  # files hold no images' part
# Settings that transformers' tables leave out, if the architecture has them.
_FURTHER = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "context_length": "max_position_embeddings",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta",
}
_QWEN3_5 = {  # transformers reads these files by another way than its tables
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "feed_forward_length": "intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "vocab_size": "vocab_size",
}
_TABLES = {"qwen35": _QWEN3_5, "qwen35moe": _QWEN3_5}
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONTROL = 3  # type of tokens that no text spells
# Tokens that end an assistant's turn, where older files name only the end of a text.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>")
_TOKENIZER = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"


def gguf_config(file: GgufFile) -> Any:
    """Returns the configuration of a file's model.

    Raises:
        ValueError: if the architecture or one of its settings is not supported.
    """
    from transformers import CONFIG_MAPPING
    from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

    if (known := ARCHITECTURES.get(file.architecture)) is None:
        raise ValueError(
            f"{file.path} holds the architecture {file.architecture!r}, and GGUF files are read of "
            f"{', '.join(ARCHITECTURES)}: load the model's safetensors folder, with weights='int4' for its size"
        )
    kind = _TEXT_ONLY.get(known, known)
    if kind == "mamba" and file.setting("ssm.dt_b_c_rms"):
        kind = "falcon_mamba"
    config_class = CONFIG_MAPPING[kind]
    tables: Any = GGUF_CONFIG_MAPPING
    table = _TABLES.get(file.architecture) or tables[known]
    settings: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(known, {}))
    defaults = config_class()
    further = {name: ours for name, ours in _FURTHER.items() if name not in table and _has(defaults, ours)}
    for name, ours in (further | table).items():
        if ours is None or (value := file.setting(name)) is None:
            continue
        if isinstance(value, list):
            if kind != "lfm2" or len(given := {*value} - {0}) != 1:  # no heads in layers with a convolution
                raise ValueError(
                    f"{file.path} has another {name} in each layer, which no model of {kind} in transformers has"
                )
            (value,) = given
        settings[ours] = value
    if not _has(defaults, "head_dim"):
        settings.pop("head_dim", None)
    # Defaults of configurations are the tokens of one checkpoint.
    settings |= {ours: file.fields.get(f"tokenizer.{name}") for name, ours in tables["tokenizer"].items()}
    settings["tie_word_embeddings"] = "output.weight" not in file.tensors
    settings.setdefault("vocab_size", file.tensors["token_embd.weight"].shape[0] if _has_table(file) else 0)
    return config_class.from_dict(settings | _unnamed(file, kind, settings) | _rotation(file, kind, settings))


def gguf_generation_config(file: GgufFile, config: Any) -> "GenerationConfig":
    """Returns settings of generation: the tokens that end a text or an assistant's turn."""
    from transformers import GenerationConfig

    found: GenerationConfig = GenerationConfig.from_model_config(config)
    tokens = file.fields.get(f"{_TOKENIZER}tokens", [])
    ends = [file.fields.get(f"{_TOKENIZER}{name}_token_id") for name in ("eos", "eot", "eom")]
    template, kinds = file.fields.get(_TEMPLATE, ""), file.fields.get(f"{_TOKENIZER}token_type", [])
    turn_ends = [end for end in _TURN_ENDS if end in template]
    ends += [index for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
             if kind == _CONTROL and token in turn_ends]  # fmt: skip
    if known := list(dict.fromkeys(end for end in ends if end is not None)):
        found.eos_token_id = known if len(known) > 1 else known[0]
    return found


def gguf_tokenizer(file: GgufFile) -> "PreTrainedTokenizerBase | None":
    """Returns the tokenizer of a file, padding on the left, with its chat templates; ``None`` if the file has none.

    Raises:
        ValueError: if transformers cannot build this kind of tokenizer, or the file's vocabulary is damaged.
    """
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    parts, options = (
        {ours: file.fields[f"tokenizer.{name}"] for name, ours in table.items() if f"tokenizer.{name}" in file.fields}
        for table in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    if not parts.get("tokens"):
        return None
    if parts.get("tokenizer_type") == "llama":
        options.setdefault("add_bos_token", True)  # files from before the field, as llama.cpp reads them
    try:
        backend, more = convert_gguf_tokenizer(file.architecture, parts)
        for name, field in _SPECIAL.items():
            index = file.fields.get(f"{_TOKENIZER}{field}_token_id")
            options[name] = None if index is None else parts["tokens"][index]
    except Exception as error:  # the tokenizers' own library raises plain ones
        raise ValueError(
            f"the tokenizer in {file.path} cannot be read ({error}): copy or convert the file again"
        ) from error
    if named := {
        name[len(_TEMPLATE) + 1 :]: text for name, text in file.fields.items() if name.startswith(f"{_TEMPLATE}.")
    }:
        options["chat_template"] = (
            named | {"default": options["chat_template"]} if "chat_template" in options else named
        )
    # As transformers' own subclasses hand their backends over: a `tokenizer_object` would be copied, word by word.
    tokenizer: Any = PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast)
    tokenizer._tokenizer = backend
    tokenizer.__init__(padding_side="left", name_or_path=str(file.path), **options, **more)
    return cast("PreTrainedTokenizerBase", tokenizer)


def _has(config: Any, name: str) -> bool:
    return name == "rope_theta" or hasattr(config, name)


def _has_table(file: GgufFile) -> bool:
    return "token_embd.weight" in file.tensors


def _unnamed(file: GgufFile, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings that an architecture's files imply without naming them."""
    layers, hidden = settings.get("num_hidden_layers"), settings.get("hidden_size")
    if (kind, layers) in (("gemma2", 46), ("gemma3_text", 62)):  # the largest sizes alone scale by the width of heads
        assert hidden is not None
        return {"query_pre_attn_scalar": hidden // settings["num_attention_heads"]}
    if kind == "gpt2":
        return {"n_positions": settings["n_ctx"], "n_inner": settings.pop("feed_forward_length", None)}
    if kind == "lfm2":  # the length is that of the weights, which the configuration would shrink again
        heads = _needed(file, "attention.head_count_kv")
        kinds = [
            "full_attention" if count else "conv"
            for count in (heads if isinstance(heads, list) else [1] * _needed(file, "block_count"))
        ]
        return {
            "layer_types": kinds,
            "norm_eps": _needed(file, "attention.layer_norm_rms_epsilon"),
            "block_auto_adjust_ff_dim": False,
        }
    if kind in ("mamba", "falcon_mamba"):
        settings.pop("max_position_embeddings", None)  # texts have no longest length
        return {
            "expand": _needed(file, "ssm.inner_size") // _needed(file, "embedding_length"),
            "use_conv_bias": "blk.0.ssm_conv1d.bias" in file.tensors,
            "use_bias": "blk.0.ssm_in.bias" in file.tensors,
        }
    if kind.startswith("qwen3_5"):  # layers that predict several tokens are counted, too
        return {
            "num_hidden_layers": _needed(file, "block_count") - file.setting("nextn_predict_layers", 0),
            "linear_value_head_dim": _needed(file, "ssm.inner_size") // _needed(file, "ssm.time_step_rank"),
        }
    return {}


def _needed(file: GgufFile, name: str) -> Any:
    if (value := file.setting(name)) is None:
        raise ValueError(f"{file.path} lacks its field {file.architecture}.{name}: copy or convert it again")
    return value


def _rotation(file: GgufFile, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns settings of rotary positions: the rotated part of a head, and longer texts than in training."""
    base = settings.pop("rope_theta", None)
    rope: dict[str, Any] = {"rope_type": "default"} | ({} if base is None else {"rope_theta": base})
    rotated, heads = file.setting("rope.dimension_count"), settings.get("num_attention_heads")
    if (kind == "phi3" or kind.startswith("qwen3_5")) and rotated and heads:
        rope["partial_rotary_factor"] = rotated / settings.get("head_dim", settings["hidden_size"] // heads)
    scaling = file.setting("rope.scaling.type", "none")
    factor = file.setting("rope.scaling.factor", file.setting("rope.scale_linear"))
    if scaling in ("none", "") and not factor:
        pass
    elif scaling in ("linear", "none", ""):
        rope |= {"rope_type": "linear", "factor": factor}
    elif scaling == "yarn":
        original = file.setting("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    else:
        raise ValueError(
            f"{file.path} stretches positions by {scaling!r}, which is not read: load its safetensors folder"
        )
    if kind.startswith("qwen3_5") and (sections := file.setting("rope.dimension_sections")):
        rope |= {"mrope_section": [section for section in sections if section], "mrope_interleaved": True}
    if kind == "gpt2" or (base is None and len(rope) == 1):
        return {}
    if kind == "gemma3_text":  # layers with a window keep positions as they are, on a base of their own
        local = file.setting("rope.freq_base_swa", 10000.0)
        plain = {"rope_type": "default", "rope_theta": local}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": plain}}
    return {"rope_parameters": rope}


__all__ = ["ARCHITECTURES", "gguf_config", "gguf_generation_config", "gguf_tokenizer"]
