"""Engines that decode the same prompts take turns: those of this process and peers in processes of their own."""

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

OURS = "arbordraft"  # begins the names of our engines
GENERATE = "generate"  # of transformers
LOOKUP = "generate, prompt lookup"  # which it has for one prompt at a time
TRIALS = 2  # rounds to find the fastest of several ways to run a peer


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
class Workload:
    """The same prompts in batches of one size, which an engine decodes one after the other."""

    batch: int
    batches: list[Batch]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], batch: int) -> "Workload":
        """Whole batches of all texts; what is left over is left out."""
        starts = range(0, len(texts) - batch + 1, batch)
        return cls(batch, [Batch.of(tokenizer, texts[start : start + batch]) for start in starts])


@dataclass(frozen=True)
class Run:
    """One timed pass over a workload; and how many cores this process, peers and all others kept busy meanwhile."""

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
        peers: names of those engines that are peers.
        runs: by engine.
    """

    batch: int
    peers: list[str]
    runs: dict[str, list[Run]]

    @property
    def prompts(self) -> int:
        """All that were answered in a round."""
        return len(next(iter(self.runs.values()))[0].answers)

    def speed(self, engine: str) -> float:
        """Median of the rounds."""
        return statistics.median(run.speed for run in self.runs[engine])

    def ratio(self, engine: str, reference: str) -> float:
        """Median of the rounds' ratios of tokens per second."""
        rounds = zip(self.runs[engine], self.runs[reference], strict=True)
        return statistics.median(run.speed / other.speed for run, other in rounds)

    def pairs(self) -> list[tuple[str, str]]:
        """What is compared: every engine of this process with its references."""
        return [(name, other) for other in self.references for name in self.runs if name not in (*self.peers, other)]

    @property
    def best(self) -> str:
        """Our fastest engine."""
        return max((name for name in self.runs if name.startswith(OURS)), key=self.speed)

    @property
    def references(self) -> list[str]:
        """Transformers and the peers, as far as they are there."""
        return [name for name in (GENERATE, *self.peers) if name in self.runs]

    def same_answers(self, engine: str, reference: str) -> int:
        """How many answers of the first round are equal."""
        return sum(map(eq, self.runs[engine][0].answers, self.runs[reference][0].answers))

    def measurement(self, engine: str, reference: str) -> Measurement:
        """One pair as it is stored."""
        ours, other = (statistics.median(run.seconds for run in self.runs[name]) * 1e3 for name in (engine, reference))
        case = f"batch {self.batch}, {engine} against {reference}"
        detail = (
            f"{self.speed(engine):.1f} against {self.speed(reference):.1f} tokens/s, "
            f"{self.same_answers(engine, reference)} of {self.prompts} answers equal"
        )
        return Measurement("compare", case, ours, other, self.ratio(engine, reference), detail=detail)


Engine = Callable[[Batch], tuple[float, Tokens]]  # gives seconds and answers


@dataclass(frozen=True)
class Task:
    """What every engine has to do.

    Args:
        workloads: answer these,
        new_tokens: tokens of an answer at most,
        ends: and stop behind the first of these.
        tell: called with what is being measured.
    """

    workloads: list[Workload]
    new_tokens: int
    ends: set[int]
    tell: Callable[[str], None]

    def in_process(self, generate: Callable[..., Tensor], **options: Any) -> Engine:
        """An engine of this process, which has the interface of transformers."""

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
            self.tell(f"batch {workload.batch}: measuring {', '.join(here)}")
            runs = _take_turns(here, workload, repeats, peers)
            self._check(runs)
            cases.append(Case(workload.batch, names, runs))
        return cases

    def fastest(
        self, configs: Sequence[Config], start: Callable[[Config], Peer], give_up: Callable[[str], object]
    ) -> tuple[Peer | None, list[Case]]:
        """The fastest of several ways to run a peer, over all workloads, still running; and the cases of each.

        A way in which the peer gives up is told to ``give_up`` and left out.
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
        """The answer without the padding behind its end."""
        return next((answer[: place + 1] for place, token in enumerate(answer) if token in self.ends), answer)

    def _check(self, runs: dict[str, list[Run]]) -> None:
        """Engines that stop elsewhere could not be compared."""
        for name, rounds in runs.items():
            for answer in chain.from_iterable(run.answers for run in rounds):
                ended = len(answer) == self.new_tokens or answer[-1:] in [[end] for end in self.ends]
                if not ended or answer != self._cut(answer):
                    raise RuntimeError(f"{name} gave {len(answer)} tokens that end with {answer[-1:]}")


def _take_turns(
    engines: dict[str, Engine], workload: Workload, repeats: int, peers: Sequence[Peer]
) -> dict[str, list[Run]]:
    """Every engine one batch unmeasured, then rounds in which each begins in turn."""
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
    """All batches once, and who kept the machine busy meanwhile."""

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
