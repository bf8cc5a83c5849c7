"""Headers of GGUF files are parsed as the gguf package parses them; damage is named."""

import struct

import pytest
import torch
from support.models import fusable

pytest.importorskip("gguf")
import gguf
from support.gguf_files import LETTERS, write_gguf

from arbordraft.checkpoints.gguf_file import GgufFile

FIELDS = {
    "general.name": "tiny",
    "llama.a.truth": True,
    "llama.a.number": -5.5,
    "llama.a.list": [3, 1, 2],
    "llama.a.fractions": [0.5, -1.5],
    "llama.a.texts": ["ä", "", "漢字"],
}


@pytest.fixture
def file(tmp_path):
    write_gguf(tmp_path / "x.gguf", fusable(vocab_size=len(LETTERS)), [("output", "F16"), ("", "Q4_1")], fields=FIELDS)
    return tmp_path / "x.gguf"


def test_fields_and_tensors_are_those_of_the_package(file):
    found, expected = GgufFile(file), gguf.GGUFReader(file)
    assert found.fields | FIELDS == found.fields
    theirs = {name: field.contents() for name, field in expected.fields.items() if not name.startswith("GGUF.")}
    assert found.fields == theirs
    assert found.architecture == "llama"
    assert found.setting("block_count") == 2
    assert found.setting("nothing", 7) == 7
    assert list(found.tensors) == [tensor.name for tensor in expected.tensors]
    for theirs in expected.tensors:
        ours = found.tensors[theirs.name]
        assert ours.kind == theirs.tensor_type.name
        assert ours.shape == tuple(map(int, reversed(theirs.shape)))
        assert ours.raw.tobytes() == theirs.data.tobytes()
        assert ours.raw.shape[:-1] == ours.shape[:-1]


def test_every_type_of_number_is_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    kinds = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64", "bool"]
    for kind in kinds:
        getattr(writer, f"add_{kind}")(kind, 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert {kind: GgufFile(tmp_path / "x.gguf").fields[kind] for kind in kinds} == dict.fromkeys(kinds, 1)


def test_files_cut_anywhere_are_refused(file):
    """Every prefix of the file is refused; where tensors are cut, one is named."""
    whole = file.read_bytes()
    data = len(whole) - sum(tensor.raw.nbytes for tensor in GgufFile(file).tensors.values())
    for end in [*range(4, 200), *range(200, data - 200, 97), *range(data, len(whole) - 64, 4099)]:
        file.write_bytes(whole[:end])
        with pytest.raises(
            ValueError, match=r"truncated or damaged in its header, at|is cut: tensor '.*' lies at bytes"
        ):
            GgufFile(file)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(
        ValueError, match=rf"is cut: tensor 'blk.*' lies at bytes \d+ to \d+, and the file ends at {len(whole) // 2}"
    ):
        GgufFile(file)
    file.write_bytes(whole)
    GgufFile(file)


def spoiled(file, place, data):
    """Overwrites the bytes at a place, or those that follow the first occurrence of a text and as many bytes more."""
    whole = bytearray(file.read_bytes())
    if isinstance(place, tuple):
        place = whole.index(place[0]) + len(place[0]) + place[1]
    whole[place : place + len(data)] = data
    file.write_bytes(whole)


@pytest.mark.parametrize(
    ("place", "data", "match"),
    [
        (0, b"GGML", "is no GGUF file: it does not begin with 'GGUF'"),
        (4, struct.pack("<I", 1), "has version 1 of the format, and only versions 2 and 3"),
        (4, struct.pack(">I", 3), "is stored for big-endian machines"),
        (16, struct.pack("<Q", 1 << 40), "truncated or damaged in its header, at "),
        ((b"general.name", 0), struct.pack("<I", 99), r"at field 'general\.name' \(its type is 99\)"),
        ((b"general.name", 4), struct.pack("<Q", 1 << 40), r"at field 'general\.name' \(the file ends before it\)"),
        ((b"general.name", 12), b"\xff\xff", r"at field 'general\.name' \('utf-8'"),
        ((b"a.list", 4), struct.pack("<I", 99), r"at field 'llama\.a\.list' \(its list is of type 99\)"),
        ((b"a.texts", 8), struct.pack("<Q", 1 << 50), r"at field 'llama\.a\.texts'"),
        ((b"blk.1.ffn_up.weight", 0), struct.pack("<I", 9), r"entry of tensor 'blk\.1\.ffn_up\.weight' \(it has 9 dim"),
        ((b"blk.1.ffn_up.weight", 4), struct.pack("<Q", 65), r"tensor 'blk.*' has the shape \[96, 65\]"),
        ((b"blk.1.ffn_up.weight", 20), struct.pack("<I", 4711), r"'blk\.1\.ffn_up\.weight' is of the unknown type"),
        ((b"blk.1.ffn_up.weight", 24), struct.pack("<Q", 1 << 40), r"is cut: tensor 'blk\.1\.ffn_up\.weight' lies at"),
        ((b"blk.1.attn_k", -1), b"q", r"holds tensor 'blk\.1\.attn_q\.weight' twice"),
    ],
    ids=str,
)  # fmt: skip
def test_damage_is_named(file, place, data, match):
    GgufFile(file)
    spoiled(file, place, data)
    with pytest.raises(ValueError, match=match) as caught:
        GgufFile(file)
    assert str(file) in str(caught.value)


def test_parts_of_a_file_are_refused(tmp_path):
    write_gguf(tmp_path / "x.gguf", fusable(vocab_size=len(LETTERS)), fields={"split.count": 3, "split.no": 1})
    with pytest.raises(ValueError, match=r"x\.gguf is part 2 of 3: join the parts with llama\.cpp's"):
        GgufFile(tmp_path / "x.gguf")


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.gguf is no file: name a GGUF file on this machine"):
        GgufFile(tmp_path / "none.gguf")


def test_writes_do_not_reach_the_file(file):
    before = file.read_bytes()
    found = GgufFile(file)
    torch.from_numpy(found.tensors["output_norm.weight"].raw).fill_(1)
    assert found.tensors["output_norm.weight"].raw.sum() == found.tensors["output_norm.weight"].raw.size
    assert file.read_bytes() == before
