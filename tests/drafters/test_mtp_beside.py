"""The layer for multi-token prediction beside models with recurrent layers, which transformers has no module of."""

from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.companions import Dictated, Rounds
from support.models import LETTERS, PROMPTS, decode, tiny_tokenizer
from support.recurrent_models import recurrent

import arbordraft as ad
from arbordraft.drafter_names import choose_drafter, drafter_named
from arbordraft.drafters.mtp import LayersBeside

KINDS = {
    "qwen3_next": {"decoder_sparse_step": 2},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_backend = pytest.mark.parametrize("kernels", ["torch", "native"])

pytestmark = pytest.mark.usefixtures("kernels")


@cache
def made(kind):
    """Returns a model, its attention layer with random weights, and the other weights of the layer for predictions."""
    model = recurrent(kind, **KINDS[kind])
    attends = next(layer for layer in model.model.layers if hasattr(layer, "self_attn"))
    config = type(model.config).from_dict({**model.config.to_dict(), "layer_types": ["full_attention"] * 3})
    size, generator = config.hidden_size, torch.Generator().manual_seed(5)
    block = type(attends)(config, 1).eval()  # the second layer has experts with a step of two, as a first one has not
    with torch.no_grad():
        for weight in block.parameters():
            scale = weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.5
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))
    if "mlp.gate.weight" in block.state_dict():
        assert block.mlp.experts.gate_up_proj.ndim == 3
    block.config = config
    config._attn_implementation = "eager"
    others = {name: 0.5 * torch.randn(size, generator=generator) for name in ("norm", "pre_fc_norm_embedding")}
    others["pre_fc_norm_hidden"] = 0.5 * torch.randn(size, generator=generator)
    others["fc"] = torch.randn(size, 2 * size, generator=generator) * (2 * size) ** -0.5
    return model, block, others


def tensors(kind, *, stacked=True):
    """Returns the layer's tensors by their names in published files."""
    _, block, others = made(kind)
    found = {f"mtp.{name}.weight": tensor for name, tensor in others.items()}
    for name, tensor in block.state_dict().items():
        if stacked or "experts." not in name or "shared" in name:
            found[f"mtp.layers.0.{name}"] = tensor
            continue
        for expert, rows in enumerate(tensor):
            parts = {"down": rows} if "down" in name else dict(zip(("gate", "up"), rows.chunk(2), strict=True))
            for part, rows in parts.items():
                found[f"mtp.layers.0.mlp.experts.{expert}.{part}_proj.weight"] = rows
    return {name: tensor.clone() for name, tensor in found.items()}


@torch.no_grad()
def reference(kind, text, **other):
    """Returns the ``[V]`` probabilities after a text, computed by hand."""
    model, block, others = made(kind)
    parts = others | other

    def normed(rows, name):
        size = rows.float().pow(2).mean(-1, keepdim=True)
        return rows * torch.rsqrt(size + model.config.rms_norm_eps) * (1 + parts[name])

    ids = torch.tensor([text])
    hidden = model(ids[:, :-1], output_hidden_states=True).hidden_states[-1]
    rows = torch.cat(
        [
            normed(model.get_input_embeddings()(ids[:, 1:]), "pre_fc_norm_embedding"),
            normed(hidden, "pre_fc_norm_hidden"),
        ],
        dim=-1,
    )
    rows = rows @ parts["fc"].T
    count = rows.shape[1]
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    places = torch.arange(1, count + 1)[None]
    rotary = model.model.rotary_emb(rows, position_ids=places)
    out = block(rows, position_embeddings=rotary, attention_mask=mask, position_ids=places)
    return model.lm_head(normed(out, "norm"))[0, -1].softmax(-1)


@cache
def built(kind, kernels):
    target = ad.RaggedModel(made(kind)[0], kernels=kernels)
    return target, ad.MtpDrafter(target, LayersBeside(target.model, tensors(kind)))


@every_kind
@every_backend
def test_it_predicts_as_computed_by_hand(kind, kernels):
    target, drafter = built(kind, kernels)
    for at in (2, 3, 7, 12):
        text = PROMPTS[2][:at]
        tree = Rounds(drafter, target, [text]).propose(ad.TreeTopology.chain(2), Dictated([5, 7]))
        torch.testing.assert_close(tree.drawn_from(0), reference(kind, text), rtol=0, atol=1e-5)
    rounds = Rounds(drafter, target, [PROMPTS[2]])
    for _ in range(3):
        tree = rounds.propose(ad.TreeTopology.chain(2), Dictated([5, 7]))
        torch.testing.assert_close(tree.drawn_from(0), reference(kind, rounds.tokens[0]), rtol=0, atol=1e-5)
        rounds.commit(tree, [1])


@every_kind
@pytest.mark.parametrize("part", ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc"])
def test_every_weight_matters(kind, part):
    """Negative control."""
    other = {part: torch.roll(made(kind)[2][part], 1, dims=-1)}
    assert (reference(kind, PROMPTS[2], **other) - reference(kind, PROMPTS[2])).abs().max() > 1e-3


@every_kind
@every_backend
@pytest.mark.parametrize("topology", [ad.TreeTopology.chain(3), ad.TreeTopology.from_k_config((2, 2))], ids=str)
def test_texts_are_those_of_the_model(kind, kernels, topology):
    target, drafter = built(kind, kernels)
    for request in ({}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "seeds": [1, 2, 3]}):
        expected, _ = decode(ad.builders.plain(target), **request)
        found, stats = decode(ad.SpeculativeDecoder(target, drafter, topology, ad.Coupling.shared(2)), **request)
        assert found == expected
        assert sum(stats.tried.values()) > 0


@pytest.fixture
def checkpoint(tmp_path):
    def save(kind, more, left=()):
        made(kind)[0].save_pretrained(tmp_path)
        tiny_tokenizer(LETTERS).save_pretrained(tmp_path)
        held = load_file(tmp_path / "model.safetensors") | more
        held = {name: tensor for name, tensor in held.items() if name not in left}
        save_file(held, tmp_path / "model.safetensors", metadata={"format": "pt"})
        return tmp_path

    return save


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "one by one"])
@every_kind
def test_it_is_read_from_the_models_folder(checkpoint, kind, stacked):
    folder = checkpoint(kind, tensors(kind, stacked=stacked))
    decoder = ad.load(folder, drafter="mtp", dtype="float32", kernels="torch", costs=None)
    ours, theirs = built(kind, "torch")[1].mtp.layers.state_dict(), decoder.drafter.mtp.layers.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    drafter, why = choose_drafter(decoder.target)
    assert isinstance(drafter, ad.MtpDrafter)
    assert why.startswith("trained with this model")
    assert decode(decoder)[0] == decode(ad.builders.plain(decoder.target))[0]


@pytest.mark.parametrize(
    ("more", "left", "reason"),
    [
        ({}, ("mtp.fc.weight",), r"its layer lacks eh_proj\.weight"),
        ({"mtp.layers.1.mlp.x": torch.ones(2)}, (), r"its layer also has mtp\.layers\.1\.mlp\.x"),
        ({"mtp.embed_tokens.weight": torch.ones(2)}, (), r"its layer also has mtp\.embed_tokens\.weight"),
        ({"mtp.norm.weight": torch.ones(3)}, (), r"has post_norm\.weight of shape \[3\] instead of \[32\]"),
    ],
    ids=["too few", "a second layer", "own embeddings", "another shape"],
)
def test_other_layers_are_refused_and_auto_goes_on(checkpoint, more, left, reason):
    folder = checkpoint("qwen3_5_text", tensors("qwen3_5_text") | more, left)
    with pytest.raises(ValueError, match=f"does not hold the layers for multi-token prediction of Qwen3_5.*{reason}"):
        ad.load(folder, drafter="mtp", dtype="float32", kernels="torch", costs=None)
    decoder = ad.load(folder, dtype="float32", kernels="torch", costs=None)
    assert isinstance(decoder.drafter, ad.NGramDrafter)


def test_models_without_files_are_refused():
    target = ad.RaggedModel(recurrent("qwen3_next"), kernels="torch")
    with pytest.raises(ValueError, match=r"prediction of Qwen3NextForCausalLM: the model was made in memory"):
        drafter_named("mtp", target)
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM has no layer for multi-token prediction"):
        drafter_named("mtp", ad.RaggedModel(recurrent("lfm2"), kernels="torch"))
