"""One measurement and its provenance."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from arbordraft.kernels.machine import cpu
from arbordraft.utils.files import write_text

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Measurement:
    """One comparison: medians of two times in milliseconds, and the median of the pairs' ratios.

    Args:
        group: name that related cases share.
        case: settings that vary between measurements.
        ours: time of arbordraft.
        reference: time of the call that arbordraft is compared with.
        ratio: ``ours / reference``, or the speed-up ``reference / ours``.
        reach: the project's bound for the ratio, such as ``"<= 1.10"``; empty for none.
        detail: further figures.
        reached: whether the bound holds; ``None`` without one.
    """

    table: ClassVar[str] = "times in milliseconds"

    group: str
    case: str
    ours: float
    reference: float
    ratio: float
    reach: str = ""
    detail: str = ""
    reached: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.reach:
            relation, bound = self.reach.split()
            reached = self.ratio <= float(bound) if relation == "<=" else self.ratio >= float(bound)
            object.__setattr__(self, "reached", reached)


def provenance() -> dict[str, Any]:
    """Returns command line, commit, date, machine and versions of a measurement."""
    here = Path(__file__).parent
    commit = _git("describe", "--always", folder=here)  # --dirty would lock the index
    if commit is not None and _git("status", "--porcelain", "-uno", folder=here):
        commit += "-dirty"
    processor = cpu()
    return {
        "argv": [Path(argument).name for argument in sys.argv],  # without folders, which are private
        "commit": commit,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": processor.get("model name", processor["processor"]),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in ("arbordraft", "torch", "transformers", "scipy")},
    }


def _git(*arguments: str, folder: Path) -> str | None:
    """Returns the output of a git command that only reads; ``None`` outside of a checkout, or without git."""
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def save(path: Path, measurements: Sequence[Any], **settings: Any) -> None:
    """Writes measurements (dataclasses) and their provenance as JSON; the file appears only when it is complete."""
    report = {"provenance": provenance(), "settings": settings, "measurements": [asdict(row) for row in measurements]}
    write_text(path, json.dumps(report, indent=2) + "\n")


def precision(model: "PreTrainedModel") -> str:
    """Returns the short name of a model's dtype."""
    return str(model.dtype).removeprefix("torch.")
