"""Steps that always run on the same buffers; on a GPU they are recorded as CUDA graphs."""

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from arbordraft.decoding.static.cache import Memory
from arbordraft.kernels import choice
from arbordraft.target.attention import UnsupportedModel
from arbordraft.utils.table import Table

INSTEAD = "build the decoder with buckets=None"
_MOST = 32  # recordings of a decoder; each has buffers and perhaps a graph
_RECOMPILE_LIMIT = 128
Fill = Callable[[Tensor], object]  # writes into a table on the host
Out = TypeVar("Out")


class FixedStep(Protocol):
    """A step of fixed shapes that never asks the host.

    Attributes:
        bucket: the shapes of the table of inputs that change from step to step.
        operator: name of the step among the kernels.
        title: description of the step for messages.
    """

    @property
    def bucket(self) -> Table: ...

    @property
    def operator(self) -> str: ...

    @property
    def title(self) -> str: ...

    def __call__(self, table: Tensor, inputs: Tensor, memory: Memory) -> Any:
        """Runs the step on a table, its other inputs, and the memory of its caches."""


class Recording:
    """A step with its input buffers, which never move; on a GPU it is recorded as a CUDA graph.

    Args:
        step: the step.
        inputs: the step's inputs besides its table, on its device.
        compiler: backend of ``torch.compile``; by default the step is not compiled.
        graphs: memory pool that graphs share; ``None`` if nothing is recorded.
    """

    def __init__(self, step: FixedStep, inputs: Tensor, compiler: str | None = None, graphs: Any = None) -> None:
        self.step, self.inputs, self._graphs = step, inputs, graphs
        self._call = step if compiler is None else _compiled(step, compiler)
        self._host = torch.zeros(step.bucket.size, dtype=torch.int64, pin_memory=inputs.device.type == "cuda")
        self._table = torch.zeros(step.bucket.size, dtype=torch.int64, device=inputs.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Any = None
        self._places: tuple[int, ...] = ()  # addresses of the memory that the graph was recorded with
        self._addresses: object = None

    def __call__(self, memory: Memory, fill: Fill, idle: Fill | None = None) -> Any:
        """Uploads the table, runs the step and returns its result, which the next run overwrites.

        Args:
            memory: memory of the step's caches.
            fill: writes the table and the inputs.
            idle: writes a table for recording, with which the step changes no row in use; ``fill`` by default.

        Raises:
            ValueError: if the chosen kernels cannot do without the host.
        """
        check_kernels(self.step.operator, self._table)
        if self._graphs is not None and self._places != memory.addresses:
            self._upload(idle or fill)
            self.record(memory)
            self._places = memory.addresses
        self._upload(fill)
        if self._graph is None:
            return self._run(memory)
        self._graph.replay()
        return self._out

    @property
    def recorded(self) -> bool:
        """Whether runs overwrite the results of earlier runs."""
        return self._graph is not None

    def record(self, memory: Memory) -> None:
        """Records the step on memory at its current addresses."""
        from arbordraft.kernels.kv_cache.triton import address_table

        addresses = address_table(list(memory.rows)) if memory.rows else None
        self._graph, self._out = record(lambda: self._run(memory), self._graphs, self.step.title)
        self._addresses = addresses  # the graph reads them

    def _upload(self, fill: Fill) -> None:
        fill(self._host)
        self._table.copy_(self._host, non_blocking=True)

    def _run(self, memory: Memory) -> Any:
        with torch.no_grad():
            return self._call(self._table, self.inputs, memory)


class Recorder:
    """The most recently used recordings of a decoder, which run one at a time and share their memory.

    Args:
        compiler: backend of ``torch.compile``; by default steps are not compiled.

    Attributes:
        recordings: recordings by key, the least recently used one first.
    """

    def __init__(self, compiler: str | None = None) -> None:
        self.compiler = compiler
        self.recordings: dict[Hashable, Recording] = {}
        self.memory: Any = None
        self._lock = threading.RLock()

    def reset(self, device: torch.device) -> None:
        """Drops all recordings, compiled code included."""
        with self._lock:
            self.recordings.clear()
            self.memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Gives the caller exclusive use of all recordings until it has downloaded its result."""
        with self._lock, on(device):
            yield

    def recording(self, key: Hashable, make: Callable[[], tuple[FixedStep, Tensor]]) -> Recording:
        """Returns the recording of a step; if there is none, ``make`` builds the step and its inputs."""
        found = self.recordings.pop(key, None) or Recording(*make(), self.compiler, self.memory)
        self.recordings[key] = found
        if len(self.recordings) > _MOST:
            del self.recordings[next(iter(self.recordings))]
        return found


def _compiled(step: FixedStep, backend: str) -> Callable[..., Any]:
    """Compiles a step with ``torch.compile`` as a single graph."""
    found = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)

    def call(*inputs: Any) -> Any:
        # All steps share their code, and so one limit on recompilations, each of which is intended.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return found(*inputs)

    return call


def on(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU current while it records and replays, since it need not be torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_kernels(operator: str, tensor: Tensor) -> None:
    """Raises ValueError if the kernels that run on a tensor's device would ask the host; counts the call."""
    if not choice.uses_triton(operator, tensor) and tensor.is_cuda:
        raise ValueError(f"without Triton a step asks the host: use kernels 'auto' or 'triton', or {INSTEAD}")


def record(run: Callable[[], Out], memory: Any, title: str) -> tuple[torch.cuda.CUDAGraph, Out]:
    """Records a call that reads and writes the same buffers in every run.

    Other threads may go on using the GPU meanwhile.

    Args:
        run: the call. It runs three times, so repeated runs must not change the outcome.
        memory: memory pool that is shared by graphs which never run at once. It lives as long as one of its graphs. A
            caller that renews a graph must therefore keep the old one until the new one exists.
        title: description of the call for messages.

    Returns:
        The graph and the result of the call, which every replay overwrites.

    Raises:
        UnsupportedModel: if no graph can hold the call, for example because it asks the host.
    """
    try:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # compiles kernels and fills caches, which cannot be recorded
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            out = run()
    except RuntimeError as failure:
        raise UnsupportedModel(f"{title} cannot be recorded as a CUDA graph ({failure}): {INSTEAD}") from failure
    return graph, out


__all__ = ["INSTEAD", "Recorder", "Recording", "check_kernels", "on", "record"]
