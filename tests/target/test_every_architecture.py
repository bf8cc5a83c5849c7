"""Every causal language model that transformers has, small: decoded as transformers decodes it, or refused in words."""

import re

import pytest
import torch
import transformers
from support.models import PROMPTS, greedy_reference, left_padded, new_tokens
from support.shrunken import shrunken
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology, UnsupportedModel

BOTH = ["sliding_attention", "full_attention"]
SHARED = {"num_hidden_layers": 4, "layer_types": 2 * BOTH, "num_kv_shared_layers": 2}
OPTIONS = {
    "gemma3n_text": {**SHARED, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": SHARED,
    "gemma4_unified_text": {"layer_types": BOTH, "num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "moshi": {"audio_vocab_size": 61},
    "zaya": {"num_experts_per_tok": 1},
}
# What has no small configuration, or none that works: parts for pictures and sound, fixed tables, checks of sizes.
LARGE = {
    *("blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "fuyu", "gemma3", "gemma3n", "gemma4"),
    *("gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "got_ocr2", "moss_transcribe_diarize"),
    *("musicgen", "musicgen_melody", "phi4_multimodal", "qwen4_exp", "qwen4_exp_text", "reformer", "roc_bert", "zamba"),
}
WORDS = re.compile(
    "layers of .* which|AttentionInterface|is not causal|counts by itself|itself fails|packed rows do not"
)
# Layers whose keys and values are chosen, compressed or kept as a state.
CHOOSING = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "axk2", "mamba", "jamba", "zamba2")


@pytest.mark.parametrize("architecture", [name for name in CHOOSING if name in transformers.CONFIG_MAPPING])
def test_kinds_of_layers_are_named(architecture):
    with pytest.raises(
        UnsupportedModel, match=r"has layers of [a-z_, ]+ \(config\.layer_types\), which keep a state, or"
    ):
        RaggedModel(shrunken(architecture))


def test_models_that_see_later_tokens_are_named():
    model = shrunken("bert", is_decoder=False)
    with pytest.raises(UnsupportedModel, match="BertLMHeadModel is not causal"):
        RaggedModel(model, kernels="torch")


def test_models_that_fail_by_themselves_are_named():
    def fails(*_):
        raise KeyError("broken")

    model = shrunken("llama")
    model.model.embed_tokens.register_forward_hook(fails)
    with pytest.raises(UnsupportedModel, match=r"cannot run on packed tokens.*KeyError\('broken'\)"):
        RaggedModel(model)


@pytest.mark.parametrize("window", [1, 3, 4])
def test_windows_shorter_than_the_texts_of_the_self_test(window):
    """This one keeps to its window with a cache only."""
    with pytest.raises(UnsupportedModel, match=f"beyond sliding_window={window} packed logits would differ"):
        RaggedModel(shrunken("moshi", **OPTIONS["moshi"], sliding_window=window), kernels="torch")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_architecture(architecture):
    try:
        model = shrunken(architecture, **OPTIONS.get(architecture, {}))
    except Exception:
        assert architecture in LARGE, "give it a small configuration, or note that there is none"
        return
    try:
        target = RaggedModel(model)
    except UnsupportedModel as refusal:
        reason = str(refusal)
    else:
        reason = ""
    if reason:
        assert WORDS.search(reason)
        return
    chain = SpeculativeDecoder(target, NGramDrafter(), TreeTopology.chain(3))
    options = {"max_new_tokens": 24, "eos_token_id": None}
    found = chain.generate(**left_padded(PROMPTS), do_sample=False, **options)
    assert new_tokens(found, PROMPTS, [24] * 3) == greedy_reference(model, PROMPTS, **options)
    assert torch.equal(chain.generate(**left_padded(PROMPTS), do_sample=False, **options), found)
