"""Runs the phases of ``arbordraft bench gpu`` and writes their results, atomically, as they come."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rich.console import Console

from arbordraft.bench.gpu.setting import Item, Phase, Setting
from arbordraft.bench.measure import provenance
from arbordraft.bench.tables import print_tables
from arbordraft.kernels import choice
from arbordraft.utils.files import write_text

FILE = "gpu.json"
_SAVED = 5.0  # seconds between two savings within a phase


@dataclass
class PhaseResult:
    """The outcome of one phase.

    Args:
        state: ``waiting``, ``running``, ``done``, ``out of time``, ``failed`` or ``interrupted``.
        seconds: spent on it.
        left_out: names of the items that its deadline left no time for.
        errors: of items that failed, by name.
        rows: its measurements, which are dataclasses.
    """

    state: str = "waiting"
    seconds: float | None = None
    left_out: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)

    @property
    def wrong(self) -> list[Any]:
        """Rows that say that a result is wrong."""
        return [row for row in self.rows if getattr(row, "correct", None) is False]


@dataclass(frozen=True)
class Planned:
    """A phase with its place in the plan.

    Args:
        items: the function that makes its items, a :data:`~arbordraft.bench.gpu.setting.Phase`, as
            ``"package.module:function"``.
        weight: share of the time, relative to the phases behind it.
        checks: whether it checks correctness, so that its failure is the command's.
        interpreted: whether on a CPU its kernels run in Triton's interpreter, and not in plain PyTorch.
    """

    items: str
    weight: float = 1.0
    checks: bool = False
    interpreted: bool = False


class GpuBench:
    """One run of some phases.

    Args:
        folder: where ``gpu.json`` is written.
        phases: by name, in their order.
        setting: device and seed.
        minutes: of all phases together. A phase may use its share of those that are left.
        shown: is called with the name and the result of each phase that has ended.
    """

    def __init__(
        self,
        folder: Path,
        phases: Mapping[str, Planned],
        setting: Setting,
        minutes: float,
        shown: Callable[[str, PhaseResult], object] = lambda name, result: None,
    ) -> None:
        self.path, self.phases, self.setting, self.shown = folder / FILE, phases, setting, shown
        self.minutes = minutes
        self.results = {name: PhaseResult() for name in phases}
        self._about: dict[str, Any] = {}

    @property
    def right(self) -> bool:
        """Whether all checks that ran agree, and none has failed."""
        checking = [self.results[name] for name, phase in self.phases.items() if phase.checks]
        return not any(result.wrong or result.errors for result in checking)

    def run(self) -> bool:
        """Runs all phases; returns :attr:`right`.

        Raises:
            KeyboardInterrupt: if it is interrupted; the file then holds all rows until there.
            WriteError: if the file cannot be written.
        """
        self._about = provenance()
        end = time.monotonic() + 60 * self.minutes
        self.save()
        left = sum(phase.weight for phase in self.phases.values())
        for name, phase in self.phases.items():
            now = time.monotonic()
            self.setting.deadline = now + max(0.0, end - now) * phase.weight / left
            left -= phase.weight
            with nullcontext() if self.setting.on_gpu or phase.interpreted else _in_plain_torch():
                self._run(name, phase)
        return self.right

    def _run(self, name: str, phase: Planned) -> None:
        result, begun = self.results[name], time.monotonic()
        result.state = "running"
        saved = begun
        try:
            for item in (items := list(self._items(phase, result))):
                if time.monotonic() >= self.setting.deadline:
                    result.left_out = [other.name for other in items[items.index(item) :]]
                    break
                try:
                    result.rows.extend(item.run())
                except Exception as error:  # whatever a driver, a compiler or a model raises
                    result.errors[item.name] = described(error)
                    self.setting.free()
                if time.monotonic() > saved + _SAVED:
                    result.seconds, saved = time.monotonic() - begun, time.monotonic()
                    self.save()
            result.state = "failed" if result.errors else "out of time" if result.left_out else "done"
        except BaseException:
            result.state = "interrupted"
            raise
        finally:
            result.seconds = time.monotonic() - begun
            self.save()
        del items
        self.setting.free()
        self.shown(name, result)

    def _items(self, phase: Planned, result: PhaseResult) -> Sequence[Item]:
        try:
            make: Phase = resolve_name(phase.items)
            return make(self.setting)
        except Exception as error:
            result.errors["preparation"] = described(error)
            return []

    def save(self) -> None:
        """Writes what there is."""
        device = self.setting.device.type
        report = {
            "provenance": self._about,
            "settings": {"device": device, "minutes": self.minutes, "seed": self.setting.seed},
            "timed": self.setting.on_gpu,  # or times say nothing
            "right": self.right,
            "phases": {
                name: vars(result) | {"rows": [asdict(row) for row in result.rows]}
                for name, result in self.results.items()
            },
        }
        write_text(self.path, json.dumps(report, indent=1) + "\n")


@contextmanager
def _in_plain_torch() -> Iterator[None]:
    """Lets operators run in plain PyTorch, also those that would run in Triton's interpreter."""
    kept = os.environ.pop(choice.INTERPRETER, None)
    try:
        with choice.use("reference"):
            yield
    finally:
        if kept is not None:
            os.environ[choice.INTERPRETER] = kept


def print_phase(console: Console, name: str, result: PhaseResult) -> None:
    """Prints the outcome of a phase: its tables, wrong results first, and what failed or was left out."""
    console.print(f"{name}: {result.state}, {result.seconds or 0:.1f} s", style="bold")
    print_tables(console, [*result.wrong, *(row for row in result.rows if row not in result.wrong)])
    for item, error in result.errors.items():
        console.print(f"{item} failed: {error}", style="red", soft_wrap=True)
    if result.left_out:
        console.print(f"left out for lack of time: {'; '.join(result.left_out)}", soft_wrap=True)
    checked = sum(getattr(row, "correct", None) is not None for row in result.rows)
    if result.wrong:
        console.print(f"{len(result.wrong)} of {checked} results are wrong", style="red")
    elif checked:
        console.print(f"all {checked} results agree as far as rounding allows")


def described(error: Exception) -> str:
    """Kind and message of an error, in one line of at most 400 letters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


__all__ = ["FILE", "GpuBench", "PhaseResult", "Planned", "described", "print_phase"]
