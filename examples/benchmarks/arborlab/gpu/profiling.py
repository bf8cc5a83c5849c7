"""Phase ``profile``: launches, largest kernels, gaps and synchronisations of one recorded step."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from arborlab.gpu.setting import Item, Setting
from arborlab.gpu.shapes import ON_GPU, Decode, ShapeModels

_STEPS = 8
_KERNELS = 8  # largest kernels that are listed
_NAME = 90  # characters of a kernel's name
_CALLS = (
    "cudaGraphLaunch", "cudaLaunchKernel", "cuLaunchKernelEx", "cuLaunchKernel", "cudaMemcpyAsync",
    "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaEventRecord",
)  # fmt: skip


@dataclass(frozen=True)
class ProfileRow:
    """One figure of a recorded step; ``None`` without a GPU.

    Args:
        figure: name of the counted event or of a kernel.
        per_step: number of events in a step, or the figure itself.
        us: microseconds of the events in a step.
        share: share of the step's time.
    """

    model: str
    figure: str
    per_step: float | None = None
    us: float | None = None
    share: float | None = None

    @property
    def table(self) -> str:
        """Title of its table."""
        return f"a recorded step of {self.model}"


def profiles(setting: Setting) -> list[Item]:
    """Returns the items of the phase."""
    models = ShapeModels(setting.device, setting.seed)
    names = ON_GPU[:2] if setting.on_gpu else ("tiny",)
    return [Item(name, partial(_step, models, name, setting)) for name in names]


def _step(models: ShapeModels, name: str, setting: Setting) -> Iterator[ProfileRow]:
    model = models.get(name)
    decode, layers = model.by(model.plain()), model.model.config.num_hidden_layers
    decode(3)
    step = 1e3 * decode(_STEPS + 8).ms
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    counts, times = events(decode, _STEPS, activities)
    if not setting.on_gpu:
        yield ProfileRow(name, "operators of torch on the host", sum(counts.values()) / _STEPS)
        for figure in ("milliseconds", "launches of kernels", "launches of kernels per layer", "gaps", *_CALLS):
            yield ProfileRow(name, figure)
        return
    on_gpu = {event: count for event, count in counts.items() if event.startswith("gpu: ")}
    launches, busy = sum(on_gpu.values()) / _STEPS, sum(times[event] for event in on_gpu) / _STEPS
    yield ProfileRow(name, "step", 1, step, 1.0)
    yield ProfileRow(name, "launches of kernels and copies", launches, busy, busy / step)
    yield ProfileRow(name, "launches of kernels and copies per layer", launches / layers)
    yield ProfileRow(name, "gaps, in which the GPU waits", None, step - busy, 1 - busy / step)
    for call in _CALLS:
        yield ProfileRow(name, call, counts[f"cpu: {call}"] / _STEPS, times[f"cpu: {call}"] / _STEPS)
    for event, us in Counter({event: times[event] for event in on_gpu}).most_common(_KERNELS):
        kernel = event.removeprefix("gpu: ")[:_NAME]
        yield ProfileRow(name, kernel, counts[event] / _STEPS, us / _STEPS, us / _STEPS / step)


def events(
    decode: Decode, steps: int, activities: Sequence[ProfilerActivity]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns counts and microseconds of the events of some steps, by device and name, without those of the prompt."""
    counts, times = defaultdict[str, float](float), defaultdict[str, float](float)
    for sign, tokens in ((-1, 2), (1, 2 + steps)):
        with profile(activities=activities) as profiler:
            decode(tokens)
            if ProfilerActivity.CUDA in activities:
                torch.cuda.synchronize()
        for event in profiler.events() or ():
            there = event.device_type.name == "CUDA"
            name = f"{'gpu' if there else 'cpu'}: {event.name}"
            counts[name] += sign
            times[name] += sign * (event.device_time_total if there else event.cpu_time_total)
    return counts, times
