"""Arrays that stand for tensors of a graph: computing with them records nodes.

The functions have the names and the meaning of numpy's. A definition that runs on numpy and torch alike becomes a graph
when it runs on these arrays. Constants keep every bit, while torch's exporter rounds Python's numbers to float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_EXPONENTS = 128  # of either sign, that frexp supports


class GraphBuilder:
    """Collects the nodes, inputs and constants of a graph."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._inputs: list[Any] = []
        self._constants: dict[tuple[Any, ...], Any] = {}

    def input(self, name: str, dtype: type[np.generic], shape: Sequence[str]) -> "Array":
        """Adds an input, a tensor that is given when the graph is run; its sizes have names."""
        from onnx import helper

        self._inputs.append(helper.make_tensor_value_info(name, _code(np.dtype(dtype)), list(shape)))
        return Array(self, name, np.dtype(dtype), len(shape))

    def constant(self, value: Any, dtype: Any) -> "Array":
        """Adds a constant: a number, or an array of numbers."""
        from onnx import numpy_helper

        array = np.array(value, dtype)
        key = array.dtype, array.shape, array.tobytes()
        if key not in self._constants:
            self._constants[key] = numpy_helper.from_array(array, f"constant_{len(self._constants)}")
        return Array(self, self._constants[key].name, array.dtype, array.ndim)

    def node(
        self, operator: str, *inputs: "Array", dtype: Any = None, rank: int | None = None, **options: Any
    ) -> "Array":
        """Adds an operator; its result has the first input's dtype and the greatest rank by default."""
        from onnx import helper

        name = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, [each.name for each in inputs], [name], name, **options))
        known = max(each.rank for each in inputs) if rank is None else rank
        return Array(self, name, inputs[0].dtype if dtype is None else np.dtype(dtype), known)

    def model(self, outputs: Mapping[str, tuple["Array", Sequence[str]]], opset: int) -> Any:
        """Builds an ``onnx.ModelProto`` that returns these tensors by name; their sizes have names, too."""
        from onnx import helper

        renamed = [helper.make_node("Identity", [array.name], [name], name) for name, (array, _) in outputs.items()]
        shown = [
            helper.make_tensor_value_info(name, _code(array.dtype), list(shape))
            for name, (array, shape) in outputs.items()
        ]
        graph = helper.make_graph([*self._nodes, *renamed], "main", self._inputs, shown, list(self._constants.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _operator(name: str, *, swapped: bool = False, to: Any = None) -> Callable[["Array", Any], "Array"]:
    """Builds a method for two operands, the second of which may be a number; ``to`` is the result's dtype."""

    def method(self: "Array", other: Any) -> "Array":
        first, second = alike(self, other)
        return self.graph.node(name, *((second, first) if swapped else (first, second)), dtype=to)

    return method


class Array:
    """A tensor of a graph.

    Args:
        graph: the graph that it belongs to.
        name: its name in the graph.
        dtype: dtype of its elements.
        rank: number of its axes.
    """

    def __init__(self, graph: GraphBuilder, name: str, dtype: np.dtype[Any], rank: int) -> None:
        self.graph, self.name, self.dtype, self.rank = graph, name, dtype, rank

    __add__ = __radd__ = _operator("Add")
    __sub__, __rsub__ = _operator("Sub"), _operator("Sub", swapped=True)
    __mul__ = __rmul__ = _operator("Mul")
    __truediv__ = __floordiv__ = _operator("Div")  # rounds down integers that are not negative
    __and__, __or__, __xor__ = _operator("BitwiseAnd"), _operator("BitwiseOr"), _operator("BitwiseXor")
    __lt__, __ge__ = _operator("Less", to=bool), _operator("GreaterOrEqual", to=bool)
    __eq__ = _operator("Equal", to=bool)  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> "Array":
        return self.graph.node("Neg", self)

    def __rshift__(self, bits: int) -> "Array":
        return self.graph.node("BitShift", *alike(self, bits), direction="RIGHT")

    def __lshift__(self, bits: int) -> "Array":
        return self.graph.node("BitShift", *alike(self, bits), direction="LEFT")

    def __getitem__(self, place: tuple[slice | None, ...]) -> "Array":
        """Inserts axes of size 1 at the places of ``None``."""
        axes = [axis for axis, what in enumerate(place) if what is None]
        return self.graph.node("Unsqueeze", self, self.graph.constant(axes, np.int64), rank=len(place))

    @property
    def shape(self) -> list["Array"]:
        """The sizes, known only when the graph is run."""
        sizes = self.graph.node("Shape", self, dtype=np.int64, rank=1)
        places = [self.graph.constant(axis, np.int64) for axis in range(self.rank)]
        return [self.graph.node("Gather", sizes, place, rank=0) for place in places]

    def astype(self, dtype: Any) -> "Array":
        return self if self.dtype == dtype else self.graph.node("Cast", self, dtype=dtype, to=_code(np.dtype(dtype)))

    def reshape(self, *sizes: Any) -> "Array":
        parts = [size if isinstance(size, Array) else self.graph.constant(size, np.int64) for size in sizes]
        wanted = self.graph.node("Concat", *(part[None,] for part in parts), axis=0)
        return self.graph.node("Reshape", self, wanted, rank=len(sizes))


def alike(first: Array, second: Any) -> tuple[Array, Array]:
    """Returns two operands of one dtype: a number takes the tensor's, two tensors are promoted as by numpy."""
    if not isinstance(second, Array):
        return first, first.graph.constant(second, first.dtype)
    dtype = np.result_type(first.dtype, second.dtype)
    return first.astype(dtype), second.astype(dtype)


def arange(end: Array, dtype: Any) -> Array:
    """Returns the integers from 0 to below ``end``."""
    graph = end.graph
    return graph.node("Range", graph.constant(0, np.int64), end, graph.constant(1, np.int64), rank=1).astype(dtype)


def columns(array: Array, end: Array) -> Array:
    """Returns the first ``end`` columns of ``[R, C]``."""
    first, axis = (array.graph.constant([number], np.int64) for number in (0, 1))
    return array.graph.node("Slice", array, first, end[None,], axis)


def first_maximum(array: Array) -> tuple[Array, Array]:
    """Returns the ``[R]`` first places of the maxima of ``[R, C]``, and the maxima."""
    node, axes = array.graph.node, array.graph.constant([1], np.int64)
    place = node("ArgMax", array, dtype=np.int64, rank=1, axis=1, keepdims=0, select_last_index=0)
    return place, node("ReduceMax", array, axes, rank=1, keepdims=0)


def where(condition: Array, first: Any, second: Any) -> Array:
    """Returns the first where the condition holds, else the second; one of them may be a number."""
    first, second = alike(first, second) if isinstance(first, Array) else alike(second, first)[::-1]
    return condition.graph.node("Where", condition, first, second, dtype=first.dtype)


def minimum(first: Array, second: Any) -> Array:
    """Returns the minimum of every two elements."""
    return first.graph.node("Min", *alike(first, second))


def stack(arrays: Sequence[Array]) -> Array:
    """Stacks arrays of one shape on a new first axis."""
    return arrays[0].graph.node("Concat", *(each[None, *[slice(None)] * each.rank] for each in arrays), axis=0)


def moveaxis(array: Array, source: int, destination: int) -> Array:
    """Moves one axis to another place among the others."""
    axes = [axis for axis in range(array.rank) if axis != source]
    axes.insert(destination, source)
    return array.graph.node("Transpose", array, perm=axes)


def frexp(x: Array) -> tuple[Array, Array]:
    """Splits x into m in [1/2, 1) and an integer e, so that x is ``m * 2**e``.

    A logarithm finds e, or an integer next to it, however a library rounds; the rest is exact.

    Args:
        x: numbers from 2**-127 to 2**127.
    """
    graph = x.graph
    exponent = graph.node("Floor", graph.node("Log", x) * (1 / np.log(2))).astype(np.int64) + 1
    powers = graph.constant(np.ldexp(1.0, np.arange(_EXPONENTS, -_EXPONENTS - 1, -1)), x.dtype)
    m = x * graph.node("Gather", powers, exponent + _EXPONENTS, rank=x.rank)
    large, small = m >= 1.0, m < 0.5
    m = where(large, m * 0.5, where(small, m + m, m))
    return m, where(large, exponent + 1, where(small, exponent - 1, exponent))


def _code(dtype: np.dtype[Any]) -> int:
    from onnx import helper

    return int(helper.np_dtype_to_tensor_dtype(dtype))
