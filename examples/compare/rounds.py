"""Rounds in which engines decode the same prompts in turns: engines of this process, and peers in their own."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import and_, eq
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
ASSISTED = "generate, draft model"  # likewise
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
    """Batches of one size, which an engine decodes one after the other.

    Args:
        name: the kind of prompts.
        batch: prompts at a time.
        temperature: temperature; 0 is greedy.
        first: a batch of other prompts, which is decoded unmeasured.
        batches: the measured batches.
    """

    name: str
    batch: int
    temperature: float
    first: Batch
    batches: list[Batch]

    @classmethod
    def of(
        cls,
        name: str,
        tokenizer: PreTrainedTokenizerBase,
        texts: Sequence[str],
        batch: int,
        temperature: float = 0.0,
        others: Sequence[str] = (),
    ) -> "Workload":
        """Builds whole batches of the texts; texts of an incomplete last batch are left out.

        Args:
            name: the kind of prompts.
            tokenizer: encodes them as chats.
            texts: the prompts.
            batch: prompts at a time.
            temperature: temperature.
            others: prompts that are decoded unmeasured first, at least ``batch``; by default the first texts.
        """
        starts = range(0, len(texts) - batch + 1, batch)
        batches = [Batch.of(tokenizer, texts[start : start + batch]) for start in starts]
        return cls(name, batch, temperature, Batch.of(tokenizer, (others or texts)[:batch]), batches)


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
        name: the kind of prompts.
        batch: prompts at a time.
        temperature: temperature.
        peers: names of the engines that are peers.
        runs: rounds by engine.
        margins: by engine, how much likelier our token was where greedy answers part; filled in afterwards.
    """

    name: str
    batch: int
    temperature: float
    peers: list[str]
    runs: dict[str, list[Run]]
    margins: dict[str, list[float]] = field(default_factory=dict)

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
        """Names of transformers' ways and of the peers, if they took part."""
        return [name for name in (GENERATE, LOOKUP, ASSISTED, *self.peers) if name in self.runs]

    def shared(self, engine: str, reference: str) -> list[int]:
        """Returns how many tokens each answer of the first round shares with the other engine's."""
        pairs = zip(self.runs[engine][0].answers, self.runs[reference][0].answers, strict=True)
        return [sum(accumulate(map(eq, left, right), and_)) for left, right in pairs]

    def same_answers(self, engine: str, reference: str) -> int:
        """Counts the equal answers of the first round."""
        return sum(map(eq, self.runs[engine][0].answers, self.runs[reference][0].answers))

    def measurement(self, engine: str, reference: str) -> Measurement:
        """Builds the measurement of one pair."""
        kind = f"{self.name}, batch {self.batch}" + (f", temperature {self.temperature:g}" if self.temperature else "")
        ours, other = (statistics.median(run.seconds for run in self.runs[name]) * 1e3 for name in (engine, reference))
        case = f"{kind}, {engine} against {reference}"
        detail = f"{self.speed(engine):.1f} against {self.speed(reference):.1f} tokens/s"
        if not self.temperature:
            detail += f", {self.same_answers(engine, reference)} of {self.prompts} answers equal"
        return Measurement("compare", case, ours, other, self.ratio(engine, reference), detail=detail)


Engine = Callable[[Batch, float], tuple[float, Tokens]]  # takes a temperature too, returns seconds and answers


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

        def run(batch: Batch, temperature: float) -> tuple[float, Tokens]:
            law = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
            start = time.perf_counter()
            ids = generate(**batch.inputs, max_new_tokens=self.new_tokens, do_sample=temperature > 0, **law, **options)
            seconds = time.perf_counter() - start
            return seconds, [self._cut(answer) for answer in ids[:, batch.inputs["input_ids"].shape[1] :].tolist()]

        return run

    def cases(self, engines: dict[str, Engine], repeats: int, peers: Sequence[Peer] = ()) -> list[Case]:
        """Measures every workload."""
        names = [str(peer) for peer in peers]
        engines = engines | {name: self._asking(peer) for name, peer in zip(names, peers, strict=True)}
        cases = []
        for workload in self.workloads:
            alone = () if workload.batch == 1 else (LOOKUP, ASSISTED)
            here = {name: engine for name, engine in engines.items() if name not in alone}
            self.on_progress(f"{workload.name}, batch {workload.batch}: measuring {', '.join(here)}")
            runs = _take_turns(here, workload, repeats, peers)
            self._check(runs)
            cases.append(Case(workload.name, workload.batch, workload.temperature, names, runs))
        return cases

    def fastest(
        self, configs: Sequence[Config], start: Callable[[Config], Peer], give_up: Callable[[str], object]
    ) -> tuple[Peer | None, list[Case]]:
        """Finds the fastest way to run a peer over all workloads; returns that peer, still running, and all cases.

        A single way is not measured. If the peer gives up, the reason goes to ``give_up`` and this way is left out.
        """
        fastest: Peer | None = None
        highest, found = 0.0, []
        for config in configs:
            try:
                loser = peer = start(config)
                cases = self.cases({}, TRIALS, [peer]) if len(configs) > 1 else []
            except PeerError as error:
                give_up(str(error))
                continue
            found += cases
            speed = statistics.geometric_mean([case.speed(str(peer)) for case in cases] or [1.0])
            if speed > highest:
                loser, fastest, highest = fastest, peer, speed
            if loser is not None:
                loser.close()
        return fastest, found

    def _asking(self, peer: Peer) -> Engine:
        def run(batch: Batch, temperature: float) -> tuple[float, Tokens]:
            answer = peer.generate(batch.prompts, self.new_tokens, temperature)
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
    """Runs one unmeasured batch of every engine, then rounds; each engine in turn is the first to decode a batch."""
    for engine in engines.values():
        engine(workload.first, workload.temperature)
    names = list(engines)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(repeats):
        timed: dict[str, list[_Timed]] = {name: [] for name in names}
        for number, batch in enumerate(workload.batches):
            first = (turn + number) % len(names)
            for name in names[first:] + names[:first]:
                timed[name].append(_timed(engines[name], batch, workload.temperature, peers))
        for name in names:
            runs[name].append(_run(timed[name]))
    return runs


@dataclass(frozen=True)
class _Timed:
    """Seconds of one batch, its answers, and how much CPU time passed meanwhile."""

    seconds: float
    answers: Tokens
    wall: float
    own: float
    peers: float
    machine: float


def _timed(engine: Engine, batch: Batch, temperature: float, peers: Sequence[Peer]) -> _Timed:
    """Times one batch, and measures the CPU time of each side."""

    def used() -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), sum(peer.cpu_seconds() for peer in peers), machine_seconds()

    before = used()
    seconds, answers = engine(batch, temperature)
    return _Timed(seconds, answers, *(after - start for after, start in zip(used(), before, strict=True)))


def _run(timed: Sequence[_Timed]) -> Run:
    """Adds the batches of a pass up."""
    wall, own, theirs, machine = (
        sum(getattr(each, name) for each in timed) for name in ("wall", "own", "peers", "machine")
    )
    answers = [answer for each in timed for answer in each.answers]
    others = max(0.0, machine - own - theirs) / wall
    return Run(sum(each.seconds for each in timed), answers, own / wall, theirs / wall, others)
