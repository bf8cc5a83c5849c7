"""Networks of drafters: sizes, starting points, files, and the target they belong to."""

import pytest
import torch
from safetensors import safe_open
from support.companions import EXIT, LAYERS, STUDENTS, eagle_row, target, trained, with_norms
from support.models import PROMPTS, VOCAB, next_logits, tiny
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import arbordraft as ad
from arbordraft.drafter_names import load_drafter
from arbordraft.drafters.language_model import shrink
from arbordraft.heads.base import fingerprint
from arbordraft.heads.block import BlockHead
from arbordraft.heads.eagle import EagleHead
from arbordraft.heads.exit_adapter import ExitAdapter
from arbordraft.heads.medusa import MedusaHead
from arbordraft.kernels import native
from arbordraft.target.prepacked.prepacked_modules import prepack_linears

TOKENS = [1, 3, 4, 50, 60]
MADE = {
    "block": lambda model: BlockHead.for_target(
        model, TOKENS, hidden_layers=(1, 2, 3), block_size=3, markov_rank=4, name="tiny"
    ),
    "eagle": lambda model: EagleHead.for_target(model, TOKENS, hidden_layers=(1, 2, 3), name="tiny"),
    "medusa": lambda model: MedusaHead.for_target(model, TOKENS, num_heads=2, num_hidden_layers=2, name="tiny"),
    "exit": lambda model: ExitAdapter.for_target(model, EXIT, name="tiny"),
}
DRAFTERS = {"block": ad.BlockDrafter, "eagle": ad.EagleDrafter, "medusa": ad.MedusaDrafter, "exit": ad.EarlyExitDrafter}
every_network = pytest.mark.parametrize("name", MADE)
_MLP = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
NAMES = {  # as serving engines read them
    "eagle": {"d2t", "t2d", "fc.weight", "norm.weight", "lm_head.weight"}
    | {f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"}
    | {f"midlayer.{name}.weight" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    | {f"midlayer.{name}" for name in _MLP},
    "medusa": {"d2t", "t2d", *(f"lm_heads.{h}.weight" for h in range(2))}
    | {f"blocks.{h}.layers.{j}.{part}" for h in range(2) for j in range(2) for part in ("weight", "bias")},
    "exit": {"norm.weight", *_MLP},
}
NAMES["block"] = NAMES["eagle"] | {"masks.weight", "markov.weight", "gate.weight", "lm_head_markov.weight"}


def outputs(name, network):
    """Returns the outputs of a network for some hidden states."""
    with torch.no_grad():
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(network.dtype)
        if name == "exit":
            return network(hidden)
        if name == "medusa":
            return torch.cat([network.widen(network.logits(hidden, head)) for head in range(2)])
        embeddings, fused = hidden, network.fuse(hidden.repeat(1, 3))
        if name == "block":
            embeddings, fused = network.ask(embeddings, fused, torch.tensor([0, 1, 2, 1, 0]))
        found = network.queries_keys_values(embeddings, fused, network.rotary(torch.arange(5), hidden.dtype))
        final = network.norm(network.finish(hidden, found[0].flatten(1)))
        logits = network.lm_head(final)
        if name == "block":
            logits = logits + network.lm_head_markov(network.gates(final) * network.follow(hidden))
        return network.widen(logits)


def scrambled(name, model=None):
    """Builds a network with weights away from their starting point."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = MADE[name](model or target().model)
        with torch.no_grad():
            for weight in network.parameters():
                weight.add_(0.2 * torch.randn(weight.shape))
    return network.eval()


# Files


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@every_network
def test_saving_and_loading_keeps_a_network(name, dtype, tmp_path):
    network = scrambled(name).to(dtype)
    network.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == NAMES[name]
    again = type(network).from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(outputs(name, again), outputs(name, network))
    assert again.dtype == dtype
    if name != "exit":
        assert again.tokens.tolist() == TOKENS
        assert again.t2d.nonzero().flatten().tolist() == TOKENS
    known = ("vocab_size", "target_hidden_size", "hidden_layers", "target_fingerprint", "target_name")
    assert [getattr(again.config, key) for key in known] == [getattr(network.config, key) for key in known]


def test_an_adapter_without_a_number_of_layers_is_refused(tmp_path):
    adapter = scrambled("exit")
    adapter.config.hidden_layers = None
    adapter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="layers must lie in"):
        ad.EarlyExitDrafter.from_pretrained(tmp_path, target())


# Where training starts


def test_medusa_starts_as_the_targets_own_head():
    head, hidden = MedusaHead.for_target(target().model, TOKENS), torch.randn(3, 32)
    for index in range(4):
        wide = head.widen(head.logits(hidden, index))
        assert torch.equal(wide[:, TOKENS], target().model.lm_head(hidden)[:, TOKENS])
        others = [token for token in range(VOCAB) if token not in TOKENS]
        assert (wide[:, others] == -torch.inf).all()


def test_an_adapter_starts_as_the_identity():
    hidden = torch.randn(3, 32)
    assert torch.equal(ExitAdapter.for_target(target().model, EXIT)(hidden), hidden)
    assert not torch.allclose(scrambled("exit")(hidden), hidden)


def test_an_eagle_layer_that_sees_no_tokens_is_the_targets_last():
    """Compares rotation, groups of heads, norms and MLP with transformers' own layer on the same states."""
    model = target().model
    head = EagleHead.for_target(model, range(VOCAB), hidden_layers=[LAYERS - 1])
    with torch.no_grad():
        head.fc.weight.copy_(torch.eye(32))
        for part in (head.midlayer.self_attn.q_proj, head.midlayer.self_attn.k_proj, head.midlayer.self_attn.v_proj):
            part.weight[:, :32] = 0
    for prompt in (PROMPTS[0], PROMPTS[2]):
        assert_close(eagle_row(head, model, [*prompt, 0], []), next_logits(model, prompt), rtol=0, atol=1e-5)
    with torch.no_grad():
        head.midlayer.hidden_norm.weight.mul_(torch.linspace(0.5, 1.5, 32))
    assert (eagle_row(head, model, [*PROMPTS[0], 0], []) - next_logits(model, PROMPTS[0])).abs().max() > 1e-2


# Native kernels


@pytest.mark.skipif(not native.load(), reason="needs the C++ kernels")
@every_network
def test_native_kernels_stand_in_for_norms_and_linears(name):
    """Outputs are equal except for rounding, and no linear or norm of torch remains."""
    plain, fast = scrambled(name), scrambled(name)
    prepack_linears(fast)
    assert not any(isinstance(module, torch.nn.Linear | torch.nn.RMSNorm) for module in fast.modules())
    assert_close(outputs(name, fast), outputs(name, plain), rtol=1e-4, atol=1e-4)


# Vocabulary


def test_a_trimmed_vocabulary():
    head = MedusaHead.for_target(target().model, TOKENS[::-1])
    assert head.tokens.tolist() == TOKENS
    assert head.d2t.tolist() == [token - index for index, token in enumerate(TOKENS)]
    for wrong in (TOKENS[:4], [*TOKENS[:4], VOCAB], [-1, *TOKENS[1:]], [*TOKENS, 2]):
        with pytest.raises(ValueError, match="draft vocabulary must be 5 different ids below 61"):
            head.set_vocabulary(wrong)
    whole = MedusaHead.for_target(target().model, range(VOCAB))
    logits = torch.randn(2, VOCAB)
    assert whole.widen(logits) is logits


# The target


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"vocab_size": 53}, "vocabulary of 61 tokens, the target has 53"),
        ({"hidden_size": 64}, "hidden states of size 32, the target's have 64"),
        ({"num_hidden_layers": LAYERS + 1}, "trained for another target .tiny, fingerprint"),
        ({}, "config.target_fingerprint = None"),
    ],
    ids=["vocabulary", "size", "depth", "norms"],
)
@every_network
def test_another_target_is_refused(name, other, message):
    model = with_norms(tiny(**{"num_hidden_layers": LAYERS, **other}), seed=2)
    another, made = ad.RaggedModel(model, kernels="torch"), MADE[name](target().model)
    with pytest.raises(ValueError, match=message):
        DRAFTERS[name](*((another, EXIT, made) if name == "exit" else (made, another)))


@every_network
def test_a_head_without_a_fingerprint_fits_similar_targets(name):
    network = MADE[name](target().model)
    network.config.target_fingerprint = None
    other = ad.RaggedModel(with_norms(tiny(num_hidden_layers=LAYERS), seed=2), kernels="torch")
    DRAFTERS[name](*([other, EXIT, network] if name == "exit" else [network, other]))


def test_the_fingerprint_is_that_of_the_weights():
    model = with_norms(tiny(num_hidden_layers=3))
    known = fingerprint(model)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert fingerprint(model.to(dtype)) == known
    with torch.no_grad():  # as quantisers do, norms left alone
        for weight in model.parameters():
            if weight.ndim == 2:
                scale = weight.abs().amax(dim=1, keepdim=True) / 7
                weight.copy_((weight / scale).round() * scale)
    assert fingerprint(model) == known
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        weight = model.get_parameter(name)
        before = weight.detach().clone()
        with torch.no_grad():
            weight[3] *= 1.02
        assert fingerprint(model) != known
        with torch.no_grad():
            weight.copy_(before)
    assert fingerprint(model) == known
    assert fingerprint(with_norms(tiny(num_hidden_layers=2))) != known


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gpt_neox", "gemma2", "phi3", "qwen3_moe"])
def test_fingerprints_notice_the_norms_of_every_architecture(architecture):
    assert fingerprint(tiny(architecture)) != fingerprint(with_norms(tiny(architecture)))


# Some layers of a target


def cut(model, layers):
    """Cuts a model down to some layers, by hand."""
    inner = model.model
    inner.layers = torch.nn.ModuleList(inner.layers[layer] for layer in layers)
    inner.config.num_hidden_layers = len(layers)
    return model


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "olmo2"])
@pytest.mark.parametrize(
    ("wanted", "layers"), [(2, [0, 5]), (3, [0, 2, 5]), (6, range(6)), ([1, 4], [1, 4]), ([3], [3])]
)
def test_a_small_model_has_the_layers(architecture, wanted, layers, tmp_path):
    model, twin = (with_norms(tiny(architecture, num_hidden_layers=6)) for _ in range(2))
    small, expected = shrink(model, wanted), cut(twin, list(layers))
    for prompt in PROMPTS:
        assert torch.equal(next_logits(small, prompt), next_logits(expected, prompt))
    assert model.config.num_hidden_layers == 6
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    assert not mine & {parameter.data_ptr() for parameter in small.parameters()}
    small.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert torch.equal(next_logits(again, PROMPTS[2]), next_logits(small, PROMPTS[2]))


def test_layers_of_several_kinds_keep_their_kinds(tmp_path):
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = tiny("gemma2", num_hidden_layers=4, layer_types=kinds)
    small = shrink(model, [1, 2, 3])
    assert small.config.layer_types == kinds[1:]
    assert model.config.layer_types == kinds
    # Without their kinds the layers would attend to something else.
    wrong = shrink(model, [1, 2, 3])
    wrong.config.layer_types = kinds[:3]
    wrong = type(wrong)(wrong.config).eval()
    wrong.load_state_dict(small.state_dict())
    assert not torch.allclose(next_logits(wrong, PROMPTS[2]), next_logits(small, PROMPTS[2]))
    small.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.layer_types == kinds[1:]


def test_tied_weights_stay_tied():
    small = shrink(tiny(num_hidden_layers=3, tie_word_embeddings=True), 2)
    assert small.lm_head.weight is small.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("layers", "message"),
    [(1, "2 to 4 layers"), (5, "2 to 4 layers"), ([], "ascend"), ([0, 4], "ascend within 0..3"), ([2, 1], "ascend"),
     ([1, 1], "ascend"), ([-1], "ascend")],
)  # fmt: skip
def test_invalid_layers_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        shrink(target().model, layers)


def test_layers_that_do_not_fit_in_another_place_are_refused():
    """The first layer of deepseek is dense, all others are experts."""
    model = tiny("deepseek_v3", num_hidden_layers=3)
    shrink(model, [0, 2])
    with pytest.raises(ad.UnsupportedModel, match=r"layers \[1, 2\] of this DeepseekV3ForCausalLM do not fit"):
        shrink(model, [1, 2])


@pytest.mark.parametrize("name", STUDENTS)
def test_drafters_load_the_files_of_training(name, tmp_path):
    student = trained(name)
    student.save(tmp_path)
    drafter = load_drafter(tmp_path, target())
    assert type(drafter) is type(student.drafter(target()))
    found = drafter.model.model if name == "model" else drafter.adapter if name == "exit" else drafter.head
    for key, tensor in student.network.state_dict().items():
        stored = tensor.half().float() if tensor.is_floating_point() else tensor
        assert torch.equal(found.state_dict()[key], stored), key
    assert name == "model" or not any(parameter.requires_grad for parameter in found.parameters())
    if name == "exit":
        assert drafter.layers == EXIT
