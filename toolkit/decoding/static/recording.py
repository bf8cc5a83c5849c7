"""CUDA graphs of what always runs on the same buffers."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from arbordraft.kernels import choice
from arbordraft.target.attention import UnsupportedModel

INSTEAD = "build the decoder with buckets=None"
Out = TypeVar("Out")


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


__all__ = ["INSTEAD", "check_kernels", "on", "record"]
