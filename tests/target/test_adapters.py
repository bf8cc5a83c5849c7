"""Unmerged PEFT adapters are merged into the copies that kernels read; the model stays unmerged."""

import pytest
import torch
from support.models import PROMPTS, fusable, greedy_reference, left_padded, new_tokens
from support.prepacked_models import ROUNDING, disagreements, faithful, logits, plain
from torch.testing import assert_close

from arbordraft import RaggedModel, builders
from arbordraft.target.equality import equality_report
from arbordraft.trees.verdict import Exactness

peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
pytestmark = pytest.mark.usefixtures("kernels")
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS = {
    "lora": peft.LoraConfig(r=4, lora_alpha=8, target_modules=EVERYWHERE, init_lora_weights=False),
    "some": peft.LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "lm_head"], init_lora_weights=False),
    "rslora": peft.LoraConfig(r=4, use_rslora=True, target_modules=["q_proj"], init_lora_weights=False),
    "dora": peft.LoraConfig(r=4, use_dora=True, target_modules=["o_proj"], init_lora_weights=False),
    "lokr": peft.LoKrConfig(r=4, target_modules=["down_proj"], init_weights=False),
}


def adapted(kind="lora", architecture="llama", seed=0):
    torch.manual_seed(seed)
    return peft.get_peft_model(fusable(architecture, seed=seed), KINDS[kind]).eval()


def is_merged(model):
    return any(getattr(module, "merged", False) for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_act(kind):
    model = adapted(kind)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    target = RaggedModel(model, kernels="native")
    assert target.row_invariant
    assert "adapters merged into copies of" in target.chosen
    found = logits(target)
    assert_close(found, logits(plain(model)), **ROUNDING)
    with model.disable_adapter():  # control: the adapter matters
        assert not torch.allclose(found, logits(plain(model)), atol=1e-2)
    assert not is_merged(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_adapters_that_transformers_loaded():
    model = fusable()
    peft.inject_adapter_in_model(KINDS["lora"], model)  # like add_adapter, which may need a newer PEFT
    target = faithful(model.eval(), row_invariant=True)
    assert target.chosen.startswith("native: 2 of 2 layers fused, adapters merged into copies of 14 linears")


def test_adapters_beside_experts():
    model = adapted("some", "qwen2_moe")
    faithful(model, row_invariant=True)


# Active adapters may change


def several(model):
    model.base_model.set_adapter(["default", "second"])


def another(model):
    model.set_adapter("second")


def none(model):
    model.base_model.disable_adapter_layers()


def scaled(model):
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


def trained(model):
    with torch.no_grad():
        model.get_parameter("base_model.model.model.layers.1.mlp.up_proj.lora_B.default.weight").mul_(3)


def merged_by_hand(model):
    model.merge_adapter()


@pytest.mark.parametrize("change", [several, another, none, scaled, trained])
def test_a_change_is_noticed_once(change):
    model = adapted()
    model.add_adapter("second", KINDS["some"])
    target = RaggedModel(model, kernels="native")
    before = logits(target)
    change(model)
    expected = logits(plain(model.eval()))
    with pytest.warns(UserWarning, match="changed after they were prepacked"):
        found = logits(target)
    assert_close(found, expected, **ROUNDING)
    assert not torch.allclose(found, before, atol=1e-2)
    assert target.row_invariant
    assert torch.equal(logits(target), found)


@pytest.mark.parametrize("change", [several, another, none, scaled, trained, merged_by_hand])
def test_adapters_changed_before_wrapping_act(change):
    model = adapted()
    model.add_adapter("second", KINDS["some"])
    change(model)
    faithful(model.eval(), row_invariant=True)


# Decoding


@pytest.mark.parametrize("weights", [None, "int8"], ids=str)
def test_speculative_bfloat16_equals_plain_decoding(weights):
    target = RaggedModel(adapted().to(torch.bfloat16), kernels="native", weights=weights)
    found = equality_report(target, Exactness.EXACT)
    assert found.equal == found.rows > 0
    assert list(disagreements(target)) == []


def test_generate_of_the_wrapped_model():
    model, options = adapted(), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    decoder = builders.ems_sd(model, length=3)
    found = model.generate(**left_padded(PROMPTS), **options, custom_generate=decoder.decode_loop)
    assert torch.equal(found, decoder.generate(**left_padded(PROMPTS), **options))
    assert new_tokens(found, PROMPTS, [12] * 3) == greedy_reference(
        model, PROMPTS, max_new_tokens=12, eos_token_id=None
    )


def test_merging_in_bfloat16_is_no_less_exact():
    """PEFT rounds the product with an adapter and the sum; the copy rounds each weight once."""
    errors = {"native": 0.0, "torch": 0.0}
    for seed in range(4):
        model = adapted(seed=seed).to(torch.bfloat16)
        exact = logits(plain(model.float()))
        model.to(torch.bfloat16)
        for kernels in errors:
            found = logits(RaggedModel(model, kernels=kernels, self_test=False)).float()
            errors[kernels] += (found - exact).square().mean().item()
    assert errors["native"] < 1.5 * errors["torch"]


# Modules that only look like adapters


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.parametrize("fault", ["adds something", "cannot merge", "merges something else"])
def test_adapters_that_only_look_right_are_left_alone(fault, monkeypatch):
    model = adapted()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    kind = type(layer)

    class Odd(kind):
        def forward(self, x, *args, **kwargs):
            found = super().forward(x, *args, **kwargs)
            return found + 1 if fault == "adds something" else found

        def merge(self, *args, **kwargs):
            if fault == "cannot merge":
                raise ValueError("no")
            super().merge(*args, **kwargs)
            if fault == "merges something else":
                self.get_base_layer().weight.data *= 1.01

    layer.__class__ = Odd
    faithful(model, fused=1, row_invariant=False, self_test=False)
