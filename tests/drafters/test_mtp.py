"""The layer for multi-token prediction that some models contain: it drafts as in transformers."""

import copy
import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.companions import Dictated, Rounds
from support.models import ARCHITECTURES, LETTERS, PROMPTS, decode, tiny, tiny_tokenizer
from transformers import AutoConfig
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

import arbordraft as ad
from arbordraft.drafter_names import choose_drafter, drafter_named
from arbordraft.exports.decoder_config import DecoderConfig
from arbordraft.testing import tiny_model

_SIZES = ARCHITECTURES["llama"] | {"num_mtp_layers": 1, "moe_intermediate_size": 16}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
KINDS = {
    "deepseek_v3": ARCHITECTURES["deepseek_v3"] | {"num_mtp_layers": 1},
    "glm4_moe": _SIZES | _ROUTED,
    "mellum": _SIZES
    | {"num_experts": 4, "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 2}
    | {"mtp_layer_types": ["full_attention"], "mtp_mlp_layer_types": ["sparse"]},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_backend = pytest.mark.parametrize("kernels", ["torch", "native"])

pytestmark = pytest.mark.usefixtures("kernels")


@cache
def made(kind):
    """Builds a model and its layers, with weights that all matter; tests copy the layers."""
    model = tiny_model(AutoConfig.for_model(kind, **KINDS[kind]))
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = MtpModel(model, 1).eval()
        with torch.no_grad():
            for parameter in layers.layers.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
                else:
                    parameter.uniform_(0.5, 1.5)
    return model, layers


def copied(kind):
    model, layers = made(kind)
    layers = copy.deepcopy(layers)
    layers.tie_with_main_model(model)
    return layers


@cache
def built(kind, kernels):
    target = ad.RaggedModel(made(kind)[0], kernels=kernels)
    return target, ad.MtpDrafter(target, copied(kind))


@torch.no_grad()
def reference(kind, text, layers=None):
    """Returns the ``[V]`` probabilities after a text, by transformers' own loop."""
    model, _ = made(kind)
    ids = torch.tensor([text])
    hidden = model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    _, logits, _ = (layers or copied(kind))(
        input_ids=ids[:, 1:],
        last_hidden_states=hidden,
        attention_mask=None,
        position_ids=torch.arange(1, len(text))[None],
        mtp_cache=MtpCache(config=model.config.get_mtp_config()),
    )
    return logits[0, 0].softmax(-1)


@every_kind
@every_backend
def test_it_predicts_like_transformers(kind, kernels):
    """Compares after every prefix of a text, read at once or token by token."""
    target, drafter = built(kind, kernels)
    text, compared = PROMPTS[2], 0
    for at in range(2, len(text)):
        tree = Rounds(drafter, target, [text[:at]]).propose(ad.TreeTopology.chain(2), Dictated([5, 7]))
        torch.testing.assert_close(tree.drawn_from(0), reference(kind, text[:at]), rtol=0, atol=1e-5)
        compared += 1
    assert compared > 5
    rounds = Rounds(drafter, target, [text])
    for _ in range(3):
        tree = rounds.propose(ad.TreeTopology.chain(2), Dictated([5, 7]))
        torch.testing.assert_close(tree.drawn_from(0), reference(kind, rounds.tokens[0]), rtol=0, atol=1e-5)
        rounds.commit(tree, [1])


@every_kind
def test_another_layer_would_be_seen(kind):
    """Negative control: without the norm of the hidden states the row differs."""
    layers = copied(kind)
    layers.layers[0].hnorm = torch.nn.Identity()
    assert (reference(kind, PROMPTS[2], layers) - reference(kind, PROMPTS[2])).abs().max() > 1e-3


@every_kind
@every_backend
@pytest.mark.parametrize("topology", [ad.TreeTopology.chain(3), ad.TreeTopology.from_k_config((2, 2))], ids=str)
def test_texts_are_those_of_the_model(kind, kernels, topology):
    """Chains and trees, greedy and with shared noise, several samples at once."""
    target, drafter = built(kind, kernels)
    for request in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3]}):
        expected, _ = decode(ad.builders.plain(target), **request)
        found, stats = decode(ad.SpeculativeDecoder(target, drafter, topology, ad.Coupling.shared(2)), **request)
        assert found == expected
        assert sum(stats.tried.values()) > 0


@every_kind
def test_texts_are_those_of_transformers_with_the_same_layer(kind, monkeypatch):
    model, _ = made(kind)
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *_, **__: copied(kind))
    target, drafter = built(kind, "torch")
    decoder = ad.SpeculativeDecoder(target, drafter, ad.TreeTopology.chain(1))
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        theirs = model.generate(ids, **given, use_mtp=True)
        ours = decoder.generate(ids, **given)
        assert ours[0].tolist() == theirs[0].tolist()


def test_deeper_drafts_read_its_own_output():
    """Computed by hand: the second row's hidden state is the output of the first row."""
    target, drafter = built("glm4_moe", "torch")
    layers, text = copied("glm4_moe"), PROMPTS[2][:5]
    tree = Rounds(drafter, target, [text]).propose(ad.TreeTopology.chain(2), Dictated([5, 7]))
    model, _ = made("glm4_moe")
    with torch.no_grad():
        hidden = model(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
        tokens = torch.tensor([[*text[1:], 5]])
        for _ in range(2):  # the first pass only gives the output of the last slot
            states = torch.cat([hidden, hidden[:, -1:]], dim=1) if hidden.shape[1] < tokens.shape[1] else hidden
            cache = MtpCache(config=model.config.get_mtp_config())
            out = layers.forward_layer(0, states, torch.arange(1, len(text) + 1)[None], cache, input_ids=tokens)
            hidden = torch.cat([hidden[:, : len(text) - 1], out[:, len(text) - 2, None]], dim=1)
        expected = layers._project_to_logits(out[0, -1]).softmax(-1)
    torch.testing.assert_close(tree.drawn_from(1), expected, rtol=0, atol=1e-5)


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Saves a model with its layer in one folder, as published."""
    model, layers = made("glm4_moe")
    # The class names the extra layers of published sizes; this model has two layers.
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    model.save_pretrained(tmp_path)
    tiny_tokenizer(LETTERS).save_pretrained(tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    for name, tensor in layers.layers.state_dict().items():
        inner = name.removeprefix("0.").replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if "experts" in inner and tensor.ndim == 3:
            for expert, rows in enumerate(tensor):
                prefix = inner.rpartition(".")[0]
                parts = (
                    {"down_proj": rows}
                    if "down" in inner
                    else dict(zip(("gate_proj", "up_proj"), rows.chunk(2), strict=True))
                )
                held |= {f"model.layers.2.{prefix}.{expert}.{part}.weight": t.clone() for part, t in parts.items()}
        else:
            held[f"model.layers.2.{inner}"] = tensor.clone()
    save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_it_is_read_from_the_models_folder(checkpoint):
    decoder = ad.load(checkpoint, drafter="mtp", dtype="float32", kernels="torch", costs=None)
    assert isinstance(decoder.drafter, ad.MtpDrafter)
    ours, theirs = made("glm4_moe")[1].layers.state_dict(), decoder.drafter.mtp.layers.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    drafter, why = choose_drafter(decoder.target)
    assert isinstance(drafter, ad.MtpDrafter)
    assert why.startswith("trained with this model")


def test_a_decoder_with_it_survives_its_config(checkpoint):
    decoder = ad.load(checkpoint, drafter="mtp", dtype="float32", kernels="torch", costs=None)
    plain = ad.SpeculativeDecoder(decoder.target, decoder.drafter, ad.TreeTopology.chain(2))
    config = DecoderConfig.of(plain, str(checkpoint))
    assert json.dumps(config.drafter) == '{"class": "MtpDrafter", "arguments": {}}'
    again, _ = config.build(checkpoint)
    assert isinstance(again.drafter, ad.MtpDrafter)


def test_files_without_it_are_refused_and_auto_goes_on(tmp_path, monkeypatch):
    model, _ = made("glm4_moe")
    monkeypatch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2.*"])
    model.save_pretrained(tmp_path)
    tiny_tokenizer(LETTERS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not hold the layers for multi-token prediction of Glm4Moe"):
        ad.load(tmp_path, drafter="mtp", kernels="torch", costs=None)
    decoder = ad.load(tmp_path, kernels="torch", costs=None)
    assert isinstance(decoder.drafter, ad.NGramDrafter)


def test_models_without_it_are_refused():
    target = ad.RaggedModel(tiny(), kernels="torch")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no layer for multi-token prediction"):
        drafter_named("mtp", target)
    with pytest.raises(ValueError, match="must be built for the target"):
        ad.SpeculativeDecoder(target, built("glm4_moe", "torch")[1], ad.TreeTopology.chain(1))


def test_layers_with_a_state_are_refused():
    layers = copied("mellum")
    layers.config.layer_types = ["linear_attention"]
    with pytest.raises(ad.UnsupportedModel, match="is one of linear_attention"):
        ad.MtpDrafter(ad.RaggedModel(made("mellum")[0], kernels="torch"), layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_check_of_rows_tells_rounding_from_faults(dtype):
    """In bfloat16, rounding decides between experts; a layer that mixes neighbouring rows is refused all the same."""
    for seed in range(12):
        model, layers = copy.deepcopy(made("glm4_moe"))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in layers.layers.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=2 * parameter.shape[-1] ** -0.5)
        layers = layers.to(dtype)
        target = ad.RaggedModel(model.to(dtype), kernels="torch", self_test=False)
        layers.tie_with_main_model(target.model)
        ad.MtpDrafter(target, layers)
        mlp = layers.layers[0].mtp_block.mlp
        forward = mlp.forward
        mlp.forward = lambda rows, forward=forward: forward(rows + 0.5 * torch.roll(rows, 1, dims=1))
        with pytest.raises(ad.UnsupportedModel, match="keeps more than keys and values"):
            ad.MtpDrafter(target, layers)
