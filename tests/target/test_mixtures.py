"""Mixtures of experts: those that are fused, those that only look right, and changes of their weights."""

import warnings
from dataclasses import replace

import pytest
import torch
from support.models import fusable
from support.prepacked_models import MIXTURES, ROUNDING, faithful, logits, plain
from support.recurrent_models import FUSED, recurrent
from torch import nn
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from arbordraft import RaggedModel
from arbordraft.kernels.decoder_layers import LayerRun, Matrix
from arbordraft.target import self_test
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.memory import copy_bytes
from arbordraft.target.prepacked.probing import noise

pytestmark = pytest.mark.usefixtures("kernels")


def block_of(model, layer=0):
    return model.model.layers[layer].mlp


def experts_of(model):
    return block_of(model).experts


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen2_moe", {"shared_expert_intermediate_size": 32}),
        ("qwen2_moe", {"shared_expert_intermediate_size": 16}),
        ("qwen2_moe", {"norm_topk_prob": True, "num_experts_per_tok": 1}),
        ("qwen3_moe", {"norm_topk_prob": True, "num_experts_per_tok": 3}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts": 17}),
        ("qwen3_moe", {"num_experts_per_tok": 4}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"hidden_act": "gelu"}),
        ("mixtral", {"experts_implementation": "eager"}),
        ("mixtral", {"experts_implementation": "batched_mm"}),
    ],
    ids=str,
)
def test_kinds_of_mixtures(architecture, options):
    model = fusable(architecture, **options)
    faithful(model, fused=2, row_invariant=True)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_bytes_of_a_copy_are_estimated(architecture):
    model = fusable(architecture, num_experts=16, num_local_experts=16)
    held = RaggedModel(model, kernels="native").prepacking.nbytes
    assert 0.85 < copy_bytes(model) / held < 1.02  # shared experts are padded; the estimate omits the router


class Sigmoids(nn.Module):
    """A router whose weights are sigmoids, with corrections of the choice."""

    def __init__(self, own, correction=None, normalised=True):
        super().__init__()
        self.weight, self.top_k, self.normalised = own.weight, own.top_k, normalised
        self.routed_scaling_factor = 1.5
        if correction is not None:
            self.register_buffer("correction", correction)

    def forward(self, x):
        scores = nn.functional.linear(x, self.weight)
        weights = scores.sigmoid()
        chosen = (weights + getattr(self, "correction", 0)).topk(self.top_k).indices
        weights = self.weights(weights).gather(-1, chosen)
        return (
            scores,
            self.routed_scaling_factor * weights / (weights.sum(-1, keepdim=True) if self.normalised else 1),
            chosen,
        )

    def weights(self, weights):
        return weights


def corrections():
    return torch.tensor([0.9, -0.3, 0.5, -0.6])


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("correction", [None, corrections()], ids=["plain", "corrected"])
def test_sigmoids_in_place_of_a_softmax(correction, normalised):
    model = fusable("qwen2_moe")
    for layer in (0, 1):
        block_of(model, layer).gate = Sigmoids(block_of(model, layer).gate, correction, normalised)
    target = faithful(model, fused=2, row_invariant=True)
    if correction is not None:
        assert torch.equal(block_of(model).gate.correction, corrections())  # tried with others, which must not stay
        block_of(model, 1).gate.correction = -correction
        with pytest.warns(UserWarning, match="changed after they were prepacked"):
            found = logits(target)
        assert_close(found, logits(plain(model)), **ROUNDING)


def test_corrections_of_a_block():
    """LFM2 keeps them beside the router."""
    model = recurrent("lfm2_moe", **FUSED["lfm2_moe"])
    before = logits(plain(model))
    for layer in model.model.layers[1:]:
        layer.feed_forward.expert_bias = corrections()
    faithful(model, fused=3, row_invariant=True)
    assert not torch.allclose(logits(plain(model)), before, atol=1e-2)


def without_gates(dtype=torch.float32):
    """Returns a model of Nemotron-H whose router keeps float32, as in its checkpoints, and corrects its choice."""
    model = recurrent("nemotron_h", **FUSED["nemotron_h"])
    gate = model.model.layers[3].mixer.gate
    weight = gate.weight.detach().clone()
    model.to(dtype)
    gate.weight, gate.e_score_correction_bias = nn.Parameter(weight), corrections()
    return model


def test_experts_without_gates():
    before = logits(plain(recurrent("nemotron_h", **FUSED["nemotron_h"])))
    model = without_gates()
    faithful(model, fused=5, row_invariant=True)
    assert torch.equal(model.model.layers[3].mixer.gate.e_score_correction_bias, corrections())
    assert not torch.allclose(logits(plain(model)), before, atol=1e-2)


def test_a_router_keeps_float32_in_a_model_of_16_bits():
    """Control: a router that was rounded to the type of the rows gives other weights."""
    layer = RaggedModel(without_gates(torch.bfloat16), kernels="native", self_test=False).prepacking.stack[3]
    assert layer.experts.router.weight.dtype == torch.float32
    assert layer.gate_up.weight.dtype == torch.bfloat16
    found = []
    for scores in (layer.experts.router.weight, layer.experts.router.weight.bfloat16().float()):
        experts = replace(layer.experts, router=Matrix(scores))
        run = LayerRun([replace(layer, experts=experts)])
        cache = RaggedKVCache()
        batch = cache.lay_out([cache.open(3)], [range(3)])
        x = noise(1, 3, scores.shape[1]).bfloat16()
        found.append(run(x, [(x.new_empty(0),) * 2], None, batch)[0])
    assert not torch.equal(*found)


# Mixtures that only look right


def corrected_weights(model):
    class Corrected(Sigmoids):
        def weights(self, weights):
            return weights + self.correction

    block_of(model).gate = Corrected(block_of(model).gate, corrections())


def tangent_router(model):
    class Tangent(Sigmoids):
        def weights(self, weights):
            return (2 * weights).tanh()

    block_of(model).gate = Tangent(block_of(model).gate)


def bounded_router(model):
    class Bounded(type(block_of(model).gate)):
        def forward(self, x):
            scores, factors, chosen = super().forward(x)
            return scores, factors.clamp(max=0.8), chosen

    block_of(model).gate.__class__ = Bounded


def corrected_router(model):
    block_of(model).gate.register_buffer("correction", torch.zeros(4))


def clamped_gates(model):
    class Clamped(type(experts_of(model))):
        def _apply_gate(self, gate_up):
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=20)) * up

    experts_of(model).__class__ = Clamped


def odd_activation(model):
    experts_of(model).act_fn = nn.ReLU6()


def louder_block(model):
    class Louder(type(block_of(model))):
        def forward(self, x):
            return 1.1 * super().forward(x)

    block_of(model).__class__ = Louder


def extra_part(model):
    block_of(model).more = nn.Linear(64, 64)


def listener(model):
    experts_of(model).register_forward_hook(lambda module, args, output: 1.1 * output)


def other_activation_shared(model):
    block_of(model).shared_expert.act_fn = nn.GELU()


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.parametrize(
    "fault",
    [
        tangent_router,
        corrected_weights,
        bounded_router,
        corrected_router,
        clamped_gates,
        odd_activation,
        louder_block,
        extra_part,
        listener,
        other_activation_shared,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixture_that_only_looks_right_is_not_fused(fault, dtype):
    model = fusable("qwen2_moe").to(dtype)
    fault(model)
    target = RaggedModel(model, kernels="native", self_test=False)
    assert target.prepacking.fused == 1
    assert not target.row_invariant
    if dtype == torch.float32:
        assert_close(logits(target), logits(plain(model)), **ROUNDING)


# Changes


@pytest.mark.parametrize(
    "part", ["experts.gate_up_proj", "experts.down_proj", "gate.weight", "shared_expert_gate.weight"]
)
def test_a_change_is_noticed(part):
    model = fusable("qwen2_moe")
    target = RaggedModel(model, kernels="native")
    before = logits(target)
    with torch.no_grad():
        block_of(model, 1).get_parameter(part).mul_(-1.25)
    with pytest.warns(UserWarning, match="changed after they were prepacked"):
        found = logits(target)
    assert_close(found, logits(plain(model)), **ROUNDING)
    assert not torch.allclose(found, before, atol=1e-3)


def test_originals_in_a_file():
    model = fusable("qwen2_moe")
    expected = logits(plain(model))
    target = RaggedModel(model, kernels="native", keep_weights=False)
    assert_close(logits(target), expected, **ROUNDING)
    assert_close(logits(plain(model)), expected, **ROUNDING)


# Mixtures in 16 bits, whose rounding decides between experts


def random_mixture(seed):
    """Returns a small gpt-oss whose router is often undecided in 16 bits."""
    settings = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 160,
        "sliding_window": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt_oss", **settings)).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5)
            elif "bias" in name or "sink" in name:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong mask"])
def test_the_self_test_in_16_bits_tells_rounding_from_faults(kernels, wrong, monkeypatch):
    """A wrong mask, the negative control, is refused although rounding alone moves some of these models as far."""
    if wrong:
        words = self_test.ancestor_words
        monkeypatch.setattr(self_test, "ancestor_words", lambda visible: words(torch.ones_like(visible).tril()))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(12):
            model = random_mixture(seed).bfloat16()
            if not wrong:
                RaggedModel(model, kernels=kernels)
            else:
                with pytest.raises(UnsupportedModel, match="packed logits differ from single ones"):
                    RaggedModel(model, kernels=kernels)
    assert any("16 bits decide between experts" in str(one.message) for one in told) != wrong
