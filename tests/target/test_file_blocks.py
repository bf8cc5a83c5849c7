"""A GGUF file's own blocks: they are decoded as they are, and nothing else is taken for them."""

import logging

import pytest
import torch
from models import tiny
from torch.testing import assert_close

import arbordraft as ad
from arbordraft.kernels.prepacked_linear import Groups
from arbordraft.loading import load_model
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.file_blocks import FileBlocks

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
from gguf_files import LETTERS, dequantised, file_name, write_gguf

pytestmark = pytest.mark.usefixtures("kernels")
MIXED = [("lm_head", "Q8_0"), ("embed", "Q8_0"), ("v_proj", "Q8_0"), ("gate", "Q4_0"), ("down", "Q4_0"), ("", "Q4_1")]


def llama(**changes):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return tiny(vocab_size=len(LETTERS), intermediate_size=96, **{**sizes, **changes})


@pytest.fixture
def written(tmp_path):
    def write(kinds, **changes):
        file = tmp_path / "tiny.gguf"
        write_gguf(file, llama(**changes), kinds)
        return file

    return write


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kinds", [[("", "Q8_0")], [("", "Q4_0")], [("", "Q4_1")], MIXED], ids=["Q8_0", "Q4_0", "Q4_1", "mixed"]
)
def test_blocks_are_the_files_own(written, kinds, dtype):
    file = written(kinds)
    model, _ = load_model(str(file), dtype)
    blocks, truth = FileBlocks.of(file, model), dequantised(file)
    find = blocks.finder(model)
    assert blocks.others == {}
    matrices = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    assert blocks.places.keys() == matrices.keys()
    for name, weight in matrices.items():
        dense = find(weight).dense()
        assert torch.equal(dense.to(dtype), weight)  # in the model's order of rows
        assert torch.equal(dense.sort(dim=0).values, truth[file_name(name)].sort(dim=0).values)
    rows = find(matrices["model.layers.0.self_attn.q_proj.weight"]).dense()
    assert not torch.equal(rows, truth["blk.0.attn_q.weight"])  # the control: there the order differs


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_they_are_what_is_decoded(written, tied):
    file = written([("", "Q8_0")], tie_word_embeddings=tied)
    target = ad.load(file, "none", weights="file", dtype="float32", device="cpu").target
    assert target.weights == "file"
    assert target.row_invariant
    assert "file" in target.chosen
    head = target.network().get_output_embeddings()
    kept = Groups.restore(*head.prepacked, len(LETTERS), 64)
    truth = dequantised(file)["token_embd.weight" if tied else "output.weight"]
    assert torch.equal(kept.dense(), truth)


def test_a_text_is_that_of_the_files_numbers(written):
    """Near those of the model that transformers reads: activations of 8 bits are all that differs."""
    file = written(MIXED)
    model, _ = load_model(str(file), torch.float32)
    decoder = ad.load(file, "none", weights="file", dtype="float32", device="cpu")
    tokens = torch.arange(20) % len(LETTERS)
    cache = RaggedKVCache()
    batch = cache.plan([cache.open(20)], [range(20)])
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
    spread = (expected - expected.mean(dim=-1, keepdim=True)).square().mean().sqrt()
    error = (decoder.target(tokens, batch, cache) - expected).square().mean().sqrt() / spread
    assert error < 0.05
    assert decoder.complete("hello", max_new_tokens=8) == decoder.complete("hello", max_new_tokens=8)


def test_written_weights_are_no_blocks_any_more(written):
    file = written([("", "Q8_0")])
    model, _ = load_model(str(file), torch.float32)
    find = FileBlocks.of(file, model).finder(model)
    down = model.model.layers[0].mlp.down_proj.weight
    assert find(down) is not None
    with torch.no_grad():
        down.mul_(2)
    assert find(down) is None
    assert find(model.model.layers[1].mlp.down_proj.weight) is not None
    assert find(torch.zeros(3, 3)) is None


def test_kinds_that_kernels_do_not_read_keep_8_bits(written, caplog):
    file = written([("down_proj", "Q5_0"), ("", "Q4_1")])
    model, _ = load_model(str(file), torch.float32)
    assert FileBlocks.of(file, model).others == {"Q5_0": 2}
    with caplog.at_level(logging.WARNING, "arbordraft"):
        target = ad.load(file, "none", weights="file", dtype="float32", device="cpu").target
    assert "2 of Q5_0) are kept in 8 bits" in caplog.text
    layer = target.prepacking.stack[0]
    kept = Groups.restore(layer.down.weight, layer.down.scale, 64, 96)
    assert kept.bits == 8
    assert_close(kept.dense(), model.model.layers[0].mlp.down_proj.weight.detach(), rtol=0, atol=0.01)


def test_files_without_blocks_are_refused(written, tmp_path):
    with pytest.raises(ValueError, match=r"holds F32.*choose weights='int8' or 'int4'"):
        ad.load(written([]), "none", weights="file", device="cpu")
    llama().save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match="means the blocks of a GGUF file"):
        ad.load(tmp_path / "folder", "none", weights="file", device="cpu")
    with pytest.raises(ValueError, match="weights must be one of int4, int8, int8-weight-only or None, got 'file'"):
        ad.RaggedModel(llama(), weights="file")
