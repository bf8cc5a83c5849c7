"""Quantises the weights of a graph that is already written."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from arbordraft.exports.onnx.storing import save
from arbordraft.utils.choices import Quantization

_QUANTISED = ("MatMulInteger", "MatMulNBits")
_BLOCK = 32  # weights that share a scale when they have four bits


def quantize(path: Path, how: Quantization) -> None:
    """Quantises the matrices of a graph's file in place; its metadata stay.

    Raises:
        ValueError: if it has no matrices that can be quantised.
    """
    import onnx

    known = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    with quiet():
        model = _int8(path) if how is Quantization.int8 else _int4(path)
    if not any(node.op_type in _QUANTISED for node in model.graph.node):
        raise ValueError(f"{path.name} has no matrices that can be quantised; export it without")
    onnx.helper.set_model_props(model, known)
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    save(model, path)


def _int8(path: Path) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = path.with_name("quantized.onnx")
    quantize_dynamic(
        path,
        small,
        ["MatMul"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
        extra_options={"MatMulConstBOnly": True},
    )
    model = onnx.load(small)
    for file in path.parent.glob(f"{small.name}*"):
        file.unlink()
    return model


def _int4(path: Path) -> Any:
    """Quantises to four bits; the head, which decides the most probable token, gets twice the bits."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(path)
    heads = _heads(model.graph)
    others = {node.name for node in model.graph.node} - heads
    for bits, left in ((8, others), (4, heads)):
        quantizer = MatMulNBitsQuantizer(
            model, bits=bits, block_size=_BLOCK, is_symmetric=True, accuracy_level=4, nodes_to_exclude=list(left)
        )
        quantizer.process()
        model = quantizer.model.model
    return model


def _heads(graph: Any) -> set[str]:
    """Finds the last matrix products before the logits."""
    makers = {output: node for node in graph.node for output in node.output}
    heads, pending = set(), ["logits"]
    while pending:
        node = makers.get(pending.pop())
        if node is not None and node.op_type == "MatMul":
            heads.add(node.name)
        elif node is not None:
            pending += node.input
    return heads


@contextmanager
def quiet() -> Iterator[None]:
    """Silences libraries that log for their developers: onnxruntime reports every node it quantises."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
