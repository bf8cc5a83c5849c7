"""DFlash and DSpark heads in the layout of the ``speculators`` library, which vLLM loads.

The library keeps an output matrix only for a trimmed vocabulary; otherwise it uses the target's.

Shapes: D draft vocabulary, F hidden states side by side, H hidden size, V vocabulary, r rank of the Markov term.
"""

from typing import Any

from arbordraft.exports.engines.eagle3 import (
    SPECULATORS_VERSION,
    ascending,
    check_states,
    layer_config,
    proposal,
)
from arbordraft.exports.engines.layout import Layout, Shapes, dtype_name
from arbordraft.exports.engines.target import Target, check_fit
from arbordraft.heads.dflash import DFlashHead


def dflash(head: DFlashHead, target: Target, speculative_tokens: int, card: str) -> Layout:
    """Returns the layout of DSpark, or of DFlash if a head has no Markov term and only its masks predict.

    Raises:
        ValueError: if the layout cannot hold such a head, or the head belongs to another target.
    """
    given = head.config
    check_fit(given, target)
    _check(head)
    states, fc, _ = ascending(head)
    check_states(states, target, "vllm")
    spark = head.markov_head is not None or given.from_anchor
    kind, architecture = ("dspark", "DSpark") if spark else ("dflash", "DFlash")
    layers = layer_config(head, target, "qwen3")
    layers |= {"layer_types": ["full_attention"] * given.num_hidden_layers, "use_sliding_window": False}
    config: dict[str, Any] = {
        "architectures": [f"{architecture}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": given.draft_vocab_size,
        "block_size": given.block_size,
        "sample_from_anchor": given.from_anchor,
        "mask_token_id": given.mask_token_id,
        "aux_hidden_state_layer_ids": states,
        "sliding_window_non_causal": False,
        "target_hidden_size": None,  # as large as the head's own
        "tie_word_embeddings": False,
        "dtype": dtype_name(head.dtype),
        "transformer_layer_config": layers,
        "speculators_config": proposal(kind, target, speculative_tokens),
    }
    if spark:
        config |= {"markov_rank": given.markov_rank, "markov_head_type": given.markov}
        config |= {"enable_confidence_head": False, "confidence_head_with_markov": False}
    tensors = head.state_dict() | {"fc.weight": fc}
    if given.draft_vocab_size == given.vocab_size:
        del tensors["d2t"], tensors["t2d"]
    return Layout(config, tensors, dflash_shapes(config), card)


def dflash_shapes(config: dict[str, Any]) -> Shapes:
    """Returns the shapes of the tensors that the library keeps for a ``config.json``."""
    layers = config["transformer_layer_config"]
    hidden, inner, vocabulary = layers["hidden_size"], layers["intermediate_size"], layers["vocab_size"]
    heads, kv_heads = (layers[name] * layers["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    drafted, rank = config["draft_vocab_size"], config.get("markov_rank", 0)
    shapes: Shapes = {"fc.weight": (hidden, len(config["aux_hidden_state_layer_ids"]) * hidden)}
    shapes |= {"hidden_norm.weight": (hidden,), "norm.weight": (hidden,)}
    inside: Shapes = {
        "self_attn.q_proj.weight": (heads, hidden),
        "self_attn.k_proj.weight": (kv_heads, hidden),
        "self_attn.v_proj.weight": (kv_heads, hidden),
        "self_attn.o_proj.weight": (hidden, heads),
        "self_attn.q_norm.weight": (layers["head_dim"],),
        "self_attn.k_norm.weight": (layers["head_dim"],),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if layers["attention_bias"]:
        sizes = {"q": heads, "k": kv_heads, "v": kv_heads, "o": hidden}
        inside |= {f"self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    for layer in range(layers["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in inside.items()}
    if drafted < vocabulary:
        shapes |= {"lm_head.weight": (drafted, hidden), "d2t": (drafted,), "t2d": (vocabulary,)}
    if rank:
        shapes |= {"markov_head.markov_w1.weight": (vocabulary, rank), "markov_head.markov_w2.weight": (drafted, rank)}
        outer = {"gated": ("gate_proj", rank, rank), "rnn": ("joint_proj", 2 * rank, 3 * rank)}
        if (found := outer.get(config["markov_head_type"])) is not None:
            name, inputs, outputs = found
            shapes |= {f"markov_head.{name}.weight": (outputs, hidden + inputs), f"markov_head.{name}.bias": (outputs,)}
    return shapes


def _check(head: DFlashHead) -> None:
    """Raises ValueError if the layout cannot hold a head."""
    config = head.config
    if not config.qk_norm:
        raise ValueError("vLLM norms queries and keys of DFlash heads, this one does not: train it with qk_norm")
    if (config.rope_parameters or {}).get("rope_type", "default") != "default":
        raise ValueError(f"the export writes plain rotary embeddings, not {config.rope_parameters}")
    if config.own_head and config.draft_vocab_size == config.vocab_size:
        raise ValueError(
            "the layout keeps output matrices of trimmed vocabularies alone, this head has one of all tokens: train it "
            f"with a vocabulary below {config.vocab_size}"
        )


__all__ = ["dflash", "dflash_shapes"]
