"""The console script: its output, its error lines and its exit statuses."""

import io
import json
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from support.models import tiny_checkpoint, tiny_tokenizer
from typer.testing import CliRunner

from arbordraft.bench import equality
from arbordraft.bench.report import Report
from arbordraft.cli import main as cli
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.detokenizing import IncrementalDetokenizer
from arbordraft.decoding.prompts import read_categories, read_prompts
from arbordraft.target.equality import EqualityReport

runner = CliRunner()


@pytest.mark.parametrize(
    ("shape", "nodes"),
    [("chain:3", 4), ("k:2,1", 5), ("fork:2x3", 7), ("parents:-1,0,0,1", 4), ("sequoia:0.6,0.2@5", 5)],
)
def test_tree_draws_every_shape(shape, nodes):
    result = runner.invoke(cli.app, ["tree", shape])
    assert result.exit_code == 0
    assert f"{nodes} nodes with the root" in result.output


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
        assert "pathwise" in result.output


def test_generate_reads_prompts_from_a_file(tmp_path):
    folder = tiny_checkpoint(tmp_path)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b\n\nc a b\n")
    result = runner.invoke(
        cli.app, ["generate", "--file", str(prompts), "--model", str(folder), "--max-new-tokens", "3", "--raw"]
    )
    assert result.exit_code == 0, result.output
    assert "6" in result.output  # two prompts of three tokens


def bench(tmp_path, *arguments):
    """Runs a benchmark of a tiny model and returns its JSON; checks that it reports its progress more than once."""
    report, rounds, on_progress = tmp_path / "bench.json", [], Report.on_progress

    def watch(report, what, done, of):
        assert 0 <= done < of
        rounds.append(done)
        on_progress(report, what, done, of)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Report, "on_progress", watch)
        result = runner.invoke(cli.app, ["bench", *arguments, "--json", str(report)])
    assert result.exit_code == 0, result.output
    assert len(rounds) > 1
    assert not list(tmp_path.glob("*.part*"))
    return json.loads(report.read_text())


@pytest.fixture
def asked(tmp_path):
    """Returns options that name a tiny model and two questions."""
    torch.manual_seed(0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in "abcd"))
    return ["--model", str(tiny_checkpoint(tmp_path))], ["--prompts", str(prompts), "--limit", "2", "--new-tokens", "4"]


def test_bench_compares_tokens(tmp_path, asked):
    model, (prompts, path, *_) = asked
    settings = [*model, prompts, path, "--dtype", "bfloat16", "--new-tokens", "4", "--temperature", "0,1"]
    found = bench(tmp_path, "equality", *settings)
    assert len(found["measurements"]) == 24
    assert {m["reach"] for m in found["measurements"]} == {""}, "rows of this model depend on the batch"
    assert found["provenance"]["versions"]["torch"] == version("torch")


def test_bench_equality_fails_where_a_promise_is_broken(asked, monkeypatch):
    """All decoders promise equal tokens; the last token of a batch is dropped."""
    model, prompts = asked
    promise = EqualityReport(equality.Equality.pathwise, "", 1, 1)
    monkeypatch.setattr(SpeculativeDecoder, "equality_report", lambda self: promise)
    honest = equality._tokens

    def broken(target, decoder, workload, on_progress, what):
        tokens = honest(target, decoder, workload, on_progress, what)
        return tokens if workload.batch == 1 else [tokens[0], tokens[1][:-1]]

    command = ["bench", "equality", *model, *prompts, "--dtype", "float32", "--batches"]
    assert CliRunner().invoke(cli.app, [*command, "2"]).exit_code == 0
    monkeypatch.setattr(equality, "_tokens", broken)
    assert CliRunner().invoke(cli.app, [*command, "1"]).exit_code == 0
    assert CliRunner().invoke(cli.app, [*command, "2"]).exit_code == 1


@pytest.mark.parametrize(
    ("command", "options", "rows"),
    [
        ("decode", ["--drafter", "early-exit:1", "--batch", "2"], 5 + 5),
        ("policy", ["--drafter", "early-exit:1", "--batches", "2"], 2 * 4),
        ("compare", ["--drafter", "early-exit:1", "--repeats", "1"], 6),
        ("verifiers", ["--drafter", "early-exit:1", "--temperatures", "1", "--children", "2", "--no-trees"], 9),
        pytest.param(
            "verifiers",
            ["--drafter", "early-exit:1", "--temperatures", "1", "--children", "2", "--nodes", "4"],
            9 + 52,
            marks=pytest.mark.soak,
        ),
    ],
)
def test_bench_decodes_and_draws(tmp_path, asked, command, options, rows):
    picture = tmp_path / "bench.png"
    with warnings.catch_warnings(action="ignore"):  # the lossy fork warns
        found = bench(tmp_path, command, *(part for parts in asked for part in parts), *options, "--png", str(picture))
    assert len(found["measurements"]) == rows
    assert picture.stat().st_size > 1000


def test_the_example_questions_can_be_read():
    questions = read_prompts(Path(__file__).resolve().parents[2] / "examples" / "questions.jsonl")
    assert len(set(questions)) >= 10


def test_prompts_are_read_from_chats_and_turns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]}
    turns = {"question_id": 81, "category": "writing", "turns": ["b", "c"]}
    path.write_text(f"{json.dumps(chat)}\n\n{json.dumps(turns)}\n")
    assert read_prompts(path) == ["a", "b"]


def test_categories_are_measured_by_themselves(tmp_path, asked):
    path = tmp_path / "prompts.jsonl"
    lines = [{"category": kind, "turns": [text]} for kind, text in (("code", "a"), ("chat", "b"), ("code", "c"))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--drafter", "ngram", "--temperatures", "0", "--new-tokens", "4", "--categories"]
    found = bench(tmp_path, "decode", *asked[0], "--prompts", str(path), *options)
    rows = [(row["category"], row["batch"]) for row in found["measurements"] if row["decoder"] == "plain"]
    assert rows == [("code", 2), ("chat", 1)]
    refused = CliRunner().invoke(cli.app, ["bench", "decode", *options], env={"COLUMNS": "200"})
    assert refused.exit_code == 2
    assert "built-in prompts have none" in refused.output
    path.write_text(json.dumps({"turns": ["a"]}) + "\n")
    with pytest.raises(ValueError, match=r'prompt 1 of .* has no "category"'):
        read_categories(path)


@pytest.mark.parametrize("prompt", ["", "\n", "[/bold]", "[red]"], ids=repr)
def test_any_prompt_can_be_a_title(prompt):
    """Covers empty prompts and prompts that look like markup."""
    from rich.console import Console

    from arbordraft.cli.display import AnswerStreamer, show_answers

    console, tokenizer = Console(record=True, width=80, file=io.StringIO(), force_terminal=True), tiny_tokenizer()
    streamer = AnswerStreamer(IncrementalDetokenizer(tokenizer))
    with show_answers(console, [prompt], [streamer]):
        streamer.put(torch.tensor([1, 2]))  # the prompt
        streamer.put(torch.tensor(tokenizer("answer")["input_ids"]))
        streamer.end()
    assert "answer" in (text := console.export_text())
    assert prompt.strip() in text
