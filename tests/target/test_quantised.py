"""Weights that are no plain tensors run in the model's own modules; all other modules stay fast."""

import copy

import pytest
import torch
from support.models import PROMPTS, check_greedy, fusable
from support.prepacked_models import ROUNDING, faithful, logits, plain
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import arbordraft
from arbordraft import RaggedModel, UnsupportedModel, builders
from arbordraft.target.equality import Equality
from arbordraft.target.prepacked.memory import copy_bytes
from arbordraft.target.prepacked.probing import vocabulary

pytestmark = [pytest.mark.filterwarnings("ignore:not prepacked"), pytest.mark.filterwarnings("ignore:torch.ao")]


class Codes(Tensor):
    """8-bit weights that pose as float32, as in torchao; they support few operations and no copies."""

    codes: Tensor
    scale: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __new__(cls, weight):
        self = Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)
        self.scale = weight.detach().abs().amax(dim=1, keepdim=True) / 127
        self.codes = (weight.detach() / self.scale).round().to(torch.int8)
        return self

    @classmethod
    def __torch_dispatch__(cls, function, _, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        if function in (torch.ops.aten.t.default, torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            return function(*(a.codes * a.scale if isinstance(a, cls) else a for a in args), **(kwargs or {}))
        raise NotImplementedError(function)

    def __deepcopy__(self, memo):
        raise NotImplementedError("no copies")


class Packed(nn.Module):
    """Linear whose weight is a method and which cannot be copied, as in some libraries."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("codes", linear.weight.detach().clone())

    def weight(self):
        return self.codes

    def forward(self, x):
        return x @ self.codes.T

    def __deepcopy__(self, memo):
        raise TypeError("no copies")


def as_subclass(linear):
    linear.weight = nn.Parameter(Codes(linear.weight), requires_grad=False)
    return linear


KINDS = {"subclass": as_subclass, "module": Packed, "parametrised": parametrizations.weight_norm}
PLACES = {"q_proj": ("self_attn", "q_proj"), "down_proj": ("mlp", "down_proj"), "all": None}


def changed(kind, place="all"):
    model = fusable()
    for name, module in list(model.named_modules()):
        where = (*name.split(".")[-2:],)
        if type(module) is nn.Linear and PLACES[place] in (None, where):
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, where[-1], KINDS[kind](module))
    return model


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_no_plain_tensors_run_in_their_modules(kind, place):
    model = changed(kind, place)
    target = RaggedModel(model, kernels="native")
    count = {"q_proj": 2, "down_proj": 2, "all": 15}[place]
    assert f"{count} linears left to the model" in target.chosen
    assert target.prepacking.fused == 0
    assert_close(logits(target), logits(plain(model)), **ROUNDING)
    assert not target.row_invariant


@pytest.mark.parametrize("kind", KINDS)
def test_loading_falls_back(kind):
    decoder = arbordraft.load(changed(kind), "ngram", costs=None)
    check_greedy(decoder, count=8)


def test_sizes_are_read_off_the_linear():
    model = changed("subclass")
    assert vocabulary(model) == vocabulary(changed("module")) == 61
    assert copy_bytes(model) == 0


@pytest.mark.usefixtures("kernels")
def test_modules_that_fail_in_recognition_run_unchanged():
    """If recognition raises an error, the module itself runs."""
    model = fusable()
    norm = model.model.layers[0].input_layernorm
    kind = type(norm)

    class Odd(kind):
        def buffers(self, *args):
            raise RuntimeError("not here")

    norm.__class__ = Odd
    faithful(model, fused=1)


class GatedNorm(nn.RMSNorm):
    """RMS norm, unless it is given another argument, whose name says nothing about a gate."""

    def forward(self, x, other=None):
        return super().forward(x if other is None else x * other.sigmoid())


class GatedMLP(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.inside, self.norm = mlp, GatedNorm(64, eps=1e-6)

    def forward(self, x):
        return self.norm(self.inside(x), x)


@pytest.mark.usefixtures("kernels")
def test_copies_that_do_not_fit_the_model_are_not_used():
    """If calls of a module differ from those of its trial, the model's own modules run."""
    model = fusable()
    model.model.layers[0].mlp = GatedMLP(model.model.layers[0].mlp)
    with pytest.warns(UserWarning, match="kernels='auto' uses the model's own modules"):
        target = RaggedModel(model)
    assert target.chosen.startswith("torch: the model's own modules (prepacked weights do not fit the model: ")
    assert_close(logits(target), logits(plain(model)), **ROUNDING)
    with pytest.raises(UnsupportedModel, match="forward"):
        RaggedModel(model, kernels="native")


# Activations that are quantised with one scale for all rows


def dynamic(model):
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)


def test_scales_over_all_rows_are_named():
    """A model whose rounding depends on the other rows is decoded, and guarantees the law only."""
    model = dynamic(fusable("gpt2"))
    with pytest.warns(UserWarning, match="itself gives a text other logits when other texts run beside it"):
        target = RaggedModel(model)
    assert "left to the model" in target.chosen
    assert not target.row_invariant
    decoder = builders.ems_sd(target, length=2)
    report = decoder.equality_report()
    assert report.equality == Equality.law
    assert "other rows run beside it" in report.reason
    check_greedy(builders.plain(target), PROMPTS[:1], 6)  # one row at a time, as in transformers


class Stepped(nn.Linear):
    """Rounds activations to steps, row by row; a sum with another rounding may fall on another step."""

    steps = 127

    def forward(self, x):
        scale = x.abs().amax(dim=-1, keepdim=True) / self.steps
        return super().forward((x / scale).round() * scale)


@pytest.mark.filterwarnings("ignore:.*a sum is rounded otherwise")
@pytest.mark.parametrize(
    ("steps", "seed"), [(127, 3), (127, 0), (31, 1)]
)  # with the first and last, sums fall on other steps
def test_models_that_round_each_row_alone_are_accepted(steps, seed, monkeypatch):
    monkeypatch.setattr(Stepped, "steps", steps)
    model = fusable(seed=seed)
    for layer in model.model.layers:
        for linear in (layer.mlp.down_proj, layer.mlp.up_proj, layer.self_attn.q_proj, layer.self_attn.o_proj):
            linear.__class__ = Stepped
    assert "left to the model" in RaggedModel(model, kernels="auto").chosen


class Averaged(nn.Linear):
    """Adds the mean of all rows to each row."""

    def forward(self, x):
        return super().forward(x + 2 * x.flatten(0, -2).mean(dim=0))


def test_rows_that_mix_are_refused():
    model = fusable()
    for layer in model.model.layers:
        layer.mlp.down_proj.__class__ = Averaged
    with pytest.raises(UnsupportedModel, match="its rows depend on each other"):
        RaggedModel(model, kernels="torch")
