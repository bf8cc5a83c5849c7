"""The console script: what users see, and that errors are one line and a status."""

import json
import subprocess
import sys

import pytest
import torch
from models import tiny_checkpoint
from typer.testing import CliRunner

from arbordraft import cli
from arbordraft.prompts import read_prompts

runner = CliRunner()


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [("chain:3", 4), ("k:2,1", 5), ("fork:2x3", 7), ("parents:-1,0,0,1", 4), ("sequoia:0.6,0.2@5", 5)],
)
def test_tree_draws_every_shape(shape, nodes):
    result = runner.invoke(cli.app, ["tree", shape])
    assert result.exit_code == 0
    assert f"{nodes} nodes with the root" in result.output


@pytest.mark.parametrize("shape", ["bush:3", "chain:x", "k:0", "fork:3", "parents:0,1", "sequoia:0.9,0.9@4"])
def test_unknown_trees_are_usage_errors(shape):
    result = runner.invoke(cli.app, ["tree", shape])
    assert result.exit_code == 2
    assert "chain:5" in result.output  # says how to write one


def test_tree_writes_a_png(tmp_path):
    path = tmp_path / "tree.png"
    result = runner.invoke(cli.app, ["tree", "k:3,2", "--png", str(path)])
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_generate_decodes_a_batch(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    arguments = ["generate", "a b c", "b c a b", "--model", str(folder), "--max-new-tokens", "6", "--raw"]
    for extra in (
        [],
        ["--drafter", "early-exit:1", "--temperature", "1"],
        ["--drafter", str(folder), "--tree", "k:2,1"],
    ):
        result = runner.invoke(cli.app, [*arguments, *extra])
        assert result.exit_code == 0, result.output
        assert "tau" in result.output
        assert "exact" in result.output


def test_generate_reads_prompts_from_a_file(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n\nc a b\n")
    result = runner.invoke(
        cli.app, ["generate", "--file", str(prompts), "--model", str(folder), "--max-new-tokens", "3", "--raw"]
    )
    assert result.exit_code == 0, result.output
    assert "6" in result.output  # two prompts of three tokens


def test_generate_without_prompts_is_a_usage_error():
    assert runner.invoke(cli.app, ["generate"]).exit_code == 2


def test_bench_measures_and_writes_json(tmp_path):
    torch.manual_seed(0)
    folder = tiny_checkpoint(tmp_path)
    report = tmp_path / "bench.json"
    arguments = ["bench", "--model", str(folder), "--dtype", "float32", "--repeats", "1", "--new-tokens", "4"]
    result = runner.invoke(cli.app, [*arguments, "--json", str(report)])
    assert result.exit_code == 0, result.output
    found = json.loads(report.read_text())
    assert {measurement["group"] for measurement in found["measurements"]} == {"forward", "verify", "decode"}
    assert all(measurement["ours"] > 0 for measurement in found["measurements"])
    assert found["provenance"]["versions"]["torch"] == torch.__version__
    assert not list(tmp_path.glob("*.part"))


def test_bench_of_the_cpu_kernels(tmp_path):
    folder, report, prompts = tiny_checkpoint(tmp_path), tmp_path / "bench.json", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in "abcd"))
    settings = ["--model", str(folder), "--dtype", "bfloat16", "--repeats", "1", "--new-tokens", "4", "--no-others"]
    found = {}
    for suite in ("cpu", "equality"):
        arguments = ["bench", suite, *settings, "--prompts", str(prompts), "--json", str(report)]
        result = runner.invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        found[suite] = json.loads(report.read_text())["measurements"]
    assert {"cpu forward", "cpu decode"} <= {measurement["group"] for measurement in found["cpu"]}
    assert len(found["equality"]) == 6
    assert all(m["ratio"] == 1 for m in found["equality"] if "bitwise" in m["detail"])


def test_a_prompt_file_of_another_kind_is_named(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"question": "b"}\n')
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2 is not"):
        read_prompts(path)


def test_errors_are_one_line_without_a_traceback():
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from arbordraft.cli import main; main()",
            "generate",
            "hi",
            "--model",
            "/no/such/model",
        ],
        capture_output=True,
        text=True,
        env={"HF_HUB_OFFLINE": "1", "PATH": ""},
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_help_names_every_command():
    result = runner.invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("generate", "bench", "tree"))
