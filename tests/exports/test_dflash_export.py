"""Exports of DFlash and DSpark heads to the layout of ``speculators``, from checkpoints of that library."""

import json

import pytest
import torch
from heads.test_published import FOLDER, beside
from safetensors.torch import load_file

import arbordraft as ad
from arbordraft.drafter_names import load_drafter
from arbordraft.exports.engines import export_sglang, export_vllm
from arbordraft.exports.onnx import sources
from arbordraft.heads.dflash import DFlashHead
from arbordraft.heads.published import published_head

KINDS = ["dflash", "dspark", "dspark-gated", "dspark-rnn"]


@pytest.fixture
def exported(tmp_path):
    """Returns a function that reads a checkpoint of the library and exports it again."""

    def make(kind, change=None, **options):
        of, _ = beside(kind)
        of.model.save_pretrained(tmp_path / "target")
        head = published_head(FOLDER / kind, of.model)
        if change is not None:
            change(head)
        head.save_pretrained(tmp_path / "head")
        given = {"layout": "speculators", "target": str(tmp_path / "target"), "speculative_tokens": 3}
        return export_vllm(tmp_path / "head", tmp_path / "out", **given | options), tmp_path / "out"

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_checkpoint_equals_the_librarys(exported, kind):
    """Compares all tensors but the confidence head's, and every setting that changes the drafts."""
    _, out = exported(kind)
    ours, theirs = load_file(out / "model.safetensors"), load_file(FOLDER / kind / "model.safetensors")
    theirs = {name: tensor for name, tensor in theirs.items() if not name.startswith("confidence_head.")}
    if kind == "dflash":  # drafts from the whole vocabulary, for which the library keeps no map either
        assert "d2t" not in ours
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in ours)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (out, FOLDER / kind))
    names = ["speculators_model_type", "draft_vocab_size", "block_size", "sample_from_anchor", "mask_token_id"]
    names += ["aux_hidden_state_layer_ids", "sliding_window_non_causal", "target_hidden_size", "dtype"]
    names += ["markov_rank", "markov_head_type"] if "markov_rank" in theirs else []
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    layers, known = ours["transformer_layer_config"], theirs["transformer_layer_config"]
    same = ["model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"]
    same += ["num_key_value_heads", "rms_norm_eps", "attention_bias", "vocab_size", "layer_types", "rope_parameters"]
    assert {name: layers[name] for name in same} == {name: known[name] for name in same}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_read_back(exported, kind):
    done, out = exported(kind)
    assert [file.name for file in done.files] == ["README.md", "config.json", "model.safetensors"]
    of, _ = beside(kind)
    again = load_drafter(out, of)
    assert isinstance(again, ad.DFlashDrafter)
    known = published_head(FOLDER / kind, of.model)
    assert all(map(torch.equal, again.head.parameters(), known.parameters()))
    assert again.head.config.to_diff_dict() == known.config.to_diff_dict()


def test_hidden_states_are_sorted_by_layer(exported):
    """Engines collect each state once, in the order of the layers."""

    def turn(head):
        head.config.hidden_layers = [3, 1, 2]
        parts = head.fc.weight.data.split(16, dim=1)
        head.fc.weight.data = torch.cat([parts[place] for place in (2, 0, 1)], dim=1)

    _, out = exported("dspark", turn)
    known = load_file(FOLDER / "dspark" / "model.safetensors")
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], known["fc.weight"])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layout": "eagle3"}, "are written with --layout speculators"),
        ({"speculative_tokens": 9}, "looks 3 tokens ahead, and chains of 9"),
    ],
)
def test_requests_that_do_not_fit_are_refused(exported, tmp_path, options, match):
    with pytest.raises(ValueError, match=match):
        exported("dspark", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "settings", "match"),
    [
        ("dspark", {"qk_norm": False}, "this one does not: train it with qk_norm"),
        ("dspark", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "plain rotary embeddings"),
        ("dflash", {"own_head": True}, "has one of all tokens"),
    ],
)
def test_heads_that_the_layout_cannot_hold_are_refused(tmp_path, kind, settings, match):
    of, _ = beside(kind)
    of.model.save_pretrained(tmp_path / "target")
    known = published_head(FOLDER / kind, of.model).config
    head = DFlashHead(type(known)(**known.to_diff_dict() | settings))
    head.save_pretrained(tmp_path / "head")
    given = {"layout": "speculators", "target": str(tmp_path / "target"), "speculative_tokens": 3}
    with pytest.raises(ValueError, match=match):
        export_vllm(tmp_path / "head", tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_export_for_sglang_is_refused(exported, tmp_path):
    exported("dspark")
    with pytest.raises(ValueError, match="are written for vLLM"):
        export_sglang(tmp_path / "head", tmp_path / "other", target=str(tmp_path / "target"))


def test_export_to_onnx_is_refused(exported, tmp_path):
    exported("dspark")
    with pytest.raises(ValueError, match="holds a DFlash or DSpark head, which has no graphs"):
        sources.of(str(tmp_path / "head"), str(tmp_path / "target"))
