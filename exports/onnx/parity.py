"""Compares a written graph with the network that it was made from.

Shapes: V vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from arbordraft.exports.onnx.cases import SHAPES, Inputs
from arbordraft.exports.onnx.plans import GraphSpec
from arbordraft.onnx.graph import Graph
from arbordraft.utils.errors import UserError

TOLERANCE = 1e-4  # of a float32 graph, as a share of the greatest value: rounding grows with the values
LEAST_ACCEPTANCE = 0.8  # of tokens drawn from a quantised graph, by the float32 one


class ParityError(UserError):
    """A graph's outputs differ from those of the network that it was made from."""


def check_exact(spec: GraphSpec, path: Path, tolerance: float = TOLERANCE) -> dict[str, float | bool]:
    """Compares a float32 graph in onnxruntime with the network, shape by shape.

    Returns:
        The greatest difference as a share of the greatest value; if tokens are predicted, also whether all most
        probable tokens are equal.

    Raises:
        ParityError: if an output differs by more than ``tolerance`` times its greatest value, or times 1 if that is
            smaller. Also if a most probable token, a verdict or a score with noise differs, or a shape cannot be run.
    """
    worst = 0.0
    for shape, (outputs, wanted) in zip(SHAPES, _compared(spec, Graph(path), _examples(spec)), strict=True):
        for name, ours, theirs in zip(spec.outputs, outputs, wanted, strict=True):
            if ours.shape != theirs.shape or not _equal(name, ours, theirs):
                raise ParityError(f"{spec.file}: {name} differ from the network's own for {shape}; nothing was written")
            if _has_no_tolerance(theirs) or not theirs.numel():
                continue
            difference = (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
            if not difference <= tolerance:
                raise ParityError(
                    f"{spec.file}: {name} differ from the network's own by {difference:.2e} of their greatest for "
                    f"{shape}, allowed are {tolerance:.0e}; nothing was written. If a deep network rounds so much, "
                    "raise --tolerance (tolerance=)"
                )
            worst = max(worst, difference)
    report: dict[str, float | bool] = {f"{spec.file}: greatest difference": worst}
    if "logits" in spec.outputs:
        report[f"{spec.file}: same most probable tokens"] = True
    return report


def check_quantized(spec: GraphSpec, path: Path, least: float = LEAST_ACCEPTANCE) -> dict[str, float | bool]:
    """Measures the effect of quantisation, on the shapes and on real rows.

    Returns:
        The greatest difference of logits. On real rows, also how often the most probable token is the same. Finally the
        acceptance of tokens drawn from the quantised graph by the float32 one: the sum of ``min(p, q)``.

    Raises:
        ParityError: if the acceptance is below ``least``, there are no real rows, or the graph cannot be run.
    """
    graph, place = Graph(path), spec.outputs.index("logits")
    pairs = [(outputs[place], wanted[place]) for outputs, wanted in _compared(spec, graph, _examples(spec))]
    worst = max((ours - theirs).abs().max().item() for ours, theirs in pairs)
    rows = [] if spec.real is None else list(_compared(spec, graph, spec.real()))
    if not rows:
        raise ParityError(f"{spec.file}: there are no texts to measure the loss by quantisation on")
    ours, theirs = (torch.cat([row[place].flatten(0, -2) for row in part]) for part in zip(*rows, strict=True))
    accepted = torch.minimum(ours.softmax(-1), theirs.softmax(-1)).sum(-1).mean().item()
    if not accepted >= least:
        raise ParityError(
            f"{spec.file}: tokens of the quantised graph would be accepted with {accepted:.3f} by the float32 one, "
            f"less than {least}; nothing was written. Leave it in float32, or lower the bound"
        )
    same = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    return {
        f"{spec.file}: greatest difference of logits, quantised": worst,
        f"{spec.file}: same most probable token, quantised": same,
        f"{spec.file}: acceptance by float32, quantised": accepted,
    }


def _examples(spec: GraphSpec) -> Iterable[Inputs]:
    generator = torch.Generator().manual_seed(0)
    return (spec.example(shape, generator) for shape in SHAPES)


@torch.no_grad()
def _compared(spec: GraphSpec, graph: Graph, inputs: Iterable[Inputs]) -> Iterable[tuple[list[Tensor], list[Tensor]]]:
    """Yields the outputs of the graph and of the network."""
    for given in inputs:
        wanted = spec.network(*given.values())
        try:
            outputs = graph.run({name: given[name] for name in graph.inputs})
        except Exception as error:  # onnxruntime has a class of its own for every cause
            raise ParityError(
                f"{spec.file} cannot be run: {str(error).splitlines()[0]}; nothing was written"
            ) from error
        yield [outputs[name] for name in spec.outputs], wanted


def _has_no_tolerance(values: Tensor) -> bool:
    """Tells whether every bit counts: of integers, and of float64, which only scores with shared noise have."""
    return not values.is_floating_point() or values.dtype == torch.float64


def _equal(name: str, ours: Tensor, theirs: Tensor) -> bool:
    """Tells whether verdicts, scores with noise, or most probable tokens are equal."""
    if _has_no_tolerance(theirs):
        return torch.equal(ours, theirs)
    return name != "logits" or torch.equal(ours.argmax(-1), theirs.argmax(-1))
