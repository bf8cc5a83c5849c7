"""Runs the phases of ``arbordraft bench gpu`` and writes their results, atomically, as they come."""

import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rich.console import Console

from arbordraft.bench.measure import provenance
from arbordraft.bench.tables import print_tables
from arbordraft.kernels import choice
from arbordraft.utils.files import write_text
from arborlab.gpu.setting import Item, Phase, Setting

FILE = "gpu.json"
_SAVED = 5.0  # seconds between two savings within a phase
_PATIENCE = 60.0  # seconds past the deadline of its phase after which an item counts as hanging


@dataclass
class PhaseResult:
    """The outcome of one phase.

    Args:
        state: ``waiting``, ``running``, ``done``, ``out of time``, ``failed`` or ``interrupted``.
        seconds: time of the phase.
        left_out: names of the items that its deadline left no time for.
        errors: messages of the items that failed, by name.
        rows: measurements of the phase, which are dataclasses.
    """

    state: str = "waiting"
    seconds: float | None = None
    left_out: list[str] = field(default_factory=list)
    errors: dict[str, str] = field(default_factory=dict)
    rows: list[Any] = field(default_factory=list)

    @property
    def wrong(self) -> list[Any]:
        """Rows of wrong results."""
        return [row for row in self.rows if getattr(row, "correct", None) is False]


@dataclass(frozen=True)
class Planned:
    """A phase with its place in the plan.

    Args:
        items: the function that makes its items, a :data:`~arborlab.gpu.setting.Phase`, as
            ``"package.module:function"``.
        weight: share of the remaining time, relative to the later phases.
        checks: whether it checks correctness, so that the command fails if the phase does.
        interpreted: whether its kernels run in Triton's interpreter on a CPU, and not in plain PyTorch.
    """

    items: str
    weight: float = 1.0
    checks: bool = False
    interpreted: bool = False


# The most telling come first, since time may run out. Each imports its module only when it begins.
PHASES = {
    "machine": Planned("arborlab.gpu.machine:machine", weight=1),
    "compile": Planned("arborlab.gpu.compiling:compilation", weight=4, interpreted=True),
    "decoders": Planned("arborlab.gpu.decoders:decoders", weight=4, checks=True),
    "steps": Planned("arborlab.gpu.steps:steps", weight=7),
    "roofline": Planned("arborlab.gpu.kernels:bounds", weight=3),
    "kernels": Planned("arborlab.gpu.kernels:checks", weight=4, checks=True, interpreted=True),
    "profile": Planned("arborlab.gpu.profiling:profiles", weight=2),
    "smollm2": Planned("arborlab.gpu.smollm2:smollm2", weight=1.5),
}


class GpuBench:
    """One run of some phases.

    Args:
        folder: where ``gpu.json`` is written.
        phases: by name, in their order.
        setting: device and seed.
        minutes: time of all phases together. A phase may use its share of the remaining minutes.
        shown: receives the name and the result of each phase that has ended.
        only: run only items whose names contain this text.
        patience: seconds past the deadline of its phase after which an item counts as hanging, as a kernel may that
            waits for ever. Then the results are saved and the process ends, since nothing else stops a kernel. By
            default 60 on a GPU; on a CPU there is no bound.
    """

    def __init__(
        self,
        folder: Path,
        phases: Mapping[str, Planned],
        setting: Setting,
        minutes: float,
        shown: Callable[[str, PhaseResult], object] = lambda name, result: None,
        only: str = "",
        patience: float | None = None,
    ) -> None:
        self.path, self.phases, self.setting, self.shown = folder / FILE, phases, setting, shown
        self.minutes, self.only = minutes, only
        self.patience = _PATIENCE if patience is None and setting.on_gpu else patience
        self.results = {name: PhaseResult() for name in phases}
        self._about: dict[str, Any] = {}

    @property
    def right(self) -> bool:
        """Whether all checks that ran agree and none has failed."""
        checking = [self.results[name] for name, phase in self.phases.items() if phase.checks]
        return not any(result.wrong or result.errors for result in checking)

    def run(self) -> bool:
        """Runs all phases; returns :attr:`right`.

        Raises:
            KeyboardInterrupt: if it is interrupted; the file then holds all rows so far.
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
            items = list(self._items(phase, result))
            for place, item in enumerate(items):
                if time.monotonic() >= self.setting.deadline:
                    result.left_out = [other.name for other in items[place:]]
                    break
                try:
                    with self._bounded(name, items[place:]):
                        result.rows.extend(item.run())
                except Exception as error:  # drivers, compilers and models raise errors of any type
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

    @contextmanager
    def _bounded(self, name: str, items: Sequence[Item]) -> Iterator[None]:
        """Bounds the time of the first of the items that are left."""
        if self.patience is None:
            yield
            return
        timer = threading.Timer(self.setting.seconds_left + self.patience, self._give_up, (name, items))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, name: str, items: Sequence[Item]) -> None:
        """Ends the process while an item hangs."""
        result = self.results[name]
        result.errors[items[0].name] = "hangs: the process was ended"
        result.state, result.left_out = "failed", [item.name for item in items[1:]]
        self.save()
        self.shown(name, result)
        waiting = ",".join(name for name, result in self.results.items() if result.state == "waiting")
        if waiting:
            self.setting.log(f"Phases that did not run: {waiting}. Name them with --phases, and another folder.")
        os._exit(1)

    def _items(self, phase: Planned, result: PhaseResult) -> Sequence[Item]:
        try:
            make: Phase = resolve_name(phase.items)
            return [item for item in make(self.setting) if self.only in item.name]
        except Exception as error:
            result.errors["preparation"] = described(error)
            return []

    def command(self, name: str, item: str) -> str:
        """Returns the command that runs one item of a phase alone."""
        given = ["--device cpu"] if not self.setting.on_gpu else []
        given += [f"--model {shlex.quote(self.setting.model)}"] if self.setting.model else []
        given += [f"--seed {self.setting.seed}"] if self.setting.seed else []
        options = " ".join([f"--phases {name}", f"--only {shlex.quote(item)}", *given])
        return f"arbordraft bench gpu --out {shlex.quote(f'{self.path.parent}-again')} {options}"

    def save(self) -> None:
        """Writes all results so far."""
        device = self.setting.device.type
        report = {
            "provenance": self._about,
            "settings": {"device": device, "minutes": self.minutes, "seed": self.setting.seed, "only": self.only},
            "timed": self.setting.on_gpu,  # times of a CPU are meaningless
            "right": self.right,
            "phases": {
                name: vars(result)
                | {"rows": [asdict(row) for row in result.rows]}
                | {"commands": [self.command(name, item) for item in result.left_out]}
                for name, result in self.results.items()
            },
        }
        write_text(self.path, json.dumps(report, indent=1) + "\n")


@contextmanager
def _in_plain_torch() -> Iterator[None]:
    """Makes all operators run in plain PyTorch, even if Triton's interpreter is on."""
    kept = os.environ.pop(choice.INTERPRETER, None)
    try:
        with choice.use("reference"):
            yield
    finally:
        if kept is not None:
            os.environ[choice.INTERPRETER] = kept


def print_phase(console: Console, name: str, result: PhaseResult, command: Callable[[str, str], str]) -> None:
    """Prints the outcome of a phase: its tables, wrong results first, then items that failed or were left out.

    ``command`` returns the command that runs an item of a phase alone.
    """
    console.print(f"{name}: {result.state}, {result.seconds or 0:.1f} s", style="bold")
    print_tables(console, [*result.wrong, *(row for row in result.rows if row not in result.wrong)])
    for item, error in result.errors.items():
        console.print(f"{item} failed: {error}", style="red", soft_wrap=True)
    if result.left_out:
        console.print(f"left out for lack of time: {len(result.left_out)}; to run one alone:")
        for item in result.left_out:
            console.print(f"  {command(name, item)}", soft_wrap=True, highlight=False)
    checked = sum(getattr(row, "correct", None) is not None for row in result.rows)
    if result.wrong:
        console.print(f"{len(result.wrong)} of {checked} results are wrong", style="red")
    elif checked:
        console.print(f"all {checked} results agree as far as rounding allows")


def described(error: Exception) -> str:
    """Returns type and message of an error, in one line of at most 400 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
