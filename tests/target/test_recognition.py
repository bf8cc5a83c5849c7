"""Only layers that compute what the kernels compute are fused; all others are left to themselves."""

import pytest
import torch
from support.prepacked_models import ROUNDING, Lora, logits, plain, prepacked_modules, small
from torch import nn
from torch.testing import assert_close
from transformers.activations import ACT2FN

from arbordraft import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import PrepackedNorm

pytestmark = pytest.mark.usefixtures("kernels")


# What is not a plain linear


class Quantised(nn.Module):
    """A linear whose weights are kept in another form."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("kept", linear.weight.detach().clone() / 3)

    def forward(self, x):
        return 3 * (x @ self.kept.T)


class Scaled(nn.Linear):
    """Looks like a linear and is none."""

    def forward(self, x):
        return 1.5 * super().forward(x)


def test_adapters():
    model = small()
    model.model.layers[0].self_attn.q_proj = Lora(model.model.layers[0].self_attn.q_proj)
    model.model.layers[1].mlp.down_proj = Lora(model.model.layers[1].mlp.down_proj)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 0
    assert_close(logits(target), logits(plain(model)), **ROUNDING)
    model.model.layers[1].mlp.down_proj = model.model.layers[1].mlp.down_proj.base
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 1
    assert not target.row_invariant
    for layers in (None, 1):
        assert_close(logits(target, layers), logits(plain(model), layers), **ROUNDING)


@pytest.mark.parametrize("kind", [Quantised, Scaled])
def test_other_kinds_of_linears_are_left_alone_and_named(kind):
    model = small()
    for layer in model.model.layers:
        odd = kind(layer.self_attn.o_proj) if kind is Quantised else Scaled(64, 64, bias=False)
        layer.self_attn.o_proj = odd
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.o_proj.*layers\.1\.self_attn\.o_proj") as caught:
        target = RaggedModel(model, kernels="native")
    assert len(caught) == 1
    assert kind.__name__ in str(caught[0].message)
    assert target.prepacking.fused == 0
    assert_close(logits(target), logits(plain(model)), **ROUNDING)


def places(model):
    layer = model.model.layers[0]
    return {
        "layer": layer,
        "attention": layer.self_attn,
        "linear": layer.self_attn.k_proj,
        "norm": layer.input_layernorm,
        "mlp": layer.mlp,
        "activation": layer.mlp.act_fn,
        "inner linear": layer.mlp.down_proj,
        "last norm": model.model.norm,
        "head": model.lm_head,
    }


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", places(small()))
def test_whoever_listens_is_called(place, later):
    model, calls = small(), []
    listened = places(model)[place]
    if later:
        target = RaggedModel(model, kernels="native", self_test=False)
        assert target.row_invariant
    hook = listened.register_forward_hook(lambda *_: calls.append(place))
    if not later:
        target = RaggedModel(model, kernels="native", self_test=False)
        calls.clear()
        found = logits(target)
    else:
        with pytest.warns(UserWarning, match="changed after they were prepacked"):
            found = logits(target)
    assert len(calls) >= 2  # once per forward
    hook.remove()
    assert_close(found, logits(plain(model)), **ROUNDING)


def test_changing_what_a_part_is_given_is_heeded():
    model = small()
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 1
    assert_close(logits(target), logits(plain(model)), **ROUNDING)


# Layers that only look right


def louder(module, factor=1.1):
    """A subclass of the module's class whose result is a little larger."""
    base = type(module)

    class Subclass(base):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            return (factor * found[0], *found[1:]) if isinstance(found, tuple) else factor * found

    module.__class__ = Subclass


def patched(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: 1.1 * forward(*args, **kwargs)


class OtherNorm(nn.Module):
    """An RMS norm with another power."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon) ** -0.45


class BoundedNorm(OtherNorm):
    def forward(self, x):
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon) ** -0.5).clamp(-2.5, 2.5)


class GatedNorm(OtherNorm):
    """Takes an argument that no RMS norm has."""

    def forward(self, x, gate):
        return super().forward(x) * gate


class Gated(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = GatedNorm(norm)

    def forward(self, x):
        return self.norm(x, 0.5)


class Clamped(nn.Module):
    def forward(self, x):
        return nn.functional.silu(x).clamp(max=15)


def odd_layer(layer):
    louder(layer)


def odd_attention(layer):
    louder(layer.self_attn)


def odd_mlp(layer):
    louder(layer.mlp)


def odd_activation(layer):
    layer.mlp.act_fn = ACT2FN["quick_gelu"]


def bounded_relu(layer):
    layer.mlp.act_fn = nn.ReLU6()


def bounded_silu(layer):
    layer.mlp.act_fn = Clamped()


def odd_norm(layer):
    layer.input_layernorm = OtherNorm(layer.input_layernorm)


def bounded_norm(layer):
    layer.post_attention_layernorm = BoundedNorm(layer.post_attention_layernorm)


def patched_layer(layer):
    patched(layer)


def patched_mlp(layer):
    patched(layer.mlp)


def patched_linear(layer):
    patched(layer.self_attn.o_proj)


def extra_norm(layer):
    layer.self_attn.q_norm = OtherNorm(layer.input_layernorm)


def extra_buffer(layer):
    layer.register_buffer("factor", torch.tensor(1.1))
    odd_layer(layer)


def louder_by_attribute(layer):
    """Only a tensor in a list tells this layer from the others."""
    layer.factors = [torch.tensor(1.1)]
    base = type(layer)

    class Subclass(base):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * self.factors[0]

    layer.__class__ = Subclass


FAULTS = [
    odd_layer,
    odd_attention,
    odd_mlp,
    odd_activation,
    bounded_relu,
    bounded_silu,
    odd_norm,
    bounded_norm,
    patched_layer,
    patched_mlp,
    patched_linear,
    extra_norm,
    extra_buffer,
    louder_by_attribute,
]


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.parametrize("count", [1, 2], ids=["last layer", "both layers"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_that_only_looks_right_is_not_fused(fault, count):
    model = small(num_hidden_layers=3)
    for layer in list(model.model.layers)[-count:]:
        fault(layer)
    if fault is louder_by_attribute and count == 2:  # alike but for what the list holds
        first, second = list(model.model.layers)[-2:]
        second.__class__ = first.__class__
        first.factors = [torch.tensor(1.0)]
        count = 1
    target = RaggedModel(model, kernels="native", self_test=False)
    assert target.prepacking.fused == 3 - count
    assert not target.row_invariant
    assert_close(logits(target), logits(plain(model)), **ROUNDING)


@pytest.mark.parametrize("kind", [OtherNorm, BoundedNorm])
def test_a_last_norm_that_only_looks_right(kind):
    model = small()
    model.model.norm = kind(model.model.norm)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 2
    assert not target.row_invariant
    assert not any(isinstance(prepacked_module, PrepackedNorm) for prepacked_module in prepacked_modules(target))
    assert_close(logits(target), logits(plain(model)), **ROUNDING)


def test_a_norm_that_cannot_be_tried():
    model = small()
    model.model.norm = Gated(model.model.norm)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 2
    assert not target.row_invariant
    assert_close(logits(target), logits(plain(model)), **ROUNDING)


def test_modules_that_mix_rows_take_the_promise_away():
    class Mixer(nn.Module):
        def forward(self, x):
            return x + 1e-3 * x.mean(dim=1, keepdim=True)

    model = small()
    model.model.norm = nn.Sequential(model.model.norm, Mixer())
    target = RaggedModel(model, kernels="native", self_test=False)
    assert target.prepacking.fused == 2
    assert not target.row_invariant


def test_a_module_is_not_taken_for_its_namesake():
    model = small()
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb.__class__ = type(rotary.__name__, (rotary,), {})
    assert not RaggedModel(model, kernels="native", self_test=False).row_invariant
    assert RaggedModel(small(), kernels="native", self_test=False).row_invariant


def test_a_module_in_two_places():
    model = small()
    shared = model.model.layers[0].mlp.down_proj
    model.model.layers[1].mlp.down_proj = shared
    model.model.second = model.model.norm
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 2
    assert sum(isinstance(prepacked_module, PrepackedNorm) for prepacked_module in prepacked_modules(target)) == 2
    assert_close(logits(target), logits(plain(model)), **ROUNDING)
