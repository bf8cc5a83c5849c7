"""vLLM in processes of its own, driven over pipes. Nothing but the standard library is imported here."""

import json
import os
import re
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tokens = list[list[int]]  # of every prompt or answer in a batch


@dataclass(frozen=True)
class VllmConfig:
    """One way to run vLLM.

    Args:
        name: for people.
        dtype: of the weights and of what is computed.
        speculative: ``speculative_config`` of ``vllm.LLM``, or ``None`` to decode plainly.
        reserved: cores that vLLM leaves to its scheduler, ``VLLM_CPU_NUM_OF_RESERVED_CPU``; 1 is its default.
        preload: libraries for ``LD_PRELOAD``; without an OpenMP library in it vLLM adds PyTorch's.
        counted: whether vLLM counts what became of drafts.
    """

    name: str
    dtype: str
    speculative: dict[str, Any] | None = None
    reserved: int = 0
    preload: str = ""
    counted: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """What vLLM reads from environment variables, besides those that are set already."""
        return {
            "VLLM_CPU_NUM_OF_RESERVED_CPU": str(self.reserved),
            "VLLM_CPU_KVCACHE_SPACE": "2",  # gigabytes
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **({"LD_PRELOAD": self.preload} if self.preload else {}),
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of ``vllm.LLM`` besides the model."""
        return {
            "dtype": self.dtype,
            "max_model_len": 2048,
            "max_num_seqs": 32,
            "enable_prefix_caching": False,  # the other engines read every prompt anew
            **({"speculative_config": self.speculative} if self.speculative else {}),
            **({"enforce_eager": True, "disable_log_stats": False} if self.counted else {}),
        }


class VllmError(RuntimeError):
    """vLLM gave up; the message holds the end of its log."""


class Vllm:
    """A running vLLM, frozen whenever it is not asked.

    Its worker would otherwise keep one core busy for a second after every answer, at the cost of who comes next.

    Args:
        python: the interpreter of vLLM's environment.
        config: how to run it.
        model: folder of the model.
        log: file for everything that vLLM prints.

    Raises:
        VllmError: if it does not start.
    """

    def __init__(self, python: Path, config: VllmConfig, model: Path, log: Path) -> None:
        self.config = config
        self.log = log
        with log.open("w") as errors:
            # A process group can be frozen as a whole; and if we die, the system ends a group that is frozen.
            self.process = subprocess.Popen(
                [python, Path(__file__).with_name("vllm_worker.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **config.environment},
                process_group=0,
            )
        try:
            self.start_seconds: float = self._ask({"model": str(model), **config.arguments})["seconds"]
        except BaseException:
            self.close()
            raise
        match = re.search(r"core ids=(\[.*?\])", log.read_text(errors="replace"))
        self.compute_cores: list[int] | None = json.loads(match[1]) if match else None

    def generate(self, prompts: Tokens, new_tokens: int) -> tuple[float, Tokens]:
        """The seconds that vLLM took, and its answers."""
        answer = self._ask({"prompts": prompts, "max_tokens": new_tokens})
        return answer["seconds"], answer["tokens"]

    def generate_counted(self, prompts: Tokens, new_tokens: int) -> tuple[Tokens, dict[str, Any]]:
        """Its answers, and what it has counted of speculation so far; it must have been told to count."""
        answer = self._ask({"prompts": prompts, "max_tokens": new_tokens, "counters": True})
        return answer["tokens"], answer["counters"]

    def cpu_seconds(self) -> float:
        """What its processes have used so far."""
        ticks = 0
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):  # it may have ended by now
                    fields = (folder / "stat").read_text().rpartition(")")[2].split()
                    ticks += (int(fields[2]) == self.process.pid) * (int(fields[11]) + int(fields[12]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Lets vLLM end by itself, and ends what is left of it."""
        if self.process.returncode is not None:
            return
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=30)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin
        assert self.process.stdout
        self._signal(signal.SIGCONT)
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            end = self.log.read_text(errors="replace").splitlines()[-12:]
            raise VllmError(f"vLLM ({self.config.name}) gave up; the last it said:\n" + "\n".join(end))
        self._signal(signal.SIGSTOP)
        return json.loads(answer)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def find_vllm(python: Path | None) -> tuple[str | None, str]:
    """The version of vLLM that a Python can import, or ``None``; and one line for the reader."""
    without = "vLLM is not measured"
    if python is None:
        return None, f"{without}: name the Python of its environment with --vllm-python"
    probe = "import vllm; print(vllm.__version__)"
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
    return version, f"vLLM {version} is measured"
