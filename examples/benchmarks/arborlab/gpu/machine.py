"""Phase ``machine``: versions, the device, its ceilings, and the time that launches take on the host."""

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

import torch

from arbordraft.kernels import choice
from arbordraft.kernels.fused_layers import rms_norm
from arborlab.gpu.setting import Item, Setting
from arborlab.gpu.timing import captured

_CALLS = 1000  # launches of a timing
_LOOP = 1_000_000  # turns of the loop that times the host


@dataclass(frozen=True)
class Figure:
    """One fact about the machine; ``None`` where there is no GPU to measure."""

    table: ClassVar[str] = "machine"

    figure: str
    value: str | float | None
    unit: str = ""


def machine(setting: Setting) -> list[Item]:
    """Returns the items of the phase."""
    parts = {"versions": _versions, "host": _host, "device": _device, "ceilings": _ceilings, "launches": _launches}
    return [Item(name, partial(part, setting)) for name, part in parts.items()]


def _versions(setting: Setting) -> Iterator[Figure]:
    for name in ("arbordraft", "torch", "triton", "transformers"):
        try:
            yield Figure(name, version(name))
        except PackageNotFoundError:
            yield Figure(name, None)
    yield Figure("python", platform.python_version())
    yield Figure("cuda", torch.version.cuda)


def _host(setting: Setting) -> Iterator[Figure]:
    def turn() -> float:
        begun, total = time.perf_counter(), 0
        for number in range(_LOOP):
            total += number
        return time.perf_counter() - begun

    yield Figure("a turn of a Python loop", min(turn() for _ in range(3)) / _LOOP * 1e9, "ns")
    yield Figure("CPU cores", float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))


def _device(setting: Setting) -> Iterator[Figure]:
    if not setting.on_gpu:
        yield Figure("device", None)
        return
    about = torch.cuda.get_device_properties(setting.device)
    yield Figure("device", about.name)
    yield Figure("memory", about.total_memory / 1e9, "GB")
    yield Figure("multiprocessors", float(about.multi_processor_count))
    yield Figure("compute capability", f"{about.major}.{about.minor}")
    yield Figure("driver", _driver())


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0]


def _ceilings(setting: Setting) -> Iterator[Figure]:
    watch = setting.watch
    found = (None,) * 3 if watch is None else (watch.bandwidth / 1e9, watch.throughput / 1e12, watch.least * 1e6)
    names = {"copy of 1 GiB": "GB/s", "bfloat16 product of 8192 x 8192": "TFLOP/s", "shortest kernel": "us"}
    for (name, unit), value in zip(names.items(), found, strict=True):
        yield Figure(name, value, unit)


def _launches(setting: Setting) -> Iterator[Figure]:
    """Yields the host's time per launch, without waiting for the GPU."""
    names = ("launch of an empty kernel of torch", "launch of a kernel of Triton", "replay of a graph")
    if not setting.on_gpu:
        yield from (Figure(name, None, "us") for name in names)
        return
    number = torch.zeros(1, device=setting.device)
    row, weight = (torch.ones(1, 64, device=setting.device) for _ in range(2))
    norm = partial(rms_norm, row, weight[0], 1e-6)
    calls: tuple[Callable[[], object], ...] = (number.zero_, norm, captured(number.zero_))
    with choice.use("triton"):
        for name, run in zip(names, calls, strict=True):
            yield Figure(name, _host_us(run), "us")


def _host_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(_CALLS // 5):  # as many as the GPU's queue holds
            run()
        times.append((time.perf_counter() - begun) / (_CALLS // 5))
    torch.cuda.synchronize()
    return sorted(times)[2] * 1e6
