"""Steps that always run on the same buffers: recorded as CUDA graphs where there is a GPU."""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.target.attention import UnsupportedModel
from arbordraft.utils.table import Table

INSTEAD = "build the decoder with buckets=None"
_MOST = 32  # recordings of a decoder: each has buffers and perhaps a graph
_RECOMPILE_LIMIT = 128
Pools = Sequence[Tensor]  # keys and values of layer 0, of layer 1, ...: [P, Hkv, D] each
Fill = Callable[[Tensor], object]  # writes into a table on the host
Out = TypeVar("Out")


class FixedStep(Protocol):
    """A step of fixed shapes, which never asks the host.

    Attributes:
        bucket: the shapes of the table that says what is different this time.
        operator: its name among the kernels.
        title: what it is, for people.
    """

    @property
    def bucket(self) -> Table: ...

    @property
    def operator(self) -> str: ...

    @property
    def title(self) -> str: ...

    def __call__(self, table: Tensor, inputs: Tensor, pools: Pools) -> Any:
        """Runs it on a table, what it reads besides, and the pools of a cache."""


class Recording:
    """A step with the buffers that it reads, which stay where they are; on a GPU recorded as a CUDA graph.

    Args:
        step: the step.
        inputs: what it reads besides its table, on its device.
        compiler: backend of ``torch.compile``; by default it runs as it is.
        memory: what graphs share; ``None`` where nothing is recorded.
    """

    def __init__(self, step: FixedStep, inputs: Tensor, compiler: str | None = None, memory: Any = None) -> None:
        self.step, self.inputs, self._memory = step, inputs, memory
        self._call = step if compiler is None else _compiled(step, compiler)
        self._host = torch.zeros(step.bucket.size, dtype=torch.int64, pin_memory=inputs.device.type == "cuda")
        self._table = torch.zeros(step.bucket.size, dtype=torch.int64, device=inputs.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._out: Any = None
        self._places: tuple[int, ...] = ()  # of the pools that it was recorded with
        self._addresses: object = None

    def __call__(self, pools: Pools, fill: Fill, idle: Fill | None = None) -> Any:
        """Runs the step: an upload, the step, and what there is to download, which the next run overwrites.

        Args:
            pools: of the cache.
            fill: writes the table, and the inputs.
            idle: writes a table with which recording changes no row that counts; by default ``fill`` does.

        Raises:
            ValueError: if the chosen kernels cannot do without the host.
        """
        check_kernels(self.step.operator, self._table)
        places = tuple(pool.data_ptr() for pool in pools)
        if self._memory is not None and self._places != places:
            self._upload(idle or fill)
            self.record(pools)
            self._places = places
        self._upload(fill)
        if self._graph is None:
            return self._run(pools)
        self._graph.replay()
        return self._out

    @property
    def recorded(self) -> bool:
        """Whether runs overwrite what earlier ones returned."""
        return self._graph is not None

    def record(self, pools: Pools) -> None:
        """Records the step on the pools as they lie now."""
        from arbordraft.kernels.kv_cache.triton import address_table

        addresses = address_table(list(pools))
        self._graph, self._out = record(lambda: self._run(pools), self._memory, self.step.title)
        self._addresses = addresses  # the graph reads them

    def _upload(self, fill: Fill) -> None:
        fill(self._host)
        self._table.copy_(self._host, non_blocking=True)

    def _run(self, pools: Pools) -> Any:
        with torch.no_grad():
            return self._call(self._table, self.inputs, pools)


class Recorder:
    """The recordings of a decoder, those that were used last; they run one at a time and share their memory.

    Args:
        compiler: backend of ``torch.compile``; by default steps run as they are.

    Attributes:
        recordings: by what tells them apart, the one least recently used first.
    """

    def __init__(self, compiler: str | None = None) -> None:
        self.compiler = compiler
        self.recordings: dict[Hashable, Recording] = {}
        self.memory: Any = None
        self._lock = threading.RLock()

    def reset(self, device: torch.device) -> None:
        """Forgets what was recorded and compiled."""
        with self._lock:
            self.recordings.clear()
            self.memory = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @contextmanager
    def turn(self, device: torch.device) -> Iterator[None]:
        """Whoever runs a recording has all of them for itself until it has downloaded what came out."""
        with self._lock, on(device):
            yield

    def recording(self, key: Hashable, make: Callable[[], tuple[FixedStep, Tensor]]) -> Recording:
        """The recording of a step; ``make`` returns the step and its inputs if there is none."""
        found = self.recordings.pop(key, None) or Recording(*make(), self.compiler, self.memory)
        self.recordings[key] = found
        if len(self.recordings) > _MOST:
            del self.recordings[next(iter(self.recordings))]
        return found


def _compiled(step: FixedStep, backend: str) -> Callable[..., Any]:
    """A step through ``torch.compile``, in one piece."""
    found = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)

    def call(*inputs: Any) -> Any:
        # The limit is one for all steps together, as they share their code; each of them is traced for good reason.
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT):
            return found(*inputs)

    return call


def on(device: torch.device) -> AbstractContextManager[object]:
    """Records and replays on a GPU that need not be torch's current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def check_kernels(operator: str, tensor: Tensor) -> None:
    """Raises ValueError if the kernels that run on a tensor's device would ask the host; counts what runs."""
    if not choice.wants_triton(operator, tensor) and tensor.is_cuda:
        raise ValueError(f"without Triton a step asks the host: use kernels 'auto' or 'triton', or {INSTEAD}")


def record(run: Callable[[], Out], memory: Any, what: str) -> tuple[torch.cuda.CUDAGraph, Out]:
    """Records a call that reads and writes the same buffers whenever it runs.

    Other threads may go on using the GPU meanwhile.

    Args:
        run: the call; it runs three times, so that once more must make no difference.
        memory: what graphs share that never run at once. It lives as long as some graph does: whoever makes a graph
            anew keeps the old one until the new one is there.
        what: for people.

    Returns:
        The graph and what the call returned, which every replay overwrites.

    Raises:
        UnsupportedModel: if the call does what no graph can, such as to ask the host.
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
        raise UnsupportedModel(f"{what} cannot be recorded as a CUDA graph ({failure}): {INSTEAD}") from failure
    return graph, out


__all__ = ["INSTEAD", "Pools", "Recorder", "Recording", "check_kernels", "on", "record"]
