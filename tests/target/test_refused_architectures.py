"""Models are refused for the right reasons, and accepted models are right beyond their windows."""

from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from support.models import PROMPTS, VOCAB, check_greedy, decode, tiny
from transformers import AutoConfig

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology, UnsupportedModel
from arbordraft.testing import tiny_model

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1}
# The attention interface does not receive these limits, or only the cache applies them.
HIDDEN = {
    "llama4_text": {**_SIZES, **_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 16},
    "phimoe": {**_SIZES, **_EXPERTS, "sliding_window": 16},
    "qwen2_moe": {
        **_SIZES,
        **_EXPERTS,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 16,
        "layer_types": ["sliding_attention"] * 2,
    },
    "moshi": {**_SIZES, "ffn_dim": 48, "sliding_window": 16},
}
TOLD = ("mistral", "gemma2", "gemma3_text", "gemma3", "gpt_oss", "phi3")


_GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
# Architectures that do not route attention through the interface; docs/choosing.md lists them.
REFUSED = {
    "stablelm": _SIZES,
    "nemotron": _SIZES,
    "gpt_neo": {**_SIZES, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128},
    "xglm": {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "diffllama": _SIZES,
    "rwkv": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
}
# Architectures that do so since transformers 5.24.
ROUTED = {"gptj": {**_GPT, "rotary_dim": 4}, "codegen": {**_GPT, "rotary_dim": 4}}
CHOOSING = Path(__file__).resolve().parents[2] / "docs" / "choosing.md"


def built(architecture, **options):
    """Builds a random model whose attention distinguishes tokens."""
    settings = {**(HIDDEN | REFUSED | ROUTED)[architecture], **options}
    return tiny_model(AutoConfig.for_model(architecture, **settings))


@pytest.mark.parametrize("architecture", REFUSED)
def test_models_that_are_refused_are_listed(architecture):
    with pytest.raises(UnsupportedModel, match=r"AttentionInterface|a mask of its own|packed trees do not support"):
        RaggedModel(built(architecture), kernels="torch")
    assert f"`{architecture}`" in CHOOSING.read_text()


@pytest.mark.parametrize("architecture", ROUTED)
def test_models_need_transformers_that_routes_their_attention(architecture):
    model = built(architecture)
    if Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(UnsupportedModel, match="AttentionInterface"):
            RaggedModel(model, kernels="torch")
        return
    check_greedy(SpeculativeDecoder(RaggedModel(model, kernels="torch"), NGramDrafter(), TreeTopology([-1, 0, 1])))


@pytest.mark.parametrize("architecture", HIDDEN)
def test_limits_that_attention_does_not_receive_are_refused(architecture):
    span = "attention_chunk_size=16" if architecture == "llama4_text" else "sliding_window=16"
    with pytest.raises(UnsupportedModel, match=rf"beyond {span} packed .*max_position_embeddings = 16 before"):
        RaggedModel(built(architecture), kernels="torch")


@pytest.mark.parametrize("architecture", HIDDEN)
def test_texts_within_the_limit_are_decoded(architecture):
    """Follows the advice of the error message."""
    target = RaggedModel(built(architecture, max_position_embeddings=16), kernels="torch")
    assert target.max_positions == 16
    decoder = SpeculativeDecoder(target, NGramDrafter(), TreeTopology([-1, 0, 1]))
    with pytest.raises(ValueError, match="16 positions"):
        decode(decoder, PROMPTS[:1], max_new_tokens=20)
    check_greedy(decoder, PROMPTS[:1], 8)


@pytest.mark.parametrize("architecture", TOLD)
def test_windows_that_attention_receives_are_accepted(architecture):
    given = {"sliding_window": 16}
    model = tiny(architecture, **({"text_config": {**tiny_text(), **given}} if architecture == "gemma3" else given))
    target = RaggedModel(model, kernels="torch")
    assert target.model.config.get_text_config().sliding_window == 16
    check_greedy(SpeculativeDecoder(target, NGramDrafter(), TreeTopology([-1, 0, 1])), [[*range(3, 27)]])


def tiny_text():
    """Returns the configuration of the language model alone, for a model of several parts."""
    return tiny("gemma3_text").config.to_dict()


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_nan_and_infinite_weights_are_named(value):
    model = tiny()
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    with pytest.raises(ValueError, match=r"NaN or infinite weights \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        RaggedModel(model, kernels="torch")


def test_rows_that_overflow_are_named():
    model = tiny().to(torch.float16)
    model.get_output_embeddings().weight.data.fill_(6e4)
    with pytest.raises(ValueError, match=r"gives NaN or infinite logits in torch\.float16.*another dtype"):
        RaggedModel(model, kernels="torch")


@pytest.mark.parametrize(("kind", "count"), [("_tp_size", 2), ("_fsdp_size", 4)])
def test_models_split_over_processes_are_refused_by_name(kind, count):
    model = tiny()
    setattr(model, kind, 1)
    RaggedModel(model, kernels="torch")
    setattr(model, kind, count)
    with pytest.raises(UnsupportedModel, match=rf"LlamaForCausalLM is split over {count} processes .*without tp_plan="):
        RaggedModel(model, kernels="torch")
