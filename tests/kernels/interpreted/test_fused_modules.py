"""Norms, rotations and gated activations run in Triton only for modules that compute as those of transformers do."""

import copy

import pytest
import torch
from support.models import PROMPTS, decode, fusable, varied
from support.prepacked_models import ROUNDING, logits, plain
from torch import nn
from torch.testing import assert_close

from arbordraft import RaggedModel, SpeculativeDecoder, TreeTopology
from arbordraft.drafters import NGramDrafter
from arbordraft.kernels import choice

LLAMA = {"norms": 5, "rotations": 2, "gates": 2, "sums": 2}
# Fused parts of two layers and the last norm.
KINDS = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "mistral": LLAMA,
    "qwen3": LLAMA | {"norms": 9},
    "gemma2": LLAMA | {"norms": 9},
    "gemma3_text": LLAMA | {"norms": 13},
    "mixtral": {"norms": 5, "rotations": 2, "sums": 2},
    "olmo2": {"norms": 9, "gates": 2},  # normalises queries before it splits them into heads
    "phi3": {"norms": 5},
    "glm4": {"norms": 9},  # rotates neighbouring channels
    "cohere": {"gates": 2},
    "gpt2": {},
}
RUN = {"norms": "rms_norm", "rotations": "rotate_append", "gates": "gated_activation", "sums": "add_rms_norm"}


def fused(model):
    return RaggedModel(model, kernels="triton", self_test=False)


def parts(target):
    found = str(target._prepared.fused)
    return {kind: int(count) for count, kind in (part.split() for part in found.split(", ") if part)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", KINDS)
def test_references_change_no_bit(architecture, dtype):
    model = varied(architecture).to(dtype)
    target = RaggedModel(model, kernels="triton")
    assert parts(target) == KINDS[architecture]
    with choice.use("reference"):
        assert torch.equal(logits(target), logits(plain(model)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "mixtral", "olmo2"])
def test_kernels_only_round_otherwise(architecture):
    model = varied(architecture)
    target = fused(model)
    with choice.use("reference"):
        expected = logits(plain(model))
    choice.ran.clear()
    with choice.use("triton"):
        assert_close(logits(target), expected, **ROUNDING)
    assert {name.partition("/")[2] for name in choice.ran} == {"triton"}
    assert {name.partition("/")[0] for name in choice.ran} >= {RUN[kind] for kind in KINDS[architecture]}


@pytest.mark.parametrize("compiler", [None, pytest.param("aot_eager", marks=pytest.mark.soak)])
def test_steps_of_fixed_shapes_run_them(compiler):
    model, found = varied("llama"), []
    for target, path, buckets in ((plain(model), "reference", None), (fused(model), "triton", (8,))):
        with choice.use(path if compiler is None else "reference"):  # a trace cannot read the choice
            decoder = SpeculativeDecoder(
                target,
                NGramDrafter(),
                TreeTopology.chain(2),
                buckets=buckets,
                compile_backend=compiler if buckets else None,
            )
            choice.ran.clear()
            found.append(decode(decoder, PROMPTS[:2], max_new_tokens=4)[0])
    assert compiler or all(choice.ran[f"{name}/triton"] for name in RUN.values())
    assert found[0] == found[1]


def test_a_layer_takes_the_norm_of_the_next_one():
    """Only the norm before the first layer and the one after the last layer run alone."""
    target = fused(varied("llama"))
    choice.ran.clear()
    logits(target)
    forwards = choice.ran["rms_norm/reference"] / 2
    assert choice.ran["add_rms_norm/reference"] == 3 * forwards > 0
    for layers in (1, 2):
        assert torch.equal(logits(target, layers), logits(plain(target.model), layers))


@pytest.mark.parametrize("place", ["behind", "before"])
def test_hooks_between_two_layers_act(place):
    """Negative control: the hook changes the tensor of the next layer in place."""
    model = varied("llama")
    first, second = model.model.layers
    if place == "behind":
        first.register_forward_hook(lambda _, given, out: out.mul_(2))
    else:
        second.register_forward_pre_hook(lambda _, given: given[0].mul_(2))
    assert torch.equal(logits(fused(model)), logits(plain(model)))
    assert not torch.allclose(logits(fused(model)), logits(plain(varied("llama"))))


def test_steps_are_recorded_by_default_on_a_gpu():
    decoder = SpeculativeDecoder(fused(fusable()), NGramDrafter(), TreeTopology.chain(2))
    assert decoder.static is not None
    assert decoder.static.automatic


# Changes that users make to their models


def places(model):
    layer = model.model.layers[0]
    return {
        "layer": layer,
        "attention": layer.self_attn,
        "linear": layer.self_attn.k_proj,
        "first norm": layer.input_layernorm,
        "second norm": layer.post_attention_layernorm,
        "mlp": layer.mlp,
        "activation": layer.mlp.act_fn,
        "inner linear": layer.mlp.down_proj,
        "last norm": model.model.norm,
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("later", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", places(fusable()))
def test_forward_hooks_are_called_and_act(place, later):
    model, target = varied("llama"), None
    if later:
        target = fused(model)
    places(model)[place].register_forward_hook(
        lambda _, __, out: 2 * out if isinstance(out, torch.Tensor) else (2 * out[0], *out[1:])
    )
    target = target or fused(model)
    assert torch.equal(logits(target), logits(plain(model)))
    assert not torch.allclose(logits(target), logits(plain(varied("llama"))))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("place", [name for name in places(fusable()) if name != "activation"])
def test_replaced_forwards_are_called(place):
    model = varied("llama")
    module = places(model)[place]
    own, calls = module.forward, []

    def forward(*args, **kwargs):
        calls.append(place)
        return own(*args, **kwargs)

    module.forward = forward
    target = fused(model)
    calls.clear()
    found = logits(target)
    assert calls
    assert torch.equal(found, logits(plain(model)))


@pytest.mark.parametrize("how", ["in place", "another tensor", "another type"])
def test_new_weights_are_read(how):
    model = varied("llama")
    target = fused(model)
    before = logits(target)
    if how == "another type":
        model.to(torch.bfloat16)
    else:
        for norm in (model.model.layers[0].input_layernorm, model.model.layers[1].post_attention_layernorm):
            if how == "in place":
                norm.weight.data.mul_(2)
            else:
                norm.weight = nn.Parameter(2 * norm.weight.detach())
    assert torch.equal(logits(target), logits(plain(model)))
    assert not torch.equal(logits(target), before)


def test_the_model_keeps_its_own_modules():
    model = varied("llama")
    before, tokens = copy.deepcopy(model.state_dict()), torch.tensor([PROMPTS[0]])
    expected = model(tokens).logits
    with choice.use("triton"):
        logits(fused(model))
    assert torch.equal(model(tokens).logits, expected)
    assert not any("forward" in vars(module) for module in model.modules())
    assert all(map(torch.equal, model.state_dict().values(), before.values()))
    copied = copy.deepcopy(fused(model))
    assert parts(copied) == LLAMA
    assert torch.equal(logits(copied), logits(plain(model)))


# Modules that only look like supported ones


def wrapped(module, change):
    kind = type(module)
    module.__class__ = type(f"Other{kind.__name__}", (kind,), {"forward": change(kind.forward)})


def scaled(forward):
    return lambda self, x: 1.01 * forward(self, x)


def bounded(forward):
    return lambda self, x: forward(self, x).clamp(max=1.5)


def cooler(forward):
    def run(self, *args, ragged, **kwargs):
        return forward(self, *args, ragged=ragged, s_aux=self.q_proj.weight[:4, 0], **kwargs)

    return run


@pytest.mark.parametrize(
    ("place", "change", "kind"),
    [
        ("first norm", scaled, "norms"),
        ("second norm", bounded, "norms"),
        ("mlp", scaled, "gates"),
        ("activation", bounded, "gates"),
        ("attention", cooler, "rotations"),
    ],
)
def test_other_modules_are_left_alone(place, change, kind):
    model = varied("llama")
    wrapped(places(model)[place], change)
    target = fused(model)
    assert parts(target)[kind] == LLAMA[kind] - 1
    assert torch.equal(logits(target), logits(plain(model)))


def test_layers_that_do_not_rotate_are_left_alone():
    target = fused(fusable("cohere2"))
    assert "rotations" not in parts(target)


def test_weights_of_types_that_kernels_do_not_take_are_refused():
    with pytest.raises(ValueError, match="kernels='triton' cannot be used: weights must be float32"):
        RaggedModel(fusable().double(), kernels="triton")


def test_adapters_keep_acting():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj", "gate_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(varied("llama"), config).eval()
    target = fused(model)
    assert parts(target) == LLAMA
    with_adapters = logits(target)
    assert torch.equal(with_adapters, logits(plain(model)))
    with model.disable_adapter():
        without = logits(RaggedModel(model, kernels="torch", self_test=False))
        assert torch.equal(logits(target), without)
    assert not torch.equal(with_adapters, without)
