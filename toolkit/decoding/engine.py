"""Continuous batching: requests join and leave a batch between two steps.

Shapes: none; samples are counted, not stacked.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.request_samples import RequestSamples
from arbordraft.decoding.requests import Request
from arbordraft.decoding.runner import state_tokens
from arbordraft.decoding.scheduler import Entry, Job, Scheduler
from arbordraft.decoding.state import Sample
from arbordraft.decoding.streams import Stream
from arbordraft.utils.checks import check_instance, check_int
from arbordraft.utils.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

_FAILURES = 3  # failed steps in a row after which the next is expected to fail, too


class EngineClosed(UserError):
    """The engine is closed and takes no more requests."""


class QueueFull(UserError):
    """The queue of waiting requests is full; the engine may take the request later."""


class Engine:
    """Decodes requests as they come, in one unpadded batch that they join and leave between two steps.

    Each request has its own settings. Its text depends on its prompt, settings and seed alone, not on other requests.
    This holds bit for bit if the kernels are row-invariant (``decoder.equality_report()``).

    The ``max_samples`` slots are shared out between requests, not between answers. A free slot goes to the request with
    the highest ``priority``, then to the one with the fewest answers in the batch. Ties go to the request that has
    waited longest since it came or since one of its answers last ended. So a request for many answers (``n``) does not
    block others.

    An answer is admitted once the cache has room for all rows that it may need. An admitted answer thus never fails for
    lack of room. While a request waits for room, no other request overtakes it.

    Prompts are read in portions between decoding steps, first the one that would finish first if it were read alone. So
    a short prompt does not wait for a long one that came with it. A long prompt does not wait for all later ones. If a
    prompt shares its beginning with a text that is still cached, that part is copied, not computed.

    Settings that requests leave open are those that the model had when the engine was built. Weights and modules may
    change later, for instance if an adapter is switched. Running answers then end with the old model. Cached texts are
    dropped, and the next request is admitted with the new model. If weights change that running answers read from the
    model itself, these answers fail with ``WeightsChanged``, since part of their text followed the old weights.

    Args:
        decoder: runs the steps; any number of engines and other calls may use it at a time.
        max_cache_tokens: rows of each KV cache, which bounds its memory. Rows of finished texts are kept until others
            need them. Steps of fixed shapes reserve some rows for padding: more rows if ``max_samples`` is higher. If
            the target or a draft model has recurrent layers, each answer also takes ``state_tokens`` of the model.
            By default 65,536 rows, plus the states of ``max_samples`` answers.
        max_samples: most answers decoded at a time.
        max_rows: most prompt tokens read between two steps, which bounds how long a stream can stall.
            :func:`~arbordraft.decoding.measuring.rows_within` tells how many a machine reads in a given time.
        max_waiting: most requests that may wait for their first slot, each counted once for all its answers; unlimited
            by default.
        reuse: copy common beginnings; by default only if copies have the same bits as computed rows.

    Raises:
        TypeError: for arguments of the wrong type.
        ValueError: for values out of range, and if the model's own settings are not supported: decode with
            ``generation_config="none"``.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from arbordraft import NGramDrafter, RaggedModel, SpeculativeDecoder
        >>> config = LlamaConfig(vocab_size=1, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
        >>> target = RaggedModel(LlamaForCausalLM(config).eval(), kernels="torch", self_test=False)
        >>> engine = Engine(SpeculativeDecoder(target, NGramDrafter()), max_cache_tokens=1000)
        >>> streams = [engine.submit(Request(prompt=[0], max_new_tokens=count)) for count in (3, 1)]
        >>> engine.run()
        >>> [len(stream.result()[0].tokens) for stream in streams]
        [3, 1]
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        *,
        max_cache_tokens: int | None = None,
        max_samples: int = 64,
        max_rows: int = 256,
        max_waiting: int | None = None,
        reuse: bool | None = None,
    ) -> None:
        self.decoder = check_instance("decoder", decoder, SpeculativeDecoder)
        self.max_samples = check_int("max_samples", max_samples, 1)
        if max_cache_tokens is None:
            max_cache_tokens = decoder.stepper.usual_tokens(self.max_samples)
        self.max_cache_tokens = check_int("max_cache_tokens", max_cache_tokens, 1)
        if self.max_cache_tokens < (least := decoder.stepper.least_tokens(self.max_samples)):
            extra = ["the padding of fixed shapes"] * decoder.stepper.fixed
            extra += ["the states of recurrent layers"] * (state_tokens(decoder.target, decoder.drafter) > 0)
            included = f", {' and '.join(extra)} included" if extra else ""
            raise ValueError(
                f"max_cache_tokens must be at least {least} for max_samples={self.max_samples} and trees of "
                f"{decoder.topology.num_nodes} nodes{included}, got {max_cache_tokens}: raise it, or lower max_samples"
            )
        self.max_rows = check_int("max_rows", max_rows, 1)
        self.max_waiting = None if max_waiting is None else check_int("max_waiting", max_waiting, 0)
        if reuse is None:
            reuse = decoder.stepper.can_share
        self._samples_of = RequestSamples(decoder)
        self._mutex = threading.Lock()  # guards the queue and the flags
        self._scheduler = Scheduler(
            decoder.stepper, self.max_cache_tokens, self.max_samples, self.max_rows, reuse, mutex=self._mutex
        )
        self._stepping = threading.Lock()  # guards the batch
        self._wanted = threading.Condition(self._mutex)
        self._thread: threading.Thread | None = None
        self._closed = self._drain_first = False
        self._failed = 0  # failed steps in a row

    def submit(self, *requests: Request) -> Stream:
        """Submits requests and returns the stream of their answers; may be called from any thread.

        Args:
            requests: at least one, all of the same priority. The engine takes either all of them or none. They share
                slots like one request. If one fails, the others end, too.

        Returns:
            Their answers, numbered request by request.

        Raises:
            TypeError: if an argument is not a :class:`Request`.
            ValueError: if a request cannot be answered: it has unknown tokens, is too long, or asks for something that
                the decoder's steps do not support.
            CacheOverflow: if the cache can never have enough room for a request.
            QueueFull: if too many requests wait.
            EngineClosed: if the engine was closed.
        """
        if not requests:
            raise ValueError("there is nothing to answer: submit at least one request")
        stream = Stream([check_instance("request", request, Request) for request in requests], self._advance)
        if len({request.priority for request in requests}) > 1:
            raise ValueError("requests that are submitted together share one priority")
        job, entries = Job(requests[0].priority, lambda: stream.aborted), list[Entry]()
        for request in requests:
            samples = self._samples_of(request, stream, first=len(entries))
            for index, sample in enumerate(samples, len(entries)):
                self._scheduler.check(sample)
                entries.append(Entry(sample, job, _on_finished(stream, index)))
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
        """Number of answers that wait for admission."""
        return sum(len(job.waiting) for job in list(self._scheduler.waiting))

    @property
    def running(self) -> int:
        """Number of answers that are being decoded."""
        return len(self._scheduler.running)

    @property
    def healthy(self) -> bool:
        """Whether the engine can answer: it is not closed, and its last three steps did not all fail."""
        return not self._closed and self._failed < _FAILURES

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end an answer unless its request names others; taken from the model's own settings."""
        return self._samples_of.ends

    @property
    def own_settings(self) -> "GenerationConfig":
        """The model's own settings, which hold where a request sets nothing."""
        return self._samples_of.own

    def room(self, prompt: int) -> int:
        """Returns how many new tokens fit after a prompt of ``prompt`` tokens; below 1 if the prompt is too long."""
        decoder, cache = self.decoder, self._scheduler.state.cache
        room = self.max_cache_tokens - cache.reserved - cache.state_tokens - decoder.topology.num_nodes
        if decoder.target.max_positions is not None:
            room = min(room, decoder.target.max_positions + 1)  # the last token needs none
        return room - prompt

    def step(self) -> bool:
        """Runs one round of admission, prompt reading and decoding; returns whether work remains.

        An error that concerns more than one request is raised here and ends all admitted requests. If three such steps
        fail in a row, the third also ends the waiting requests.
        """
        with self._stepping:
            try:
                busy = self._scheduler.advance()
            except BaseException as error:
                self._failed += 1
                reason = error if isinstance(error, Exception) else EngineClosed("the engine was interrupted")
                with self._mutex:
                    self._scheduler.fail_all(reason, include_waiting=self._failed >= _FAILURES)
                raise
            self._failed = 0
            return busy

    def run(self) -> None:
        """Steps until all requests are answered."""
        self._announce()
        while self.step():
            pass

    def start(self) -> Self:
        """Starts a thread that steps whenever there is work; ``with engine:`` does that, too."""
        with self._mutex:
            if self._closed:
                raise EngineClosed("the engine is closed: make another one")
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="arbordraft-engine", daemon=True)
                self._thread.start()
        return self

    def close(self, *, drain: bool = False) -> None:
        """Closes the engine: it takes no more requests and finishes the step in progress.

        Args:
            drain: answer the submitted requests first; otherwise they end with :class:`EngineClosed`.
        """
        with self._wanted:
            self._closed, self._drain_first = True, drain
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
                if self._closed and not (self._drain_first and self._scheduler.busy):
                    return
            try:
                self.step()
            except BaseException:  # step() has already passed the error to its requests
                continue

    def _announce(self) -> None:
        """Tells the decider how many tokens are wanted if nothing is being decoded; used without a thread."""
        if not self._scheduler.running:
            waiting = [entry for job in list(self._scheduler.waiting) for entry in job.waiting]
            self.decoder.decider.expect(sum(entry.sample.budget for entry in waiting))

    def _advance(self) -> bool:
        """Takes a step if no thread does so; returns whether a thread runs."""
        if self._thread is not None:
            return True
        self._announce()
        self.step()
        return False

    def _free(self) -> int:
        return max(0, self.max_samples - len(self._scheduler.running))


def _on_finished(stream: Stream, index: int) -> Callable[[Sample], None]:
    def finished(sample: Sample) -> None:
        if sample.failure is not None:
            stream.fail(sample.failure)
        else:
            ended = "stop" if sample.stopped else "length" if sample.ended else "cancelled"
            stream.end(index, ended)

    return finished


__all__ = ["Engine", "EngineClosed", "QueueFull"]
