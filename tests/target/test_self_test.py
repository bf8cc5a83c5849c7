"""The self-test of weights in few bits runs a few layers, and refuses the same models."""

import pytest
import torch
from support.models import fusable
from torch import nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from arbordraft import RaggedModel, UnsupportedModel
from arbordraft.loading import load_model
from arbordraft.target import self_test
from arbordraft.target.model_view import ModelView
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.self_test import thinned
from arbordraft.testing import tiny_model

pytestmark = pytest.mark.usefixtures("kernels")
LAYERS = 7


class CountsRows(LlamaAttention):
    """Lets each row depend on its place among the rows of a forward."""

    def forward(self, hidden_states, *args, **kwargs):
        places = torch.arange(hidden_states.shape[1])[:, None]
        return super().forward(hidden_states * (1 + 0.3 * places), *args, **kwargs)


@pytest.fixture(params=["folder", "file"])
def model(request, tmp_path):
    made = fusable(num_hidden_layers=LAYERS, vocab_size=27)
    if request.param == "folder":
        return made
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    write_gguf(tmp_path / "x.gguf", made, [("", "Q8_0")])
    return load_model(str(tmp_path / "x.gguf"), torch.float32, as_stored=True)[0]


def spoil(model, index):
    old = model.model.layers[index].self_attn
    new = CountsRows(model.config, old.layer_idx).eval()
    vars(new)["_modules"] = old._modules
    model.model.layers[index].self_attn = new


def weights_of(model):
    return None if isinstance(model.lm_head.weight, FileBlocks) else "int8"


def test_models_are_accepted(model):
    assert RaggedModel(model, weights=weights_of(model)).prepacking.fused == LAYERS


@pytest.mark.parametrize("index", range(LAYERS))
def test_a_layer_of_another_kind_is_compared(model, index):
    spoil(model, index)
    with pytest.raises(UnsupportedModel, match="packed logits differ from single ones"):
        RaggedModel(model, weights=weights_of(model))


def test_a_kind_that_is_skipped_would_pass(model, monkeypatch):
    """Negative control: without it, only rows of the packed copy would be compared with each other."""
    spoil(model, 4)
    monkeypatch.setattr(self_test, "_check_weights", lambda *_: None)
    with pytest.raises(UnsupportedModel, match="packed logits differ from single ones"):
        RaggedModel(model, weights=weights_of(model))
    monkeypatch.setattr(self_test, "settings", lambda layer: "all alike")
    RaggedModel(model, weights=weights_of(model))


def test_most_layers_of_one_kind_are_skipped(model):
    """Only the first, the middle and the last one run; the model itself stays as it is."""
    own, packed = thinned(model)
    held = [isinstance(layer.mlp.down_proj.weight, FileBlocks) for layer in model.model.layers]
    ran = []
    for view in (own, packed.model):
        for layer in view.model.layers:
            layer.mlp.register_forward_hook(lambda mlp, *_: ran.append(mlp))
    with torch.no_grad():
        own(torch.arange(5)[None])
    assert [view_layer.mlp in ran for view_layer in own.model.layers] == [n in (0, 3, 6) for n in range(LAYERS)]
    assert [isinstance(layer.mlp.down_proj.weight, FileBlocks) for layer in model.model.layers] == held
    assert ModelView(model).current()


def test_kinds_of_layers_are_each_compared():
    kinds = ["sliding_attention", "full_attention"] * 3
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "vocab_size": 27, "num_attention_heads": 4}
    model = tiny_model(AutoConfig.for_model("gemma2", **sizes, num_hidden_layers=6, layer_types=kinds, pad_token_id=0))
    own, _ = thinned(model)
    ran = []
    for index, layer in enumerate(own.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: ran.append(index))
    with torch.no_grad():
        own(torch.arange(5)[None])
    assert ran == [0, 1, 3, 4, 5]


def test_only_some_rows_of_a_large_head_are_compared(model, monkeypatch):
    monkeypatch.setattr(self_test, "HEAD_ROWS", 9)
    own, packed = thinned(model)
    rows = 9 if isinstance(model.lm_head.weight, FileBlocks) else 27
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        assert own(tokens).logits.shape[-1] == packed.model.lm_head.out_features == rows
        assert model(tokens).logits.shape[-1] == 27
    assert isinstance(own.lm_head, nn.Linear)
    RaggedModel(model, weights=weights_of(model))
