"""Continuous batching: requests join and leave a batch between two steps.

Shapes: none; samples are counted, not stacked.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.request_samples import RequestSamples
from arbordraft.decoding.requests import Request
from arbordraft.decoding.scheduler import Entry, Job, Scheduler
from arbordraft.decoding.state import Sample
from arbordraft.decoding.streams import Stream
from arbordraft.utils.checks import check_instance, check_int
from arbordraft.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

_FAILURES = 3  # steps in a row after which the next one will fail, too


class EngineClosed(UserError):
    """The engine takes no requests any more."""


class QueueFull(UserError):
    """More requests wait than the engine was told to keep; the same request may be taken later."""


class Engine:
    """Decodes requests as they come, in one unpadded batch that they join and leave between two steps.

    A request's settings are its own. What it says depends on its prompt, settings and seed alone, and not on what
    shares the batch: bit for bit where the kernels treat rows alike (``decoder.equality_report()``).

    Slots are shared out between requests, not between answers. A free one goes to the request with the fewest answers
    that are being decoded, among equals to the one whose last answer ended, or that came, the longest ago: a request
    for many answers (``n``) holds nobody up until all of them are done. A higher ``priority`` goes before all that. An
    answer is admitted once the cache holds all that it may need, so an admitted one never fails for lack of room, and
    nobody overtakes the request that waits for it.

    Prompts are read in portions between the steps of those that decode already, first the one that would be done first
    if it were alone: a short prompt does not wait for a long one that came with it, and a long one not for all that
    come later. What a prompt has in common with the beginning of a text that is still there is copied, not computed.
    Weights, and the settings that requests leave open, are those that the model had when the engine was made.

    Args:
        decoder: does the steps; any number of engines and other calls may use it at a time.
        max_tokens: rows of each KV cache, which bounds the memory; of a finished text they are kept until others need
            them. Steps of fixed shapes set some aside for padding, the more the higher ``max_samples`` is.
        max_samples: answers that are decoded at a time.
        max_rows: tokens of prompts that are read between two steps, which bounds how long a stream can stall;
            :func:`~arbordraft.decoding.measuring.rows_within` says how many a machine reads in a given time.
        max_waiting: requests that may wait for their first slot, whatever number of answers they want; any number by
            default.
        reuse: copy common beginnings. By default where that gives the same bits as reading them.

    Raises:
        TypeError: for arguments of another kind.
        ValueError: for values out of range, and if the model's own settings ask for what cannot be done: decode with
            ``generation_config="none"``.

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
        decoder: SpeculativeDecoder,
        *,
        max_tokens: int = 65_536,
        max_samples: int = 64,
        max_rows: int = 256,
        max_waiting: int | None = None,
        reuse: bool | None = None,
    ) -> None:
        self.decoder = check_instance("decoder", decoder, SpeculativeDecoder)
        self.max_tokens = check_int("max_tokens", max_tokens, 1)
        self.max_samples = check_int("max_samples", max_samples, 1)
        if self.max_tokens < (least := decoder.stepper.least_tokens(self.max_samples)):
            padding = ", the padding of fixed shapes included" if decoder.stepper.fixed else ""
            raise ValueError(
                f"max_tokens must be at least {least} for max_samples={self.max_samples} and trees of "
                f"{decoder.topology.num_nodes} nodes{padding}, got {self.max_tokens}: raise it, or lower max_samples"
            )
        self.max_rows = check_int("max_rows", max_rows, 1)
        self.max_waiting = None if max_waiting is None else check_int("max_waiting", max_waiting, 0)
        if reuse is None:
            reuse = decoder.stepper.can_share
        self._samples_of = RequestSamples(decoder)
        self._mutex = threading.Lock()  # over the queue and the flags
        self._scheduler = Scheduler(
            decoder.stepper, self.max_tokens, self.max_samples, self.max_rows, reuse, mutex=self._mutex
        )
        self._stepping = threading.Lock()  # over the batch
        self._wanted = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._closed = self._drains = False
        self._failed = 0  # steps in a row

    def submit(self, *requests: Request) -> Stream:
        """Asks for answers; may be called from any thread.

        Args:
            requests: at least one, all of one priority; either all of them are taken, or none. They count as one where
                slots are shared out, and if one fails, the others end, too.

        Returns:
            Their answers, numbered request by request.

        Raises:
            TypeError: if one is no request.
            ValueError: if one cannot be answered: its tokens are unknown, it is too long, or wants what the decoder's
                kind of steps cannot do.
            CacheOverflow: if one can never have as much room as it may need.
            QueueFull: if too many wait.
            EngineClosed: if the engine was closed.
        """
        if not requests:
            raise ValueError("there is nothing to answer: submit at least one request")
        stream = Stream([check_instance("request", request, Request) for request in requests], self._driven)
        if len({request.priority for request in requests}) > 1:
            raise ValueError("requests that are submitted together share one priority")
        job, entries = Job(requests[0].priority, lambda: stream.unwanted), list[Entry]()
        for request in requests:
            samples = self._samples_of(request, stream, first=len(entries))
            for index, sample in enumerate(samples, len(entries)):
                self._scheduler.check(sample)
                entries.append(Entry(sample, job, _teller(stream, index)))
        with self._wanted:
            if self._closed:
                raise EngineClosed("the engine is closed: make another one")
            waiting = sum(not job.begun for job in self._scheduler.waiting)
            if self.max_waiting is not None and waiting + 1 > self.max_waiting + self._free():
                raise QueueFull(f"{waiting} requests wait already, {self.max_waiting} may: ask again later")
            self._scheduler.add(*entries)
            self._wanted.notify_all()
        return stream

    @property
    def waiting(self) -> int:
        """Answers that are still to be admitted."""
        return sum(len(job.waiting) for job in list(self._scheduler.waiting))

    @property
    def living(self) -> int:
        """Answers that are being decoded."""
        return len(self._scheduler.living)

    @property
    def healthy(self) -> bool:
        """Whether there is reason to ask it: it is not closed, and one of its last three steps succeeded."""
        return not self._closed and self._failed < _FAILURES

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer unless its request names others: those of the model's own settings."""
        return self._samples_of.ends

    @property
    def own_settings(self) -> "GenerationConfig":
        """Settings of the model itself, for all that a request leaves open."""
        return self._samples_of.own

    def room(self, prompt: int) -> int:
        """Most new tokens that may be asked for behind a prompt of some tokens; below 1 if it is too long itself."""
        decoder, cache = self.decoder, self._scheduler.state.cache
        room = self.max_tokens - cache.reserved - decoder.topology.num_nodes
        if decoder.target.max_positions is not None:
            room = min(room, decoder.target.max_positions + 1)  # the last token needs none
        return room - prompt

    def step(self) -> bool:
        """Admits, reads and decodes a bit; returns whether there is more to do.

        Whatever goes wrong beyond a single request is raised here, and ends all requests that were being answered; of
        three such steps in a row, the last one ends those that wait, too.
        """
        with self._stepping:
            try:
                busy = self._scheduler.advance()
            except BaseException as error:
                self._failed += 1
                reason = error if isinstance(error, Exception) else EngineClosed("the engine was interrupted")
                with self._mutex:
                    self._scheduler.lose(reason, everybody=self._failed >= _FAILURES)
                raise
            self._failed = 0
            return busy

    def run(self) -> None:
        """Steps until nothing is left to do."""
        self._announce()
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
            self._scheduler.close(EngineClosed("the engine was closed before the answer had ended"))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *failure: object) -> None:
        self.close(drain=failure[0] is None)

    def _work(self) -> None:
        while True:
            if not self._scheduler.busy:
                self.decoder.decider.expect(0, hurry=lambda: self._scheduler.busy or self._closed)
            with self._wanted:
                while not self._scheduler.busy and not self._closed:
                    self._wanted.wait()
                if self._closed and not (self._drains and self._scheduler.busy):
                    return
            try:
                self.step()
            except BaseException:  # its requests have been told, and there is nobody else to tell
                continue

    def _announce(self) -> None:
        """Tells the decider what is wanted, if nothing is being decoded; a thread does so while it is idle."""
        if not self._scheduler.living:
            waiting = [entry for job in list(self._scheduler.waiting) for entry in job.waiting]
            self.decoder.decider.expect(sum(entry.sample.budget for entry in waiting))

    def _driven(self) -> bool:
        """Whether a thread steps; if none does, takes a step."""
        if self._thread is not None:
            return True
        self._announce()
        self.step()
        return False

    def _free(self) -> int:
        return max(0, self.max_samples - len(self._scheduler.living))


def _teller(stream: Stream, index: int) -> Callable[[Sample], None]:
    def finished(sample: Sample) -> None:
        if sample.failure is not None:
            stream.fail(sample.failure)
        else:
            ended = "stop" if sample.stopped else "length" if sample.ended else "cancelled"
            stream.end(index, ended)

    return finished


__all__ = ["Engine", "EngineClosed", "QueueFull"]
