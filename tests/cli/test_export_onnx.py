"""``arbordraft export onnx`` and ``ort-genai``: their output and refusals; a failure leaves no files."""

import json
import shutil
import sys

import numpy as np
import pytest
from support.companions import target, trained
from support.models import PROMPTS, greedy_reference, tiny, tiny_checkpoint
from support.onnx_graphs import decider
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from arbordraft import UnsupportedModel
from arbordraft.cli import main as cli
from arbordraft.drafter_names import load_drafter
from arbordraft.exports.onnx import export, export_ort_genai
from arbordraft.onnx.decider import OnnxDecider
from arbordraft.onnx.graph import Graph

runner = CliRunner()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Returns a folder of checkpoints: a target, drafters and a decider for it, and a small model with a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoints")
    target().model.save_pretrained(path / "target")
    trained("eagle").save(path / "eagle")
    trained("exit").save(path / "exit")
    decider().save_pretrained(path / "decider")
    tiny_checkpoint(path / "chat")
    return path


def test_a_trained_drafter_becomes_a_folder_that_drafts(root, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    arguments = [str(root / "eagle"), str(tmp_path / "out"), "--target", str(root / "target"), "--quantize", "int8"]
    result = runner.invoke(cli.app, ["export", "onnx", *arguments])
    assert result.exit_code == 0, result.output
    for word in ("model.onnx", "fuse.onnx", "sha256", "MiB", "greatest difference", "acceptance by float32"):
        assert word in result.output
    drafter = load_drafter(tmp_path / "out", target())
    assert drafter.head.graph.about["target_name"] == "target"
    assert str(tmp_path) not in json.dumps(drafter.head.graph.about)


def test_a_folder_is_replaced_only_with_force(root, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("")
    result = runner.invoke(cli.app, ["export", "onnx", str(root / "decider"), str(out)])
    assert isinstance(result.exception, FileExistsError)
    assert "--force" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert runner.invoke(cli.app, ["export", "onnx", str(root / "decider"), str(out), "--force"]).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["model.onnx", "parity.json"]
    assert OnnxDecider.from_pretrained(out).threshold == decider().threshold


def test_an_error_is_one_line_and_a_status(root, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["arbordraft", "export", "onnx", str(root / "eagle"), str(tmp_path / "out")])
    monkeypatch.setenv("COLUMNS", "500")
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "does not say which model it drafts for: name it with --target" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_library_is_named(root, tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    for run in (lambda: export(root / "decider", tmp_path / "out"), lambda: export_ort_genai("x", "y", target="z")):
        with pytest.raises(ImportError, match=rf"{library}: pip install 'arbordraft\[onnx\]'"):
            run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["eagle", "target", "decider"])
def test_a_damaged_checkpoint_is_not_exported(root, tmp_path, name):
    """`tests/checkpoints/test_damaged.py` covers the kinds of damage; this test covers the kinds of checkpoint."""
    weights = shutil.copytree(root / name, tmp_path / name) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged"):
        export(tmp_path / name, tmp_path / "out", target=str(root / "target") if name == "eagle" else None)
    assert [path.name for path in tmp_path.iterdir()] == [name]


# Refused exports


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("verification:1", "write early-exit:LAYERS or verification:TOPS,TAILS"),
        ("verification:2,0", "at least one tail"),
        ("early-exit:one", "write early-exit:LAYERS"),
        ("early-exit:4", r"layers must lie in 1\.\.3"),
    ],
)
def test_invalid_sources_are_refused(root, tmp_path, source, message):
    with pytest.raises(ValueError, match=message):
        export(source, tmp_path / "out", target=str(root / "target"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mistral", "falcon", "mamba"])
def test_an_unsupported_architecture_is_refused(tmp_path, name):
    tiny(name).save_pretrained(tmp_path / "model")
    with pytest.raises(UnsupportedModel, match=r"full attention|AttentionInterface"):
        export(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_draft_model_of_another_vocabulary_is_refused(root, tmp_path):
    tiny(vocab_size=53).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="53 token ids, the target 61"):
        export(tmp_path / "model", tmp_path / "out", target=str(root / "target"))


# onnxruntime-genai


@pytest.fixture(scope="module")
def genai(root, tmp_path_factory):
    """Returns a folder for onnxruntime-genai that the command line wrote."""
    out = tmp_path_factory.mktemp("genai") / "out"
    arguments = ["early-exit:1", str(out), "--target", str(root / "chat"), "--length", "3"]
    result = runner.invoke(cli.app, ["export", "ort-genai", *arguments])
    assert result.exit_code == 0, result.output
    assert "genai_config.json" in result.output
    return out


def test_the_folder_decodes_in_onnxruntime_genai(root, genai):
    """Greedy tokens are the target's own; some of them come from the draft model."""
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(genai))
    reference = AutoModelForCausalLM.from_pretrained(root / "chat")
    accepted = 0
    for prompt in PROMPTS:
        settings = onnxruntime_genai.GeneratorParams(model)
        settings.set_search_options(do_sample=False, max_length=len(prompt) + 20)
        generator = onnxruntime_genai.Generator(model, settings)
        generator.append_tokens(np.array([prompt], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        (expected,) = greedy_reference(reference, [prompt], max_new_tokens=20)
        assert generator.get_sequence(0).tolist()[len(prompt) :] == expected
        stats = generator.get_speculative_stats()
        assert stats["draft_tokens_proposed"] > 0
        assert stats["rounds"] <= len(expected)
        accepted += stats["draft_tokens_accepted"]
    assert accepted > 0


def test_the_folder_is_complete(genai):
    config = json.loads((genai / "genai_config.json").read_text())
    assert config["speculative"]["max_draft_tokens"] == 3
    assert config["model"]["type"] == "speculative"
    assert config["model"]["eos_token_id"] == 2
    assert [config["model"][part]["num_hidden_layers"] for part in ("decoder", "draft")] == [2, 1]
    assert {"target.onnx", "draft.onnx", "tokenizer.json", "parity.json"} <= {path.name for path in genai.iterdir()}
    assert Graph(genai / "draft.onnx").inputs["attention_mask"] == ["batch_size", "total_sequence_length"]


def test_ort_genai_accepts_only_draft_models(root, tmp_path):
    with pytest.raises(ValueError, match="onnxruntime-genai takes causal LMs"):
        export_ort_genai(root / "eagle", tmp_path / "out", target=str(root / "target"))
    with pytest.raises(ValueError, match="drafts 1 to 16 tokens, got 17"):
        export_ort_genai("early-exit:1", tmp_path / "out", target=str(root / "target"), length=17)
    assert list(tmp_path.iterdir()) == []
