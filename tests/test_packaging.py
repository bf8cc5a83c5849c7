"""The wheel holds exactly the library, and the library works when it is installed away from the checkout."""

import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
OPTIONAL = {"accelerate", "gguf", "lightning", "matplotlib", "mlflow", "triton"}
OPTIONAL |= {"onnx", "onnxruntime", "onnxscript"}
OPTIONAL |= {"fastapi", "openai", "prometheus_client", "pydantic", "starlette", "uvicorn"}

# Runs in a fresh interpreter: imports every module below the package and reports where each came from.
WALK = """
import importlib, json, pkgutil, arbordraft
found, failed = {"arbordraft": arbordraft.__file__}, {}
def walk(path, prefix):
    for info in pkgutil.iter_modules(path, prefix):
        if info.name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            failed[info.name] = (error.name or "").split(".")[0]
            continue
        found[info.name] = module.__file__
        if info.ispkg:
            walk(module.__path__, info.name + ".")
for package in PACKAGES:
    walk(importlib.import_module(package).__path__, package + ".")
print(json.dumps([found, failed]))
"""


def python(*arguments: str, cwd: Path) -> str:
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Builds the wheel from a copy: a build leaves files behind, and stale ones would end up in the next wheel."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for folder in SETUPTOOLS["package-dir"].values():
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    python("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(dist), ".", cwd=source)
    (wheel,) = dist.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """A folder that the wheel is installed in, without a checkout."""
    target = tmp_path_factory.mktemp("site")
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


def test_package_list_matches_the_tree():
    found = {
        ".".join([package, *path.parent.relative_to(ROOT / folder).parts])
        for package, folder in SETUPTOOLS["package-dir"].items()
        for path in (ROOT / folder).rglob("*.py")
    }
    # `kernels/` is a package without files of its own.
    assert sorted(found | {"arbordraft.kernels"}) == sorted(SETUPTOOLS["packages"])
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would break `import transformers` from the checkout"


def test_wheel_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"arbordraft/py.typed", "arbordraft/serving/page.html"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"arbordraft"}
    assert [name for name in names if {"tests", "examples", "docs"} & set(name.split("/"))] == []
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)


@pytest.mark.soak
def test_installed_modules_import(site, tmp_path):
    """Every module comes from the wheel, even if an editable checkout is installed as well."""
    packages = [name for name in SETUPTOOLS["packages"] if name.count(".") <= 1]
    script = f"import sys; sys.path.insert(0, {str(site)!r}); PACKAGES = {packages}" + WALK
    # -I keeps modules of PYTHONPATH and the working folder out.
    found, failed = json.loads(python("-I", "-c", script, cwd=tmp_path).splitlines()[-1])
    outside = {name: file for name, file in found.items() if file and not Path(file).is_relative_to(site)}
    assert outside == {}
    assert {name: missing for name, missing in failed.items() if missing not in OPTIONAL} == {}
    assert {"arbordraft.trees.topology", "arbordraft.checkpoints.smollm2"} <= found.keys()


NEEDS = (
    "needs examples/benchmarks of the source checkout, which this installation lacks: run 'pip install --editable .'"
)


@pytest.mark.parametrize(
    ("command", "status", "expected"),
    [
        ("bench gpu --out gpu-day --minutes 9", 1, f"'arbordraft bench gpu --out gpu-day --minutes 9' {NEEDS}"),
        ("bench verifiers --drafter none", 1, f"'arbordraft bench verifiers --drafter none' {NEEDS}"),
        ("tune", 1, f"'arbordraft tune' {NEEDS}"),
        ("plot figures.json figures.png", 1, f"'arbordraft plot figures.json figures.png' {NEEDS}"),
        ("bench decode --drafter none --png figures.png", 1, NEEDS),
        ("bench gpu --help", 0, "Run a program of the source checkout"),
        ("bench --help", 0, "verifiers"),
        ("bench decode --help", 0, "--drafter"),
    ],
)
def test_programs_of_the_checkout_are_named_without_one(site, tmp_path, command, status, expected):
    script = f"import sys; sys.path.insert(0, {str(site)!r}); from arbordraft.cli.main import main; main()"
    run = subprocess.run(
        [sys.executable, "-I", "-c", script, *command.split()], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == status, run.stderr
    assert expected in run.stdout + run.stderr
