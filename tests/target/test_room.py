"""Memory that a model needs is known from the header of its checkpoint, before it is read."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import fusable
from support.recurrent_models import recurrent_target

import arbordraft as ad
from arbordraft import loading
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked import room
from arbordraft.target.prepacked.room import NotEnoughMemory, check_room, needed_memory

WEIGHTS = [None, "int8", "int4"]


def packed(target):
    return sum(
        part.nbytes
        for matrix in target.prepacking._matrices()
        for part in (matrix.weight, matrix.scale)
        if part is not None
    )


def saved(folder, tied, dtype=torch.float32):
    model = fusable(hidden_size=256, intermediate_size=512, vocab_size=1024, tie_word_embeddings=tied)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_of_a_folder_are_estimated(tmp_path, dtype, weights, tied):
    needed = needed_memory(saved(tmp_path, tied, dtype), dtype, weights)
    target = ad.load(tmp_path, "none", dtype=dtype, weights=weights, device="cpu").target
    assert 0.9 < needed["packed weights"] / packed(target) < 1.1
    assert needed["converted weights"] == 0
    assert needed["cache"] == 2 * 2 * target.model.config.num_key_value_heads * 16 * 2048 * dtype.itemsize


@pytest.mark.parametrize(
    "architecture", ["lfm2", "qwen3_next", "qwen3_5_text", "granitemoehybrid", "bamba", "falcon_h1", "jamba", "mamba2"]
)
def test_layers_without_keys_take_no_cache(tmp_path, architecture):
    target, cache = recurrent_target(architecture), RaggedKVCache()
    target.prefill({cache.open(3): [1, 2, 3]}, cache)
    target.model.save_pretrained(tmp_path)
    assert needed_memory(tmp_path, torch.float32)["cache"] == 2048 * cache.row_bytes


def test_converted_weights_are_counted(tmp_path):
    """Matrices stay in their files if these have one dtype, and all is converted if they have several."""
    folder = saved(tmp_path, tied=False)
    tensors = load_file(folder / "model.safetensors")
    vectors = sum(tensor.numel() for tensor in tensors.values() if tensor.ndim == 1)
    assert needed_memory(folder, torch.bfloat16)["converted weights"] == 2 * vectors
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
    save_file(tensors, folder / "model.safetensors")
    others = sum(tensor.numel() for name, tensor in tensors.items() if name != "model.norm.weight")
    assert needed_memory(folder, torch.bfloat16)["converted weights"] == 2 * others


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("weights", [*WEIGHTS, "file", "dense"])
def test_packed_weights_of_a_file_are_estimated(tmp_path, weights, tied):
    pytest.importorskip("gguf")
    from support.gguf_files import write_gguf

    from arbordraft.checkpoints.gguf_file import GgufFile

    model = fusable(hidden_size=256, intermediate_size=512, vocab_size=27, tie_word_embeddings=tied)
    write_gguf(tmp_path / "x.gguf", model, [("", "Q4_1")])
    needed = needed_memory(GgufFile(tmp_path / "x.gguf"), torch.float32, weights)
    target = ad.load(tmp_path / "x.gguf", "none", dtype="float32", weights=weights, device="cpu").target
    assert 0.85 < needed["packed weights"] / packed(target) < 1.1


def test_models_that_do_not_fit_are_refused_before_they_are_read(tmp_path, monkeypatch, caplog):
    folder = saved(tmp_path, tied=False)
    needed = sum(needed_memory(folder, torch.float32).values())
    monkeypatch.setattr(loading, "_read", lambda *_, **__: pytest.fail("it was read"))
    monkeypatch.setattr(room, "available_memory", lambda: needed - 1)
    with pytest.raises(
        NotEnoughMemory, match=r"needs 0\.3 GiB of memory \(.* of packed weights, .* of cache, .*\), and .* are free"
    ):
        ad.load(folder, "none", dtype="float32", device="cpu")
    with pytest.raises(NotEnoughMemory, match=r"GiB of cache.*smaller max_cache_tokens"):
        ad.load(folder, "none", dtype="float32", device="cpu", max_cache_tokens=10**9)
    with pytest.raises(pytest.fail.Exception, match="it was read"):  # kernels asked for by name are tried
        ad.load(folder, "none", dtype="float32", device="cpu", kernels="native")
    assert not caplog.records


@pytest.mark.parametrize(("share", "warned"), [(1.05, True), (1.2, False)])
def test_close_fits_are_warned_of(monkeypatch, caplog, share, warned):
    monkeypatch.setattr(room, "available_memory", lambda: int(share * 2**31))
    check_room("x", {"packed weights": 2**31, "cache": 0})
    assert (
        "x needs 2.0 GiB of memory (2.0 GiB of packed weights), and 2.1 GiB are free: weights='int4'" in caplog.text
    ) == warned


def test_unknown_memory_refuses_nothing(monkeypatch):
    monkeypatch.setattr(room, "available_memory", lambda: None)
    check_room("x", {"packed weights": 2**60})
