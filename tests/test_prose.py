"""Docstrings, comments, messages, pages and names are plain English, as far as a program can tell."""

from pathlib import Path

import pytest
from support import prose

ROOT = Path(__file__).resolve().parents[1]
PLACES = ["toolkit", "kernels", "training", "exports", "examples", "tests", "docs", "README.md", "CONTRIBUTING.md"]
ROOMS = ["toolkit", "kernels", "training", "exports", "examples/benchmarks/arborlab"]
# Sentences that break a rule on purpose, by file.
ALLOWED = {"tests/support/prose.py", "tests/test_prose.py"}


@pytest.mark.parametrize("place", PLACES)
def test_sentences_are_plain(place):
    files = [path for path in prose.files(ROOT / place) if str(path.relative_to(ROOT)) not in ALLOWED]
    assert [str(finding) for path in files for finding in prose.findings(path)] == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""What is drafted."""', "opening"),
        ('"""The same for pages."""', "opening"),
        ('"""Returns what is drafted."""', "'what'"),
        ("x = 1  # nobody reads it", "'nobody'"),
        ('raise ValueError("whoever asks")', "'whoever'"),
        ('option(help="as there is none")', "'as there is'"),
        ("def test_what_is_left(): pass", "'what'"),
        (f'"""Returns {"one and " * 13}two rows."""', "29 words"),
    ],
)
def test_a_riddle_is_found(tmp_path, text, rule):
    file = tmp_path / "module.py"
    file.write_text(text + "\n")
    assert rule in {finding.rule for finding in prose.findings(file)}


@pytest.mark.parametrize("room", ROOMS)
def test_names_are_the_fields(room):
    files = [path for path in prose.files(ROOT / room) if path.suffix == ".py"]
    assert [str(finding) for path in files for finding in prose.odd_identifiers(path)] == []


@pytest.mark.parametrize(
    "text",
    [
        "def _tell(): pass",
        "async def tell_others(): pass",
        "class SpellerOfTokens: pass",
        "def report(*, tell): pass",
        "def report(*tell): pass",
        "show = lambda news: None",
        "_MOST_LETTERS = 3",
        "left, (nudged, right) = pair",
        "if spelt := tokens: pass",
        "for piece in parts: pass",
        "parts = [piece for piece in parts]",
        "with desk() as desk: pass",
        "class Part:\n    thoughts: str",
        "self.wantsTriton = True",
        "self._heeds[0].turned += 1",
        "from tokens import decode as spell",
        "try: pass\nexcept ValueError as misfit: pass",
    ],
)
def test_an_odd_name_is_found(tmp_path, text):
    file = tmp_path / "module.py"
    file.write_text(text + "\n")
    assert len(list(prose.odd_identifiers(file))) == 1


def test_names_of_others_and_longer_words_pass(tmp_path):
    file = tmp_path / "module.py"
    file.write_text("import tell\nnewsletter = tell.news(spelt=1).pieces\nintelligent = unwantedly = newline = 1\n")
    assert list(prose.odd_identifiers(file)) == []


def test_plain_sentences_pass(tmp_path):
    text = """Returns rows ``what[R, V]``. They are sorted.

    Args:
        rows: a list of `nobody`, and {} more.

    Examples:
        >>> what = 1
    """
    file = tmp_path / "module.py"
    file.write_text(f'def rows(): """{text.format("one and " * 5)}"""\n')
    assert list(prose.findings(file)) == []
