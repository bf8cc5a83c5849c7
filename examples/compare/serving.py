"""Measures servers under load in one run: arbordraft without and with drafts, vLLM's CPU build and transformers.

All serve SmolLM2-135M-Instruct in bfloat16 over HTTP on the same cores. The load tool is vLLM's `vllm bench serve`. It
sends the same prompts of 50 to 1,000 tokens to each server and asks for 128 tokens at temperature 0. Requests arrive at
random (Poisson) or come from clients that send one after the other (closed loops). Servers take turns at every load, so
that a slow moment of the machine hits all of them; waiting servers are frozen. See README.md. Linux only.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from passages import prompts
from peers import find
from processes import machine_seconds
from rich.console import Console
from rich.table import Table
from rich.text import Text
from servers import LoadTool, Server, ServerError, kinds
from transformers import AutoTokenizer

from arbordraft.bench.measure import save
from arbordraft.checkpoints.smollm2 import NAME, fetch_smollm2

DRAFTER = Path(__file__).resolve().parents[1] / "checkpoints" / "smollm2-135m-instruct-eagle"
PERCENTILES = (50, 95, 99)
MOST = 1.6  # requests per second of a cell: about as many as two cores can answer
console = Console(highlight=False)


@dataclass(frozen=True)
class Load:
    """Requests that arrive at random at a rate per second, or clients that ask one after the other."""

    rate: float | None = None
    clients: int | None = None

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients else f"{self.rate:g} requests/s"

    def requests(self, seconds: float) -> int:
        """Returns the requests of a cell of about ``seconds``: at most ``MOST`` per second, as more only queue."""
        rate = self.rate if self.clients is None else 0.3 * self.clients**0.6
        return max(1, self.clients or 1, round(seconds * min(MOST, rate or 0.0)))

    def arguments(self) -> list[str]:
        """Returns the tool's arguments for this load."""
        if self.clients is None:
            return ["--request-rate", str(self.rate)]
        return ["--max-concurrency", str(self.clients)]


@dataclass(frozen=True)
class Cell:
    """One run of a server under a load, with times in milliseconds at the 50th, 95th and 99th percentile.

    Args:
        load: name of the load.
        server: name of the server.
        requests: number of sent requests.
        failed: number of requests without an answer.
        seconds: time from the first request to the last answer.
        tokens_per_second: tokens that the answered requests asked for, by seconds.
        counted: share of these tokens that the tool counted. If a server reports no count, the tool tokenizes the text.
        first_token: time from the request to the first text.
        between: time between two chunks of a stream, which hold several tokens where drafts are accepted.
        per_token: time of an answer after its first text, by its tokens.
        cores: cores that the server kept busy.
        tool_cores: cores that the tool kept busy.
        other_cores: cores that everything else kept busy.
    """

    load: str
    server: str
    requests: int
    failed: int
    seconds: float
    tokens_per_second: float
    counted: float
    first_token: list[float]
    between: list[float]
    per_token: list[float]
    cores: float
    tool_cores: float
    other_cores: float


def measure(server: Server, tool: LoadTool, load: Load, arguments: list[str], tokens: int, limit: float) -> Cell:
    """Puts a load on a server.

    Raises:
        ServerError: if the server answers nothing or the tool fails.
    """

    def used() -> tuple[float, float, float, float]:
        return time.perf_counter(), server.program.cpu_seconds(), tool.program.cpu_seconds(), machine_seconds()

    server.wake()
    before = used()
    try:
        found = tool.run(server, arguments + load.arguments(), limit)
    finally:
        after = used()
        server.program.freeze()
    wall, own, tools, machine = (late - early for late, early in zip(after, before, strict=True))
    answered = [place for place, error in enumerate(found["errors"]) if not error]
    if not answered:
        raise ServerError(f"{server.kind.name} answered nothing: {found['errors'][0]}")
    first, between, per_token = [], [], []
    for place in answered:
        begun, gaps = found["ttfts"][place], found["itls"][place]
        if server.kind.greets and gaps:
            begun, gaps = begun + gaps[0], gaps[1:]
        first.append(begun)
        between += gaps
        per_token.append(sum(gaps) / max(1, tokens - 1))
    times = [
        [round(float(value) * 1e3, 2) for value in np.percentile(row or [0.0], PERCENTILES)]
        for row in (first, between, per_token)
    ]
    asked, seconds = tokens * len(answered), found["duration"]
    cores = [round(value / wall, 3) for value in (own, tools, max(0.0, machine - own - tools))]
    seen = sum(found["output_lens"][place] for place in answered)
    failed = len(found["errors"]) - len(answered)
    figures = round(seconds, 2), round(asked / seconds, 2), round(seen / asked, 3)
    return Cell(str(load), server.kind.name, len(found["errors"]), failed, *figures, *times, *cores)


def rounds(
    servers: list[Server], tool: LoadTool, loads: list[Load], arguments: argparse.Namespace, folder: Path, model: Path
) -> Iterator[Cell | ServerError]:
    """Measures every server under every load, each beginning in turn; a failed server is left out from then on."""
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    file = folder / "prompts.jsonl"
    tool_arguments = ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--tokenizer", str(model)]
    tool_arguments += ["--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template"]
    tool_arguments += ["--disable-shuffle", "--custom-output-len", str(arguments.new_tokens), "--temperature", "0"]
    tool_arguments += ["--save-detailed", "--disable-tqdm", "--ready-check-timeout-sec", "0"]
    for number in range(arguments.repeats * len(loads)):
        load = loads[number % len(loads)]
        count = load.requests(arguments.seconds)
        texts = prompts(tokenizer, count, arguments.seed + number)  # new ones, which no prefix cache holds
        file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
        now = ["--num-prompts", str(count), "--seed", str(arguments.seed + number)]
        first = number % len(servers) if servers else 0
        for server in servers[first:] + servers[:first]:
            try:
                yield measure(server, tool, load, tool_arguments + now, arguments.new_tokens, arguments.limit)
            except ServerError as error:
                servers.remove(server)
                server.close()
                yield error


def show(cells: list[Cell], reference: str) -> None:
    """Prints a table; figures are medians of the repeats."""
    table = Table(
        "load", "server", "tokens/s", f"/ {reference}", "first token, ms", "between, ms", "per token, ms", "cores"
    )
    for column in table.columns[2:]:
        column.justify = "right"

    def median(load: str, server: str, name: str) -> Any:
        values = [getattr(cell, name) for cell in cells if (cell.load, cell.server) == (load, server)]
        if values and isinstance(values[0], list):
            return " / ".join(f"{statistics.median(column):.0f}" for column in zip(*values, strict=True))
        return statistics.median(values) if values else None

    for load in dict.fromkeys(cell.load for cell in cells):
        known = median(load, reference, "tokens_per_second")
        for server in dict.fromkeys(cell.server for cell in cells if cell.load == load):
            speed = median(load, server, "tokens_per_second")
            times = [median(load, server, name) for name in ("first_token", "between", "per_token")]
            cores = f"{median(load, server, 'cores'):.2f}"
            table.add_row(load, server, f"{speed:.1f}", f"{speed / known:.2f} x" if known else "", *times, cores)
        table.add_section()
    console.print(table)
    console.print("times at the percentiles " + " / ".join(map(str, PERCENTILES)))
    tool, others = ([getattr(cell, name) for cell in cells] for name in ("tool_cores", "other_cores"))
    console.print(
        f"cores that the tool kept busy: {statistics.median(tool):.2f} in the median, {max(tool):.2f} at most"
    )
    console.print(f"and everything else: {statistics.median(others):.2f} in the median, {max(others):.2f} at most")
    if failed := sum(cell.failed for cell in cells):
        console.print(f"[red]{failed} requests were not answered")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="Python of the environment that vLLM is installed in")
    parser.add_argument("--check", action="store_true", help="only tell whether vLLM and its tool are there")
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="only these; by default all")
    parser.add_argument("--drafter", type=Path, default=DRAFTER, help="folder of a trained drafter")
    parser.add_argument("--rates", type=float, nargs="*", default=[0.5, 1, 2, 4], help="arrivals per second")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 8, 16], help="of closed loops")
    parser.add_argument("--seconds", type=float, default=40, help="of a cell, about; slow servers take longer")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a cell at most")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--json", type=Path, help="write the figures and their provenance to this file")
    return parser.parse_args()


def main() -> int:
    """Starts the servers and measures them; the exit status is 1 if one failed."""
    arguments = _parse()
    version, line = find("vLLM", "vllm", arguments.vllm_python)
    console.print(Text(line), soft_wrap=True)
    if arguments.check or version is None:
        return 0
    loads = [Load(rate=rate) for rate in arguments.rates] + [Load(clients=clients) for clients in arguments.clients]
    model, cells, errors, starts = fetch_smollm2(), [], [], {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        chosen = kinds(model, arguments.drafter, arguments.vllm_python, folder)
        if unknown := set(arguments.servers or ()) - {kind.name for kind in chosen}:
            sys.exit(f"--servers: {', '.join(unknown)} is none of {', '.join(kind.name for kind in chosen)}")
        status = stack.enter_context(console.status("vLLM's load tool: starting"))
        tool = stack.enter_context(closing(LoadTool(arguments.vllm_python, folder / "tool.log")))
        servers = []
        for kind in chosen:
            if arguments.servers and kind.name not in arguments.servers:
                continue
            status.update(f"{kind.name}: starting")
            try:
                server = stack.enter_context(closing(Server(kind, folder / f"{len(starts)}.log")))
            except ServerError as error:
                errors.append(str(error))
            else:
                servers.append(server)
                console.print(f"{kind.name}: answers after {server.start_seconds:.0f} s")
                starts[kind.name] = round(server.start_seconds, 1)
        status.update("measuring")
        for cell in rounds(servers, tool, loads, arguments, folder, model):
            if isinstance(cell, ServerError):
                errors.append(str(cell))
            else:
                cells.append(cell)
                status.update(f"{cell.load}, {cell.server}: {cell.tokens_per_second:.1f} tokens/s")
    for error in errors:
        console.print(Text(error, style="red"))
    if cells:
        show(cells, "vLLM")
    if arguments.json is not None:
        settings: dict[str, Any] = {"model": NAME, "dtype": "bfloat16", "new_tokens": arguments.new_tokens}
        settings |= {"seconds": arguments.seconds, "repeats": arguments.repeats, "seed": arguments.seed}
        settings |= {"vllm": version, "start_seconds": starts, "cpus": os.cpu_count(), "errors": errors}
        save(arguments.json, cells, **settings)
        console.print(f"wrote {arguments.json}")
    return len(errors) > 0


if __name__ == "__main__":
    sys.exit(main())
