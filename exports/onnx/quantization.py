"""Smaller weights for a graph that is already written."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

_BLOCK = 32  # weights that share a scale when they have four bits


class Quantization(StrEnum):
    """How a graph's matrices are kept."""

    none = "none"
    int8 = "int8"  # weights and, when it runs, inputs in 8 bits
    int4 = "int4"  # blocks of weights in 4 bits, those of the head in 8


def quantize(path: Path, how: Quantization) -> None:
    """Replaces the matrices of a graph's file, in place; its metadata stay.

    Raises:
        ImportError: if onnxruntime's quantization lacks a library that it needs.
    """
    import onnx

    known = {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    with _quiet():
        model = _int8(path) if how is Quantization.int8 else _int4(path)
    onnx.helper.set_model_props(model, known)
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    save(model, path)


def save(model: Any, path: Path) -> None:
    """Writes a model, with its weights in a second file if one cannot hold them."""
    import onnx

    external = model.ByteSize() > onnx.checker.MAXIMUM_PROTOBUF - 2**20
    onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.data")


def _int8(path: Path) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = path.with_name("quantized.onnx")
    options = {"MatMulConstBOnly": True}
    quantize_dynamic(path, small, ["MatMul"], per_channel=True, weight_type=QuantType.QInt8, extra_options=options)
    model = onnx.load(small)
    small.unlink()
    return model


def _int4(path: Path) -> Any:
    """The head decides which token comes first: it gets twice the bits."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx.load(path)
    heads = {node.name for node in model.graph.node if node.op_type == "MatMul" and "logits" in node.output}
    others = {node.name for node in model.graph.node} - heads
    for bits, left in ((8, others), (4, heads)):
        quantizer = MatMulNBitsQuantizer(
            model, bits=bits, block_size=_BLOCK, is_symmetric=True, accuracy_level=4, nodes_to_exclude=list(left)
        )
        quantizer.process()
        model = quantizer.model.model
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """onnxruntime reports every node, and recommends a preparation that exported graphs have behind them."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
