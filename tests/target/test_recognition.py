"""Only layers that compute the same as the kernels are fused; all other layers run in their own modules."""

import pytest
import torch
from support.models import fusable
from support.prepacked_models import ROUNDING, faithful, logits, plain, prepacked_modules
from torch import nn
from torch.testing import assert_close
from transformers.activations import ACT2FN

from arbordraft import RaggedModel
from arbordraft.target.prepacked.prepacked_modules import PrepackedNorm

pytestmark = pytest.mark.usefixtures("kernels")


# Linears of other kinds


class Scaled(nn.Linear):
    """Looks like a linear, but scales its output."""

    def forward(self, x):
        return 1.5 * super().forward(x)


def test_other_kinds_of_linears_are_left_alone_and_named():
    model = fusable()
    for layer in model.model.layers:
        layer.self_attn.o_proj = Scaled(64, 64, bias=False)
    with pytest.warns(UserWarning, match=r"layers\.0\.self_attn\.o_proj.*layers\.1\.self_attn\.o_proj") as caught:
        target = RaggedModel(model, kernels="native")
    assert len(caught) == 1
    assert "Scaled" in str(caught[0].message)
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
@pytest.mark.parametrize("place", places(fusable()))
def test_forward_hooks_are_called(place, later):
    model, calls = fusable(), []
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


def test_hooks_that_change_inputs_act():
    model = fusable()
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    faithful(model, fused=1)


# Layers that only look right


def louder(module, factor=1.1):
    """Changes the module's class to a subclass that scales its result."""
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
    """RMS norm with another power."""

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


def extra_buffer(layer):
    layer.register_buffer("factor", torch.tensor(1.1))
    louder(layer)


def louder_by_attribute(layer):
    """Scales the results of a layer by a tensor that only a list holds."""
    layer.factors = [torch.tensor(1.1)]
    base = type(layer)

    class Subclass(base):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) * self.factors[0]

    layer.__class__ = Subclass


FAULTS = {
    "layer": louder,
    "attention": lambda layer: louder(layer.self_attn),
    "mlp": lambda layer: louder(layer.mlp),
    "activation": lambda layer: setattr(layer.mlp, "act_fn", ACT2FN["quick_gelu"]),
    "bounded relu": lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU6()),
    "bounded silu": lambda layer: setattr(layer.mlp, "act_fn", Clamped()),
    "norm": lambda layer: setattr(layer, "input_layernorm", OtherNorm(layer.input_layernorm)),
    "bounded norm": lambda layer: setattr(
        layer, "post_attention_layernorm", BoundedNorm(layer.post_attention_layernorm)
    ),
    "patched layer": patched,
    "patched mlp": lambda layer: patched(layer.mlp),
    "patched linear": lambda layer: patched(layer.self_attn.o_proj),
    "extra norm": lambda layer: setattr(layer.self_attn, "q_norm", OtherNorm(layer.input_layernorm)),
    "extra buffer": extra_buffer,
    "list": louder_by_attribute,
}


@pytest.mark.filterwarnings("ignore:not prepacked")
@pytest.mark.parametrize("count", [1, 2], ids=["last layer", "both layers"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_that_only_looks_right_is_not_fused(fault, count):
    model = fusable(num_hidden_layers=3)
    for layer in list(model.model.layers)[-count:]:
        FAULTS[fault](layer)
    if fault == "list" and count == 2:  # the layers differ only in their lists
        first, second = list(model.model.layers)[-2:]
        second.__class__ = first.__class__
        first.factors = [torch.tensor(1.0)]
        count = 1
    faithful(model, fused=3 - count, row_invariant=False, self_test=False)


@pytest.mark.parametrize("kind", [OtherNorm, BoundedNorm, Gated])
def test_a_last_norm_that_only_looks_right_is_not_prepacked(kind):
    model = fusable()
    model.model.norm = kind(model.model.norm)
    target = faithful(model, fused=2, row_invariant=False)
    assert not any(isinstance(prepacked_module, PrepackedNorm) for prepacked_module in prepacked_modules(target))


def test_modules_that_mix_rows_end_row_invariance():
    class Mixer(nn.Module):
        def forward(self, x):
            return x + 1e-3 * x.mean(dim=1, keepdim=True)

    model = fusable()
    model.model.norm = nn.Sequential(model.model.norm, Mixer())
    target = RaggedModel(model, kernels="native", self_test=False)
    assert target.prepacking.fused == 2
    assert not target.row_invariant


def test_a_module_is_not_taken_for_its_namesake():
    model = fusable()
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb.__class__ = type(rotary.__name__, (rotary,), {})
    assert not RaggedModel(model, kernels="native", self_test=False).row_invariant
    assert RaggedModel(fusable(), kernels="native", self_test=False).row_invariant


def test_a_module_in_two_places():
    model = fusable()
    shared = model.model.layers[0].mlp.down_proj
    model.model.layers[1].mlp.down_proj = shared
    model.model.second = model.model.norm
    target = faithful(model, fused=2)
    assert sum(isinstance(prepacked_module, PrepackedNorm) for prepacked_module in prepacked_modules(target)) == 2
