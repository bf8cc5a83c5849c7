"""Layers of all kinds that the kernels compute: their parts are recognised, and other layers are not fused."""

import pytest
import torch
from support.models import PROMPTS, check_greedy, next_logits, varied
from support.prepacked_models import ROUNDING, faithful, logits, plain, prepacked_modules
from torch import nn
from torch.testing import assert_close
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from arbordraft import RaggedModel, builders
from arbordraft.drafters.native_models import native_model
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.target.attention import ATTENTION_NAME
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model_view import ModelView
from arbordraft.target.observation import observe
from arbordraft.target.prepacked import recognition
from arbordraft.target.prepacked.memory import copy_bytes
from arbordraft.target.prepacked.recognition import same_layer
from arbordraft.target.prepacked.rotation import Rotation

pytestmark = pytest.mark.usefixtures("kernels")

# Differences from Llama's layers: the rotated pairs, and fields of LayerWeights.
KINDS = {
    "gpt2": {"rotary": False, "gated": False, "centred": True, "activation": "gelu_tanh"},
    "olmo2": {"joint": True, "pre": False},
    "glm4": {"neighbours": True, "post": True},
    "cohere": {"neighbours": True, "parallel": True, "centred": True},
    "cohere2": {"neighbours": True, "parallel": True, "centred": True},
    "starcoder2": {"gated": False, "centred": True, "activation": "gelu_tanh"},
    "phi": {"parallel": True, "gated": False, "centred": True, "activation": "gelu_tanh"},
}


def observed(model):
    return observe(ModelView(model, ATTENTION_NAME).model, 2, model.config.vocab_size)


def recognised(seen, rotation, index=0):
    return same_layer(index, seen.layers[index], seen.attention[index], seen.batch, rotation)


@pytest.mark.parametrize("architecture", KINDS)
def test_parts_of_a_layer_are_recognised(architecture):
    expected = {"rotary": True, "gated": True, "centred": False, "joint": False, "parallel": False, "pre": True}
    expected = {**expected, "post": architecture == "olmo2", "activation": "silu", **KINDS[architecture]}
    target = RaggedModel(varied(architecture), kernels="native")
    assert target.row_invariant
    layer, other, *_ = target.prepacking.stack
    mlp = other if other.parallel else layer
    norms = [norm for norm in (layer.pre_attention, layer.post_attention) if norm]
    found = {
        "rotary": layer.rotary,
        "gated": len(mlp.gate_up.weight) * 16 == 2 * mlp.inner,
        "centred": norms[0].offset is not None,
        "joint": layer.query_norm is not None and len(layer.query_norm.weight) == layer.heads * layer.dim,
        "parallel": other.parallel,
        "pre": layer.pre_attention is not None,
        "post": layer.post_attention is not None,
        "activation": mlp.activation,
    }
    assert found == {name: value for name, value in expected.items() if name != "neighbours"}


@pytest.mark.parametrize("architecture", KINDS)
def test_fused_layers_give_the_logits_of_transformers(architecture):
    """In float32, logits agree within rounding, also in trees, and the greedy text is the same."""
    model = varied(architecture)
    target = RaggedModel(model, kernels="native", self_test=False)
    assert target.prepacking.fused == 2
    cache = RaggedKVCache()
    lengths = [len(prompt) for prompt in PROMPTS]
    batch = cache.lay_out([cache.open() for _ in PROMPTS], [range(length) for length in lengths])
    last = torch.tensor(lengths).cumsum(0) - 1
    found = target(torch.tensor([token for prompt in PROMPTS for token in prompt]), batch, cache, rows=last)
    assert_close(found, torch.stack([next_logits(model, prompt) for prompt in PROMPTS]), **ROUNDING)
    assert_close(logits(target), logits(plain(model)), **ROUNDING)
    check_greedy(builders.ems_sd(target, length=4), PROMPTS[2:], 20)


# Rotations


@pytest.mark.parametrize(
    ("architecture", "neighbours"), [("llama", False), ("phi", False), ("glm4", True), ("cohere", True)]
)
def test_pairs_of_rotated_channels_are_recognised(architecture, neighbours):
    """Other pairs, or no pairs, are not accepted."""
    seen = observed(varied(architecture))
    channels = seen.layers[0].kwargs["position_embeddings"][0].shape[-1]
    assert channels == (8 if architecture in ("phi", "glm4") else 16)
    assert recognised(seen, Rotation(channels, neighbours))
    assert not recognised(seen, Rotation(channels, not neighbours))
    assert not recognised(seen, None)
    if neighbours:
        assert not recognised(seen, Rotation(channels // 2, neighbours))


def test_layers_with_and_without_rotation():
    target = RaggedModel(varied("cohere2"), kernels="native")
    assert [layer.rotary for layer in target.prepacking.stack if layer.mixes] == [True, False]


def test_tables_in_the_other_order_are_not_accepted(monkeypatch):
    seen = observed(varied("cohere"))
    assert recognised(seen, Rotation(16, True))
    monkeypatch.setattr(recognition, "side_by_side", lambda tables: False)
    assert not recognised(seen, Rotation(16, True))


def test_pairs_are_recognised_by_the_results_of_a_layer(monkeypatch):
    """The name of the layer's class does not matter."""
    monkeypatch.setattr(modeling_glm4, "rotate_half", modeling_llama.rotate_half)
    model = varied("glm4")
    seen = observed(model)
    assert not recognised(seen, Rotation(8, neighbours=True))
    assert (
        RaggedModel(model, kernels="native", self_test=False).prepacking.fused == 0
    )  # the order of the tables fits neither form


# Norms and blocks


class Uncentred(nn.LayerNorm):
    def forward(self, x):
        return nn.functional.rms_norm(x, (x.shape[-1],), eps=self.eps) * self.weight + self.bias


class EachHead(nn.Module):
    """Norm of each head alone, with the factors of a norm over all heads."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        heads = x.unflatten(-1, (-1, 16))
        return self.weight * nn.functional.rms_norm(heads, (16,), eps=self.variance_epsilon).flatten(-2)


def uncentred(model):
    for layer in model.transformer.h:
        layer.ln_1.__class__ = Uncentred


def norm_of_each_head(model):
    for layer in model.model.layers:
        layer.self_attn.q_norm = EachHead(layer.self_attn.q_norm)


def one_after_the_other(model):
    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **kwargs)[0]
        return hidden_states + self.mlp(self.input_layernorm(hidden_states))

    for layer in model.model.layers:
        layer.__class__ = type("Serial", (type(layer),), {"forward": forward})


def other_projection(model):
    for layer in model.transformer.h:
        layer.mlp.c_fc.__class__ = type("Louder", (type(layer.mlp.c_fc),), {})


FAULTS = {uncentred: "gpt2", other_projection: "gpt2", norm_of_each_head: "olmo2", one_after_the_other: "cohere"}


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.parametrize("fault", FAULTS)
def test_layers_that_only_look_like_a_known_kind_are_not_fused(fault):
    model = varied(FAULTS[fault])
    assert RaggedModel(model, kernels="native").prepacking.fused == 2
    fault(model)
    faithful(model, fused=0, row_invariant=False, self_test=False)


@pytest.mark.parametrize(
    ("architecture", "whole"), [("glm4", True), ("starcoder2", True), ("cohere", True), ("gpt2", False)]
)
def test_whole_drafts_in_one_call(architecture, whole):
    """Other parts of the model may prevent it: GPT-2's positions are no rotation. Cohere scales its logits."""
    options = {"sliding_window": None} if architecture == "starcoder2" else {}
    assert (native_model(RaggedModel(varied(architecture, **options), kernels="native")) is not None) == whole


# Linears that keep their weights transposed


@pytest.mark.parametrize("weights", [None, "int8"])
def test_transposed_linears_are_prepacked_if_no_layer_is_fused(weights):
    model = varied("gpt2", n_head=8)  # heads of 8 channels
    target = RaggedModel(model, kernels="native", weights=weights)
    found = [
        prepacked_module
        for prepacked_module in prepacked_modules(target)
        if isinstance(prepacked_module, PrepackedLinear)
    ]
    assert target.prepacking.fused == 0
    assert sum(linear.transposed for linear in found) == 8
    assert copy_bytes(model) == sum(linear.weight.nbytes for linear in found)
    rounding = {"rtol": 0.1, "atol": 0.1} if weights else ROUNDING
    assert_close(logits(target), logits(plain(model)), **rounding)
