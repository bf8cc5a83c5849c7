"""EAGLE-1 and EAGLE-2 heads: drafts are those of transformers' own layer, without its first norm."""

import json

import pytest
import torch
from safetensors.torch import save_file
from support.companions import Dictated, Rounds
from support.models import PROMPTS, tiny
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import arbordraft as ad
from arbordraft.drafter_names import load_drafter
from arbordraft.heads.eagle import EagleHead
from arbordraft.heads.published import published_head

pytestmark = pytest.mark.usefixtures("kernels")
HIDDEN = 32
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 1,
}


class Reference(torch.nn.Module):
    """The network as its authors wrote it: a linear layer, and one of Llama's layers after it."""

    def __init__(self, bias):
        super().__init__()
        self.config = LlamaConfig(**SIZES, attn_implementation="eager")
        self.fc = torch.nn.Linear(2 * HIDDEN, HIDDEN, bias=bias)
        self.layer = LlamaDecoderLayer(self.config, 0)
        self.layer.input_layernorm = torch.nn.Identity()
        self.rotary = LlamaRotaryEmbedding(self.config)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.3) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)

    def forward(self, embeddings, hidden):
        x, count = self.fc(torch.cat([embeddings, hidden], dim=-1))[None], len(hidden)
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        at = torch.arange(count)[None]
        out = self.layer(x, attention_mask=mask, position_ids=at, position_embeddings=self.rotary(x, at))
        return (out[0] if isinstance(out, tuple) else out)[0]


@torch.no_grad()
def rows(reference, model, prefix, drafted):
    """Returns the row of every draft: the target's states come first, then the layer's own outputs in their place."""
    tokens = torch.tensor([*prefix, *drafted])
    hidden = model(tokens[None, : len(prefix) - 1], output_hidden_states=True).hidden_states[-1][0]
    found = []
    for last in range(len(prefix) - 1, len(tokens)):
        out = reference(model.get_input_embeddings()(tokens[1 : last + 1]), hidden)
        found.append(model.lm_head(out[-1]).softmax(-1))
        hidden = torch.cat([hidden, out[-1:]])
    return found


def checkpoint(folder, bias, model, *, nested=False, **more):
    """Saves a head in the layout of SafeAILab, which vLLM reads, with a copy of the target's embeddings."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = Reference(bias)
    tensors = {f"layers.0.{name}": tensor for name, tensor in reference.layer.state_dict().items()}
    tensors |= {f"fc.{name}": tensor for name, tensor in reference.fc.state_dict().items()}
    tensors |= {"embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(), **more}
    settings = {"model_type": "llama", **SIZES}
    settings = {"model_type": "eagle", "model": settings} if nested else settings
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(settings | {"architectures": ["EagleLlamaForCausalLM"]}))
    return reference


@pytest.mark.parametrize("kernels", ["torch", "native"])
@pytest.mark.parametrize(("bias", "nested"), [(False, False), (True, True)], ids=["EAGLE", "HASS"])
def test_drafts_are_those_of_the_layer(tmp_path, kernels, bias, nested):
    of = ad.RaggedModel(tiny(), kernels=kernels)
    reference = checkpoint(tmp_path / "head", bias, of.model, nested=nested)
    drafter, chain = load_drafter(tmp_path / "head", of), [5, 7, 9]
    assert isinstance(drafter, ad.EagleDrafter)
    assert drafter.head.embed_tokens is None
    rounds = Rounds(drafter, of, [PROMPTS[2], PROMPTS[2][:4]])
    for ends in ((2, 0), (1, 1), (3, 3)):
        tree = rounds.propose(ad.TreeTopology.chain(3), Dictated([token for token in chain for _ in rounds.tokens]))
        for sample, text in enumerate(rounds.tokens):
            for depth, expected in enumerate(rows(reference, of.model, text, chain[:2])):
                found = tree.drawn_from(tree[sample].rows.start + depth)
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        rounds.commit(tree, ends)


def test_a_first_norm_would_be_seen(tmp_path):
    """Negative control: the row changes with it."""
    of = ad.RaggedModel(tiny(), kernels="torch")
    reference = checkpoint(tmp_path / "head", False, of.model)
    expected = rows(reference, of.model, PROMPTS[2], [])[0]
    reference.layer.input_layernorm = torch.nn.RMSNorm(HIDDEN)
    assert (rows(reference, of.model, PROMPTS[2], [])[0] - expected).abs().max() > 1e-3


def test_it_is_saved_in_our_format_and_unsupported_parts_are_refused(tmp_path):
    of = ad.RaggedModel(tiny(), kernels="torch")
    checkpoint(tmp_path / "head", False, of.model)
    head = published_head(tmp_path / "head", of.model)
    head.save_pretrained(tmp_path / "kept")
    kept = EagleHead.from_pretrained(tmp_path / "kept")
    assert all(map(torch.equal, kept.parameters(), head.parameters()))
    with pytest.raises(ValueError, match="first_generation=True"):
        head.config.check_plain("the export")
    checkpoint(tmp_path / "more", False, of.model, **{"embed_layernorm.weight": torch.ones(HIDDEN)})
    with pytest.raises(ValueError, match=r"left over: embed_layernorm\.weight"):
        published_head(tmp_path / "more", of.model)
