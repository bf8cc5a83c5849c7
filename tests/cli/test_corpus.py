"""``--corpus``: texts of files in which lookups find drafts."""

import json

import pytest
from support.models import tiny_checkpoint, tiny_tokenizer
from typer.testing import CliRunner

import arbordraft as ad
from arbordraft.cli import main as cli
from arbordraft.cli.corpus import fill


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), tiny_tokenizer(eos_token="c")))


def generate(folder, *arguments):
    command = ["generate", "abab", "--raw", "--json", "--model", folder, "--max-new-tokens", "24", "--dtype", "float32"]
    result = CliRunner().invoke(cli.app, [*command, "--drafter", "ngram", "--device", "cpu", *arguments])
    return result, json.loads(result.stdout) if result.exit_code == 0 else None


def test_a_corpus_makes_answers_faster_and_changes_none(folder, tmp_path):
    """The folder holds a text with the answer, beside a file that is no text."""
    _, before = generate(folder)
    answer = before["answers"][0]["text"]
    assert len(answer) > 8
    (tmp_path / "texts" / "deep").mkdir(parents=True)
    (tmp_path / "texts" / "deep" / "answer.txt").write_text("abab" + answer)
    (tmp_path / "texts" / "picture").write_bytes(b"\xff\xfe\x00")
    _, after = generate(folder, "--corpus", str(tmp_path / "texts"))
    assert after["answers"][0]["text"] == answer
    assert after["tau"] > before["tau"]


def test_files_of_folders_and_saved_pools_are_read(tmp_path):
    tokenizer = tiny_tokenizer()
    (tmp_path / "files" / ".git").mkdir(parents=True)
    (tmp_path / "files" / ".git" / "hidden").write_text("hhhhh")
    (tmp_path / "files" / "one").write_text("abcde")
    (tmp_path / "files" / "two").write_text("fghij")
    saved = ad.TextPool()
    saved.add([7, 8, 9, 7, 8])
    saved.save(tmp_path / "pool.safetensors")
    pool = ad.TextPool()
    fill(pool, [tmp_path / "files", tmp_path / "pool.safetensors"], tokenizer)
    assert pool.texts() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [7, 8, 9, 7, 8]]


def test_unreadable_and_short_files_are_refused(folder, tmp_path):
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"picture: it is no text in UTF-8"):
        fill(ad.TextPool(), [tmp_path / "picture"], tiny_tokenizer())
    (tmp_path / "short").write_text("ab")
    with pytest.raises(ValueError, match="no text of more than 3 tokens"):
        fill(ad.TextPool(), [tmp_path / "short"], tiny_tokenizer())
    (tmp_path / "x.safetensors").write_text("no pool")
    with pytest.raises(ValueError, match="holds no pool of texts"):
        fill(ad.TextPool(), [tmp_path / "x.safetensors"], tiny_tokenizer())
    result, _ = generate(folder, "--corpus", str(tmp_path / "missing"))
    assert result.exit_code == 2
    result, _ = generate(folder, "--corpus", str(tmp_path / "picture"))
    assert result.exit_code != 0
