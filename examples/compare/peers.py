"""Other engines in processes of their own, driven over pipes. Nothing but the standard library is imported here."""

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Program

Tokens = list[list[int]]  # of every prompt or answer in a batch
Generate = Callable[[Tokens, int], tuple[Tokens, dict[str, Any]]]  # gives answers, and what was counted if anything


@dataclass(frozen=True)
class Config:
    """One way to run a peer.

    Args:
        name: for people.
        settings: what its ``load`` is called with.
        environment: variables that it reads.
    """

    name: str
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """What a peer answered.

    Args:
        seconds: of the call alone.
        tokens: the answers.
        counters: what the peer has counted so far, of speculation for example.
    """

    seconds: float
    tokens: Tokens
    counters: dict[str, Any]


class PeerError(RuntimeError):
    """A peer gave up; the message holds the end of its log."""


class Peer:
    """A running peer, frozen whenever it is not asked.

    vLLM's worker for example would otherwise keep one core busy for a second after every answer, at the cost of who
    comes next.

    Args:
        name: for people.
        module: file beside this one whose ``load(settings)`` gives a :data:`Generate`.
        python: the interpreter of the peer's environment.
        config: how to run it.
        log: file for everything that it prints.

    Raises:
        PeerError: if it does not start.
    """

    def __init__(self, name: str, module: str, python: Path, config: Config, log: Path) -> None:
        self.name, self.config = name, config
        pipe = subprocess.PIPE
        command = [python, Path(__file__).with_name("worker.py"), module]
        self.program = Program(command, config.environment, log, stdin=pipe, stdout=pipe)
        try:
            self.start_seconds: float = self._ask(config.settings)["seconds"]
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        return f"{self.name} {self.config.name}"

    def generate(self, prompts: Tokens, new_tokens: int) -> Answer:
        """Decodes greedily until answers end by themselves or have ``new_tokens`` tokens."""
        return Answer(**self._ask({"prompts": prompts, "max_tokens": new_tokens}))

    def cpu_seconds(self) -> float:
        """What its processes have used so far."""
        return self.program.cpu_seconds()

    def close(self) -> None:
        """Lets it end by itself, and ends what is left of it."""
        self.program.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self.program.process
        assert process.stdin
        assert process.stdout
        self.program.thaw()
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            raise PeerError(f"{self} gave up; the last it said:\n{self.program.last_lines()}")
        self.program.freeze()
        return json.loads(answer)


def find(name: str, library: str, python: Path | None) -> tuple[str | None, str]:
    """The version of a library that a Python can import, or ``None``; and one line for the reader."""
    without = f"{name} is not measured"
    if python is None:
        return None, f"{without}: name the Python of its environment"
    probe = f"import importlib.metadata as about, {library}; print(about.version(about.packages_distributions()"
    probe += f"[{library!r}][0]))"
    try:
        done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True, timeout=300)
    except OSError as error:
        return None, f"{without}: {python} cannot be run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return None, f"{without}: {python} did not import it within 300 s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or [f"exit status {error.returncode}"])[-1]
        return None, f"{without}: {python} cannot import it ({reason})"
    version = done.stdout.split()[-1]
    return version, f"{name} {version} is measured"
