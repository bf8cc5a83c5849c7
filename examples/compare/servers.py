"""Servers of SmolLM2-135M-Instruct, each at its best setting, and the tool that puts load on them."""

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from processes import Program
from vllm_cpu import environment

NAME = "smollm2"  # name of the model for clients
START_LIMIT = 600.0  # seconds


class ServerError(RuntimeError):
    """A server gave up, or does not answer; the message holds its last output."""


@dataclass(frozen=True)
class ServerKind:
    """How to run a server.

    Args:
        name: name for people.
        command: the program and its arguments; ``{port}`` stands for the port.
        model: name of the model for clients.
        environment: environment variables that it reads.
        ignores_ends: whether requests may set ``ignore_eos``; other servers get a copy of the model without end tokens.
        greets: whether a stream begins with a chunk that holds no text but the speaker's role. vLLM sends it with the
            first token. The server of transformers sends it before it reads the prompt, so it must not count as the
            first token.
    """

    name: str
    command: list[str | Path]
    model: str = NAME
    environment: dict[str, str] = field(default_factory=dict)
    ignores_ends: bool = True
    greets: bool = False


def kinds(model: Path, drafter: Path, vllm_python: Path, scratch: Path) -> list[ServerKind]:
    """Lists all servers: ours plain, with lookups, and with a trained drafter beside them; vLLM's; transformers'."""
    own = [sys.executable, Path(__file__).with_name("own_server.py"), "--port", "{port}", "--name", NAME]
    endless = _without_ends(model, scratch / "endless")
    vllm = [vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--port", "{port}", "--model", model]
    vllm += ["--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32"]
    serve = "from transformers.cli.transformers import main; main()"
    transformers: list[str | Path] = [sys.executable, "-c", serve, "serve", endless, "--port", "{port}"]
    transformers += ["--continuous-batching", "--dtype", "bfloat16", "--device", "cpu", "--host", "127.0.0.1"]
    # 128 blocks hold 32,768 tokens; by default transformers takes nearly all memory.
    transformers += ["--cb-num-blocks", "128", "--cb-max-batch-tokens", "512"]
    offline = {"HF_HUB_OFFLINE": "1"}
    return [
        ServerKind("arbordraft", [*own, "--drafter", "none"]),
        ServerKind("arbordraft n-gram", [*own, "--drafter", "ngram"]),
        ServerKind("arbordraft drafter and n-gram", [*own, "--drafter", drafter]),
        ServerKind("vLLM", vllm, environment=environment(), greets=True),
        ServerKind("transformers", transformers, str(endless), offline, ignores_ends=False, greets=True),
    ]


def _without_ends(model: Path, folder: Path) -> Path:
    """Makes a copy of the model with no token that ends an answer."""
    shutil.copytree(model, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    for name in ("config.json", "generation_config.json"):
        about = json.loads((model / name).read_text()) | {"eos_token_id": None}
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(about))
    return folder


class Server:
    """A running server that answers, frozen between measurements, as some keep a core busy while they wait.

    Args:
        kind: how to run it.
        log: file for everything that it prints.

    Raises:
        ServerError: if it does not answer within ten minutes.
    """

    def __init__(self, kind: ServerKind, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.kind, self.url = kind, f"http://127.0.0.1:{port}"
        start = time.perf_counter()
        command = [str(part).replace("{port}", port) for part in kind.command]
        self.program = Program(command, kind.environment, log)
        try:
            self._wait(start + START_LIMIT)
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start
        self.program.freeze()

    def wake(self) -> None:
        """Thaws the server and lets it answer once, because an answer after a rest takes longer.

        Raises:
            ServerError: if it does not answer.
        """
        self.program.thaw()
        said = {"role": "user", "content": "Hello"}
        body = {"model": self.kind.model, "messages": [said], "max_completion_tokens": 2, "temperature": 0}
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                json.load(answer)
        except (OSError, ValueError) as error:
            raise ServerError(f"{self.kind.name}: {error}; its last output:\n{self.program.last_lines()}") from error

    def _wait(self, deadline: float) -> None:
        while True:
            try:
                return self.wake()
            except ServerError:
                if self.program.process.poll() is not None or time.perf_counter() > deadline:
                    raise
                time.sleep(1)

    def close(self) -> None:
        """Ends the server."""
        self.program.close(signal.SIGINT)


class LoadTool:
    """vLLM's ``vllm bench serve``, see ``load_worker.py``.

    Args:
        python: the interpreter of vLLM's environment.
        log: file for everything that it prints.
    """

    def __init__(self, python: Path, log: Path) -> None:
        pipe = subprocess.PIPE
        worker = Path(__file__).with_name("load_worker.py")
        self.program = Program([python, worker], environment(), log, stdin=pipe, stdout=pipe)
        self._answer()

    def run(self, server: Server, arguments: list[str], limit: float) -> dict[str, Any]:
        """Puts load on a server and returns the tool's results.

        Args:
            server: the server that gets the load.
            arguments: arguments of the tool, besides those that name the server.
            limit: most seconds.

        Raises:
            ServerError: if the tool fails or does not end in time.
        """
        ends = ["--ignore-eos"] if server.kind.ignores_ends else []
        named = ["--base-url", server.url, "--model", server.kind.model, *ends]
        assert self.program.process.stdin
        print(json.dumps({"arguments": named + arguments, "limit": limit}), file=self.program.process.stdin, flush=True)
        found = self._answer()
        if "error" in found:
            raise ServerError(f"{server.kind.name}: {found['error']}; its last output:\n{server.program.last_lines()}")
        return found

    def close(self) -> None:
        """Ends the tool."""
        self.program.close()

    def _answer(self) -> dict[str, Any]:
        assert self.program.process.stdout
        line = self.program.process.stdout.readline()
        if not line:
            raise ServerError(f"the load tool gave up; its last output:\n{self.program.last_lines()}")
        return json.loads(line)
