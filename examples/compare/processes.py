"""Programs that can be frozen while another one is timed; Linux only, imports only the standard library."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Program:
    """A running program and all processes that it starts.

    A frozen program uses no CPU time, while a server or a pool of threads that waits in a loop may keep a core busy.

    Args:
        command: the program and its arguments.
        environment: environment variables besides those that are set already.
        log: file for its output, or only for its errors if ``pipes`` take the rest.
        pipes: arguments of ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str], log: Path, **pipes: Any) -> None:
        self.log = log
        with log.open("w") as file:
            # A process group can be frozen as a whole. If we die, the system ends a frozen group.
            self.process = subprocess.Popen(
                command,
                **{"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file, "text": True} | pipes,
                env={**os.environ, **environment},
                process_group=0,
            )

    def freeze(self) -> None:
        """Stops the program until :meth:`thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues the program."""
        self._signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        """Returns the CPU time of its processes so far."""
        ticks = 0
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):  # it may have ended by now
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    ticks += (int(fields[2]) == self.process.pid) * (int(fields[11]) + int(fields[12]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def last_lines(self) -> str:
        """Returns the last lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    def close(self, ask: signal.Signals | None = None) -> None:
        """Closes the program's input, and kills processes that remain half a minute later.

        Args:
            ask: signal for a program that ignores the end of its input.
        """
        if self.process.returncode is not None:
            return
        self.thaw()
        if ask is not None:
            self.process.send_signal(ask)
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=30)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def machine_seconds() -> float:
    """Returns the seconds for which cores were busy, or taken away by a hypervisor."""
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, ticks)
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
