"""Packed weights lie together in memory, and their originals leave it if a file holds them."""

import contextlib
import itertools
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import fusable

import arbordraft as ad
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked import replace
from arbordraft.target.prepacked.gguf_blocks import FileBlocks
from arbordraft.target.prepacked.memory import in_file
from arbordraft.utils.pages import LargePages, drop_pages, lie_in_file

TOKENS = torch.arange(12)
LARGE = 1 << 21  # bytes of a large page


SHAPES = ((1000, 33, 16), (1000, 33, 1, 16), (1000, 33, 16), (3, 5))
TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float32)
BYTES = 1000 * 33 * 16 * 7 + 60


def made(empty):
    """Returns tensors of several types with numbers in them."""
    tensors = [empty(*shape, dtype=dtype) for shape, dtype in zip(SHAPES, TYPES, strict=True)]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    return tensors


def gaps(tensors):
    """Returns the bytes between the end of each tensor and the beginning of the next one."""
    return [b.data_ptr() - a.data_ptr() - a.nbytes for a, b in itertools.pairwise(tensors)]


def lie_together(tensors):
    return all(0 <= gap < 64 for gap in gaps(tensors))


def test_tensors_lie_together():
    tensors = made(LargePages(BYTES + 1000).empty)
    for number, (tensor, shape, dtype) in enumerate(zip(tensors, SHAPES, TYPES, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert (tensor == number + 1).all()  # none overlaps another
    assert lie_together(tensors)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    assert not lie_together(made(torch.empty))  # control: the allocator leaves gaps


@pytest.mark.parametrize("size", [LARGE - 1, 0])
def test_less_than_a_page_is_left_to_the_allocator(size):
    tensors = made(LargePages(size).empty)
    assert not lie_together(tensors)
    assert all((tensor == number + 1).all() for number, tensor in enumerate(tensors))


def test_tensors_beyond_the_end_lie_elsewhere():
    tensors = made(LargePages(BYTES - 60).empty)
    assert lie_together(tensors[:3])
    assert not 0 <= gaps(tensors)[2] < 64
    assert (tensors[3] == 4).all()


def test_the_place_of_tensors_that_are_not_used_is_given_back():
    pages = LargePages(BYTES)
    first = pages.empty(100, dtype=torch.uint8)
    with contextlib.suppress(KeyError), pages.given_back():
        unused = pages.empty(1000, dtype=torch.uint8)
        raise KeyError
    assert pages.empty(1000, dtype=torch.uint8).data_ptr() == unused.data_ptr() == first.data_ptr() + 128
    with pages.given_back():  # control
        kept = pages.empty(1000, dtype=torch.uint8)
    assert pages.empty(1000, dtype=torch.uint8).data_ptr() > kept.data_ptr()


def resident(tensor):
    """Returns the share of a tensor's pages that are in this process's memory."""
    first, count = tensor.data_ptr() // mmap.PAGESIZE, tensor.nbytes // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(8 * first)
        entries = np.frombuffer(table.read(8 * count), np.uint64)
    return float((entries >> np.uint64(63)).mean())


@pytest.fixture
def mapped(tmp_path):
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("needs Linux's table of pages")
    values = torch.arange(1 << 18, dtype=torch.float32)
    values.numpy().tofile(tmp_path / "values")
    tensor = torch.from_file(str(tmp_path / "values"), size=len(values))  # private: writes do not reach the file
    assert torch.equal(tensor, values)
    return tensor


def stretch(tensor):
    return tensor.data_ptr(), tensor.nbytes


def test_pages_of_files_leave_memory(mapped):
    assert lie_in_file(*stretch(mapped))
    assert resident(mapped) == 1
    drop_pages([stretch(mapped)])
    assert resident(mapped) == 0
    assert torch.equal(mapped, torch.arange(1 << 18, dtype=torch.float32))


def test_changed_pages_stay(mapped):
    mapped[77777] = -1
    assert not lie_in_file(*stretch(mapped))
    drop_pages([stretch(mapped)])
    assert resident(mapped) == 1
    assert mapped[77777] == -1
    drop_pages([stretch(mapped[:70000])])  # control: parts that are still the file's
    assert resident(mapped) < 0.8
    assert mapped[77777] == -1


def test_other_memory_stays():
    tensor = torch.ones(1 << 18)
    assert not lie_in_file(*stretch(tensor))
    drop_pages([stretch(tensor)])
    assert tensor.sum() == len(tensor)


@pytest.mark.parametrize("options", [{}, {"weights": "int4"}, {"weights": "int8"}, {"keep_weights": False}], ids=str)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_originals_of_another_dtype_stay_in_the_folder(kernels, tmp_path, options, tied):
    """They are converted as they are read, and give the same texts as originals converted in memory."""
    if not Path("/proc/self/pagemap").exists():
        pytest.skip("needs Linux's table of pages")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "tie_word_embeddings": tied}
    fusable(**sizes).bfloat16().save_pretrained(tmp_path)
    target = ad.load(tmp_path, "none", dtype="float32", device="cpu", **options).target
    model, plain = target.model, type(target.model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    down = model.model.layers[0].mlp.down_proj.weight
    assert isinstance(down, FileBlocks)
    assert isinstance(model.lm_head.weight, FileBlocks)
    assert isinstance(model.model.embed_tokens.weight, FileBlocks)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.dtype == model.config.dtype == torch.float32
    for name, weight in plain.named_parameters():
        assert torch.equal(model.get_parameter(name) + 0, weight)
    expected = ad.RaggedModel(plain, kernels="native", weights=options.get("weights"))
    assert str(target.prepacking) == str(expected.prepacking)
    rows = [ad.RaggedModel.forward(each, *one_text(each)) for each in (target, expected)]
    assert torch.equal(*rows)
    with torch.no_grad():
        assert torch.equal(model(TOKENS[None]).logits, plain(TOKENS[None]).logits)


def one_text(target):
    cache = RaggedKVCache()
    return TOKENS, cache.lay_out([cache.open(len(TOKENS))], [range(len(TOKENS))]), cache


def test_originals_of_a_folder_are_read_from_it(kernels, tmp_path, monkeypatch):
    """They take no memory after they are packed, and no second file is written."""
    monkeypatch.setattr(replace, "move_to_file", lambda tensors: pytest.fail("a second file"))
    fusable(hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)
    decoders = [ad.load(tmp_path, "none", dtype="float32", device="cpu", keep_weights=keep) for keep in (True, False)]
    down = [decoder.target.model.model.layers[0].mlp.down_proj.weight for decoder in decoders]
    if Path("/proc/self/pagemap").exists():
        assert [resident(weight) < 0.1 for weight in down] == [True, True]
    assert torch.equal(*down)  # reads them
    assert not Path("/proc/self/pagemap").exists() or all(map(in_file, down))
    assert not in_file(fusable().lm_head.weight)  # control
