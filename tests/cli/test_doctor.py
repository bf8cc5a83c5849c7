"""``arbordraft doctor``: its report, and its exit status for broken parts."""

import json

import pytest
from support.models import fusable, tiny_checkpoint
from typer.testing import CliRunner

from arbordraft import loading
from arbordraft.cli import examination
from arbordraft.cli.main import app
from arbordraft.decoding import measuring
from arbordraft.kernels import native


@pytest.fixture(autouse=True, scope="module")
def _built():
    """Builds the kernels in the usual cache folder, before tests change that folder."""
    native.load()


def examined(*options):
    result = CliRunner().invoke(app, ["doctor", *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_the_report_as_json(monkeypatch, tmp_path):
    monkeypatch.setenv("ARBORDRAFT_CACHE", str(tmp_path))
    (tmp_path / "costs").mkdir()
    (tmp_path / "costs" / "a.json").write_text("12345")
    monkeypatch.setattr(examination, "_MOST_BYTES", 2**16)
    status, shown = examined("--json")
    report = json.loads(shown)
    assert status == 0
    assert report["broken"] == []
    assert {"name": "costs", "files": 1, "bytes": 5} in report["cache"]["entries"]
    assert report["machine"]["threads"] >= 1
    assert report["memory"]["read"] > 0
    assert report["memory"]["copy"] > 0
    assert set(report["kernels"]["chosen"]) == {"bfloat16", "float32"}
    assert {"onnx", "train", "gguf"} <= report["extras"].keys()


def test_costs_are_measured_thoroughly_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loading, "known_costs", measuring.known_costs)
    folder = str(tiny_checkpoint(tmp_path / "model"))
    options = ("--measure", folder, "--drafter", "ngram", "--kernels", "torch", "--dtype", "float32", "--quick")
    result = CliRunner().invoke(app, ["doctor", "--json", *options])
    assert result.exit_code == 0
    costs = json.loads(result.stdout)["costs"]
    kept = loading.load(folder, "ngram", kernels="torch", dtype="float32")
    found = measuring.known_costs(kept.target, kept.drafter)
    assert list(costs["forward"]) == list(map(str, found.target.rows))
    assert list(costs["forward"].values()) == [1e3 * seconds for seconds in found.target.seconds]
    assert (costs["drafter"], costs["besides"]) == ("NGramDrafter", 1e3 * found.rest)
    assert "costs of a forward" in examined(*options)[1]
    assert examined("--measure", folder, "--drafter", "none", "--quick")[0] == 1


def test_the_report_as_text():
    status, shown = examined()
    assert status == 0
    for part in ("processor", "memory", "bandwidth", "kernels, bfloat16", "cache", "extra onnx", "nothing is broken"):
        assert part in shown


@pytest.fixture
def gguf_file(tmp_path):
    pytest.importorskip("gguf")
    from support.gguf_files import LETTERS, write_gguf

    model = fusable(vocab_size=len(LETTERS), num_key_value_heads=2)
    kinds = [("down", "Q8_0"), ("token_embd", "F16"), ("", "Q4_0")]
    fields = {"tokenizer.ggml.token_type": [1, 3, *[1] * 25], "tokenizer.chat_template": "{{ messages }}"}
    write_gguf(tmp_path / "x.gguf", model, kinds, fields=fields)
    return tmp_path / "x.gguf"


def test_files_are_described_from_their_headers(gguf_file, monkeypatch):
    monkeypatch.setattr(loading, "_read", lambda *_: pytest.fail("it was read"))
    status, shown = examined(str(gguf_file), "--json", "--dtype", "float32")
    model = json.loads(shown)["model"]
    assert status == 0
    assert (model["architecture"], model["positions"], model["packed in"]) == ("llama", 128, "the file's blocks")
    assert {kind: part["tensors"] for kind, part in model["kinds"].items()} == {
        "Q4_0": 13,
        "Q8_0": 2,
        "F32": 5,
        "F16": 1,
    }
    assert model["kinds"]["Q8_0"]["bytes"] == 2 * 64 * 96 // 32 * 34
    assert model["needed"]["packed weights"] == model["kinds"]["Q8_0"]["bytes"] + model["kinds"]["Q4_0"]["bytes"]
    assert model["cache per token"] == 2 * 2 * 2 * 16 * 4
    assert (model["tokens"], model["chat template"], model["ends"]) == (27, True, ["c"])
    status, shown = examined(str(gguf_file))
    assert "Q4_0: 13 tensors" in shown
    assert "27 tokens, with a chat template, ends of texts: c" in shown
    assert "packed weights in int4" in examined(str(gguf_file), "--weights", "int4")[1]


def test_folders_are_described_from_their_headers(tmp_path):
    tiny_checkpoint(tmp_path)
    model = json.loads(examined(str(tmp_path), "--json", "--dtype", "float32")[1])["model"]
    assert model["architecture"] == "llama"
    assert list(model["kinds"]) == ["F32"]
    assert model["packed in"] == "float32"
    assert model["weights"] == model["kinds"]["F32"]["bytes"] // 4


def test_damaged_files_are_named(gguf_file):
    gguf_file.write_bytes(gguf_file.read_bytes()[:-500])
    error = CliRunner().invoke(app, ["doctor", str(gguf_file)]).exception
    assert "x.gguf is cut: tensor '" in str(error)


def test_a_quick_report_measures_nothing():
    status, shown = examined("--quick")
    assert status == 0
    assert "nothing is broken" in shown
    assert "bandwidth" not in shown
    assert "kernels, " not in shown


@pytest.mark.parametrize(
    ("lines", "extras", "broken"),
    [
        (["torch>=1"], {}, []),
        (["nowhere-at-all>=1"], {}, ["nowhere-at-all is missing: pip install 'nowhere-at-all'"]),
        (["torch>=999"], {}, [r"torch is "]),
        (['nowhere-at-all>=1; extra == "x"'], {"x": ["nowhere-at-all"]}, []),
        (['torch>=1; extra == "x"'], {"x": []}, []),
        (
            ['arbordraft[x]; extra == "y"', 'nowhere-at-all; extra == "x"'],
            {"x": ["nowhere-at-all"], "y": ["nowhere-at-all"]},
            [],
        ),
        (['nowhere-at-all; extra == "dev"'], {}, []),
        (['nowhere-at-all; sys_platform == "amiga" and extra == "x"'], {"x": []}, []),
    ],
    ids=["fine", "missing", "too old", "extra missing", "extra there", "extra of an extra", "developers", "elsewhere"],
)
def test_missing_requirements_are_reported(monkeypatch, lines, extras, broken):
    monkeypatch.setattr(examination, "requires", lambda _: lines)
    report = examination.examine()
    assert {name: state["missing"] for name, state in report["extras"].items()} == extras
    assert all(state["install"] == f"pip install 'arbordraft[{name}]'" for name, state in report["extras"].items())
    assert len(report["broken"]) == len(broken)
    assert all(found.startswith(expected) for found, expected in zip(report["broken"], broken, strict=True))


@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("ARBORDRAFT_ISA", "mmx", "ARBORDRAFT_ISA must be one of"),
        ("ARBORDRAFT_CACHE", "/dev/null/x", "no cache folder"),
    ],
    ids=["instruction set", "cache"],
)
def test_broken_parts_set_the_exit_status(monkeypatch, variable, value, told):
    monkeypatch.setenv(variable, value)
    status, shown = examined("--quick")
    assert status == 1
    assert f"broken: {told}" in shown


def test_kernels_that_are_turned_off_are_not_broken(monkeypatch):
    monkeypatch.setenv("ARBORDRAFT_ISA", "off")
    report = examination.examine()
    assert report["broken"] == []
    assert "turns them off" in report["kernels"]["problem"]
    assert not report["kernels"]["chosen"]["float32"].startswith("native")
