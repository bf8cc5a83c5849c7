"""Writes a folder of graphs from their specs: traces and compares them, and only then puts them in place."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, TypedDict

import torch

from arbordraft.exports.folder import Export, contents
from arbordraft.exports.onnx.cases import SHAPES, Shape
from arbordraft.exports.onnx.parity import LEAST_ACCEPTANCE, TOLERANCE, check_exact, check_quantized
from arbordraft.exports.onnx.plans import GraphSpec
from arbordraft.exports.onnx.quantization import quantize, quiet
from arbordraft.exports.onnx.storing import compact, save
from arbordraft.onnx.graph import FORMAT, PREFIX
from arbordraft.utils.choices import Quantization
from arbordraft.utils.files import new_folder

OPSETS = (20, 23)  # 23 has attention, norms and rotary embeddings as operators
PARITY = "parity.json"
_TRACED = Shape(2, 3, 4)  # sizes of 0 and 1 would be taken for constants


class WriteOptions(TypedDict, total=False):
    """Options of :func:`write`.

    Attributes:
        opset: 20, or 23 with attention as one operator; 20 by default.
        quantization: quantisation of the matrices; none by default.
        tolerance: allowed difference of a float32 graph's outputs, as a share of the greatest output.
        least_acceptance: least acceptance of tokens drawn from a quantised graph, by the float32 graph.
        force: whether to replace an existing folder.
        on_progress: receives messages on the progress.
    """

    opset: int
    quantization: Quantization | str
    tolerance: float
    least_acceptance: float
    force: bool
    on_progress: Callable[[str], object]


def write(
    specs: Callable[[], Sequence[GraphSpec]],
    out: str | os.PathLike[str],
    *,
    opset: int = 20,
    quantization: Quantization | str = Quantization.none,
    tolerance: float = TOLERANCE,
    least_acceptance: float = LEAST_ACCEPTANCE,
    force: bool = False,
    on_progress: Callable[[str], object] = lambda what: None,
    finish_folder: Callable[[Path], object] = lambda folder: None,
) -> Export:
    """Writes the graphs, or nothing at all if one of them misses parity; see :func:`arbordraft.exports.onnx.export`.

    Args:
        specs: makes the specs of the graphs; called after the checks of options and libraries.
        finish_folder: writes further files into the folder.
    """
    if opset not in OPSETS:
        raise ValueError(f"opset must be one of {OPSETS}, got {opset}")
    _require_libraries()
    quantization = Quantization(quantization)
    parity: dict[str, float | bool] = {}
    with new_folder(out, force=force) as folder:
        on_progress("loading models")
        for spec in specs():
            path = folder / spec.file
            smaller = quantization if spec.quantizable else Quantization.none
            on_progress(f"tracing {spec.file}")
            _write_float32(spec, path, {"opset": opset, "quantization": smaller.value})
            if smaller is Quantization.none:
                compact(path)
            on_progress(f"comparing {spec.file}")
            parity |= check_exact(spec, path, tolerance)
            if smaller is not Quantization.none:
                on_progress(f"quantising {spec.file}")
                quantize(path, smaller)
                compact(path)
                parity |= check_quantized(spec, path, least_acceptance)
        shapes = [[shape.batch, shape.rows, shape.past] for shape in SHAPES]
        report = {"tolerance": tolerance, "batch, rows, past": shapes, "found": parity}
        (folder / PARITY).write_text(json.dumps(report, indent=2) + "\n")
        finish_folder(folder)
    return Export(Path(out), contents(out), parity)


def _write_float32(spec: GraphSpec, path: Path, about: dict[str, Any]) -> None:
    """Writes one graph in float32, with ``about`` as further entries of its metadata."""
    import onnx

    if spec.build is not None:
        model = spec.build(about["opset"])
    else:
        program = _traced(spec, about["opset"])
        _simplify(program.model)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            # Through a file: only files hold weights beyond 2 GB.
            program.save(str(Path(scratch, path.name)), external_data=True)
            model = onnx.load(Path(scratch, path.name))
    libraries = ("arbordraft", "torch", "transformers", "onnx", "onnxruntime")
    entries = {"format": FORMAT, **{f"version.{name}": version(name) for name in libraries}, **about, **spec.about}
    onnx.helper.set_model_props(model, {PREFIX + name: json.dumps(value) for name, value in entries.items()})
    save(model, path)


def _require_libraries() -> None:
    """Raises ImportError, which names the fix, if a library is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(f"graphs are written with {error.name}: pip install 'arbordraft[onnx]'") from error


def _traced(spec: GraphSpec, opset: int) -> Any:
    """Traces a network with torch's exporter, without its output for developers."""
    example = spec.example(_TRACED, torch.Generator().manual_seed(0))
    fixed = [dict(spec.axes[name]) for name in example if not name.startswith("past_key_values")]
    past = [dict(spec.axes[name]) for name in example if name.startswith("past_key_values")]
    printed = StringIO()
    with torch.no_grad(), quiet(), warnings.catch_warnings(), redirect_stdout(printed), redirect_stderr(printed):
        warnings.simplefilter("ignore")
        return torch.onnx.export(
            spec.network.eval(),
            tuple(example.values()),
            input_names=list(example),
            output_names=list(spec.outputs),
            opset_version=opset,
            dynamic_shapes=(*fixed, tuple(past)) if past else tuple(fixed),  # *past needs one tuple
            dynamo=True,
            verbose=False,
            optimize=False,  # takes time that is quadratic in the number of layers
        )


def _simplify(model: Any) -> None:
    """Folds constants, the transposed matrices above all, and drops unused nodes.

    Runtimes make further fusions when they load the graph.
    """
    from onnx_ir.passes import common
    from onnxscript import optimizer
    from onnxscript.rewriter import onnx_fusions

    unlimited = 2**62
    optimizer.fold_constants(model, input_size_limit=unlimited, output_size_limit=unlimited)
    for step in (
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),
        common.RemoveUnusedOpsetsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
    ):
        step(model)
    onnx_fusions.fuse(model)
    for step in (
        common.RemoveUnusedNodesPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
        common.ClearMetadataAndDocStringPass(),  # the place of every node in the sources of this machine
    ):
        step(model)
