"""Rounds in which engines decode the same prompts in turns: engines of this process, and peers in their own."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import eq
from typing import Any

from peers import Config, Peer, PeerError, Tokens
from processes import machine_seconds
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from arbordraft.bench.measure import Measurement
from arbordraft.decoding.prompts import chat_batch

OURS = "arbordraft"  # prefix of the names of our engines
GENERATE = "generate"  # of transformers
LOOKUP = "generate, prompt lookup"  # of transformers, for one prompt at a time
TRIALS = 2  # rounds to find the fastest of several ways to run a peer


@dataclass(frozen=True)
class Batch:
    """Chats in the forms that engines take: padded tensors, and the tokens of each chat alone."""

    inputs: dict[str, Tensor]
    prompts: Tokens

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> "Batch":
        """Builds one chat per text."""
        inputs = chat_batch(tokenizer, texts)
        rows = zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        return cls(inputs, [ids[mask == 1].tolist() for ids, mask in rows])


@dataclass(frozen=True)
class Workload:
    """Batches of one size, which an engine decodes one after the other."""

    batch: int
    batches: list[Batch]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch: int) -> "Workload":
        """Builds whole batches of the texts; texts of an incomplete last batch are left out."""
        starts = range(0, len(texts) - batch + 1, batch)
        return cls(batch, [Batch.of(tokenizer, texts[start : start + batch]) for start in starts])


@dataclass(frozen=True)
class Run:
    """One timed pass over a workload, and the numbers of cores that this process, peers and all others kept busy."""

    seconds: float
    answers: Tokens
    own_cores: float
    peer_cores: float
    other_cores: float

    @property
    def speed(self) -> float:
        """Emitted tokens per second."""
        return sum(map(len, self.answers)) / self.seconds


@dataclass(frozen=True)
class Case:
    """All rounds of one workload.

    Args:
        batch: prompts at a time.
        peers: names of the engines that are peers.
        runs: rounds by engine.
    """

    batch: int
    peers: list[str]
    runs: dict[str, list[Run]]

    @property
    def prompts(self) -> int:
        """Number of prompts answered in a round."""
        return len(next(iter(self.runs.values()))[0].answers)

    def speed(self, engine: str) -> float:
        """Returns the median tokens per second of the rounds."""
        return statistics.median(run.speed for run in self.runs[engine])

    def ratio(self, engine: str, reference: str) -> float:
        """Returns the median of the rounds' ratios of tokens per second."""
        rounds = zip(self.runs[engine], self.runs[reference], strict=True)
        return statistics.median(run.speed / other.speed for run, other in rounds)

    def pairs(self) -> list[tuple[str, str]]:
        """Pairs every engine of this process with its references."""
        return [(name, other) for other in self.references for name in self.runs if name not in (*self.peers, other)]

    @property
    def best(self) -> str:
        """Our fastest engine."""
        return max((name for name in self.runs if name.startswith(OURS)), key=self.speed)

    @property
    def references(self) -> list[str]:
        """Names of transformers' ``generate`` and of the peers, if they took part."""
        return [name for name in (GENERATE, *self.peers) if name in self.runs]

    def same_answers(self, engine: str, reference: str) -> int:
        """Counts the equal answers of the first round."""
        return sum(map(eq, self.runs[engine][0].answers, self.runs[reference][0].answers))

    def measurement(self, engine: str, reference: str) -> Measurement:
        """Builds the measurement of one pair."""
        ours, other = (statistics.median(run.seconds for run in self.runs[name]) * 1e3 for name in (engine, reference))
        case = f"batch {self.batch}, {engine} against {reference}"
        detail = (
            f"{self.speed(engine):.1f} against {self.speed(reference):.1f} tokens/s, "
            f"{self.same_answers(engine, reference)} of {self.prompts} answers equal"
        )
        return Measurement("compare", case, ours, other, self.ratio(engine, reference), detail=detail)


Engine = Callable[[Batch], tuple[float, Tokens]]  # returns seconds and answers


@dataclass(frozen=True)
class Task:
    """The task of every engine.

    Args:
        workloads: prompts to answer.
        new_tokens: most tokens of an answer.
        ends: tokens after which an answer stops.
        on_progress: receives the name of the current measurement.
    """

    workloads: list[Workload]
    new_tokens: int
    ends: set[int]
    on_progress: Callable[[str], None]

    def in_process(self, generate: Callable[..., Tensor], **options: Any) -> Engine:
        """Builds an engine of this process from a function with the interface of ``generate``."""

        def run(batch: Batch) -> tuple[float, Tokens]:
            start = time.perf_counter()
            ids = generate(**batch.inputs, max_new_tokens=self.new_tokens, do_sample=False, **options)
            seconds = time.perf_counter() - start
            return seconds, [self._cut(answer) for answer in ids[:, batch.inputs["input_ids"].shape[1] :].tolist()]

        return run

    def cases(self, engines: dict[str, Engine], repeats: int, peers: Sequence[Peer] = ()) -> list[Case]:
        """Measures every workload."""
        names = [str(peer) for peer in peers]
        engines = engines | {name: self._asking(peer) for name, peer in zip(names, peers, strict=True)}
        cases = []
        for workload in self.workloads:
            here = {name: engine for name, engine in engines.items() if name != LOOKUP or workload.batch == 1}
            self.on_progress(f"batch {workload.batch}: measuring {', '.join(here)}")
            runs = _take_turns(here, workload, repeats, peers)
            self._check(runs)
            cases.append(Case(workload.batch, names, runs))
        return cases

    def fastest(
        self, configs: Sequence[Config], start: Callable[[Config], Peer], give_up: Callable[[str], object]
    ) -> tuple[Peer | None, list[Case]]:
        """Finds the fastest way to run a peer over all workloads; returns that peer, still running, and all cases.

        If the peer gives up, the reason goes to ``give_up`` and this way is left out.
        """
        fastest: Peer | None = None
        highest, found = 0.0, []
        for config in configs:
            try:
                loser = peer = start(config)
                cases = self.cases({}, TRIALS, [peer])
            except PeerError as error:
                give_up(str(error))
                continue
            found += cases
            speed = statistics.geometric_mean(case.speed(str(peer)) for case in cases)
            if speed > highest:
                loser, fastest, highest = fastest, peer, speed
            if loser is not None:
                loser.close()
        return fastest, found

    def _asking(self, peer: Peer) -> Engine:
        def run(batch: Batch) -> tuple[float, Tokens]:
            answer = peer.generate(batch.prompts, self.new_tokens)
            return answer.seconds, answer.tokens

        return run

    def _cut(self, answer: list[int]) -> list[int]:
        """Returns the answer without the padding after its end."""
        return next((answer[: place + 1] for place, token in enumerate(answer) if token in self.ends), answer)

    def _check(self, runs: dict[str, list[Run]]) -> None:
        """Raises if an answer ends neither at an end token nor at the limit, so that it cannot be compared."""
        for name, rounds in runs.items():
            for answer in chain.from_iterable(run.answers for run in rounds):
                ended = len(answer) == self.new_tokens or answer[-1:] in [[end] for end in self.ends]
                if not ended or answer != self._cut(answer):
                    raise RuntimeError(f"{name} gave {len(answer)} tokens that end with {answer[-1:]}")


def _take_turns(
    engines: dict[str, Engine], workload: Workload, repeats: int, peers: Sequence[Peer]
) -> dict[str, list[Run]]:
    """Runs one unmeasured batch of every engine, then rounds that each engine begins in turn."""
    for engine in engines.values():
        engine(workload.batches[0])
    names = list(engines)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(_timed(engines[name], workload, peers))
    return runs


def _timed(engine: Engine, workload: Workload, peers: Sequence[Peer]) -> Run:
    """Times all batches once, and measures the cores that each side kept busy."""

    def used() -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), sum(peer.cpu_seconds() for peer in peers), machine_seconds()

    before = used()
    seconds, answers = 0.0, []
    for batch in workload.batches:
        took, answered = engine(batch)
        seconds += took
        answers += answered
    wall, own, theirs, machine = (after - start for after, start in zip(used(), before, strict=True))
    return Run(seconds, answers, own / wall, theirs / wall, max(0.0, machine - own - theirs) / wall)
