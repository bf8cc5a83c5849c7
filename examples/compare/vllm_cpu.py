"""Greedy decoding on a CPU, measured in one run: arbordraft, transformers' generate and vLLM's CPU build.

All engines decode the same chats with the same bfloat16 weights on the same cores, up to the same end of an answer.
They take turns, so that a slow moment of the machine meets all of them; whole calls are timed, prompts included.
vLLM lives in an environment of its own (see README.md); without it the others are measured alone. Linux only.
"""

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rounds import Batch, Case, Engine, Task
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from vllm_process import Vllm, VllmConfig, VllmError, find_vllm

from arbordraft import RaggedModel, SpeculativeDecoder, builders
from arbordraft.bench.measure import save
from arbordraft.pretrained import NAME, fetch_smollm2, load_smollm2
from arbordraft.prompts import MIXED, VARIED

NGRAMS = ["4:3:5", "5:4:4", "2:2:4"]  # looking up as our tree does; as in vLLM's documentation; short drafts
QUIET = 0.05  # share of the cores that others may take before the figures come with a warning
console = Console(highlight=False)


def decoders(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, SpeculativeDecoder]:
    """The decoders of arbordraft that are compared."""
    target = RaggedModel(model, tokenizer, kernels="auto")
    return {"plain": builders.plain(target), "n-gram": builders.lookup(target)}


def vllm_config(reserved: int, ngram: str | None, preload: str = "") -> VllmConfig:
    """vLLM decoding plainly, or with its lookup: ``drafted tokens:shortest:longest suffix to look up``."""
    lookup = None
    if ngram is not None:
        names = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        lookup = {"method": "ngram", **dict(zip(names, map(int, ngram.split(":")), strict=True))}
    name = f"{f'n-gram {ngram}' if ngram else 'plain'}, {reserved} reserved"
    return VllmConfig(name, "bfloat16", lookup, reserved, preload)


@dataclass
class Findings:
    """All that was measured."""

    cases: list[Case] = field(default_factory=list)
    alone: list[Case] = field(default_factory=list)  # of vLLM without the others
    vllms: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def compare(task: Task, engines: dict[str, Engine], model: Path, arguments: argparse.Namespace, logs: Path) -> Findings:
    """Measures our engines beside every vLLM: plain and with lookup, with and without reserved cores."""
    findings = Findings()

    def start(config: VllmConfig) -> Vllm:
        task.tell(f"vLLM {config.name}: starting, which takes a minute or two")
        vllm = Vllm(arguments.vllm_python, config, model, logs / f"{len(findings.vllms)}.log")
        console.print(f"vLLM {config.name}: up after {vllm.start_seconds:.0f} s on cores {vllm.compute_cores}")
        set_by_all = {
            name: value for name, value in os.environ.items() if re.match("VLLM_|OMP_|KMP_|GOMP_|LD_PRE", name)
        }
        environment = {name: _without_folders(value) for name, value in (set_by_all | config.environment).items()}
        about = {"name": config.name, "environment": environment, "arguments": config.arguments}
        findings.vllms.append(about | {"start_seconds": vllm.start_seconds, "compute_cores": vllm.compute_cores})
        return vllm

    for reserved in arguments.reserved:
        for ngrams in ([None], arguments.ngrams):
            configs = [vllm_config(reserved, ngram, arguments.vllm_preload) for ngram in ngrams]
            try:
                alone, cases = task.beside(configs, start, engines, arguments.repeats)
            except VllmError as error:
                findings.errors.append(str(error))
            else:
                findings.alone += alone
                findings.cases += cases
    return findings


def read_prompts(file: Path | None) -> list[str]:
    """The first turns of a file in MT-Bench's format; by default prompts of this project, of changing kinds."""
    if file is None:
        return list(chain.from_iterable(zip(VARIED, MIXED, strict=True)))
    return [json.loads(line)["messages"][0]["content"] for line in file.read_text().splitlines() if line.strip()]


def show(findings: Findings) -> None:
    """Prints what was found: speeds, their ratios, and how many answers are those of `generate`."""
    for error in findings.errors:
        console.print(Text(error, style="red"))
    cases = findings.cases
    for beside in dict.fromkeys(case.vllm for case in cases):
        references = [name for name in ("generate", "vLLM") if name in cases[0].runs]
        table = Table(
            "batch", "engine", "tokens/s", *(f"/ {name}" for name in references), "same answers", title=beside
        )
        for column in table.columns[2:]:
            column.justify = "right"
        for case in cases:
            for name in case.runs if case.vllm == beside else ():
                ratios = [f"{case.ratio(name, reference):.2f} x" for reference in references]
                same = f"{case.same_answers(name, 'generate')} of {case.batch}"
                table.add_row(str(case.batch), name, f"{case.speed(name):.1f}", *ratios, same)
            table.add_section()
        console.print(table)
    if cases:
        show_disturbance(cases)


def show_disturbance(cases: Sequence[Case]) -> None:
    """Prints what else kept the machine busy while an engine was timed."""
    timed = [(name == "vLLM", run) for case in cases for name, runs in case.runs.items() for run in runs]
    vllm = max(run.vllm_cores for is_vllm, run in timed if not is_vllm)
    own = max((run.own_cores for is_vllm, run in timed if is_vllm), default=0.0)
    others = [run.other_cores for _, run in timed]
    console.print(f"cores kept busy while the other was timed: by vLLM at most {vllm:.2f}, by this process {own:.2f}")
    usual, worst = statistics.median(others), max(others)
    console.print(f"cores that other programs or a hypervisor took: {usual:.2f} in the median, {worst:.2f} at most")
    if usual > QUIET * (os.cpu_count() or 1):
        console.print("[red]the machine was not quiet, and engines that use every core suffer most: measure again")


def store(path: Path, findings: Findings, **settings: Any) -> None:
    """Writes the medians as measurements, and the rest as their settings."""
    rounds = [
        {"case": case.vllm, "batch": case.batch, "engine": name, "tokens": sum(map(len, run.answers))}
        | {key: round(value, 4) for key, value in vars(run).items() if key != "answers"}
        for case in findings.cases
        for name, runs in case.runs.items()
        for run in runs
    ]
    trials = [
        {"case": case.vllm, "batch": case.batch, "tokens_per_second": case.speed("vLLM")} for case in findings.alone
    ]
    measurements = [case.measurement(*pair) for case in findings.cases for pair in case.pairs()]
    sys.argv[1:] = [_without_folders(argument) for argument in sys.argv[1:]]  # they become part of the provenance
    save(path, measurements, **settings, vllm=findings.vllms, vllm_alone=trials, errors=findings.errors, rounds=rounds)


def _without_folders(text: str) -> str:
    """Where files lie on this machine says nothing to those who read the results."""
    return re.sub(r"[^\s=:]*/", "", text)


def _parse() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--vllm-python", type=Path, help="Python of the environment that vLLM is installed in")
    options.add_argument("--vllm-preload", default="", metavar="LIBRARIES", help="LD_PRELOAD for vLLM")
    options.add_argument("--check", action="store_true", help="only tell whether vLLM can be measured")
    options.add_argument("--prompts", type=Path, help="file in MT-Bench's format; by default built-in prompts")
    options.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--max-new-tokens", type=int, default=128)
    options.add_argument("--repeats", type=int, default=5, help="rounds per batch; medians are reported")
    options.add_argument("--threads", type=int, default=2, help="cores that every engine may use")
    options.add_argument("--reserved", type=int, nargs="+", default=[0, 1], help="VLLM_CPU_NUM_OF_RESERVED_CPU")
    options.add_argument("--ngrams", nargs="+", default=NGRAMS, metavar="DRAFTED:SHORTEST:LONGEST", help="of vLLM")
    options.add_argument("--json", type=Path, help="write the figures and their provenance to this file")
    return options.parse_args()


def main() -> int:
    """Runs the comparison; the exit status is 1 if vLLM can be imported but fails."""
    arguments = _parse()
    version, line = find_vllm(arguments.vllm_python)
    console.print(Text(line), soft_wrap=True)
    if arguments.check:
        return 0
    texts = read_prompts(arguments.prompts)
    if len(texts) < max(arguments.batches):
        sys.exit(f"a batch of {max(arguments.batches)} needs as many prompts, and there are {len(texts)}")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.threads])  # vLLM inherits it
    torch.set_num_threads(arguments.threads)

    folder = fetch_smollm2()
    model, tokenizer = load_smollm2(torch.bfloat16)
    batches = [Batch.of(tokenizer, texts[:size]) for size in sorted(arguments.batches)]
    end = model.generation_config.eos_token_id
    with console.status("") as status, tempfile.TemporaryDirectory() as logs:
        task = Task(batches, arguments.max_new_tokens, {end} if isinstance(end, int) else set(end), status.update)
        ours = decoders(model, tokenizer)
        engines = {f"arbordraft {name}": task.in_process(decoder.generate) for name, decoder in ours.items()}
        engines["generate"] = task.in_process(model.generate)
        if version is None:
            findings = Findings(task.cases(engines, arguments.repeats, None))
        else:
            findings = compare(task, engines, folder, arguments, Path(logs))
    show(findings)
    if arguments.json is not None:
        settings = {"model": NAME, "dtype": "bfloat16", "max_new_tokens": arguments.max_new_tokens}
        settings |= {"prompts": arguments.prompts.name if arguments.prompts else "built in"}
        store(arguments.json, findings, **settings, repeats=arguments.repeats, vllm_version=version)
        console.print(f"wrote {arguments.json}")
    return len(findings.errors) > 0


if __name__ == "__main__":
    sys.exit(main())
