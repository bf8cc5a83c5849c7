"""A pretended GPU: its tensors say ``cuda:0`` but compute on the CPU; crossings between the two are counted.

An operator that mixes tensors of the host and the device raises, as on a GPU. Operations that make a host wait for a
GPU count as crossings. These are uploads, downloads, numbers that the host reads, indices from the host, and shapes
that depend on data. Each crossing is counted by the line of our code that caused it.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_ATEN = torch.ops.aten
_COPIES = {_ATEN.copy_.default, _ATEN._to_copy.default}
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default, _ATEN._unsafe_index.Tensor}
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
DEVICE = torch.device("cuda:0")
MEMORY = 2**22


class OnDevice(Tensor):
    """A tensor of the device; ``host`` is the tensor that computes."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnDevice":
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device="meta",
            requires_grad=False,
        )
        made.host = host
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.host})"

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(operator, args, kwargs or {})


class Counts:
    """Crossings since :meth:`clear` by kind and line, and operators that the device ran, without views."""

    def __init__(self) -> None:
        self.crossings: Counter[tuple[str, str]] = Counter()
        self.operators: Counter[str] = Counter()

    def clear(self) -> None:
        self.crossings.clear()
        self.operators.clear()

    @property
    def launches(self) -> int:
        return self.operators.total()

    @property
    def total(self) -> int:
        return self.crossings.total()


COUNTS = Counts()


def _note(kind: str) -> None:
    COUNTS.crossings[kind, _line()] += 1


def _line() -> str:
    """Returns the innermost line of our code."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        for folder in ("/toolkit/", "/kernels/", "/arbordraft/"):
            if folder in name and "/site-packages/torch" not in name and "/site-packages/transformers" not in name:
                return f"{name.rpartition(folder)[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


def _computed(operator: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = _tensors((args, kwargs), [])
    ours = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    plain = [tensor for tensor in tensors if not isinstance(tensor, OnDevice) and tensor.dim()]
    wanted, first = kwargs.get("device"), args[0] if args else None
    to_device = bool(ours) if wanted is None else torch.device(wanted).type in ("cuda", "meta")
    if operator is _ATEN._local_scalar_dense.default and ours:
        _note("asked")
    elif operator in _COPIES and (bool(ours) != to_device or (ours and plain)):
        _note("download" if (ours and not to_device) or (plain and first is plain[0]) else "upload")
    elif operator in _INDEXED and ours:
        if plain:
            _note("index")
        if any(index is not None and index.dtype is torch.bool for index in args[1]):
            _note("mask")
    elif ours and _waits(operator):
        _note(operator.overloadpacket.__name__)
    elif ours and plain:
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, at {_line()}")
    if ours and operator.namespace != "prim" and not _is_view(operator):
        COUNTS.operators[operator.overloadpacket.__name__] += 1
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = _on_host((args, kwargs))
    if operator.namespace == "arbordraft":  # other overloads may run C++ kernels on a CPU, which accept less
        operator = getattr(operator.overloadpacket, "portable", operator)
    if operator is _ATEN.histc.default and not args[0].is_floating_point():  # a CPU has no histogram of integers
        found = operator(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
    else:
        found = operator(*args, **kwargs)
    if _writes(operator):
        return first  # the tensor that was changed in place
    if not to_device:
        return found
    return _changed(Tensor, lambda out: out if isinstance(out, OnDevice) else OnDevice(out), found)


# Schemas are slow to read: once per operator, not per call.


@cache
def _waits(operator: Any) -> bool:
    """Returns whether the host waits for the numbers of a result, or for its shape."""
    return bool(_WAITS & set(operator.tags))


@cache
def _writes(operator: Any) -> bool:
    """Returns whether an operator changes its first argument."""
    returns = operator._schema.returns
    return bool(returns) and returns[0].alias_info is not None and returns[0].alias_info.is_write


@cache
def _is_view(operator: Any) -> bool:
    """Returns whether an operator launches no work: it views a tensor, or allocates memory."""
    returns = operator._schema.returns
    aliases = bool(returns) and returns[0].alias_info is not None and not _writes(operator)
    return aliases or operator.overloadpacket.__name__ in ("empty", "new_empty", "empty_like", "_unsafe_view")


def _tensors(values: Any, found: list[Tensor]) -> list[Tensor]:
    """Collects the tensors of arguments; pytree would take most of the time for a hundred thousand operators."""
    if isinstance(values, Tensor):
        found.append(values)
    elif type(values) in (tuple, list):
        for value in values:
            _tensors(value, found)
    elif type(values) is dict:
        for value in values.values():
            _tensors(value, found)
    elif isinstance(values, tuple):  # a named tuple
        found += [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return found


def _changed(kind: type, change: Callable[[Any], Any], values: Any) -> Any:
    """Returns the values, with the values of a type changed."""
    if isinstance(values, kind):
        return change(values)
    if type(values) in (tuple, list):
        return type(values)([_changed(kind, change, value) for value in values])
    if type(values) is dict:
        return {name: _changed(kind, change, value) for name, value in values.items()}
    return tree_map_only(kind, change, values) if isinstance(values, tuple) else values


def _on_host(values: Any) -> Any:
    return _changed(OnDevice, lambda value: value.host, values)


class _Operators(TorchDispatchMode):
    """Catches operators on tensors of the host alone, such as factories."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(operator, args, kwargs or {})


def _names_device(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")


class _Names(TorchFunctionMode):
    """Catches calls that name the GPU, for which torch would look for a driver."""

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        first = args[0] if args else None
        if name in ("tolist", "numpy") and isinstance(first, OnDevice):
            _note("download")
            return function(first.host)
        if name in ("__getitem__", "__setitem__") and isinstance(first, OnDevice):
            args = (first, _index(args[1]), *args[2:])
        kwargs.pop("pin_memory", None)
        place = kwargs.get("device")
        if place is None and name == "to":
            place = next((value for value in args[1:] if isinstance(value, str | torch.device)), None)
        if not _names_device(place):
            return function(*args, **kwargs)
        if isinstance(first, OnDevice) and name == "to":
            kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking")}
            types_of = [value for value in args[1:] if isinstance(value, torch.dtype)]
            return function(first, *types_of, **kwargs) if types_of or kwargs else first
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        args = tuple(torch.device("cpu") if _names_device(value) else value for value in args)
        if name in ("to", "tensor", "as_tensor"):
            _note("upload")
        COUNTS.operators[name] += 1
        made = function(*_on_host(args), **kwargs)
        return made if isinstance(made, OnDevice) else OnDevice(made.clone() if made is first else made)


def _index(index: Any) -> Any:
    """Converts lists of numbers to tensors, as torch does."""

    def one(part: Any) -> Any:
        return torch.tensor(list(part), dtype=torch.int64) if isinstance(part, list | range) else part

    return tuple(map(one, index)) if isinstance(index, tuple) else one(index)


def moved(module: nn.Module) -> Any:
    """Moves the parameters and buffers of a module to the device."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and not isinstance(parameter, OnDevice):
                part._parameters[name] = nn.Parameter(OnDevice(parameter.data), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and not isinstance(buffer, OnDevice):
                part._buffers[name] = OnDevice(buffer)
    return module


class _Graph:
    """Runs a recorded function again, into the buffers of the recording."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self.run = run
        self.out = run()

    def replay(self) -> None:
        for kept, new in zip(tree_leaves(self.out), tree_leaves(self.run()), strict=True):
            kept.copy_(new)


@contextmanager
def pretended_gpu() -> Iterator[Counts]:
    """Lets torch see one GPU, which computes all calls that name it; yields the counts.

    A module that moves there is moved in place, as usual.
    """
    from arbordraft.decoding.static import recording
    from arbordraft.kernels import choice

    def record(run: Callable[[], Any], memory: Any, what: str) -> tuple[_Graph, Any]:
        run()
        graph = _Graph(run)
        return graph, graph.out

    def to(module: nn.Module, *places: Any, **options: Any) -> nn.Module:
        return moved(module) if any(map(_names_device, places)) else plainly(module, *places, **options)

    plainly = nn.Module.to
    COUNTS.clear()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            patch.setattr(torch.cuda, name, lambda index: 0)
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(torch.cuda, "mem_get_info", lambda *_: (MEMORY, MEMORY))
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(nn.Module, "to", to)
        patch.setattr(choice, "installed", lambda: True)
        patch.setattr(recording, "record", record)
        patch.setattr("arbordraft.kernels.kv_cache.triton.address_table", lambda pools: None)
        stack.enter_context(_Names())
        stack.enter_context(_Operators())
        yield COUNTS
