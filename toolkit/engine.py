"""Continuous batching: requests join and leave a batch between two steps.

Shapes: none; samples are counted, not stacked.
"""

import heapq
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

from arbordraft.checks import instance, whole
from arbordraft.processors import Warp
from arbordraft.requests import Ends, Request, Stream
from arbordraft.state import Sample, SampleError
from arbordraft.stepping import Stepper
from arbordraft.target.cache import CacheOverflow

_LEAST = 32  # tokens of a common beginning that are worth copying, or waiting for
_MOST_WARPS = 256
_AHEAD = 256  # new tokens for which a sample has room from the start where nothing limits the cache


class EngineClosed(RuntimeError):
    """The engine takes no requests any more."""


class QueueFull(RuntimeError):
    """More requests wait than the engine was told to keep; the same request may be taken later."""


@dataclass(order=True)
class _Entry:
    """A sample on its way; entries are ordered as they are admitted."""

    rank: tuple[int, int]
    sample: Sample = field(compare=False)
    finished: Callable[[Sample], None] = field(compare=False, default=lambda sample: None)
    cancelled: Callable[[], bool] = field(compare=False, default=lambda: False)


class Engine:
    """Decodes requests as they come, in one unpadded batch that they join and leave between two steps.

    A request's settings are its own. What it says depends on its prompt, settings and seed alone, and not on what
    shares the batch: bit for bit where the kernels treat rows alike (``decoder.exactness_report()``).

    Requests are admitted in their order as soon as the cache holds all that they may need, so an admitted one never
    fails for lack of room. Prompts are read in portions between the steps of those that decode already. What a prompt
    has in common with the beginning of a text that is still there is copied, not computed.

    Args:
        decoder: does the steps; any number of engines and other calls may use it at a time.
        max_tokens: rows of each KV cache, which bounds the memory; of a finished text they are kept until others need
            them.
        max_samples: answers that are decoded at a time.
        max_rows: tokens of prompts that are read between two steps, which bounds how long a stream can stall.
        max_waiting: requests that may wait; any number by default.
        reuse: copy common beginnings. By default where that gives the same bits as reading them.

    Raises:
        TypeError: for arguments of another kind.
        ValueError: for values out of range.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder
        >>> config = LlamaConfig(vocab_size=1, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> target = RaggedModel(LlamaForCausalLM(config).eval(), kernels="torch", self_test=False)
        >>> engine = Engine(SpeculativeDecoder(target, NGramDrafter()), max_tokens=1000)
        >>> streams = [engine.submit(Request(prompt=[0], max_new_tokens=count)) for count in (3, 1)]
        >>> engine.run()
        >>> [len(stream.result()[0].tokens) for stream in streams]
        [3, 1]
    """

    def __init__(
        self,
        decoder: Stepper,
        *,
        max_tokens: int = 65_536,
        max_samples: int = 16,
        max_rows: int = 256,
        max_waiting: int | None = None,
        reuse: bool | None = None,
    ) -> None:
        self.decoder = instance("decoder", decoder, Stepper)
        self.max_tokens = whole("max_tokens", max_tokens, 1)
        self.max_samples = whole("max_samples", max_samples, 1)
        self.max_rows = whole("max_rows", max_rows, 1)
        self.max_waiting = None if max_waiting is None else whole("max_waiting", max_waiting, 0)
        if reuse and decoder.static is not None:
            raise ValueError("steps of fixed shapes keep no finished texts: build the decoder with buckets=None")
        if reuse is None:
            reuse = decoder.target.row_invariant and decoder.static is None
        self._batch = Batch(decoder, self.max_tokens, self.max_samples, self.max_rows, reuse)
        self._numbers = itertools.count()
        self._warps: OrderedDict[tuple[float, ...], Warp] = OrderedDict()
        self._mutex = threading.Lock()  # over the queue and the flags
        self._stepping = threading.Lock()  # over the batch
        self._wanted = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._closed = self._drains = False

    def submit(self, request: Request) -> Stream:
        """Asks for answers; may be called from any thread.

        Raises:
            TypeError: if it is no request.
            ValueError: if it cannot be answered: its tokens are unknown, it is too long, or wants what the decoder's
                kind of steps cannot do.
            CacheOverflow: if it can never have as much room as it may need.
            QueueFull: if too many wait.
            EngineClosed: if the engine was closed.
        """
        instance("request", request, Request)
        stream = Stream(request, self._driven)
        entries = self._entries(request, stream)
        with self._wanted:
            if self._closed:
                raise EngineClosed("the engine is closed: make another one")
            waiting = len(self._batch.waiting)
            if self.max_waiting is not None and waiting + len(entries) > self.max_waiting + self._free():
                raise QueueFull(f"{waiting} answers wait already, {self.max_waiting} may: ask again later")
            for entry in entries:
                heapq.heappush(self._batch.waiting, entry)
            self._wanted.notify_all()
        return stream

    @property
    def waiting(self) -> int:
        """Answers that are still to be admitted."""
        return len(self._batch.waiting)

    @property
    def living(self) -> int:
        """Answers that are being decoded."""
        return len(self._batch.living)

    def room(self, prompt: int) -> int:
        """Most new tokens that may be asked for behind a prompt of some tokens; below 1 if it is too long itself."""
        decoder, cache = self.decoder, self._batch.state.cache
        limits = [self.max_tokens - cache.reserved - decoder.topology.num_nodes]
        limits += [part.max_positions for part in (decoder.target, decoder.drafter) if part.max_positions is not None]
        return min(limits) - prompt

    def step(self) -> bool:
        """Admits, reads and decodes a bit; returns whether there is more to do.

        Whatever goes wrong beyond a single request is raised here, and ends all requests that were being answered.
        """
        with self._stepping:
            try:
                return self._batch.advance(self._mutex)
            except BaseException as error:
                self._batch.lose(error if isinstance(error, Exception) else EngineClosed("the engine was interrupted"))
                raise

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.step():
            pass

    def start(self) -> Self:
        """Steps in a thread of its own whenever there is something to do; ``with engine:`` does that, too."""
        with self._mutex:
            if self._closed:
                raise EngineClosed("the engine is closed: make another one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="arbordraft-engine", daemon=True)
                self._thread.start()
        return self

    def close(self, *, drain: bool = False) -> None:
        """Takes no more requests, and waits for the step that is being done.

        Args:
            drain: answer first what was submitted; else that is cancelled.
        """
        with self._wanted:
            self._closed, self._drains = True, drain
            self._wanted.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        elif drain:
            self.run()
        with self._stepping:
            self._batch.close(EngineClosed("the engine was closed before the answer had ended"))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.close(drain=failure[0] is None)

    def _work(self) -> None:
        while True:
            with self._wanted:
                while not self._batch.busy and not self._closed:
                    self._wanted.wait()
                if self._closed and not (self._drains and self._batch.busy):
                    return
            try:
                self.step()
            except Exception:  # its requests have been told
                continue

    def _driven(self) -> bool:
        """Whether a thread steps; if none does, takes a step."""
        if self._thread is not None:
            return True
        self.step()
        return False

    def _free(self) -> int:
        return max(0, self.max_samples - len(self._batch.living))

    def _entries(self, request: Request, stream: Stream) -> list[_Entry]:
        decoder, target = self.decoder, self.decoder.target
        if max(request.prompt) >= target.vocab_size:
            raise ValueError(f"the prompt holds ids outside the target's vocabulary of {target.vocab_size} tokens")
        if max(request.logit_bias, default=0) >= target.vocab_size:
            raise ValueError(f"logit_bias names ids outside the target's vocabulary of {target.vocab_size} tokens")
        decoder.check_positions(len(request.prompt), request.max_new_tokens)
        if request.stop and target.tokenizer is None:
            raise ValueError("stop needs a tokenizer: build the target as RaggedModel(model, tokenizer)")
        ends = request.ends
        if ends is None:
            known = target.model.generation_config.eos_token_id  # type: ignore[union-attr]
            ends = () if known is None else (known,) if isinstance(known, int) else tuple(known)
        warp = self._warp(request)
        seeds = torch.randint(2**62, (request.n,)).tolist()
        if request.seed is not None:
            seeds = [request.seed + index for index in range(request.n)]
        entries = []
        for index, seed in enumerate(seeds):
            sample = Sample(
                list(request.prompt),
                request.max_new_tokens,
                seed,
                request.greedy,
                warp,
                Ends(ends, target.tokenizer, request.stop),
                emit=stream.told(index),
                logprobs=request.logprobs,
            )
            decoder.check(sample)
            self._batch.check(sample)
            rank = (-request.priority, next(self._numbers))
            entries.append(_Entry(rank, sample, _teller(stream, index), lambda: stream.cancelled))
        return entries

    def _warp(self, request: Request) -> Warp:
        """The processors of a request; those with the same settings share them, and so are processed together."""
        if not request.plain:
            return request.warp()
        settings = (request.temperature, request.top_k, request.top_p, request.min_p)
        with self._mutex:
            warp = self._warps.pop(settings, None) or request.warp()
            self._warps[settings] = warp
            if len(self._warps) > _MOST_WARPS:
                self._warps.popitem(last=False)
        return warp


def _teller(stream: Stream, index: int) -> Callable[[Sample], None]:
    def finished(sample: Sample) -> None:
        if sample.failure is not None:
            stream.fail(sample.failure)
        else:
            ended = "stop" if sample.stopped else "length" if not sample.budget else "cancelled"
            stream.end(index, ended)

    return finished


class Batch:
    """Samples from their arrival to their end.

    Args:
        decoder: does the steps.
        max_tokens: bound on the rows of each cache; ``None`` for none.
        max_samples: samples at a time.
        max_rows: tokens of prompts that are read between two steps; ``None`` for all.
        reuse: copy common beginnings.
        closed: whether all samples are there from the start.

    Attributes:
        waiting: a heap of what is still to be admitted.
        living: what was admitted and has not ended, in that order.
    """

    def __init__(
        self,
        decoder: Stepper,
        max_tokens: int | None,
        max_samples: int,
        max_rows: int | None,
        reuse: bool,
        closed: bool = False,
    ) -> None:
        self.decoder, self.max_samples, self.max_rows, self.reuse = decoder, max_samples, max_rows, reuse
        self.state = decoder.open(max_samples, max_tokens, closed=closed)
        self.waiting: list[_Entry] = []
        self.living: list[_Entry] = []
        self._kept: OrderedDict[int, Sample] = OrderedDict()  # finished ones by number, the least recently used first

    @property
    def busy(self) -> bool:
        """Whether there is something to do."""
        return bool(self.waiting or self.living)

    def check(self, sample: Sample) -> None:
        """Raises CacheOverflow if a sample could never have as much room as it may need."""
        limit, rows = self.state.cache.max_tokens, self._rows(sample)
        if limit is not None and rows + self.state.cache.reserved > limit:
            raise CacheOverflow(
                f"a prompt of {sample.prompt} tokens, {sample.budget} new ones and the largest tree take {rows} rows, "
                f"the cache may hold {limit}: raise that limit, shorten the prompt or lower max_new_tokens"
            )

    def add(self, samples: Sequence[Sample]) -> None:
        """Lets samples wait for their admission, in this order."""
        self.waiting += [_Entry((0, number), sample) for number, sample in enumerate(samples)]

    def advance(self, mutex: "threading.Lock | None" = None) -> bool:
        """Admits, reads and decodes a bit; returns whether there is more to do."""
        with mutex or threading.Lock():
            self._sweep()
            self.admit()
        self._read()
        while self.state.closed and any(entry.sample.unread for entry in self.living):
            self._read()
        if any(entry.sample.active for entry in self.living):
            try:
                self.decoder.step(self.state)
            except SampleError as error:
                self.state[error.number].fail(error.cause)
        self._retire()
        return self.busy

    def lose(self, reason: Exception) -> None:
        """Ends all that was admitted, and begins anew: nobody knows where a step was left."""
        for entry in self.living:
            entry.sample.fail(reason)
            entry.finished(entry.sample)
        self.living.clear()
        self._kept.clear()
        self.state = self.decoder.open(self.max_samples, self.state.cache.max_tokens, closed=self.state.closed)

    def close(self, reason: Exception) -> None:
        """Ends everything."""
        waiting, self.waiting = self.waiting, []
        for entry in [*self.living, *waiting]:
            entry.sample.fail(reason)
            entry.finished(entry.sample)
        self.living.clear()
        self.decoder.close(self.state)

    def _rows(self, sample: Sample) -> int:
        nodes = self.decoder.topology.num_nodes
        # Under a limit a sample gets all it can need at once, so that there is room for it or it waits.
        likely = sample.budget if self.state.cache.max_tokens is not None else min(sample.budget, _AHEAD)
        return len(sample.tokens) + likely + nodes

    def _sweep(self) -> None:
        """Lets go of what nobody wants any more."""
        gone = [entry for entry in self.waiting if entry.cancelled()]
        if gone:
            self.waiting = [entry for entry in self.waiting if entry not in gone]
            heapq.heapify(self.waiting)
        for entry in gone:
            entry.finished(entry.sample)
        for entry in [entry for entry in self.living if entry.cancelled()]:
            self.living.remove(entry)
            entry.finished(entry.sample)
            self.decoder.leave(self.state, entry.sample)

    def admit(self) -> None:
        """Admits those who come next as far as there is room."""
        while self.waiting and len(self.living) < self.max_samples:
            sample = self.waiting[0].sample
            try:
                self.decoder.join(self.state, sample, self._rows(sample))
            except CacheOverflow:
                if not self._kept:
                    return  # until somebody leaves
                self.decoder.leave(self.state, self._kept.popitem(last=False)[1])
                continue
            self.living.append(heapq.heappop(self.waiting))

    def _read(self) -> None:
        """Reads some of the prompts that are not read yet, the first ones first."""
        left = self.max_rows
        portions: dict[int, int] = {}
        reading: list[Sample] = []
        for sample in (entry.sample for entry in self.living if entry.sample.unread):
            if left == 0:
                break
            if self.reuse and sample.unread == sample.prompt - 1:
                source, common = self._longest(sample)
                ahead = max((_common(sample, other, other.prompt) for other in reading), default=0)
                if ahead >= common + _LEAST:
                    continue  # somebody is about to read what this one could copy
                if source is not None:
                    self.decoder.share(self.state, source, sample, common)
                    if source.number in self._kept:
                        self._kept.move_to_end(source.number)
            portions[sample.number] = sample.unread if left is None else min(sample.unread, left)
            left = None if left is None else left - portions[sample.number]
            reading.append(sample)
        if portions:
            self.decoder.read(self.state, portions)

    def _longest(self, sample: Sample) -> tuple[Sample | None, int]:
        """Who has read most of a prompt's beginning, and how much of it."""
        best, most = None, _LEAST - 1
        for other in self.state.samples:
            if other is not None and other is not sample:
                known = other.prompt - 1 - other.unread if other.unread else len(other.tokens) - 1
                if (common := _common(sample, other, known)) > most:
                    best, most = other, common
        return best, most if best is not None else 0

    def _retire(self) -> None:
        for entry in [entry for entry in self.living if not entry.sample.budget]:
            self.living.remove(entry)
            sample = entry.sample
            if self.reuse and not self.state.closed and sample.failure is None and not sample.unread:
                self._kept[sample.number] = sample
                if len(self._kept) > 4 * self.max_samples:
                    self.decoder.leave(self.state, self._kept.popitem(last=False)[1])
            else:
                self.decoder.leave(self.state, sample)
            entry.finished(sample)


def _common(sample: Sample, other: Sample, known: int) -> int:
    """Tokens of a prompt that could be copied from another sample, which has read ``known`` of its own.

    Their next token is equal, too, and at least one more is left to read in front of the prompt's last.
    """
    limit = min(known, sample.prompt - 2, len(other.tokens) - 1)
    if limit < _LEAST or sample.tokens[:_LEAST] != other.tokens[:_LEAST]:
        return 0
    pairs = zip(sample.tokens[: limit + 1], other.tokens, strict=False)
    equal = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), limit + 1)
    return min(limit, equal - 1)


__all__ = ["Batch", "Engine", "EngineClosed", "QueueFull"]
