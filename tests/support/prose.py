"""Finds sentences and identifiers that break the rules of ``CONTRIBUTING.md`` on plain English.

Run as a program, it lists them: ``python tests/support/prose.py toolkit docs/serve.md``.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MOST_WORDS = 25
OPENINGS = re.compile(r"(What|The same|Of|That which|Whatever|Whoever)\b")
BANNED = re.compile(
    r"\b(what|whatever|whoever|whichever|somebody|nobody|anybody|everybody|that which|those which|the same, but|"
    r"of (its|their) like|as there (is|are)|come what may|of no account|dear|likewise|thereof|wherein|thereby)\b",
    re.IGNORECASE,
)
BANNED_IN_PAGES = re.compile(BANNED.pattern.replace("what|", "", 1), re.IGNORECASE)  # headings ask questions
# Words that no identifier contains, and the field's words for them.
BANNED_IN_IDENTIFIERS = {
    "blamed": "attributed",
    "bodiless": "without_body",
    "clue": "evidence",
    "coldest": "lowest",
    "complain": "print_error",
    "desk": "executor",
    "expanding": "dynamic",
    "farthest": "largest",
    "harmless": "ignored",
    "heeding": "reading",
    "heeds": "reads",
    "honoured": "supported",
    "hottest": "highest",
    "keeper": "callback",
    "letter": "char",
    "letters": "chars",
    "loud": "scale",
    "louder": "scaled",
    "meant": "expected",
    "misfit": "unsupported",
    "nameable": "serializable",
    "news": "delta",
    "nudge": "perturb",
    "nudged": "perturbed",
    "nudges": "perturbations",
    "overtaken": "conflict",
    "peculiar": "unsupported",
    "piece": "delta, chunk or part",
    "pieces": "deltas, chunks or parts",
    "regrets": "drops",
    "saw": "observe",
    "seat": "slot",
    "seated": "placed",
    "seats": "slots",
    "shade": "alpha",
    "sober": "filtered",
    "speakable": "encodable",
    "spell": "decode",
    "speller": "detokenizer",
    "spelling": "detokenizer",
    "spells": "decodes",
    "spelt": "decoded",
    "spoken": "shown",
    "tell": "log or on_progress",
    "teller": "callback",
    "telling": "logging",
    "tells": "logs",
    "thoughts": "reasoning",
    "turned": "rotated",
    "turning": "rotary",
    "unfit": "unsupported",
    "unheld": "unenforced",
    "unseated": "unplaced",
    "untold": "missing",
    "unwanted": "aborted",
    "wants": "uses",
    "witness": "probe",
}
_WORD_OF_NAME = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_CODE = re.compile(r"``.*?``|`[^`]*`|:\w+:`[^`]*`", re.DOTALL)
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Examples|Attributes|Shapes|Source|Sources|Note):?\s*$")
_NO_PROSE = (">>>", "...", "|", "- ", "===", "$ ", "python ", "Shapes:")
_COLUMNS = re.compile(r"\S+ {3,}\S")  # a table
_ENTRY = re.compile(r"^\s*\*{0,2}\w[\w.]*(, \*{0,2}\w[\w.]*)*: ")


class Finding(NamedTuple):
    """One sentence to rewrite: where it stands, the rule it breaks, and its beginning."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def findings(path: Path) -> Iterator[Finding]:
    """Finds what to rewrite in a Python file or in a page of Markdown."""
    if path.suffix == ".py":
        source = path.read_text(encoding="utf-8")
        yield from _in_docstrings(path, ast.parse(source))
        yield from _in_messages(path, ast.parse(source))
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield from _words(path, token.start[0], token.string, BANNED)
    else:
        fenced = False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            fenced ^= line.lstrip().startswith("```")
            if not fenced:
                yield from _words(path, number, line, BANNED_IN_PAGES)


def odd_identifiers(path: Path) -> Iterator[Finding]:
    """Finds the names that a Python file defines with a banned word, split at underscores and capitals."""
    for line, name in sorted(_defined(ast.parse(path.read_text(encoding="utf-8")))):
        for word in _WORD_OF_NAME.findall(name):
            if better := BANNED_IN_IDENTIFIERS.get(word.lower()):
                yield Finding(path, line, f"'{word.lower()}' in a name", f"{name}: rather {better}")


def _defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and name of functions, classes, arguments, and of the attributes and variables that are assigned."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)):
                yield node.lineno, name


def _words(path: Path, line: int, text: str, banned: re.Pattern[str]) -> Iterator[Finding]:
    for hit in banned.finditer(_CODE.sub("X", text)):
        yield Finding(path, line, f"'{hit[0]}'", text.strip()[:100])


def _in_docstrings(path: Path, tree: ast.Module) -> Iterator[Finding]:
    for node, public in _documented(tree, public=True):
        name = getattr(node, "name", "")
        if name.startswith("test_"):
            yield from _words(path, node.lineno, name.replace("_", " "), BANNED)
        text = ast.get_docstring(node, clean=True)
        if not text:
            continue
        line = node.body[0].lineno
        if OPENINGS.match(text):
            yield Finding(path, line, "opening", text.splitlines()[0])
        for offset, part in enumerate(text.splitlines()):
            if part.lstrip().startswith((">>>", "...")):
                continue
            yield from _words(path, line + offset, part, BANNED)
        if public:
            for sentence in sentences(text):
                if (count := len(sentence.split())) > MOST_WORDS:
                    yield Finding(path, line, f"{count} words", sentence[:100])


def _documented(node: ast.AST, *, public: bool) -> Iterator[tuple[ast.Module | ast.ClassDef | ast.FunctionDef, bool]]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        public = public and not getattr(node, "name", "").startswith("_")
        yield node, public
    for child in ast.iter_child_nodes(node):
        yield from _documented(child, public=public)


def _in_messages(path: Path, tree: ast.Module) -> Iterator[Finding]:
    """Texts of errors, warnings and options."""
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Raise) and node.exc is not None:
            parts = [node.exc]
        elif isinstance(node, ast.Call):
            parts = [word.value for word in node.keywords if word.arg in ("help", "reason", "ids")]
        for part in parts:
            for inner in ast.walk(part):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield from _words(path, inner.lineno, inner.value, BANNED)


def sentences(docstring: str) -> Iterator[str]:
    """Sentences of a docstring; code counts as one word, doctests and equations as none."""
    paragraph: list[str] = []
    paragraphs = [paragraph]
    for line in docstring.splitlines():
        if (
            not line.strip()
            or _SECTION.match(line.strip())
            or line.lstrip().startswith(_NO_PROSE)
            or _COLUMNS.match(line)
        ):
            paragraph = []
            paragraphs.append(paragraph)
            if line.lstrip().startswith("- "):
                paragraph.append(line.strip()[2:])
        elif _ENTRY.match(line):
            paragraph = [_ENTRY.sub("", line)]
            paragraphs.append(paragraph)
        else:
            paragraph.append(line.strip())
    for lines in paragraphs:
        yield from filter(None, re.split(r"(?<=[.!?])\)?\s+(?=[A-Z`(])", _CODE.sub("X", " ".join(lines))))


def files(root: Path) -> Iterator[Path]:
    """Python files and pages below a folder, or the file itself."""
    if root.is_file():
        yield root
    else:
        yield from (path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".md"))


if __name__ == "__main__":
    found = [finding for root in sys.argv[1:] for path in files(Path(root)) for finding in findings(path)]
    modules = [path for root in sys.argv[1:] for path in files(Path(root)) if path.suffix == ".py"]
    found += [finding for path in modules if "tests" not in path.parts for finding in odd_identifiers(path)]
    print(*found, sep="\n")
    sys.exit(bool(found))
