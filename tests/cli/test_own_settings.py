"""Commands that decode text follow the model's own generation_config, unless they are told to leave it out."""

import json

import pytest
from support.models import tiny_checkpoint
from typer.testing import CliRunner

from arbordraft import load
from arbordraft.cli.main import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a model whose own repetition penalty is so strong that it changes the text."""
    folder = tiny_checkpoint(tmp_path_factory.mktemp("model"))
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(own | {"repetition_penalty": 8.0}))
    return str(folder)


def said(folder, command, source, tmp_path):
    """Returns the text that a command writes."""
    options = ["--model", folder, "--drafter", "none", "--generation-config", source]
    options += ["--kernels", "torch", "--max-new-tokens", "9", "--dtype", "float32"]
    page = tmp_path / "page.html"
    asked = {"generate": ["hello", "--json"], "chat": [], "trace": ["hello", "-o", str(page)]}[command]
    result = CliRunner().invoke(app, [command, *asked, *options], input="hello\n")
    assert result.exit_code == 0, result.output
    if command == "generate":
        return json.loads(result.stdout)["answers"][0]["text"]
    if command == "trace":
        return json.JSONDecoder().raw_decode(page.read_text().partition('"text": ')[2])[0]
    return result.stdout.split()[0]


@pytest.mark.parametrize("command", ["generate", "chat", "trace"])
def test_commands_give_the_same_text_as_complete(folder, command, tmp_path):
    options = {"costs": None, "kernels": "torch", "dtype": "float32"}
    texts = {
        source: load(folder, "none", generation_config=source, **options).complete("hello", max_new_tokens=9)
        for source in ("model", "none")
    }
    assert texts["model"] != texts["none"]
    for source, text in texts.items():
        assert said(folder, command, source, tmp_path) == text
