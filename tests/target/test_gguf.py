"""Models of GGUF files equal the models that were written, for every architecture that is read."""

import pytest
import torch
from support.models import decode, greedy_reference
from transformers import AutoConfig, AutoModelForCausalLM

import arbordraft as ad
from arbordraft.checkpoints.gguf_settings import ARCHITECTURES
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.prepacked.room import needed_memory

pytest.importorskip("gguf")
from support.gguf_files import LETTERS, architecture_of, write_gguf

from arbordraft.checkpoints.gguf_file import GgufFile
from arbordraft.target.prepacked.gguf import load_gguf

TOKENS = torch.arange(12)[None]
QWEN3_5 = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 3,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
}
# By GGUF's name: transformers' name and settings that a reader could miss.
MODELS = {
    "gemma2": (
        "gemma2",
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "sliding_window": 8,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "query_pre_attn_scalar": 256,
        },
    ),
    "gpt2": ("gpt2", {"n_positions": 128, "n_inner": 96}),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
            "norm_eps": 0.01,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}),
    "mamba": ("mamba", {"state_size": 8, "expand": 3, "conv_kernel": 3, "time_step_rank": 32}),
    "phi3": (
        "phi3",
        {
            "sliding_window": 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen35": ("qwen3_5_text", QWEN3_5),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {
            **QWEN3_5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3moe": ("qwen3_moe", {"moe_intermediate_size": 32, "norm_topk_prob": True}),
    "starcoder2": (
        "starcoder2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "sliding_window": None},
    ),
}


DENSE = (
    "mlp.gate.weight",
    "shared_expert_gate.weight",
    "conv.weight",
    "conv1d.weight",
    "A_log",
    "linear_attn.out_proj.weight",
)
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def made(architecture, **changes):
    """Returns a random model whose norms and biases differ from those at the beginning."""
    name, settings = MODELS.get(architecture, (architecture, {}))
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **settings, **changes})
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def read(file, **options):
    return load_gguf(GgufFile(file), torch.float32, **options)


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def test_all_architectures_are_tested():
    assert MODELS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("blocks", [True, False], ids=["blocks", "dense"])
@pytest.mark.parametrize("architecture", MODELS)
def test_models_equal_those_that_were_written(tmp_path, architecture, blocks):
    model = made(architecture)
    assert architecture_of(model) == architecture
    write_gguf(tmp_path / "x.gguf", model)
    found = read(tmp_path / "x.gguf", blocks=blocks)
    torch.testing.assert_close(logits(found), logits(model), rtol=1e-5, atol=1e-5)
    other = dict(found.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(other[name].detach(), weight.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("architecture", MODELS)
def test_matrices_stay_in_the_file(tmp_path, architecture):
    """Blocks hold the file's numbers in the model's order; matrices whose columns llama.cpp moves are dense."""
    model = made(architecture)
    kinds = [("token_embd", "Q8_0"), ("down", "Q8_0"), ("ffn_gate_inp", "F32"), ("", "Q4_0")]
    write_gguf(tmp_path / "x.gguf", model, kinds)
    dense, found = read(tmp_path / "x.gguf", blocks=False), read(tmp_path / "x.gguf")
    assert torch.equal(logits(found), logits(dense))
    assert not torch.equal(logits(found), logits(model))  # control: blocks are rounded
    truth = dict(dense.named_parameters())
    held = {name for name, weight in found.named_parameters() if isinstance(weight, FileBlocks)}
    for name in held:
        assert torch.equal(found.get_parameter(name).dense(), truth[name])
    expected = {name for name, weight in truth.items() if weight.ndim > 1 and not name.endswith(DENSE)}
    if architecture == "gpt2":
        expected = {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}
    assert held - {"model.layers.0.mlp.shared_expert_gate.weight"} == expected
    assert not any(isinstance(weight, FileBlocks) for weight in dense.parameters())


# Recurrent layers


def test_falcon_mambas_are_told_by_their_norms(tmp_path):
    model = made("falcon_mamba", **MODELS["mamba"][1])
    write_gguf(tmp_path / "x.gguf", model)
    found = read(tmp_path / "x.gguf")
    assert found.config.model_type == "falcon_mamba"
    torch.testing.assert_close(logits(found), logits(model))
    write_gguf(tmp_path / "x.gguf", model, fields={"mamba.ssm.dt_b_c_rms": False})
    assert not torch.allclose(logits(read(tmp_path / "x.gguf")), logits(model))  # control


def test_as_many_keys_as_values_leave_no_matrix_in_memory(tmp_path):
    model = made("qwen35", linear_num_value_heads=2)
    write_gguf(tmp_path / "x.gguf", model, [("", "Q4_0")])
    found = read(tmp_path / "x.gguf")
    assert isinstance(found.model.layers[0].linear_attn.out_proj.weight, FileBlocks)
    assert found.model.layers[0].linear_attn.in_proj_qkv.weight.order is None
    assert torch.equal(logits(found), logits(read(tmp_path / "x.gguf", blocks=False)))


def test_layers_that_predict_several_tokens_are_left_in_the_file(tmp_path):
    model, file = made("qwen35"), tmp_path / "x.gguf"
    further = {"blk.3.nextn.eh_proj.weight": torch.ones(64, 128), "blk.3.attn_norm.weight": torch.ones(64)}
    write_gguf(file, model, fields={"qwen35.nextn_predict_layers": 1, "qwen35.block_count": 4}, tensors=further)
    assert torch.equal(logits(read(file)), logits(model))
    with pytest.raises(ValueError, match=r"of a GGUF file, whose layers for predictions \(nextn\) are not read: load"):
        ad.load(file, drafter="mtp", dtype="float32", kernels="torch", costs=None)
    assert isinstance(ad.load(file, dtype="float32", kernels="torch", costs=None).drafter, ad.NGramDrafter)
    write_gguf(file, model, tensors=further)
    with pytest.raises(ValueError, match=r"has no place for blk\.3\.attn_norm\.weight, blk\.3\.nextn\.eh_proj\.weight"):
        read(file)


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("lfm2", "attention.head_count_kv"),
        ("mamba", "ssm.inner_size"),
        ("qwen35", "ssm.time_step_rank"),
        ("qwen35", "block_count"),
    ],
)
def test_files_without_a_setting_of_recurrent_layers_are_refused(tmp_path, architecture, field):
    write_gguf(tmp_path / "x.gguf", made(architecture), fields={f"{architecture}.{field}": None})
    with pytest.raises(ValueError, match=rf"x\.gguf lacks its field {architecture}\.{field}: copy or convert it again"):
        read(tmp_path / "x.gguf")


def test_layers_with_other_heads_are_refused(tmp_path):
    write_gguf(tmp_path / "x.gguf", made("lfm2"), fields={"lfm2.attention.head_count_kv": [2, 4, 0]})
    with pytest.raises(ValueError, match=r"another attention\.head_count_kv in each layer, which no model of lfm2"):
        read(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "name", ["falcon-h1", "granitehybrid", "jamba", "kimi-linear", "lfm2moe", "mamba2", "nemotron_h", "qwen3next"]
)
def test_other_recurrent_architectures_are_refused_by_name(tmp_path, name):
    """Transformers has no tables of their settings and tensors."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    write_gguf(tmp_path / "x.gguf", made("llama"), fields={"general.architecture": name})
    with pytest.raises(ValueError, match=rf"holds the architecture '{name}', and GGUF files are read of .*lfm2, .*"):
        read(tmp_path / "x.gguf")
    assert name not in GGUF_CONFIG_MAPPING


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("architecture", ["lfm2", "mamba", "qwen35", "qwen35moe"])
def test_recurrent_models_run_from_their_files(tmp_path, architecture):
    """Texts are those of the dense model. Native kernels, which round activations, read blocks as they lie."""
    write_gguf(tmp_path / "x.gguf", made(architecture), [("token_embd", "Q8_0"), ("down", "Q8_0"), ("", "Q4_0")])
    dense, prompts = read(tmp_path / "x.gguf", blocks=False), [[5, 9, 7, 5, 9, 7, 5], [11]]
    expected = {"torch": greedy_reference(dense, prompts, max_new_tokens=12, eos_token_id=None)}
    for kernels in ("native", "torch"):
        decoder = ad.load(tmp_path / "x.gguf", "ngram", kernels=kernels, dtype="float32", costs=None)
        plain = expected.get(kernels) or decode(ad.builders.plain(decoder.target), prompts)[0]
        assert decode(decoder, prompts)[0] == plain
        assert decoder.target.recurrent
        assert decoder.target.chosen.endswith(", file") == (kernels == "native")
    cache = RaggedKVCache()
    decoder.target.prefill({cache.open(3): [1, 2, 3]}, cache)
    needed = needed_memory(GgufFile(tmp_path / "x.gguf"), torch.float32, tokens=100)
    assert needed["cache"] == 100 * cache.row_bytes


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fractions_of_the_models_dtype_are_mapped(tmp_path, kind, dtype):
    model = made("qwen3")
    write_gguf(tmp_path / "x.gguf", model, [("", kind)])
    file = GgufFile(tmp_path / "x.gguf")
    found = load_gguf(file, dtype)
    down = found.model.layers[0].mlp.down_proj.weight
    raw = file.tensors["blk.0.ffn_down.weight"].raw
    mapped = {"BF16": torch.bfloat16, "F32": torch.float32}.get(kind) is dtype
    assert isinstance(down, FileBlocks) != mapped
    if mapped:
        assert down.data_ptr() == raw.ctypes.data
    expected = (
        model.model.layers[0]
        .mlp.down_proj.weight.detach()
        .to(getattr(torch, {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")))
    )
    assert torch.equal(down + 0, expected.to(dtype))
    assert found.model.embed_tokens.weight.dtype == dtype


def test_llamas_of_long_texts_have_divided_frequencies(tmp_path):
    divisors = torch.linspace(1, 8, 8)
    model = made("llama")
    write_gguf(tmp_path / "x.gguf", model, tensors={"rope_freqs.weight": divisors})
    plain = logits(model)
    model.model.rotary_emb.inv_freq /= divisors
    assert torch.equal(logits(read(tmp_path / "x.gguf")), logits(model))
    assert not torch.allclose(plain, logits(model))  # control


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        ),
        ({"rope.scaling.type": "none"}, {"rope_type": "default"}),
    ],
)
def test_stretched_positions_are_those_of_the_file(tmp_path, fields, expected):
    write_gguf(tmp_path / "x.gguf", made("qwen2"), fields={f"qwen2.{name}": value for name, value in fields.items()})
    found = read(tmp_path / "x.gguf")
    expected = expected | {"rope_theta": 10000.0}
    assert found.config.rope_parameters == expected
    assert torch.equal(logits(found), logits(made("qwen2", rope_parameters=expected)))


def test_models_that_files_do_not_hold_completely_are_refused(tmp_path):
    file = tmp_path / "x.gguf"
    write_gguf(file, made("llama"), fields={"llama.block_count": 3})
    with pytest.raises(ValueError, match=r"x\.gguf: the model lacks model\.layers\.2\..* and 6 more: copy or convert"):
        read(file)
    write_gguf(file, made("llama"), tensors={"blk.0.extra.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"has no place for blk\.0\.extra\.weight: .* variant of its architecture"):
        read(file)
    write_gguf(file, made("llama"), fields={"llama.feed_forward_length": 64})
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.ffn_gate\.weight' is \[96, 64\] instead of \[64, 64\]"):
        read(file)
    write_gguf(file, made("llama"), fields={"llama.attention.head_count_kv": [2, 1]})
    with pytest.raises(ValueError, match=r"another attention\.head_count_kv in each layer"):
        read(file)
    write_gguf(file, made("llama"), fields={"llama.rope.scaling.type": "longrope"})
    with pytest.raises(ValueError, match="stretches positions by 'longrope', which is not read"):
        read(file)
    write_gguf(file, made("llama"), fields={"general.architecture": "rwkv6"})
    with pytest.raises(
        ValueError, match=r"the architecture 'rwkv6', and GGUF files are read of gemma2, .*load the model's safe"
    ):
        read(file)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_weights_that_are_no_numbers_are_named(tmp_path, kind):
    model = made("llama")
    write_gguf(tmp_path / "x.gguf", model, [("", kind)])
    read(tmp_path / "x.gguf")
    file = GgufFile(tmp_path / "x.gguf")
    raw = file.tensors["blk.1.ffn_up.weight"].raw
    raw[5, :4] = [0, 0, 192, 127] if kind == "F32" else [0, 126, 0, 126]
    with pytest.raises(
        ValueError, match=r"x\.gguf holds NaN or infinite (weights|scales) \(model\.layers\.1\.mlp\.up_proj\.weight\)"
    ):
        load_gguf(file, torch.float32)
