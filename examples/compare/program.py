"""The program around a peer: measures decoding on a CPU by arbordraft, transformers and the peer in one run.

All engines decode the same chats on the same cores, up to the same end of an answer. The model is
SmolLM2-135M-Instruct, or another one (``--load model=...``). They take turns at every batch, so that a slow moment of
the machine hits all of them. Whole calls are timed, prompts included. A peer takes part once for each kind of its
drafts, in the way that was fastest when it was tried alone. The peer has an environment of its own. Without that
environment the others are measured alone. Linux only.
"""

import argparse
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peers import Config, Peer, PeerError, find
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rounds import ASSISTED, GENERATE, LOOKUP, OURS, Case, Engine, Task, Workload
from transformers import AutoModelForCausalLM, PreTrainedModel

import arbordraft
from arbordraft import SpeculativeDecoder, builders
from arbordraft.bench.measure import save
from arbordraft.checkpoints.smollm2 import NAME, fetch_smollm2
from arbordraft.decoding.engine import Engine as ServingEngine
from arbordraft.decoding.prompts import MIXED, VARIED, read_prompts
from arbordraft.decoding.requests import Request
from arbordraft.drafter_names import drafter_named

BUILT_IN = "built in"
_LIKELY = 50  # tokens whose log-probabilities are asked for
QUIET = 0.05  # share of the cores that others may take without a warning
console = Console(highlight=False)


@dataclass(frozen=True)
class PeerKind:
    """Description of a peer, together with its file.

    Args:
        name: name for people.
        library: library that its environment must be able to import.
        file: its file, whose ``load`` runs in that environment.
        options: adds the command-line options that only this peer has.
        configs: returns groups of ways to run it, for the options, the model's folder and a folder to fill. The fastest
            way of each group is compared.
    """

    name: str
    library: str
    file: str
    options: Callable[[argparse.ArgumentParser], None]
    configs: Callable[[argparse.Namespace, Path, Path], list[list[Config]]]


def decoders(load: dict[str, Any], drafters: Sequence[str]) -> dict[str, SpeculativeDecoder]:
    """Builds the decoders of arbordraft that are compared.

    Args:
        load: arguments of ``arbordraft.load``.
        drafters: names of drafters, one decoder for each. All but ``auto`` and ``ngram`` draft after lookups.
    """
    target = arbordraft.load(drafter="none", costs=None, **{"dtype": "bfloat16"} | load).target
    ours = {"plain": builders.plain(target)}
    for name in drafters:
        if name == "auto":
            ours[name] = arbordraft.load(target)
        elif name == "ngram":
            ours["n-gram"] = builders.lookup(target)
        else:
            drafter = drafter_named(name, target)
            ours[f"n-gram, else {Path(name).name}"] = builders.cost_aware(target, drafter, lookup=True)
    return ours


def generating(model: Path, target: PreTrainedModel, draft_model: Path | None, task: Task) -> dict[str, Engine]:
    """Builds transformers' ways to decode, in bfloat16: plain, with prompt lookup, with a draft model.

    Args:
        model: folder or GGUF file of the model, whose values transformers dequantises.
        target: our model, whose ends of answers they share.
        draft_model: folder or GGUF file of the draft model.
        task: the task.
    """

    def loaded(path: Path) -> PreTrainedModel:
        place = {"gguf_file": path.name} if path.is_file() else {}
        found = AutoModelForCausalLM.from_pretrained(path.parent if place else path, dtype=torch.bfloat16, **place)
        found.generation_config = target.generation_config
        return found.eval()

    slow = loaded(model)
    ways = {GENERATE: task.in_process(slow.generate)}
    ways[LOOKUP] = task.in_process(slow.generate, prompt_lookup_num_tokens=10)
    if draft_model is not None:
        ways[ASSISTED] = task.in_process(slow.generate, assistant_model=loaded(draft_model))
    return ways


@dataclass
class Findings:
    """All results of a comparison."""

    cases: list[Case] = field(default_factory=list)
    alone: list[Case] = field(default_factory=list)  # cases of the peer without the others
    peers: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def compare(
    kind: PeerKind, python: Path, groups: list[list[Config]], task: Task, engines: dict[str, Engine], repeats: int
) -> Findings:
    """Measures our engines, and the peer in the fastest way of every group."""
    findings = Findings()
    with tempfile.TemporaryDirectory() as logs, ExitStack() as running:

        def start(config: Config) -> Peer:
            task.on_progress(f"{kind.name} {config.name}: starting, which may take minutes")
            log = Path(logs, f"{len(findings.peers)}.log")
            peer = running.enter_context(closing(Peer(kind.name, Path(kind.file).stem, python, config, log)))
            console.print(f"{peer}: up after {peer.start_seconds:.0f} s")
            set_by_all = {
                name: value for name, value in os.environ.items() if re.match("VLLM_|OMP_|KMP_|GOMP_|LD_PRE", name)
            }
            environment = {name: _without_folders(value) for name, value in (set_by_all | config.environment).items()}
            settings = json.loads(_without_folders(json.dumps(config.settings)))
            about = {"name": config.name, "environment": environment, "settings": settings}
            findings.peers.append(about | {"start_seconds": peer.start_seconds})
            return peer

        peers = []
        for configs in groups:
            fastest, alone = task.fastest(configs, start, findings.errors.append)
            findings.alone += alone
            if fastest is not None:
                peers.append(fastest)
        try:
            findings.cases = task.cases(engines, repeats, peers)
        except PeerError as error:
            findings.errors.append(str(error))
    return findings


def margins(decoder: SpeculativeDecoder, workload: Workload, case: Case, name: str) -> list[float]:
    """Returns, for each greedy answer that differs from ours, how much likelier ours was in our target's eyes.

    Each is a difference of log-probabilities of the first two tokens that differ; 0 if both are as likely.
    """
    ours, theirs = case.runs[f"{OURS} plain"][0].answers, case.runs[name][0].answers
    prompts = chain.from_iterable(batch.prompts for batch in workload.batches)
    engine, found = ServingEngine(decoder), list[float]()
    shared = case.shared(name, f"{OURS} plain")
    for prompt, left, right, place in zip(prompts, ours, theirs, shared, strict=True):
        if place < min(len(left), len(right)):
            request = Request(prompt=[*prompt, *left[:place]], max_new_tokens=1, logprobs=_LIKELY)
            likely = dict(engine.submit(request).result()[0].logprobs[0].others)
            found.append(likely[left[place]] - likely.get(right[place], -math.inf))
    return found


def show(findings: Findings) -> None:
    """Prints speeds, the ratios of our best engine, and how many answers equal those of our plain decoding."""
    for error in findings.errors:
        console.print(Text(error, style="red"))
    if findings.cases:
        plain = f"{OURS} plain"
        table = Table("prompts", "batch", "temperature", "engine", "tokens/s", "best of ours", f"answers as {plain}")
        for column in table.columns[4:]:
            column.justify = "right"
        for case in findings.cases:
            best = case.best
            for name in case.runs:
                same = "" if case.temperature else f"{case.same_answers(name, plain)} of {case.prompts}"
                if part := case.margins.get(name):
                    same = f"{same}, others part at margins of {min(part):.2f} to {max(part):.2f}"
                kind = (case.name, str(case.batch), f"{case.temperature:g}")
                table.add_row(*kind, name, f"{case.speed(name):.1f}", f"{case.ratio(best, name):.2f} x", same)
            table.add_section()
        console.print(table)
        show_disturbance(findings.cases)


def show_disturbance(cases: Sequence[Case]) -> None:
    """Prints how busy others kept the machine while an engine was timed."""
    timed = [(name in case.peers, run) for case in cases for name, runs in case.runs.items() for run in runs]
    peer = max((run.peer_cores for is_peer, run in timed if not is_peer), default=0.0)
    own = max((run.own_cores for is_peer, run in timed if is_peer), default=0.0)
    others = [run.other_cores for _, run in timed]
    console.print(f"cores kept busy while the other was timed: at most {peer:.2f} by peers, {own:.2f} here")
    usual, worst = statistics.median(others), max(others)
    console.print(f"cores that other programs or a hypervisor took: {usual:.2f} in the median, {worst:.2f} at most")
    if usual > QUIET * (os.cpu_count() or 1):
        console.print("[red]the machine was not quiet, and engines that use every core suffer most: measure again")


def store(path: Path, findings: Findings, **settings: Any) -> None:
    """Writes the medians as measurements, and the rest as their settings."""
    rounds = [
        {"prompts": case.name, "batch": case.batch, "temperature": case.temperature, "engine": name}
        | {"tokens": sum(map(len, run.answers)), "margins": case.margins.get(name, [])}
        | {key: round(value, 4) for key, value in vars(run).items() if key != "answers"}
        for case in findings.cases
        for name, runs in case.runs.items()
        for run in runs
    ]
    trials = [
        {"engine": peer, "prompts": case.name, "batch": case.batch, "tokens_per_second": case.speed(peer)}
        for case in findings.alone
        for peer in case.peers
    ]
    measurements = [case.measurement(*pair) for case in findings.cases for pair in case.pairs()]
    sys.argv[1:] = [_without_folders(argument) for argument in sys.argv[1:]]  # they become part of the provenance
    errors = [_without_folders(error) for error in findings.errors]  # they hold tracebacks
    save(path, measurements, **settings, peers=findings.peers, alone=trials, errors=errors, rounds=rounds)


def _without_folders(text: str) -> str:
    """Removes folders from a text, because they mean nothing to readers of the results."""
    return re.sub(r'[^\s=:"]*/', "", text)


def _argument(text: str) -> tuple[str, Any]:
    """Parses ``NAME=VALUE``, the value as JSON or else as a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parse(kind: PeerKind, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, help=f"Python of the environment that {kind.name} is installed in")
    parser.add_argument("--check", action="store_true", help=f"only tell whether {kind.name} can be measured")
    parser.add_argument(
        "--load",
        type=_argument,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="arguments of arbordraft.load",
    )
    parser.add_argument(
        "--drafters",
        nargs="*",
        default=["ngram", "self"],
        metavar="NAME",
        help="our drafters, named as for arbordraft.load; all but 'auto' and 'ngram' draft after lookups",
    )
    parser.add_argument("--draft-model", type=Path, help="folder or GGUF file that drafts in transformers and peers")
    parser.add_argument("--without-generate", action="store_true", help="leave transformers out")
    parser.add_argument(
        "--prompts", type=Path, nargs="+", default=[], help="files in MT-Bench's format; by default built-in prompts"
    )
    parser.add_argument("--limit", type=int, help="prompts of each file; by default as many as the largest batch")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0], help="0 is greedy")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5, help="rounds per batch; medians are reported")
    parser.add_argument("--threads", type=int, default=2, help="cores that every engine may use")
    parser.add_argument("--json", type=Path, help="write the figures and their provenance to this file")
    kind.options(parser)
    return parser.parse_args()


def run(kind: PeerKind, description: str | None) -> int:
    """Runs the comparison; the exit status is 1 if the peer can be imported but fails."""
    arguments = _parse(kind, description)
    version, line = find(kind.name, kind.library, arguments.python)
    console.print(Text(line), soft_wrap=True)
    if arguments.check:
        return 0
    largest = max(arguments.batches)
    built_in = list(chain.from_iterable(zip(VARIED, MIXED, strict=True)))
    texts = {file.stem: read_prompts(file) for file in arguments.prompts} or {BUILT_IN: built_in}
    texts = {name: some[: arguments.limit or largest] for name, some in texts.items()}
    for name, some in texts.items():
        if len(some) < largest:
            sys.exit(f"{name}: a batch of {largest} needs as many prompts, and there are {len(some)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # the peer inherits it
    torch.set_num_threads(arguments.threads)

    load = dict(arguments.load)
    folder = Path(load["model"]) if "model" in load else fetch_smollm2()
    ours = decoders(load, arguments.drafters)
    target = next(iter(ours.values())).target
    if target.tokenizer is None:
        sys.exit(f"{folder} holds no tokenizer, so there are no chats to decode")
    workloads = [
        Workload.of(name, target.tokenizer, some, batch, temperature, built_in)
        for name, some in texts.items()
        for batch in sorted(arguments.batches)
        for temperature in arguments.temperatures
    ]
    end = target.model.generation_config.eos_token_id
    with console.status("") as status, tempfile.TemporaryDirectory() as scratch:
        task = Task(workloads, arguments.max_new_tokens, {end} if isinstance(end, int) else set(end), status.update)
        engines = {f"{OURS} {name}": task.in_process(decoder.generate) for name, decoder in ours.items()}
        if not arguments.without_generate:
            engines |= generating(folder, target.model, arguments.draft_model, task)
        if version is None:
            findings = Findings(task.cases(engines, arguments.repeats))
        else:
            groups = kind.configs(arguments, folder, Path(scratch))
            findings = compare(kind, arguments.python, groups, task, engines, arguments.repeats)
    for workload, case in zip(workloads, findings.cases, strict=False):
        if not case.temperature:
            case.margins.update({name: margins(ours["plain"], workload, case, name) for name in case.runs})
    show(findings)
    if arguments.json is not None:
        loaded = json.loads(_without_folders(json.dumps(load)))
        settings = {
            "model": folder.name if "model" in load else NAME,
            "load": loaded,
            "max_new_tokens": arguments.max_new_tokens,
        }
        settings |= {"prompts": list(texts), "limit": arguments.limit or largest}
        store(arguments.json, findings, **settings, repeats=arguments.repeats, peer=kind.name, peer_version=version)
        console.print(f"wrote {arguments.json}")
    return len(findings.errors) > 0
