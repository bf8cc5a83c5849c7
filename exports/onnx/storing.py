"""Writes graphs to files in which weights take no more bytes than where they came from."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

_LEAST = 4096  # values of a weight that is worth a node more


def save(model: Any, path: Path) -> None:
    """Writes a model, with its weights in a second file if one file cannot hold them."""
    import onnx

    weights = sum(tensor.ByteSize() for tensor in model.graph.initializer)
    external = weights > onnx.checker.MAXIMUM_PROTOBUF - 2**24
    onnx.save(model, path, save_as_external_data=external, location=f"{path.name}.data")


def compact(path: Path) -> None:
    """Stores the float32 weights of a graph's file in the narrowest type that holds their values, and each once.

    Weights of a checkpoint in bfloat16 or float16 get a cast, and a matrix that is another one's transpose gets that
    operator. Runtimes compute both when they load the graph, so outputs and speed stay the same.
    """
    import onnx

    model = onnx.load(path)
    graph = model.graph
    stored: dict[bytes, str] = {}  # digests of matrices -> names
    first = []
    for tensor in list(graph.initializer):
        if tensor.data_type != onnx.TensorProto.FLOAT or numpy.prod(tensor.dims) < _LEAST:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        twin = stored.get(_digest(values.T)) if values.ndim == 2 else None
        if twin is not None:
            graph.initializer.remove(tensor)
            first.append(onnx.helper.make_node("Transpose", [twin], [tensor.name], f"{tensor.name}.transpose"))
            continue
        if values.ndim == 2:
            stored[_digest(values)] = tensor.name
        narrow = _narrow(values)
        if narrow is None:
            continue
        name, cast = tensor.name, f"{tensor.name}.stored"
        tensor.CopyFrom(onnx.helper.make_tensor(cast, narrow[0], tensor.dims, narrow[1].tobytes(), raw=True))
        first.append(onnx.helper.make_node("Cast", [cast], [name], f"{name}.cast", to=onnx.TensorProto.FLOAT))
    nodes = [*first, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    save(model, path)


def _digest(values: NDArray[Any]) -> bytes:
    return sha256(repr(values.shape).encode() + numpy.ascontiguousarray(values).tobytes()).digest()


def _narrow(values: NDArray[Any]) -> tuple[int, NDArray[Any]] | None:
    """Returns a type of 16 bits, as ONNX numbers it, and the values in it; ``None`` if none holds them exactly."""
    import onnx

    bits = numpy.ascontiguousarray(values).view(numpy.uint32)
    if not (bits & 0xFFFF).any():
        return onnx.TensorProto.BFLOAT16, (bits >> 16).astype("<u2")
    with numpy.errstate(over="ignore"):
        half = values.astype("<f2")
    if numpy.array_equal(half.astype(numpy.float32).view(numpy.uint32), bits):
        return onnx.TensorProto.FLOAT16, half
    return None
