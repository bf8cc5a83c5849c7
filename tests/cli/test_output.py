"""Output on wide and narrow terminals and in pipes: whole numbers, plain values, and texts without markup."""

import io
import re
import shlex
from dataclasses import dataclass

import pytest
from rich.console import Console
from support.models import tiny_checkpoint
from typer.testing import CliRunner

from arbordraft.bench.tables import print_rows
from arbordraft.cli import main as cli


@dataclass
class Row:
    """A row with as many columns as a benchmark of drafters."""

    drafter: str
    batch: int
    tokens_per_second: float
    plain_tokens_per_second: float
    acceptance_by_depth: list
    share: dict
    equal: bool
    note: str | None = None


ROWS = [
    Row("early-exit:10 of a [long] name", 8, 1363.25, 1104.5, [0.5, 0.25], {"draft": 0.25}, True),
    Row("ngram", 16, 98765.0, 12345.5, [0.125], {"draft": 0.5}, False),
]
NUMBERS = ("1363", "98765", "1104", "12346", "0.50 0.25", "draft 25%", "16")


def printed(width, terminal=True, rows=ROWS):
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, markup=False)
    print_rows(console, rows)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [200, 80, 40, 12])
def test_no_number_and_no_name_is_cut(width):
    shown = printed(width)
    assert all(number in shown for number in (*NUMBERS, *(row.drafter for row in ROWS))), shown
    assert "…" not in shown
    assert ("━" in shown) is (width == 200), "a table is drawn only if there is room"


def test_a_pipe_gets_values_between_tabs():
    head, *lines = printed(20, terminal=False).rstrip("\n").splitlines()
    names = head.split("\t")
    assert names == [
        *("drafter", "batch", "tokens_per_second", "plain_tokens_per_second"),
        *("acceptance_by_depth", "share", "equal", "note"),
    ]
    values = [dict(zip(names, line.split("\t"), strict=True)) for line in lines]
    assert [float(value["tokens_per_second"]) for value in values] == [1363.25, 98765.0]
    assert [value["drafter"] for value in values] == [row.drafter for row in ROWS]
    assert values[0]["acceptance_by_depth"] == "0.5 0.25"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("place")
    tiny_checkpoint(root / "model")
    (root / "[red]").mkdir()
    return root


def test_a_benchmark_in_a_pipe_prints_only_rows(place):
    options = ["--model", str(place / "model"), "--new-tokens", "4", "--repeats", "1", "--limit", "1", "--batches", "1"]
    result = CliRunner().invoke(cli.app, ["bench", "decode", "--drafter", "ngram", *options])
    assert result.exit_code == 0, result.output
    head, *rows = [line.split("\t") for line in result.stdout.strip().splitlines()]
    assert {"decoder", "tokens_per_second"} < set(head)
    assert rows
    assert all(len(row) == len(head) for row in rows)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("tree chain:2 --png '[red]/[b]x[/y].png'", r"wrote \[red\]/\[b\]x\[/y\]\.png"),
        ("tree chain:2 --png ':smile:.png'", r"wrote :smile:\.png"),
        (f"tree chain:2 --png {'long ' * 30!r}.png", rf"wrote {'long ' * 30}\.png\n"),
        ("generate '[INST] a [/INST]' b --raw --model model --max-new-tokens 2", r"> \[INST\] a \[/INST\]\n"),
    ],
    ids=["brackets", "colons", "a long path", "a prompt"],
)
def test_user_texts_are_not_read_as_markup(place, monkeypatch, command, said):
    monkeypatch.chdir(place)
    result = CliRunner().invoke(cli.app, shlex.split(command))
    assert result.exit_code == 0, result.output
    assert re.search(said, result.output), result.output


def test_commands_to_paste_are_not_wrapped(place, monkeypatch):
    monkeypatch.chdir(place)
    out = "a-folder-whose-path-is-longer-than-any-line-of-a-terminal-that-has-eighty-columns-as-most-of-them"
    result = CliRunner().invoke(cli.app, ["export", "sglang", "model", out, "--target", "model"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    card = (place / out / "README.md").read_text().replace("THIS_FOLDER", out)
    assert "launch_server" in card
    assert card in result.output
