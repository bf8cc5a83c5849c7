"""Reads facts about this machine from the operating system and the environment, with the standard library alone."""

import contextlib
import functools
import os
import platform
from pathlib import Path

ISA_VARIABLE = "ARBORDRAFT_ISA"

_V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}  # names of /proc/cpuinfo
_VNNI = _V3 | {"avx_vnni"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_V4_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_AMX = _V4_BF16 | {"amx_bf16", "amx_tile"}
_NEON = {"asimd"}
_DOT = _NEON | {"asimddp"}
_BF16 = _DOT | {"bf16", "i8mm"}
NEEDED_BY: dict[str, set[str]] = {
    "amx_bf16": _AMX,
    "avx512_bf16": _V4_BF16,
    "avx512": _V4,
    "avx_vnni": _VNNI,
    "avx2": _V3,
    "neon_bf16": _BF16,
    "neon_dot": _DOT,
    "neon": _NEON,
    "native": set(),
    "generic": set(),
    "off": set(),
}
# Files of a container: its limit, its use, and the statistics that name the cached files within its use.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
    ),
)


def chosen_isa() -> str:
    """Returns the instruction set that `$ARBORDRAFT_ISA` names; by default `native`, all that this machine has."""
    isa = os.environ.get(ISA_VARIABLE) or "native"
    if isa not in NEEDED_BY:
        raise ValueError(f"{ISA_VARIABLE} must be one of {', '.join(NEEDED_BY)}, not {isa!r}")
    return isa


def cache_folder() -> Path:
    """Returns the cache folder: `$ARBORDRAFT_CACHE`, or else a folder below `$XDG_CACHE_HOME` or ~/.cache."""
    if chosen := os.environ.get("ARBORDRAFT_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "arbordraft"


def cpu_features() -> set[str]:
    """Returns the features of the first core, as /proc/cpuinfo names them; empty if there is no such file."""
    return {word for name in ("flags", "Features") for word in cpu().get(name, "").split()}


def best_isa() -> str:
    """Returns the name in ``NEEDED_BY`` of the widest instructions that this processor has."""
    return next((isa for isa, needed in NEEDED_BY.items() if needed and needed <= cpu_features()), "generic")


@functools.cache
def cpu() -> dict[str, str]:
    """Returns the lasting facts that the operating system reports about the first core."""
    stable = {"vendor_id", "cpu family", "model", "model name", "flags", "Features"}
    stable |= {"CPU implementer", "CPU part", "CPU variant"}
    fields = {"processor": platform.processor()}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in stable:
                fields[name.strip()] = value.strip()
            elif not line.strip():
                break
    return fields


def cores() -> int | None:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def available_memory() -> int | None:
    """Returns the bytes that machine and container leave to this process; ``None`` if neither reports a number."""
    room = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        room.append(1024 * _field(Path("/proc/meminfo"), "MemAvailable:"))
    for limit, used, statistics in _GROUPS:
        with contextlib.suppress(OSError, ValueError, StopIteration):  # "max" is not a number
            taken = int(Path(used).read_text()) - _field(Path(statistics), "inactive_file")
            room.append(int(Path(limit).read_text()) - taken)
    return max(0, min(room)) if room else None


def _field(path: Path, name: str) -> int:
    """Reads the number that follows ``name`` in a file of names and numbers."""
    return int(next(line.split()[1] for line in path.read_text().splitlines() if line.split()[0] == name))


__all__ = [
    "ISA_VARIABLE",
    "NEEDED_BY",
    "available_memory",
    "best_isa",
    "cache_folder",
    "chosen_isa",
    "cores",
    "cpu",
    "cpu_features",
]
