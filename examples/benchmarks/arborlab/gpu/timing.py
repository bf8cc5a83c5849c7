"""Times calls on a GPU: medians of CUDA graphs, without the host's share, with a cold L2 cache."""

import os
import sys
from collections.abc import Callable
from importlib.util import find_spec

import torch

from arbordraft.kernels.choice import INTERPRETER, interpreted
from arbordraft.utils.errors import UserError

COPIED = 1 << 30  # bytes of the copy that measures the bandwidth
MULTIPLIED = 8192  # rows of the matrices that measure the throughput


def device(wanted: str | None = None) -> torch.device:
    """Chooses the device of kernels: a GPU, or a CPU with Triton's interpreter, which it switches on if necessary.

    Args:
        wanted: ``cuda``, ``cuda:1``, which becomes torch's current device, or ``cpu``; by default a GPU if torch sees
            one.

    Raises:
        ImportError: if Triton is not installed.
        UserError: if the GPU is missing, or Triton was imported already without its interpreter.
    """
    if find_spec("triton") is None:
        raise ImportError("these are Triton kernels; run: pip install 'arbordraft[triton]'")
    gpu = torch.cuda.is_available()
    if wanted is not None and wanted.startswith("cuda"):
        if not gpu:
            raise UserError(f"torch sees no GPU: use --device cpu, or install a build of torch that finds {wanted}")
        if interpreted():
            raise UserError(f"{INTERPRETER}=1 runs kernels on the CPU: unset it to use {wanted}")
        torch.cuda.set_device(torch.device(wanted).index or 0)
        return torch.device("cuda", torch.cuda.current_device())
    if wanted is None and gpu and not interpreted():
        return torch.device("cuda", torch.cuda.current_device())
    if not interpreted():
        if "triton" in sys.modules:
            raise UserError(f"on a CPU Triton runs in its interpreter only: set {INTERPRETER}=1 before Python starts")
        os.environ[INTERPRETER] = "1"
    return torch.device("cpu")


class Stopwatch:
    """Times calls on a GPU, spending ``milliseconds`` on each, and measures the GPU's bandwidth and throughput.

    Attributes:
        bandwidth: of a large copy, bytes read and written per second.
        throughput: of a large product of bfloat16 matrices, operations per second.
        least: seconds of a kernel that does nothing.
    """

    def __init__(self, milliseconds: float = 50) -> None:
        self.milliseconds = milliseconds
        source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
        self.bandwidth = 2 * COPIED / self.seconds(lambda: target.copy_(source))
        a, b, c = (torch.randn(MULTIPLIED, MULTIPLIED, device="cuda").bfloat16() for _ in range(3))
        self.throughput = 2 * MULTIPLIED**3 / self.seconds(lambda: torch.mm(a, b, out=c))
        number = torch.zeros(1, device="cuda")
        self.least = self.seconds(lambda: number.zero_())

    def seconds(self, run: Callable[[], object]) -> float:
        """Returns the median time of a call that finds nothing in the L2 cache."""
        from triton.testing import do_bench

        return 1e-3 * do_bench(captured(run), warmup=self.milliseconds / 4, rep=self.milliseconds, return_mode="median")


def captured(run: Callable[[], object]) -> Callable[[], object]:
    """Captures a call as a CUDA graph, after runs that compile its kernels; returns the graph's replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
