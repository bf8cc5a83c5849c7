"""The phases of ``arbordraft bench gpu``, in their order; each imports its module only when it begins."""

from arbordraft.bench.gpu.run import Planned

_HERE = "arbordraft.bench.gpu"

PHASES = {
    "machine": Planned(f"{_HERE}.machine:machine", weight=1),
    "compile": Planned(f"{_HERE}.compiling:compilation", weight=4, interpreted=True),
    "kernels": Planned(f"{_HERE}.kernels:checks", weight=4, checks=True, interpreted=True),
    "decoders": Planned(f"{_HERE}.decoders:decoders", weight=4, checks=True),
    "roofline": Planned(f"{_HERE}.kernels:bounds", weight=3),
    "steps": Planned(f"{_HERE}.steps:steps", weight=7),
    "profile": Planned(f"{_HERE}.profiling:profiles", weight=2),
    "smollm2": Planned(f"{_HERE}.smollm2:smollm2", weight=1.5),
}

__all__ = ["PHASES"]
