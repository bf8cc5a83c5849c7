"""Which folder and file may import which: the table of CONTRIBUTING.md, checked on the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The order in which data flows and in which the files are read: each imports only from those before it.
ORDER = [
    "allocator",
    "checks",
    "files",
    "failures",
    "checkpoints",
    "vocabulary",
    "pretrained",
    "topology",
    "masks",
    "sampling",
    "laws",
    "types",
    "verifiers",
    "coupling",
    "cache",
    "observation",
    "attention",
    "view",
    "recognition",
    "packing",
    "target",
    "exactness",
    "costs",
    "graphs",
    "deciders",
    "heads",
    "drafters",
    "loading",
    "metrics",
    "output",
    "huggingface",
    "state",
    "buckets",
    "static",
    "stepping",
    "decoder",
    "target_initialised",
    "builders",
    "prompts",
    "options",
    "tuning",
    "display",
    "mlflow_server",
    "bench",
]
FOLDERS = {  # folder -> the folders it may import from, besides itself
    "kernels": set(),
    "toolkit": {"kernels"},
    "training": {"toolkit"},
    "exports": {"toolkit"},
    "examples": {"toolkit", "training", "exports"},
}
KERNEL_LIBRARIES = {"torch", "triton", "numpy"}
INDEPENDENT_SIBLINGS = {"drafters"}  # packages whose modules import none of each other but `base`


def imported_names(source: str) -> Iterator[str]:
    """Every imported module, wherever the statement stands; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def locate(name: str) -> tuple[str, list[str]]:
    """Split `arbordraft.drafters.ngram.X` into its folder, `toolkit`, and the names below it."""
    parts = name.split(".")[1:]
    if parts and parts[0] in FOLDERS.keys() - {"toolkit"}:
        return parts[0], parts[1:]
    return "toolkit", parts


def violations(root: Path) -> list[str]:
    """Every import below `root` that points in a forbidden direction, as `file: reason`."""
    return [
        f"{path.relative_to(root)}: {reason}"
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
        for name in imported_names(path.read_text())
        if (reason := objection(path.relative_to(root), name))
    ]


def objection(path: Path, name: str) -> str | None:
    folder, top = path.parts[0], name.split(".")[0]
    if name.startswith("."):
        return f"relative import {name}"
    if top in FOLDERS or top == "tests":
        return f"{name} is not an installed name; import it as arbordraft.*"
    if top != "arbordraft":
        known = KERNEL_LIBRARIES | sys.stdlib_module_names
        return f"{name} in kernels" if folder == "kernels" and top not in known else None
    target, below = locate(name)
    if target != folder:
        if path == Path("toolkit/cli.py"):  # the command line stands above all folders
            return None
        return None if target in FOLDERS[folder] else f"{folder} imports {target} ({name})"
    return order_objection(path, below) if folder == "toolkit" else None


def order_objection(path: Path, below: list[str]) -> str | None:
    here = path.parts[1:]
    unit = here[0].removesuffix(".py")
    if unit in ("__init__", "cli"):  # both stand above all others and use the public names
        return None
    if unit not in ORDER:
        return f"{unit} has no place in ORDER"
    if not below or below[0] not in ORDER:
        return f"arbordraft.{'.'.join(below)} goes through the package's own __init__"
    if (unit, below[0]) == ("decoder", "tuning"):  # from_tuned hands on to what chooses decoders
        return None
    if ORDER.index(below[0]) > ORDER.index(unit):
        return f"{unit} imports {below[0]}, which comes later"
    is_module = len(here) > 1 and here[-1] != "__init__.py"
    if below[0] == unit in INDEPENDENT_SIBLINGS and is_module and below[1:2] != ["base"]:
        return f"{'/'.join(here)} imports its sibling {'.'.join(below)}"
    return None


def test_every_import_points_the_right_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/op/triton.py", "import transformers"),
        ("kernels/op/triton.py", "from arbordraft.topology import TreeTopology"),
        ("toolkit/topology.py", "from arbordraft import decoder"),
        ("toolkit/topology.py", "import arbordraft"),
        ("toolkit/topology.py", "def f():\n    from arbordraft.masks import SlicedCausalMask"),
        ("toolkit/target.py", "from arbordraft.training import losses"),
        ("toolkit/unheard_of.py", "import arbordraft.types"),
        ("toolkit/drafters/ngram.py", "from arbordraft.drafters.eagle import Eagle"),
        ("toolkit/drafters/ngram.py", "from .eagle import Eagle"),
        ("training/losses.py", "from arbordraft.exports import onnx"),
        ("exports/onnx.py", "from arbordraft.kernels.op import entry"),
        ("examples/demo.py", "from toolkit import decoder"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    (objection,) = violations(tmp_path)
    assert objection.startswith(file)


def test_allowed_imports_pass(tmp_path):
    for file, line in {
        "kernels/op/triton.py": "import triton, torch, numpy.typing, functools",
        "toolkit/decoder.py": "from arbordraft.drafters import Drafter\nimport arbordraft.kernels.op",
        "toolkit/drafters/__init__.py": "from arbordraft.drafters.ngram import NGram",
        "toolkit/drafters/ngram.py": "from arbordraft.types import DraftTree\nimport transformers",
        "toolkit/__init__.py": "from arbordraft.decoder import SpeculativeDecoder",
        "training/losses.py": "from arbordraft import decoder\nfrom arbordraft.training.data import rows",
        "examples/demo.py": "import arbordraft\nfrom arbordraft.exports import onnx",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")
    assert violations(tmp_path) == []


def test_import_stays_light():
    """Whoever only decodes pays for torch, not for training, tracking, export or command-line libraries."""
    script = (
        "import sys, torch; before = set(sys.modules); import arbordraft; "
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    added = run.stdout.split()
    heavy = {"gguf", "lightning", "matplotlib", "mlflow", "onnx", "onnxruntime", "onnxscript"}
    heavy |= {"rich", "triton", "typer"}
    assert "arbordraft" in added
    assert [name for name in added if name.split(".")[0] in heavy] == []
    assert [name for name in added if name.startswith("transformers.models.") and ".modeling_" in name] == []
    assert [name for name in added if name.startswith(("arbordraft.heads", "transformers.modeling_utils"))] == []
