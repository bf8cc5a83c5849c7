"""What every measurement is, and what stands beside it in a file."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from arbordraft.bench.workload import Tell, quiet
from arbordraft.files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Measurement:
    """One comparison. Times are medians in milliseconds; the ratio is the median of the pairs' ratios.

    Args:
        group: which question it belongs to.
        case: what was varied.
        ours: time of arbordraft.
        reference: time of what it is compared with.
        ratio: ``ours / reference``, or for decoding the speed-up ``reference / ours``.
        reach: the bound that the project set itself, if any: ``"<= 1.10"``.
        detail: further figures.
    """

    group: str
    case: str
    ours: float
    reference: float
    ratio: float
    reach: str = ""
    detail: str = ""

    @property
    def reached(self) -> bool | None:
        """Whether the bound holds; ``None`` without one."""
        if not self.reach:
            return None
        relation, bound = self.reach.split()
        return self.ratio <= float(bound) if relation == "<=" else self.ratio >= float(bound)


def provenance() -> dict[str, Any]:
    """What a figure needs beside it to be read later."""
    commit = None
    with suppress(OSError, subprocess.CalledProcessError):
        commit = _git("describe", "--always") + ("-dirty" if _git("status", "--porcelain", "-uno") else "")
    return {
        "argv": [Path(argument).name for argument in sys.argv],  # folders are nobody's business
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("arbordraft", "torch", "transformers", "scipy")},
    }


def save(path: Path, measurements: Sequence[Any], **settings: Any) -> None:
    """Writes measurements, which are dataclasses, and their provenance as JSON; it appears when it is complete."""
    rows = []
    for measurement in measurements:
        row = asdict(measurement)
        if isinstance(measurement, Measurement):
            row["reached"] = measurement.reached
        rows.append(row)
    report = {"provenance": provenance(), "settings": settings, "measurements": rows}
    write_text(path, json.dumps(report, indent=2) + "\n")


def paired(
    ours: Callable[[], None], reference: Callable[[], None], repeats: int, tell: Tell = quiet, what: str = ""
) -> tuple[float, float, float]:
    """Medians of both in milliseconds, and the median ratio of neighbours: a drifting machine slows both."""
    ours()
    reference()
    pairs = []
    for done in range(repeats):
        tell(what, done, repeats)
        pairs.append((milliseconds(ours), milliseconds(reference)))
    return (
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[0] / pair[1] for pair in pairs),
    )


def milliseconds(run: Callable[[], None]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def precision(model: "PreTrainedModel") -> str:
    """Short name of the dtype."""
    return str(model.dtype).removeprefix("torch.")


def _git(*arguments: str) -> str:
    """What git says about this checkout; ``describe --dirty`` would lock its index."""
    command = ["git", "--no-optional-locks", *arguments]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()
