"""Examples run as users run them; the README shows the same code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str) -> str:
    wide = {**os.environ, "COLUMNS": "160"}  # or tables would be cut off
    result = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, env=wide, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [
        ("quickstart.py", [], "The capital of France is Paris"),
        ("sampling.py", [], "SpecHub, lifted"),
        ("demo.py", ["--max-new-tokens", "12", "--prompts", "3"], "3 of 3 answers"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_example(example, arguments, expected):
    assert expected in run(str(ROOT / "examples" / example), *arguments)


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    assert all(f'"{path.name}"' in source for path in (ROOT / "examples").glob("*.py"))


def test_readme_shows_the_quickstart():
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    quickstart = (ROOT / "examples" / "quickstart.py").read_text()
    assert shown
    assert quickstart.split('"""\n\n', 1)[1] == shown[1]
