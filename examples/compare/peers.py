"""Other engines in processes of their own, driven over pipes. This file imports only the standard library."""

import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Program

Tokens = list[list[int]]  # of all prompts or answers in a batch
Generate = Callable[[Tokens, int, float], tuple[Tokens, dict[str, Any]]]  # returns answers and counters


@dataclass(frozen=True)
class Config:
    """One way to run a peer.

    Args:
        name: name for people.
        settings: argument of its ``load``.
        environment: environment variables that it reads.
    """

    name: str
    settings: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """Answers of a peer to one batch.

    Args:
        seconds: time of the call alone.
        tokens: the answers.
        counters: the peer's counts so far, of speculation for example.
    """

    seconds: float
    tokens: Tokens
    counters: dict[str, Any]


class PeerError(RuntimeError):
    """A peer gave up; the message holds the end of its log."""


class Peer:
    """A running peer, frozen between its calls.

    Otherwise vLLM's worker, for example, would keep one core busy for a second after every answer and slow down the
    next engine.

    Args:
        name: name for people.
        module: file beside this one whose ``load(settings)`` returns a :data:`Generate`.
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

    def generate(self, prompts: Tokens, new_tokens: int, temperature: float = 0.0) -> Answer:
        """Decodes until answers end by themselves or have ``new_tokens`` tokens; greedily at temperature 0."""
        return Answer(**self._ask({"prompts": prompts, "max_tokens": new_tokens, "temperature": temperature}))

    def cpu_seconds(self) -> float:
        """Returns the CPU time of its processes so far."""
        return self.program.cpu_seconds()

    def close(self) -> None:
        """Lets the peer end by itself, and kills processes that remain."""
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
            raise PeerError(f"{self} gave up; its last output:\n{self.program.last_lines()}")
        self.program.freeze()
        return json.loads(answer)


def find(name: str, library: str, python: Path | None) -> tuple[str | None, str]:
    """Returns the version of a library that a Python can import, or ``None``, and one line for the reader."""
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
