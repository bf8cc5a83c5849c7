"""Every kind of PEFT adapter: decoding gives the model's own logits, or the model is refused with a reason."""

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from support.models import PROMPTS, fusable, greedy_reference, left_padded, new_tokens
from support.prepacked_models import ROUNDING
from torch.testing import assert_close

from arbordraft import RaggedModel, UnsupportedModel, builders
from arbordraft.target.cache import RaggedKVCache

pytestmark = [
    pytest.mark.filterwarnings("ignore:not prepacked"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft"),
]
ANYWHERE = {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}
SQUARE = {"target_modules": ["q_proj", "o_proj"]}
# Kinds that act on each input row of a layer alone.
SERVED = {
    "ADALORA": {**ANYWHERE, "total_step": 10},
    "ADAMSS": SQUARE,
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 2},
    "BEFT": ANYWHERE,
    "BOFT": {**SQUARE, "boft_block_size": 4},
    "BONE": {**ANYWHERE, "r": 4},
    "C3A": {**SQUARE, "block_size": 16},
    "DEFT": ANYWHERE,
    "DELORA": ANYWHERE,
    "FOURIERFT": {**SQUARE, "n_frequency": 10},
    "FROD": SQUARE,
    "GLORA": ANYWHERE,
    "GRALORA": ANYWHERE,
    "HIRA": ANYWHERE,
    "HRA": ANYWHERE,
    "IA3": {"target_modules": ["v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "LOHA": ANYWHERE,
    "LOKR": ANYWHERE,
    "LORA": ANYWHERE,
    "MISS": {**ANYWHERE, "r": 4},
    "OFT": {**SQUARE, "oft_block_size": 4},
    "OSF": SQUARE,
    "PEANUT": ANYWHERE,
    "PSOFT": SQUARE,
    "PVERA": {**SQUARE, "r": 4},
    "RANDLORA": {**SQUARE, "r": 4},
    "ROAD": {**ANYWHERE, "group_size": 8},
    "SHIRA": {**SQUARE, "r": 2},
    "SUPERTUNING": SQUARE,
    "TINYLORA": ANYWHERE,
    "TRAINABLE_TOKENS": {"token_indices": [8, 3]},
    "UNILORA": ANYWHERE,
    "VBLORA": {**ANYWHERE, "vector_length": 16, "num_vectors": 8},
    "VERA": {**SQUARE, "r": 4},
    "WAVEFT": {**SQUARE, "n_frequency": 10},
}
PROMPT = {"num_virtual_tokens": 2}
REFUSED = {
    "CARTRIDGE": (PROMPT, "prompts that PEFT learned"),
    "CPT": ({"cpt_token_ids": [1, 2], "cpt_mask": [1, 1], "cpt_tokens_type_mask": [1, 2]}, "prompts that PEFT learned"),
    "LILY": (ANYWHERE, "routers average over all tokens"),
    "MULTITASK_PROMPT_TUNING": (PROMPT, "prompts that PEFT learned"),
    "POLY": (ANYWHERE, "task_ids of each call"),
    "PREFIX_TUNING": (PROMPT, "prompts that PEFT learned"),
    "PROMPT_TUNING": (PROMPT, "prompts that PEFT learned"),
    "P_TUNING": ({**PROMPT, "encoder_hidden_size": 8}, "prompts that PEFT learned"),
    "SHADOW": ({}, "second network keeps a cache"),
    "XLORA": ({"hidden_size": 64, "xlora_depth": 1}, "classifier runs the whole model once more"),
}
KNOWN = set(peft.PeftType.__members__)


def adapted(kind, /, architecture="llama", adapters=None, **options):
    """Builds a model whose adapter changes its logits."""
    base = fusable(architecture)
    if adapters:
        base.config.use_cache, options["adapters"] = False, adapters
    torch.manual_seed(0)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[kind]](task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def own(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def packed(target, tokens):
    cache = RaggedKVCache()
    return target(torch.tensor(tokens), cache.lay_out([cache.open(len(tokens))], [range(len(tokens))]), cache)


def test_every_kind_is_in_one_list():
    """A kind of a newer PEFT must be added to one of the lists, by its effect."""
    assert SERVED.keys() | REFUSED.keys() >= KNOWN
    assert SERVED.keys().isdisjoint(REFUSED)


@pytest.mark.parametrize("kind", sorted(SERVED.keys() & KNOWN))
def test_adapters_that_act_within_layers_are_decoded(kind):
    model = adapted(kind, **SERVED[kind])
    expected = own(model, PROMPTS[2])
    found = packed(RaggedModel(model), PROMPTS[2])
    assert_close(found, expected, **ROUNDING)
    with model.disable_adapter():  # control: the adapter matters
        assert not torch.allclose(own(model, PROMPTS[2]), expected, atol=1e-2)


@pytest.mark.parametrize("kind", sorted(REFUSED.keys() & KNOWN))
def test_adapters_that_act_elsewhere_are_refused(kind, tmp_path):
    options, reason = REFUSED[kind]
    if kind == "XLORA":
        adapted("LORA", **ANYWHERE).save_pretrained(tmp_path)
        options = {**options, "adapters": {"0": str(tmp_path), "1": str(tmp_path)}}
    with pytest.raises(UnsupportedModel, match=rf"'default' \({kind}\) .*{reason}.*PEFT's own generate"):
        RaggedModel(adapted(kind, **options))


# Unusual forms of a kind


LORAS = {
    "beside embeddings": {"target_modules": ["v_proj", "embed_tokens", "lm_head"]},
    "of biases": {**ANYWHERE, "lora_bias": True},
    "of whole modules": {**ANYWHERE, "modules_to_save": ["lm_head", "norm", "embed_tokens"]},
    "of tokens": {**ANYWHERE, "trainable_token_indices": [8, 3]},
    "of experts": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]},
    "of repeated layers": {**ANYWHERE, "layer_replication": [(0, 2), (1, 2)]},
}


@pytest.mark.parametrize("form", LORAS)
def test_forms_of_lora(form):
    model = adapted("LORA", "mixtral" if form == "of experts" else "llama", init_lora_weights=False, **LORAS[form])
    assert_close(packed(RaggedModel(model), PROMPTS[2]), own(model, PROMPTS[2]), **ROUNDING)


def test_several_kinds_at_once():
    model = peft.get_peft_model(fusable(), peft.LoHaConfig(r=4, init_weights=False, **ANYWHERE), mixed=True)
    model.add_adapter("second", peft.LoraConfig(r=4, init_lora_weights=False, **SQUARE))
    model.set_adapter(["default", "second"])
    assert_close(packed(RaggedModel(model.eval()), PROMPTS[2]), own(model, PROMPTS[2]), **ROUNDING)


ALORA = {**ANYWHERE, "alora_invocation_tokens": [8, 3], "init_lora_weights": False}


def test_adapters_that_start_within_a_text_are_refused():
    reason = r"'default' \(LORA\) .*aLoRA.*alora_invocation_tokens"
    with pytest.raises(UnsupportedModel, match=reason):
        RaggedModel(adapted("LORA", **ALORA))
    model = fusable()  # as transformers loads adapters
    peft.inject_adapter_in_model(peft.LoraConfig(**ALORA), model)
    with pytest.raises(UnsupportedModel, match=reason):
        RaggedModel(model.eval())


def test_only_active_adapters_are_checked():
    model = adapted("LORA", init_lora_weights=False, **ANYWHERE)
    model.add_adapter("second", peft.LoraConfig(**ALORA))
    decoder = builders.plain(RaggedModel(model.eval()))
    options = {"max_new_tokens": 4, "eos_token_id": None}
    expected = greedy_reference(model, PROMPTS, **options)
    options["do_sample"] = False
    assert new_tokens(decoder.generate(**left_padded(PROMPTS), **options), PROMPTS, [4] * 3) == expected
    model.set_adapter("second")
    with pytest.warns(UserWarning, match="changed after"), pytest.raises(UnsupportedModel, match=r"'second' .*aLoRA"):
        decoder.generate(**left_padded(PROMPTS), **options)
    with model.disable_adapter(), pytest.warns(UserWarning, match="changed after"):
        decoder.generate(**left_padded(PROMPTS), **options)


def test_adapters_that_draw_random_numbers_are_refused():
    if "PVERA" not in KNOWN:
        pytest.skip("this PEFT has no such adapters")
    with pytest.raises(UnsupportedModel, match="sample_at_inference=True"):
        RaggedModel(adapted("PVERA", sample_at_inference=True, **SERVED["PVERA"]))


def test_one_adapter_per_text_of_a_batch_is_refused():
    model = adapted("LORA", init_lora_weights=False, **ANYWHERE)
    model.add_adapter("second", peft.LoraConfig(init_lora_weights=False, **SQUARE))
    decoder = builders.plain(RaggedModel(model.eval(), kernels="torch"))
    with pytest.raises(UnsupportedModel, match=r"adapter_names=.*model\.set_adapter\(name\)"):
        model.generate(
            **left_padded(PROMPTS[:2]), adapter_names=["default", "second"], custom_generate=decoder.decode_loop
        )


def test_a_wrapper_with_computations_of_its_own_is_refused():
    """Future kinds may compute in the wrapper."""
    model = adapted("LORA", **ANYWHERE)
    inner = model.forward
    model.forward = lambda *args, **kwargs: louder(inner(*args, **kwargs))
    with pytest.raises(UnsupportedModel, match="PeftModelForCausalLM computes something outside of the LlamaForCausal"):
        RaggedModel(model)


def louder(output):
    output.logits = 1.1 * output.logits
    return output
