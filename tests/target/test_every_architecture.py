"""Every causal language model of transformers, shrunken, is decoded as by transformers or refused with a reason."""

import re

import pytest
import torch
import transformers
from support.models import PROMPTS, check_greedy, decode
from support.recurrent_models import UNEVEN, own_greedy
from support.shrunken import OPTIONS, shrunken
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder, TreeTopology, UnsupportedModel

# Without a small configuration that works: parts for images and sound, fixed tables, checks of sizes.
LARGE = {
    *("blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "fuyu", "gemma3", "gemma3n", "gemma4"),
    *("gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "got_ocr2", "moss_transcribe_diarize"),
    *("musicgen", "musicgen_melody", "phi4_multimodal", "qwen4_exp", "qwen4_exp_text", "reformer", "roc_bert", "zamba"),
}
WORDS = re.compile(
    "layers of .* which|AttentionInterface|is not causal|counts by itself|itself fails|packed rows do not"
)
# Layers that select or compress keys and values, or keep a state of an unknown kind.
CHOOSING = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa", "hy_v4", "axk2", "minimax")


@pytest.mark.parametrize("architecture", [name for name in CHOOSING if name in transformers.CONFIG_MAPPING])
def test_kinds_of_layers_are_named(architecture):
    with pytest.raises(
        UnsupportedModel,
        match=r"has layers of [a-z_, ]+ \(config\.layer_types\), which keep a state of an unknown kind, or",
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


def test_failures_of_the_gpu_are_not_blamed_on_the_model():
    """The GPU is full, or Triton cannot compile for it."""
    compilation = type("CompilationError", (Exception,), {"__module__": "triton.compiler.errors"})
    full = torch.OutOfMemoryError("CUDA out of memory")
    for failure, expected in ((full, type(full)), (compilation("sm_999"), UnsupportedModel)):

        def fails(*_, failure=failure):
            raise failure

        model = shrunken("llama")
        model.model.embed_tokens.register_forward_hook(fails)
        with pytest.raises(expected, match=r"out of memory|Triton fails on this GPU.*sm_999.*use\('reference'\)"):
            RaggedModel(model, kernels="torch")


@pytest.mark.parametrize("window", [1, 3, 4])
def test_windows_shorter_than_the_self_test_texts_are_refused(window):
    """Moshi applies its window only with a cache."""
    with pytest.raises(UnsupportedModel, match=f"beyond sliding_window={window} packed logits would differ"):
        RaggedModel(shrunken("moshi", **OPTIONS["moshi"], sliding_window=window), kernels="torch")


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("architecture", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_architecture(architecture):
    try:
        model = shrunken(architecture, **OPTIONS.get(architecture, {}))
    except Exception:
        assert architecture in LARGE, "add a small configuration to OPTIONS, or the name to LARGE"
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
    for _ in range(2):
        if architecture in UNEVEN:
            assert decode(chain, max_new_tokens=24)[0] == own_greedy(model, PROMPTS, 24)
        else:
            check_greedy(chain, count=24)
