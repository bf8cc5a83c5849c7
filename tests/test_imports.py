"""Which part may import which: the layers of CONTRIBUTING.md, checked on the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up; what stands in one line may be imported by every line below it, and in the order of the line.
LAYERS = """
kernels
allocator checks files topology masks stateful kinds processors sampling rows laws decisions types context
costs metrics checkpoints vocabulary pretrained
target onnx_graph
verifiers coupling
heads onnx_networks drafters deciders grammars static
testing
output generation stops spelling huggingface lengths texts prompts parts state step_log cohorts processing stepping
batching requests streams engine decoder target_initialised
timing measuring builders loading tuning drawing mlflow_server bench
training exports serving
cli
"""
ORDER = LAYERS.split()
ALONE = {"drafters"}  # packages whose modules import none of each other but what they share
SHARED = {"base", "fused", "garden", "slots", "whole"}
PLACES = {"toolkit": (), "kernels": ("kernels",), "training": ("training",), "exports": ("exports",)}
KERNEL_LIBRARIES = {"torch", "triton", "numpy"}


def imported_names(source: str) -> Iterator[str]:
    """Every imported module, wherever the statement stands; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def violations(root: Path) -> list[str]:
    """Every import below `root` that points in a forbidden direction, as `file: reason`."""
    return [
        f"{path.relative_to(root)}: {reason}"
        for folder in (*PLACES, "examples")
        for path in sorted((root / folder).rglob("*.py"))
        for name in imported_names(path.read_text())
        if (reason := objection(path.relative_to(root), name.split(".")))
    ]


def objection(path: Path, name: list[str]) -> str | None:
    folder, dotted = path.parts[0], ".".join(name)
    if not name[0]:
        return f"relative import {dotted}"
    if name[0] in (*PLACES, "examples", "tests"):
        return f"{dotted} is not an installed name; import it as arbordraft.*"
    if name[0] != "arbordraft":
        known = KERNEL_LIBRARIES | sys.stdlib_module_names
        return f"{dotted} in kernels" if folder == "kernels" and name[0] not in known else None
    if folder == "examples":
        return None
    here = [*PLACES[folder], *path.with_suffix("").parts[1:]]
    unit = name[1] if len(name) > 1 else ""
    if here == ["__init__"] or (here[0] in ("training", "exports", "cli") and unit not in ORDER):
        return None  # these use the public names
    if here[0] not in ORDER:
        return f"{here[0]} has no place in LAYERS"
    if unit not in ORDER:
        return f"{dotted} goes through the package's own __init__"
    if {here[0], unit} == {"training", "exports"} or ORDER.index(unit) > ORDER.index(here[0]):
        return f"{here[0]} imports {unit}, which stands above it"
    if here[0] == unit in ALONE and here[-1] != "__init__" and not SHARED & set(name[2:3]):
        return f"{'/'.join(here)} imports its sibling {dotted}"
    return None


def test_every_import_points_the_right_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/op/triton.py", "import transformers"),
        ("kernels/op/triton.py", "from arbordraft.topology import TreeTopology"),
        ("toolkit/topology.py", "from arbordraft import decoder"),
        ("toolkit/topology.py", "import arbordraft.masks"),
        ("toolkit/topology.py", "def f():\n    from arbordraft.masks import SlicedCausalMask"),
        ("toolkit/target/model.py", "from arbordraft.drafters import Drafter"),
        ("toolkit/decoder.py", "from arbordraft.training import losses"),
        ("toolkit/decoder.py", "from arbordraft.cli.options import SHAPES"),
        ("toolkit/unheard_of.py", "import arbordraft.types"),
        ("toolkit/drafters/ngram.py", "from arbordraft.drafters.eagle import Eagle"),
        ("toolkit/drafters/ngram.py", "from .eagle import Eagle"),
        ("training/losses.py", "from arbordraft.exports import onnx"),
        ("exports/onnx.py", "from arbordraft.training import losses"),
        ("training/fit.py", "from arbordraft.cli.options import SHAPES"),
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
        "toolkit/cli/main.py": "import arbordraft as ad\nfrom arbordraft.training import fit",
        "training/losses.py": "from arbordraft import Decider\nfrom arbordraft.training.data import rows",
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
    heavy = {"gguf", "lightning", "llguidance", "matplotlib", "mlflow", "onnx", "onnxruntime", "onnxscript"}
    heavy |= {"fastapi", "openai", "prometheus_client", "pydantic", "rich", "triton", "typer", "uvicorn"}
    assert "arbordraft" in added
    assert [name for name in added if name.split(".")[0] in heavy] == []
    assert [name for name in added if name.startswith("transformers.models.") and ".modeling_" in name] == []
    assert [
        name for name in added if name.startswith(("scipy.optimize", "arbordraft.heads", "transformers.modeling_utils"))
    ] == []
