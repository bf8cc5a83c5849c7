"""Imports follow the layers of CONTRIBUTING.md, checked on the sources."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import arbordraft

ROOT = Path(__file__).resolve().parents[1]

# From the bottom up: each folder may import itself and the folders listed before it.
LAYERS = """
kernels
utils
checkpoints sampling trees
target
deciders verifiers heads onnx grammars drafters
testing decoding
builders drafter_names
loading
bench training exports serving
cli
"""
ORDER = LAYERS.split()
ALONE = {"drafters"}  # packages whose modules import no siblings except those in SHARED
SHARED = {
    "agreement",
    "base",
    "block",
    "children",
    "context",
    "feeding",
    "grow",
    "level_by_level",
    "model_drafter",
    "native_models",
    "network",
    "one_call",
    "onnx_networks",
    "planning",
    "slots",
    "stage",
    "text_pool",
    "vocabulary",
}
PLACES = {"toolkit": (), "kernels": ("kernels",), "training": ("training",), "exports": ("exports",)}
LABORATORY = "arborlab"  # in examples/benchmarks, beside the scripts that import it
KERNEL_LIBRARIES = {"torch", "triton", "numpy"}


def imported_names(source: str) -> Iterator[str]:
    """Yields every imported module, from statements at any place; `from a import b` counts as `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def violations(root: Path) -> list[str]:
    """Returns forbidden imports below `root` as `file: reason`, and a circle of files if there is one."""
    sources = {
        path: path.read_text() for folder in (*PLACES, "examples") for path in sorted((root / folder).rglob("*.py"))
    }
    imports = {path: list(imported_names(source)) for path, source in sources.items()}
    found = [
        f"{path.relative_to(root)}: {reason}"
        for path, names in imports.items()
        for name in names
        if (reason := objection(path.relative_to(root), name.split(".")))
    ]
    files = {dotted(path.relative_to(root)): path for path in sources}
    known = {
        path: {files.get(name) or files.get(name.rpartition(".")[0]) for name in imports[path]} for path in sources
    }
    try:
        TopologicalSorter({path: others - {path, None} for path, others in known.items()}).prepare()
    except CycleError as circle:
        found.append("a circle of imports: " + " -> ".join(str(path.relative_to(root)) for path in circle.args[1]))
    return found


def dotted(path: Path) -> str:
    """Returns the name by which a file is imported."""
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    if parts[:2] == ["examples", "benchmarks"]:
        return ".".join(parts[2:])
    return ".".join(["arbordraft", *PLACES.get(parts[0], parts[:1]), *parts[1:]])


def objection(path: Path, name: list[str]) -> str | None:
    folder, full = path.parts[0], ".".join(name)
    if not name[0]:
        return f"relative import {full}"
    if name[0] in (*PLACES, "examples", "tests"):
        return f"{full} is not an installed name; import it as arbordraft.*"
    if name[0] == LABORATORY:
        return None if folder == "examples" else f"{full} is imported by utils/checkout.py alone"
    if name[0] != "arbordraft":
        known = KERNEL_LIBRARIES | sys.stdlib_module_names
        return f"{full} in kernels" if folder == "kernels" and name[0] not in known else None
    if folder == "examples":
        return None
    here = [*PLACES[folder], *path.with_suffix("").parts[1:]]
    unit = name[1] if len(name) > 1 else ""
    if here == ["__init__"] or (here[0] in ("training", "exports", "cli") and unit not in ORDER):
        return None  # public names may be used here
    if here[0] not in ORDER:
        return f"{here[0]} has no place in LAYERS"
    if unit not in ORDER:
        return f"{full} goes through the package's own __init__"
    if {here[0], unit} == {"training", "exports"} or ORDER.index(unit) > ORDER.index(here[0]):
        return f"{here[0]} imports {unit}, which stands above it"
    if here[0] == unit in ALONE and here[-1] != "__init__" and not SHARED & set(name[2:3]):
        return f"{'/'.join(here)} imports its sibling {full}"
    return None


def test_every_import_points_the_right_way():
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/op/triton.py", "import transformers"),
        ("kernels/op/triton.py", "from arbordraft.trees.topology import TreeTopology"),
        ("toolkit/trees/topology.py", "from arbordraft import loading"),
        ("toolkit/trees/topology.py", "import arbordraft.decoding.step"),
        ("toolkit/trees/topology.py", "def f():\n    from arbordraft.deciders.costs import CostTable"),
        ("toolkit/target/model.py", "if TYPE_CHECKING:\n    from arbordraft.drafters import Drafter"),
        ("toolkit/decoding/decoder.py", "from arbordraft.training import losses"),
        ("toolkit/decoding/decoder.py", "from arbordraft.cli.options import SHAPES"),
        ("toolkit/unheard_of.py", "import arbordraft.trees"),
        ("toolkit/drafters/ngram.py", "from arbordraft.drafters.eagle import Eagle"),
        ("toolkit/drafters/ngram.py", "from .eagle import Eagle"),
        ("training/losses.py", "from arbordraft.exports import onnx"),
        ("exports/onnx.py", "from arbordraft.training import losses"),
        ("training/fit.py", "from arbordraft.cli.options import SHAPES"),
        ("toolkit/cli/main.py", "from arborlab.plots import plot"),
        ("examples/demo.py", "from toolkit import decoder"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path, file, line):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(line + "\n")
    (objection,) = violations(tmp_path)
    assert objection.startswith(file)


def test_a_circle_is_caught(tmp_path):
    folder = tmp_path / "toolkit" / "trees"
    folder.mkdir(parents=True)
    (folder / "masks.py").write_text("if TYPE_CHECKING:\n    from arbordraft.trees.topology import TreeTopology\n")
    (folder / "topology.py").write_text("from arbordraft.trees import masks\n")
    (found,) = violations(tmp_path)
    assert found.startswith("a circle of imports: toolkit/trees/")
    scripts = tmp_path / "examples" / "benchmarks"
    (scripts / "arborlab").mkdir(parents=True)
    (scripts / "arborlab" / "plots.py").write_text("import forward")
    (scripts / "forward.py").write_text("from arborlab import plots")
    (folder / "topology.py").unlink()
    (found,) = violations(tmp_path)
    assert found.startswith("a circle of imports: examples/benchmarks/")


def test_allowed_imports_pass(tmp_path):
    for file, line in {
        "kernels/op/triton.py": "import triton, torch, numpy.typing, functools",
        "toolkit/decoding/decoder.py": "from arbordraft.drafters import Drafter\nimport arbordraft.kernels.op",
        "toolkit/drafters/__init__.py": "from arbordraft.drafters.ngram import NGram",
        "toolkit/drafters/ngram.py": "from arbordraft.trees.draft_tree import DraftTree\nimport transformers",
        "toolkit/__init__.py": "from arbordraft.decoding.decoder import SpeculativeDecoder",
        "toolkit/cli/main.py": "import arbordraft as ad\nfrom arbordraft.training import fit",
        "training/losses.py": "from arbordraft import Decider\nfrom arbordraft.training.data import rows",
        "examples/demo.py": "import arbordraft\nfrom arbordraft.exports import onnx",
    }.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(line + "\n")
    assert violations(tmp_path) == []


def test_import_stays_light():
    """Decoding imports torch, not libraries of training, tracking, export or the command line.

    It runs in the checkout: transformers probes for a package `kernels`, and must not take our folder for it.
    """
    script = """
import sys, torch
before = set(sys.modules)
import arbordraft
[getattr(arbordraft, name) for name in arbordraft.__all__]
print(*sorted(set(sys.modules) - before))
import transformers, arbordraft.kernels.ragged_tree_attention
import arbordraft.training, arbordraft.exports, arbordraft.cli.export
print(*sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    added, all_packages = (line.split() for line in run.stdout.splitlines())
    heavy = {"gguf", "lightning", "llguidance", "matplotlib", "mlflow", "onnx", "onnxruntime", "onnxscript"}
    assert not {name.split(".")[0] for name in all_packages} & heavy
    heavy |= {"fastapi", "openai", "prometheus_client", "pydantic", "rich", "triton", "typer", "uvicorn"}
    assert "arbordraft" in added
    assert [name for name in added if name.split(".")[0] in heavy] == []
    assert [name for name in added if name.startswith("transformers.models.") and ".modeling_" in name] == []
    assert [
        name for name in added if name.startswith(("scipy.optimize", "arbordraft.heads", "transformers.modeling_utils"))
    ] == []


def test_public_names_are_those_that_type_checkers_see():
    tree = ast.parse((ROOT / "toolkit" / "__init__.py").read_text())
    seen = {alias.asname for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen - {None} == set(arbordraft.__all__)
    assert set(arbordraft.__all__) <= set(dir(arbordraft))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        arbordraft.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["bench", "--help"], 0),
        (["export", "vllm", "--help"], 0),
        (["generate", "a", "--no-such-option"], 2),
        (["bench", "policy", "--repeats", "0"], 2),
        (["doctor", "--quick"], 0),
        (["bench", "equality", "--help"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_answers_about_commands_import_no_model_library(arguments, status):
    """Help, usage errors and `doctor --quick` take fractions of a second, without torch and transformers."""
    script = """
import sys
from arbordraft.cli.main import main
try:
    main()
finally:
    print("IMPORTED", *sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == status, run.stderr
    imported = run.stdout.rpartition("IMPORTED")[2].split()
    assert "arbordraft.cli.main" in imported
    assert not {"torch", "transformers", "scipy", "numpy", "lightning", "mlflow", "onnx"} & set(imported)
