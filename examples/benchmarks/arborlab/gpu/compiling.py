"""Phase ``compile``: compiles the kernels side by side, so that later phases find them in Triton's cache.

Each process takes its share of the parts. It solves problems once, decodes with whole decoders, and runs a few steps of
model shapes with three layers.
"""

import multiprocessing
import os
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from arborlab.gpu.decoders import decoders
from arborlab.gpu.kernels import makers
from arborlab.gpu.run import described
from arborlab.gpu.setting import Item, Setting
from arborlab.gpu.shapes import ON_GPU, ShapeModels

_PROCESSES = 14  # at most, as each holds some hundred megabytes on the GPU
_MODELS = "transformers.models.llama.modeling_llama"
_ON_CPU = 1  # problem only, as the interpreter compiles nothing


@dataclass(frozen=True)
class CompileRow:
    """One part of the compilation.

    Args:
        seconds: time in its process, including the making of its problem.
        error: message of a part that failed; later phases meet the error again.
    """

    table: ClassVar[str] = "compilation"

    part: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Compiled:
    """The compilation as a whole.

    Args:
        seconds: from the start of the processes to the end of the last one.
        unfinished: parts that the deadline left no time for.
    """

    table: ClassVar[str] = "compilation, all processes"

    processes: int
    parts: int
    failed: int
    unfinished: int
    seconds: float


def compilation(setting: Setting) -> list[Item]:
    """Returns the only item of the phase, which keeps to the deadline itself."""
    return [Item("all parts", partial(_side_by_side, setting))]


def _side_by_side(setting: Setting) -> Iterator[CompileRow | Compiled]:
    begun, context = time.monotonic(), multiprocessing.get_context("forkserver")
    # Once, as imports in all processes take 20 s. The command line comes first, because it finds the laboratory.
    context.set_forkserver_preload(["__main__", "arbordraft.cli.main", __name__, _MODELS])
    count = max(1, min(_PROCESSES, (os.cpu_count() or 1) - 1)) if setting.on_gpu else 1
    total = len(_parts(setting.device, setting.seed))
    answers: Any = context.Queue()
    arguments = (str(setting.device), setting.seed, count, answers)
    processes = [context.Process(target=_share, args=(*arguments, index), daemon=True) for index in range(count)]
    done = failed = 0
    try:
        for process in processes:
            process.start()
        while done < total and setting.seconds_left and (done == 0 or any(map(_alive, processes)) or answers.qsize()):
            try:
                row = CompileRow(*answers.get(timeout=0.2))
            except queue.Empty:
                if not any(map(_alive, processes)):
                    break
                continue
            done, failed = done + 1, failed + bool(row.error)
            if row.error or row.seconds > 5:
                yield row
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(5)
    yield Compiled(count, total, failed, total - done, time.monotonic() - begun)


def _alive(process: Any) -> bool:
    return bool(process.is_alive())


def _share(device: str, seed: int, count: int, answers: Any, index: int) -> None:
    """Runs every ``count``-th part in this process and reports each."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    here = torch.device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    for name, run in _parts(here, seed)[index::count]:
        begun, error = time.monotonic(), ""
        try:
            run()
        except Exception as failure:  # phases that check meet it again
            error = described(failure)
        answers.put((name, time.monotonic() - begun, error))


def _parts(device: torch.device, seed: int) -> Sequence[tuple[str, Callable[[], None]]]:
    """Lists all parts, equally in every process; the slowest parts come first."""
    solved = [(name, partial(_solve, make)) for name, make in makers(device)]
    if device.type == "cpu":
        return solved[:_ON_CPU]
    whole = [(f"decoders, {item.name}", partial(_run, item)) for item in decoders(Setting(device, seed))]
    return [*((f"steps of {name}", partial(_step, name, device, seed)) for name in ON_GPU), *whole, *solved]


def _run(item: Item) -> None:
    for _ in item.run():
        pass


def _solve(make: Callable[[], Iterator[Any]]) -> None:
    for problem in make():
        problem.run()


def _step(name: str, device: torch.device, seed: int) -> None:
    ShapeModels(device, seed, layers=3).get(name).warm_up()
