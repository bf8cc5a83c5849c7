"""Engines that decode the same batches take turns. Nothing is said here of which engines those are, save vLLM."""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import chain
from operator import eq
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from vllm_process import Tokens, Vllm, VllmConfig

from arbordraft.bench.measure import Measurement
from arbordraft.prompts import chat_batch

TRIALS = 2  # calls per batch to find the fastest of several ways to run vLLM


@dataclass(frozen=True)
class Batch:
    """The same chats for every engine: padded tensors, and the tokens of each alone."""

    inputs: dict[str, Tensor]
    prompts: Tokens

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> "Batch":
        """One chat per text."""
        inputs = chat_batch(tokenizer, texts)
        rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        return cls(inputs, [ids[mask == 1].tolist() for ids, mask in rows])


@dataclass(frozen=True)
class Run:
    """One timed call; and how many cores this process, vLLM's and all others kept busy meanwhile."""

    seconds: float
    answers: Tokens
    own_cores: float
    vllm_cores: float
    other_cores: float

    @property
    def speed(self) -> float:
        """Emitted tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


@dataclass(frozen=True)
class Case:
    """All rounds of one batch, beside one vLLM or none."""

    vllm: str
    batch: int
    runs: dict[str, list[Run]]

    def speed(self, engine: str) -> float:
        """Median of the rounds."""
        return statistics.median(run.speed for run in self.runs[engine])

    def ratio(self, engine: str, reference: str) -> float:
        """Median of the rounds' ratios of tokens per second."""
        rounds = zip(self.runs[engine], self.runs[reference], strict=True)
        return statistics.median(run.speed / other.speed for run, other in rounds)

    def pairs(self) -> list[tuple[str, str]]:
        """What is compared: every engine with `generate` and with vLLM."""
        references = [name for name in ("generate", "vLLM") if name in self.runs]
        return [(name, reference) for reference in references for name in self.runs if name != reference]

    def same_answers(self, engine: str, reference: str) -> int:
        """How many answers of the first round are equal."""
        return sum(map(eq, self.runs[engine][0].answers, self.runs[reference][0].answers))

    def measurement(self, engine: str, reference: str) -> Measurement:
        """One pair as it is stored."""
        ours, other = (statistics.median(run.seconds for run in self.runs[name]) * 1e3 for name in (engine, reference))
        case = f"{self.vllm}, batch {self.batch}, {engine} against {reference}"
        detail = (
            f"{self.speed(engine):.1f} against {self.speed(reference):.1f} tokens/s, "
            f"{self.same_answers(engine, reference)} of {self.batch} answers equal"
        )
        return Measurement("compare", case, ours, other, self.ratio(engine, reference), detail=detail)


Engine = Callable[[Batch], tuple[float, Tokens]]  # gives seconds and answers


@dataclass(frozen=True)
class Task:
    """What every engine has to do.

    Args:
        batches: answer these,
        new_tokens: tokens of an answer at most,
        ends: and stop behind the first of these.
        tell: called with what is being measured.
    """

    batches: list[Batch]
    new_tokens: int
    ends: set[int]
    tell: Callable[[str], None]

    def in_process(self, generate: Callable[..., Tensor]) -> Engine:
        """An engine of this process, which has the interface of transformers."""

        def run(batch: Batch) -> tuple[float, Tokens]:
            start = time.perf_counter()
            ids = generate(**batch.inputs, max_new_tokens=self.new_tokens, do_sample=False)
            seconds = time.perf_counter() - start
            return seconds, [self._cut(answer) for answer in ids[:, batch.inputs["input_ids"].shape[1] :].tolist()]

        return run

    def cases(self, engines: dict[str, Engine], repeats: int, vllm: Vllm | None) -> list[Case]:
        """Measures every batch."""
        beside = "no vLLM" if vllm is None else f"vLLM {vllm.config.name}"
        if vllm is not None:
            engines = {**engines, "vLLM": lambda batch: vllm.generate(batch.prompts, self.new_tokens)}
        cases = []
        for batch in self.batches:
            self.tell(f"{beside}, batch {len(batch.prompts)}: measuring {', '.join(engines)}")
            runs = _take_turns(engines, batch, repeats, vllm)
            self._check(runs)
            cases.append(Case(beside, len(batch.prompts), runs))
        return cases

    def beside(
        self,
        configs: Sequence[VllmConfig],
        start: Callable[[VllmConfig], Vllm],
        engines: dict[str, Engine],
        repeats: int,
    ) -> tuple[list[Case], list[Case]]:
        """Cases of vLLM alone in every way, and of all engines beside the way that was fastest over all batches."""
        alone: list[Case] = []
        with ExitStack() as stack:
            fastest, highest = None, 0.0
            for config in configs:
                vllm = stack.enter_context(closing(start(config)))
                cases = self.cases({}, TRIALS, vllm)
                alone += cases
                speed = statistics.geometric_mean(case.speed("vLLM") for case in cases)
                if speed > highest:
                    vllm, fastest, highest = fastest, vllm, speed
                if vllm is not None:
                    vllm.close()
            return alone, self.cases(engines, repeats, fastest)

    def _cut(self, answer: list[int]) -> list[int]:
        """The answer without the padding behind its end."""
        return next((answer[: place + 1] for place, token in enumerate(answer) if token in self.ends), answer)

    def _check(self, runs: dict[str, list[Run]]) -> None:
        """Engines that stop elsewhere could not be compared."""
        for name, rounds in runs.items():
            for answer in chain.from_iterable(run.answers for run in rounds):
                ended = len(answer) == self.new_tokens or answer[-1:] in [[end] for end in self.ends]
                if not ended or answer != self._cut(answer):
                    raise RuntimeError(f"{name} gave {len(answer)} tokens that end with {answer[-1:]}")


def _take_turns(engines: dict[str, Engine], batch: Batch, repeats: int, vllm: Vllm | None) -> dict[str, list[Run]]:
    """Every engine once unmeasured, then rounds in which each begins in turn."""
    for engine in engines.values():
        engine(batch)
    names = list(engines)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(_timed(engines[name], batch, vllm))
    return runs


def _timed(engine: Engine, batch: Batch, vllm: Vllm | None) -> Run:
    """One call, and who kept the machine busy during it."""

    def used() -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), vllm.cpu_seconds() if vllm else 0.0, _machine_seconds()

    before = used()
    seconds, answers = engine(batch)
    wall, own, theirs, machine = (after - start for after, start in zip(used(), before, strict=True))
    return Run(seconds, answers, own / wall, theirs / wall, max(0.0, machine - own - theirs) / wall)


def _machine_seconds() -> float:
    """For how long the machine's cores have been busy, or taken away by a hypervisor."""
    ticks = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, ticks)
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
