"""Engines that decode the same batches take turns: those of this process, and at most one peer beside them."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
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

GENERATE = "generate"  # of transformers
LOOKUP = "generate, prompt lookup"  # which it has for one prompt at a time
TRIALS = 2  # calls per batch to find the fastest of several ways to run a peer


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
    """One timed call; and how many cores this process, the peer's and all others kept busy meanwhile."""

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
    """All rounds of one batch.

    Args:
        beside: the peer and how it was run.
        peer: its name among the engines; empty without one.
        batch: number of prompts.
        runs: by engine.
    """

    beside: str
    peer: str
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
        """What is compared: every engine with its references."""
        return [(name, reference) for reference in self.references for name in self.runs if name != reference]

    @property
    def references(self) -> list[str]:
        """Transformers and the peer, as far as they are there."""
        return [name for name in (GENERATE, self.peer) if name in self.runs]

    def same_answers(self, engine: str, reference: str) -> int:
        """How many answers of the first round are equal."""
        return sum(map(eq, self.runs[engine][0].answers, self.runs[reference][0].answers))

    def measurement(self, engine: str, reference: str) -> Measurement:
        """One pair as it is stored."""
        ours, other = (statistics.median(run.seconds for run in self.runs[name]) * 1e3 for name in (engine, reference))
        case = f"{self.beside}, batch {self.batch}, {engine} against {reference}"
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

    def in_process(self, generate: Callable[..., Tensor], **options: Any) -> Engine:
        """An engine of this process, which has the interface of transformers."""

        def run(batch: Batch) -> tuple[float, Tokens]:
            start = time.perf_counter()
            ids = generate(**batch.inputs, max_new_tokens=self.new_tokens, do_sample=False, **options)
            seconds = time.perf_counter() - start
            return seconds, [self._cut(answer) for answer in ids[:, batch.inputs["input_ids"].shape[1] :].tolist()]

        return run

    def cases(self, engines: dict[str, Engine], repeats: int, peer: Peer | None) -> list[Case]:
        """Measures every batch."""
        beside, name = "no peer", ""
        if peer is not None:
            beside, name = f"{peer.name} {peer.config.name}", peer.name
            engines = {**engines, name: lambda batch: _asked(peer, batch, self.new_tokens)}
        cases = []
        for batch in self.batches:
            here = {name: engine for name, engine in engines.items() if name != LOOKUP or len(batch.prompts) == 1}
            self.tell(f"{beside}, batch {len(batch.prompts)}: measuring {', '.join(here)}")
            runs = _take_turns(here, batch, repeats, peer)
            self._check(runs)
            cases.append(Case(beside, name, len(batch.prompts), runs))
        return cases

    def beside(
        self,
        configs: Sequence[Config],
        start: Callable[[Config], Peer],
        engines: dict[str, Engine],
        repeats: int,
        give_up: Callable[[str], object],
    ) -> tuple[list[Case], list[Case]]:
        """Cases of a peer alone in every way, and of all engines beside the way that was fastest over all batches.

        A way in which the peer gives up is told to ``give_up`` and left out.
        """
        alone: list[Case] = []
        with ExitStack() as stack:
            fastest, highest = None, 0.0
            for config in configs:
                try:
                    peer = stack.enter_context(closing(start(config)))
                    cases = self.cases({}, TRIALS, peer) if len(configs) > 1 else []
                except PeerError as error:
                    give_up(str(error))
                    continue
                alone += cases
                speeds = [case.speed(peer.name) for case in cases]
                speed = statistics.geometric_mean(speeds) if speeds else math.inf
                loser = peer
                if speed > highest:
                    loser, fastest, highest = fastest, peer, speed
                if loser is not None:
                    loser.close()
            return alone, self.cases(engines, repeats, fastest) if fastest is not None else []

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


def _asked(peer: Peer, batch: Batch, new_tokens: int) -> tuple[float, Tokens]:
    answer = peer.generate(batch.prompts, new_tokens)
    return answer.seconds, answer.tokens


def _take_turns(engines: dict[str, Engine], batch: Batch, repeats: int, peer: Peer | None) -> dict[str, list[Run]]:
    """Every engine once unmeasured, then rounds in which each begins in turn."""
    for engine in engines.values():
        engine(batch)
    names = list(engines)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            runs[name].append(_timed(engines[name], batch, peer))
    return runs


def _timed(engine: Engine, batch: Batch, peer: Peer | None) -> Run:
    """One call, and who kept the machine busy during it."""

    def used() -> tuple[float, float, float, float]:
        return time.perf_counter(), time.process_time(), peer.cpu_seconds() if peer else 0.0, machine_seconds()

    before = used()
    seconds, answers = engine(batch)
    wall, own, theirs, machine = (after - start for after, start in zip(used(), before, strict=True))
    return Run(seconds, answers, own / wall, theirs / wall, max(0.0, machine - own - theirs) / wall)
