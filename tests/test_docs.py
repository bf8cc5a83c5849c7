"""README, docs/ and docstrings are true: code runs, command lines parse, links have targets."""

import ast
import doctest
import importlib
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from arbordraft.cli.main import app
from arbordraft.training.fit import known_configs

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BENCHMARKS = "python examples/benchmarks/"
RESULTS = ROOT / "examples" / "results"
PACKAGES = {
    "toolkit": "arbordraft.",
    "kernels": "arbordraft.kernels.",
    "training": "arbordraft.training.",
    "exports": "arbordraft.exports.",
    "examples/benchmarks/arborlab": "arborlab.",
}
FENCED = re.compile(r"^```(\w*).*?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def page_id(path: object) -> str | None:
    return str(path.relative_to(ROOT)) if isinstance(path, Path) else None


@pytest.mark.parametrize("page", PAGES[1:], ids=page_id)  # the README's code is an example
def test_python_blocks_run(page, monkeypatch):
    """One after the other, in one namespace per page, from the root of the checkout."""
    monkeypatch.chdir(ROOT)
    for block in Sybil([PythonCodeBlockParser()]).parse(page).examples():
        block.evaluate()


def documented() -> list[doctest.DocTest]:
    """Every docstring with an example."""
    found: list[doctest.DocTest] = []
    for folder, package in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if ">>> " in path.read_text():
                name = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
                module = importlib.import_module(f"{package}{name}")
                found += [each for each in doctest.DocTestFinder().find(module) if each.examples]
    return found


@pytest.mark.parametrize("example", documented(), ids=lambda example: example.name)
def test_docstring_examples_hold(example):
    shown: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    result = runner.run(example, out=shown.append)
    assert result.failed == 0, "".join(shown)


def test_there_are_enough_docstring_examples():
    assert len(documented()) >= 20


def fenced_lines(page: Path, program: str) -> list[str]:
    """Lines of fenced blocks that start a program; a backslash joins lines."""
    blocks = [body for language, body in FENCED.findall(page.read_text()) if language != "python"]
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [line.strip().removeprefix("$ ") for line in lines]
    return [command for command in commands if command.startswith(f"{program} ")]


def command_lines() -> list[tuple[str, bool]]:
    """Every command line of ours, and whether it is whole: code inside a sentence may leave arguments out."""
    sources = [*PAGES, *sorted(RESULTS.glob("*.md")), ROOT / "examples" / "compare" / "README.md"]
    whole = [(line, True) for page in sources for line in fenced_lines(page, "arbordraft")]
    whole += [(line, True) for page in sources for line in fenced_lines(page, "python") if BENCHMARKS in line]
    inline = [
        re.findall(rf"`((?:arbordraft |{BENCHMARKS})[^`\n]+)`", FENCED.sub("", page.read_text())) for page in sources
    ]
    return sorted({*whole, *((line, False) for lines in inline for line in lines)})


@pytest.mark.parametrize(("line", "whole"), command_lines(), ids=lambda value: value if isinstance(value, str) else "")
def test_command_lines_parse(line, whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem(line, whole) is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("arbordraft generat 'Hello'", "generat"),
        ("arbordraft bench decode --drafter ngram --tokens 3", "--tokens"),
        ("arbordraft bench decode --new-tokens many", "integer"),
        ("arbordraft tree chain:3 chain:4", "chain:4"),
        ("python examples/benchmarks/batching.py --lenght 3", "--lenght"),
        ("arbordraft tree --png tree.png", "Missing"),
        ("arbordraft train drafter fit --config drafter/eagel", "drafter/eagel"),
    ],
)
def test_a_wrong_command_line_is_caught(line, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expected in (problem(line, whole=True) or "")


FILLED_IN = "FILLED-IN"
PRINTED = re.compile(r"(['`]?)(arbordraft [^'\"`;:)\n,]+)")


def printed_lines(source: str) -> set[str]:
    """Command lines in the strings of a program; they end at a value that it fills in, unless that is an option's.

    A line in quotes is one in any case; otherwise it has to begin with a command, or else it is a sentence about us.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else FILLED_IN for part in node.values)
        else:
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        for quote, line in PRINTED.findall(re.sub(r"\{\w+\}", FILLED_IN, text)):
            words = line.split()
            if quote or words[1] in typer.main.get_command(app).commands:
                ends = [at for at in range(1, len(words)) if FILLED_IN in words[at] and words[at - 1][:2] != "--"]
                found.add(" ".join(words[: ends[0]] if ends else words))
    return found


def test_commands_that_are_printed_exist(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sources = [path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py")]
    lines = {line for path in sources for line in printed_lines(path.read_text())}
    assert len(lines) > 20
    problems = {line: problem(line, whole=False) for line in lines}
    unknown = re.compile(rf"^(?!.*{FILLED_IN}|.*requires an argument)")  # values of options are left out
    assert {line: error for line, error in problems.items() if error and unknown.match(error)} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('measure it: arbordraft bench deciders --drafter x')", "there is no command deciders"),
        ("print(f'write some with: arbordraft export onxx {folder}')", "there is no command onxx"),
        ("raise ValueError(\"run 'arbordraft mesure'\")", "there is no command mesure"),
        ("print(f'arbordraft bench decode --model {model} --learned {best}')", "--learned"),
        ("raise ValueError('arbordraft refuses this')", None),
    ],
)
def test_a_wrong_printed_command_is_caught(source, expected):
    problems = [problem(line, whole=False) or "" for line in printed_lines(source)]
    assert any(expected in each for each in problems) if expected else not problems


def problem(line: str, whole: bool) -> str | None:
    """Returns the error of a command line before it runs. Reads and writes in the current folder."""
    command, arguments = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
    if line.startswith(BENCHMARKS):
        script = typer.Typer()
        script.command()(importlib.import_module(Path(arguments.pop(0)).stem).main)
        command = typer.main.get_command(script)
    context = command.context_class(command, info_name="arbordraft")
    while hasattr(command, "resolve_command") and arguments:
        if command.get_command(context, arguments[0]) is None:
            return f"there is no command {arguments[0]}"
        name, command, arguments = command.resolve_command(context, arguments)
        context = command.context_class(command, info_name=name, parent=context)
    if command.context_settings.get("ignore_unknown_options"):  # Lightning's own command line reads these
        configs = [value for name, value in pairwise(arguments) if name == "--config"]
        unknown = [name for name in configs if name not in known_configs() and not name.endswith(".yaml")]
        return f"there is no configuration {unknown[0]}" if unknown else None
    for name in arguments:
        if name.endswith((".jsonl", ".txt")):  # prompts, which are to be there
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).touch()
    try:
        command.make_context(context.info_name, arguments, parent=context)
    except Exception as error:  # the parser's own exceptions have no public name in every version of typer
        reason = f"{type(error).__name__}: {getattr(error, 'message', error)}"
        return None if reason.startswith(("Missing", "NoArgs")) and not whole else reason
    return None


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_make_targets_exist(page):
    text = FENCED.sub("", page.read_text())
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    targets = {line.split()[1] for line in fenced_lines(page, "make") if "=" not in line.split()[1]}
    targets |= set(re.findall(r"`make (\w+)", text))
    known = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert targets - known == set()


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "kernels").glob("*/README.md"))], ids=page_id)
def test_named_files_exist(page):
    folders = "|".join([*PACKAGES, "tests", "examples", "docs"])
    named = re.findall(rf"(?<![\w./])(?:{folders})/[\w./-]*\w", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
    results = set(re.findall(r"`([\w-]+\.json)`", page.read_text())) - {"config.json"}
    assert [name for name in sorted(results) if not (RESULTS / name).exists()] == []


@pytest.mark.parametrize("acronym", ["GBV", "GLS", "HSD", "K-SEQ", "PLD", "SLEM", "TLI", "UniVer"])
def test_acronyms_of_papers_stand_in_the_glossary(acronym):
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    assert re.search(rf"^\| {acronym}\b", glossary, re.MULTILINE)


def test_every_page_links_to_the_glossary():
    pages = [page for page in PAGES if page.name not in ("glossary.md", "CONTRIBUTING.md")]
    assert [page_id(page) for page in pages if "glossary.md" not in page.read_text()] == []


def test_readme_is_short():
    assert len((ROOT / "README.md").read_bytes()) <= 6 * 1024


def test_every_result_is_explained():
    explained = (RESULTS / "README.md").read_text()
    assert [path.name for path in sorted(RESULTS.glob("*.json")) if f"`{path.name}`" not in explained] == []


@pytest.mark.soak
def test_the_site_builds_without_warnings(tmp_path):
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    pages = {path.relative_to(tmp_path / "site").with_suffix(".md") for path in (tmp_path / "site").rglob("*.html")}
    assert {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")} <= pages
    assert "arbordraft bench decode" in (tmp_path / "site" / "commands.html").read_text()
    assert not re.search(r'(src|href)="https?://(fonts|unpkg|cdn)', (tmp_path / "site" / "index.html").read_text())
