"""Prepacked weights: layers are fused, the model stays unchanged, and later changes are noticed."""

import copy
import warnings

import pytest
import torch
from support.models import PROMPTS, VOCAB, fusable
from support.native_checks import turn_kernels_off
from support.prepacked_models import FUSED, OTHERS, ROUNDING, TREES, Lora, faithful, logits, plain, prepacked_modules
from torch import nn
from torch.testing import assert_close

from arbordraft import RaggedModel
from arbordraft.kernels import native
from arbordraft.kernels.prepacked_linear import pack
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
from arbordraft.target import self_test
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.prepacked.backend import choose
from arbordraft.target.prepacked.prepacked_modules import PrepackedGatedMLP, PrepackedLayers, PrepackedNorm
from arbordraft.trees.topology import ancestor_words

pytestmark = pytest.mark.usefixtures("kernels")


def structure(model):
    """Returns the modules and parameters of a model by name."""
    return {**dict(model.named_modules(remove_duplicate=False)), **dict(model.named_parameters(remove_duplicate=False))}


def same_structure(model, before):
    now = structure(model)
    return now.keys() == before.keys() and all(now[name] is before[name] for name in before)


# Fused layers


@pytest.mark.parametrize("architecture", FUSED + OTHERS)
def test_prepacked_logits_equal_plain_ones(architecture):
    model = fusable(architecture)
    before, weights = structure(model), copy.deepcopy(model.state_dict())
    target = RaggedModel(model, kernels="native")
    fused = architecture in FUSED
    assert target.backend == "native"
    assert target.prepacking.fused == (2 if fused else 0)
    assert target.row_invariant == fused
    assert any(isinstance(prepacked_module, PrepackedLinear) for prepacked_module in prepacked_modules(target))
    for layers in (None, 1):
        assert_close(logits(target, layers), logits(plain(model), layers), **ROUNDING)
    assert same_structure(model, before)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text"])
def test_layers_of_several_kinds(architecture):
    """Only some layers have sliding windows; gemma3 also rotates them differently, so it needs several calls."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    overrides = {} if architecture == "mistral" else {"layer_types": kinds}
    model = fusable(architecture, num_hidden_layers=4, **overrides)
    target = RaggedModel(model, kernels="native")
    assert target.prepacking.fused == 4
    parts = [part for prepacked_module in prepacked_modules(target) for part in prepacked_module.modules()]
    calls = [len(part.layers) for part in parts if isinstance(part, PrepackedLayers)]
    assert calls == ([2, 0, 1, 1] if architecture == "gemma3_text" else [4])
    for layers in (None, 1, 2, 3):
        assert_close(logits(target, layers), logits(plain(model), layers), **ROUNDING)


@pytest.mark.parametrize(
    "options", [{"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}], ids=["tied", "biases"]
)
def test_tied_weights_and_biases(options):
    model = fusable(**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_()
    faithful(model, row_invariant=True)


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_scaled_rotations(rope):
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = fusable(rope_parameters=parameters)
    faithful(model, row_invariant=True)


def test_layers_of_unsupported_sizes_are_not_fused():
    """Layers that are not fused are replaced part by part."""
    model = fusable("olmo2", head_dim=8)
    target = faithful(model, fused=0, row_invariant=False)
    found = {type(prepacked_module) for prepacked_module in prepacked_modules(target)}
    assert found == {PrepackedLinear, PrepackedNorm, PrepackedGatedMLP}


# The model stays as it was


def test_the_model_is_restored_after_a_failure():
    model = fusable()
    prompt = torch.tensor([PROMPTS[0]])
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "do_sample": False}
    before, answer = structure(model), model.generate(prompt, **options)
    target = RaggedModel(model, kernels="native")
    for layers in (None, 1):
        with pytest.raises(IndexError):
            logits(target, layers, tokens=torch.full((sum(tree.num_nodes for tree in TREES),), VOCAB))
        assert same_structure(model, before)
        assert torch.equal(model.generate(prompt, **options), answer)
    assert_close(logits(target), logits(plain(model)), **ROUNDING)


def test_several_wrappers_of_one_model():
    model = fusable()
    targets = [RaggedModel(model, kernels=kernels) for kernels in ("native", "torch", "native")]
    expected = logits(targets[1])
    for target in targets * 2:
        assert_close(logits(target), expected, **ROUNDING)


def test_made_in_inference_mode():
    with torch.inference_mode():
        model = fusable()
        target = RaggedModel(model, kernels="native")
        expected = logits(plain(model))
        assert target.row_invariant
        assert_close(logits(target), expected, **ROUNDING)
    assert_close(logits(target), expected, **ROUNDING)
    assert_close(logits(RaggedModel(model, kernels="native")), expected, **ROUNDING)


def test_used_in_inference_mode():
    target = RaggedModel(fusable(), kernels="native")
    expected = logits(target)
    with torch.inference_mode():
        assert torch.equal(logits(target), expected)


# Changes after prepacking


def scaled(tensor):
    return tensor.detach() * 1.25


def scaled_state(model):
    return {name: scaled(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def write(weight):
    weight.mul_(1.25)


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model(torch.tensor([[5, 6, 7]])).logits.square().mean().backward()
    optimizer.step()


def assign_data(model):
    weight = model.model.layers[1].self_attn.v_proj.weight
    weight.data = scaled(weight)


def copied(model, part):
    return copy.deepcopy(part, {id(model.config): model.config})  # all parts share one configuration


def replace_layer(model):
    model.model.layers[0] = copied(model, model.model.layers[1])
    model.model.layers[0].self_attn.layer_idx = 0


def replace_list(model):
    layers = copied(model, model.model.layers)
    model.model.layers = nn.ModuleList([layers[1], layers[0]])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index


def replace_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ReLU()


def replace(path, make):
    """Returns a change that replaces a part of the model by ``make`` of the old part."""

    def change(model):
        place, _, name = path.rpartition(".")
        owner = model.get_submodule(place)
        setattr(owner, name, make(getattr(owner, name)))

    return change


def down_projection(model):
    return model.model.layers[1].mlp.down_proj.weight


def write_by_numpy(model):
    array = down_projection(model).detach().numpy()
    array *= -1.5


def write_in_inference_mode(model):
    with torch.inference_mode():
        down_projection(model).mul_(-1.5)


def write_low_rank(model):
    """Changes a weight as PEFT's ``merge_adapter()`` does, unnoticed by torch."""
    weight = down_projection(model)
    weight.data += 0.5 * torch.ones(weight.shape[0], 1) @ torch.ones(1, weight.shape[1])


CHANGES = {
    "train": train,
    "parameter": replace("model.layers.1.self_attn.v_proj.weight", lambda weight: nn.Parameter(scaled(weight))),
    "data": assign_data,
    "written norm": lambda model: write(model.model.layers[0].post_attention_layernorm.weight),
    "written head": lambda model: write(model.lm_head.weight),
    "written embedding": lambda model: write(model.model.embed_tokens.weight),
    "adapter": replace("model.layers.0.self_attn.q_proj", Lora),
    "mlp": lambda model: replace("model.layers.0.mlp", lambda _: copy.deepcopy(model.model.layers[1].mlp))(model),
    "layer": replace_layer,
    "list": replace_list,
    "activation": replace_activation,
    "last norm": replace("model.norm", lambda _: nn.LayerNorm(64)),
    "state": lambda model: model.load_state_dict(scaled_state(model)),
    "assigned state": lambda model: model.load_state_dict(scaled_state(model), assign=True),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "by numpy": write_by_numpy,
    "in inference mode": write_in_inference_mode,
    "low rank": write_low_rank,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_once(change):
    model = fusable()
    target = RaggedModel(model, kernels="native")
    before = logits(target)
    CHANGES[change](model)
    expected = logits(plain(model))
    with pytest.warns(UserWarning, match="changed after they were prepacked") as caught:
        found = logits(target)
    assert len(caught) == 1
    rounding = {"rtol": 0.05, "atol": 0.1} if change == "bfloat16" else ROUNDING
    assert_close(found, expected, **rounding)
    assert not torch.allclose(found.float(), before, atol=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(target), found)  # no second warning
    assert target.prepacking.fused == (1 if change == "adapter" else 2)
    assert target.row_invariant == (change != "adapter")


def test_a_wrapper_that_checks_nothing_would_be_seen():
    """Negative control: these changes matter."""
    model = fusable()
    target = RaggedModel(model, kernels="native")
    target._prepared.weights.current = lambda: True
    CHANGES["state"](model)
    assert not torch.allclose(logits(target), logits(plain(model)), atol=1e-2)


# Choice of the backend


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_dtypes_that_are_not_prepacked(dtype):
    model = fusable().to(dtype)
    with pytest.warns(UserWarning, match=r"uses the model's own linears: .*not torch\.float") as caught:
        target = RaggedModel(model, kernels="auto")
    assert len(caught) == 1
    assert target.backend == "torch"
    assert not target.row_invariant
    assert torch.equal(logits(target), logits(plain(model)))
    with pytest.raises(ValueError, match=r"kernels='native' cannot be used: .*not torch\.float"):
        RaggedModel(model, kernels="native")
    with pytest.warns(match="own linears"), pytest.raises(ValueError, match="int8 weights need the native kernels"):
        RaggedModel(model, kernels="auto", weights="int8")


def test_unknown_kernels_are_refused():
    with pytest.raises(ValueError, match="one of auto, native, torch, triton, got 'fast'"):
        RaggedModel(fusable(), kernels="fast")


def test_triton_needs_a_gpu():
    with pytest.raises(ValueError, match="kernels='triton' cannot be used"):
        RaggedModel(fusable(), kernels="triton")


def test_the_best_backend_is_chosen(monkeypatch):
    model = fusable()
    assert choose("auto", model).backend == "native"
    monkeypatch.setattr(native, "problem", lambda: pytest.fail("the kernels might be built in vain"))
    assert choose("torch", model).backend == "torch"


def test_without_native_kernels(monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_ISA", "off")
    model = fusable()
    target = faithful(model, row_invariant=False, kernels="auto")
    assert target.backend == "torch"
    for arguments in ({"kernels": "native"}, {"kernels": "auto", "weights": "int8"}):
        with pytest.raises(ValueError, match="ARBORDRAFT_ISA=off turns them off"):
            RaggedModel(model, **arguments)


def test_turned_off_after_packing(monkeypatch):
    model = fusable()
    target = RaggedModel(model, kernels="native")
    expected = logits(target)
    turn_kernels_off(monkeypatch)
    assert_close(logits(target), expected, **ROUNDING)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "olmo2", "gpt2", "opt", "qwen2_moe"])
@pytest.mark.parametrize(("weights", "most"), [("int8-weight-only", 0.05), ("int8", 0.05), ("int4", 0.3)])
def test_fewer_bits_cost_little(weights, most, architecture, dtype):
    """The router of a mixture keeps its bits, so nearly all rows take the same experts as before."""
    model = fusable(architecture)
    exact = logits(plain(model))
    spread = (exact - exact.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    target = RaggedModel(model.to(dtype), kernels="native", weights=weights)
    error = (logits(target).float() - exact).square().mean().sqrt() / spread
    assert 1e-4 < error < most
    assert target.row_invariant == (architecture != "opt")
    if architecture == "qwen2_moe":
        assert target.prepacking.stack[0].experts.router.weight.dtype == dtype


def test_the_head_of_4_bit_weights_keeps_8():
    """A 4-bit head would lose more than all other weights together; the model's own embedding stays unchanged."""
    model = fusable("llama")
    target = RaggedModel(model, kernels="native", weights="int4")
    head = target.network().get_output_embeddings()
    assert head.weights == "int8"
    assert torch.equal(head.prepacked[0], pack(head.weight, "int8")[0])
    down = model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(target.prepacking.stack[0].down.weight, pack(down, "int4")[0])
    own = RaggedModel(model, kernels="native").prepacking.nbytes
    assert 0.15 < target.prepacking.nbytes / own < 0.19  # 5 of 32 bits, 8.5 in the head, and tables of panels


@pytest.mark.parametrize("weights", [None, "int8", "int4"])
def test_a_wrong_mask_is_noticed_with_any_weights(weights, monkeypatch):
    """Negative control of the self-test, which compares rows of equally many bits."""
    monkeypatch.setattr(self_test, "ancestor_words", lambda visible: ancestor_words(torch.ones_like(visible).tril()))
    what = "packed logits differ from single ones" + (f" with {weights} weights" if weights else "")
    with pytest.raises(UnsupportedModel, match=what):
        RaggedModel(fusable(), kernels="native", weights=weights)


# The prepacked module of a linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_prepacked_linear_module(bias, dtype):
    linear = nn.Linear(33, 21, bias).to(dtype)
    prepacked = PrepackedLinear(linear)
    rounding = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    assert prepacked.state_dict().keys() == linear.state_dict().keys()
    assert prepacked.weight is linear.weight
    with torch.no_grad():
        for shape in ((33,), (1, 33), (2, 3, 33), (0, 33), (40, 33)):
            x = torch.randn(shape).to(dtype)
            assert_close(prepacked(x), linear(x), **rounding)
        x = torch.randn(33, 7).to(dtype).T
        assert_close(prepacked(x), linear(x), **rounding)
        linear.weight.mul_(2)
        assert_close(prepacked(x), linear(x), **rounding)
        if bias:
            linear.bias.add_(1)
            assert_close(prepacked(x), linear(x), **rounding)
    assert repr(prepacked) == "PrepackedLinear(in_features=33, out_features=21, weights=None)"


def test_linears_that_cannot_be_prepacked_are_refused(monkeypatch):
    linear = nn.Linear(4, 4)
    for arguments, message in (
        ({"linear": nn.Linear(4, 4).half()}, "weights must be float32 or bfloat16, got torch.float16"),
        ({"linear": nn.Linear(4, 4, device="meta")}, "weights must be on the CPU, got meta"),
    ):
        with pytest.raises(ValueError, match=message):
            PrepackedLinear(**{"linear": linear, **arguments})
    monkeypatch.setenv("ARBORDRAFT_ISA", "off")
    with pytest.raises(ValueError, match="this linear cannot be prepacked: ARBORDRAFT_ISA=off"):
        PrepackedLinear(linear)
