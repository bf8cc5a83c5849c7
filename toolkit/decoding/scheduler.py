"""Schedules a batch that samples join and leave: admission, prompt reading and retirement.

Shapes: none; samples are counted, not stacked.
"""

import heapq
import itertools
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from arbordraft.decoding.state import Sample
from arbordraft.decoding.step import Stepper
from arbordraft.sampling.owned_rows import SampleError
from arbordraft.target.cache import CacheOverflow

_LEAST = 32  # fewest tokens of a common beginning that are worth copying, or waiting for
_AHEAD = 256  # most new tokens that get rows at admission if the cache has no limit
_KEPT = 4  # cached finished texts per slot
_PREFILL_DIVISOR = 4  # further prompts are read in a step until max_rows / _PREFILL_DIVISOR rows are filled


@dataclass(eq=False)
class Job:
    """The samples of one submission; free slots are shared out between jobs, not between samples.

    Args:
        priority: jobs with higher priority are admitted first.
        cancelled: returns whether the request was cancelled.

    Attributes:
        waiting: samples that wait for admission, in order.
        running: number of samples in the batch.
        begun: whether a sample was admitted.
        turn: orders jobs with equal priority and ``running``. Whenever a sample of the job ends, the job goes last.
    """

    priority: int = 0
    cancelled: Callable[[], bool] = lambda: False
    waiting: "deque[Entry]" = field(init=False, default_factory=deque)
    running: int = field(init=False, default=0)
    begun: bool = field(init=False, default=False)
    turn: int = field(init=False, default=0)

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key of admission: the job with the lowest rank gets the next free slot."""
        return -self.priority, self.running, self.turn


@dataclass(eq=False)
class Entry:
    """A sample in the scheduler.

    Args:
        sample: the sample.
        job: job that the sample belongs to.
        finished: called with the sample when it has ended.
        due: prompt tokens that the scheduler will have read by the end of this prompt, if this prompt is read next.
        branch: number of first tokens that another text shares; a target with recurrent layers keeps its state there.
    """

    sample: Sample
    job: Job = field(default_factory=Job)
    finished: Callable[[Sample], None] = lambda sample: None
    due: int = 0
    branch: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key of prompt reading: by priority, then by earliest finish if the prompt were read alone.

        So a short prompt need not wait for a long one. A prompt that is n tokens shorter overtakes a long one only if
        it is admitted before n more tokens are read. So a long prompt is not overtaken for ever.
        """
        return -self.job.priority, self.due


class Scheduler:
    """Schedules samples from their arrival to their end.

    Args:
        stepper: runs the steps.
        max_tokens: most rows of each cache; ``None`` for no limit.
        max_samples: most samples in the batch at a time.
        max_rows: most prompt tokens read between two steps; ``None`` for all.
        reuse: copy common beginnings.
        fixed_batch: whether all samples are there from the start. The first step then waits until all prompts are read.
        mutex: held while ``waiting`` and ``running`` change, except at the end of a round.

    Attributes:
        waiting: jobs with samples that wait for admission.
        running: samples that were admitted and have not ended, in order of admission.
    """

    def __init__(
        self,
        stepper: Stepper,
        max_tokens: int | None,
        max_samples: int,
        max_rows: int | None,
        reuse: bool,
        fixed_batch: bool = False,
        mutex: "threading.Lock | None" = None,
    ) -> None:
        self.stepper, self.max_samples, self.max_rows, self.reuse = stepper, max_samples, max_rows, reuse
        self.state = stepper.open(max_samples, max_tokens, fixed_batch=fixed_batch)
        self.waiting: list[Job] = []
        self.running: list[Entry] = []
        self._mutex = mutex or threading.Lock()
        self._turns = itertools.count()
        self._done = 0  # prompt tokens scheduled so far
        self._kept: OrderedDict[int, Sample] = OrderedDict()  # finished ones by number, the least recently used first

    @property
    def busy(self) -> bool:
        """Whether samples wait or are in the batch."""
        return bool(self.waiting or self.running)

    def check(self, sample: Sample) -> None:
        """Raises CacheOverflow if the cache can never have enough room for a sample."""
        limit, rows = self.state.cache.max_tokens, self._rows(sample)
        states = self.state.cache.state_tokens
        if limit is not None and rows + states + self.state.cache.reserved > limit:
            besides = f" and its states of recurrent layers {states} more" if states else ""
            raise CacheOverflow(
                f"a prompt of {sample.prompt} tokens, {sample.budget} new ones and the largest tree take {rows} rows"
                f"{besides}, the cache may hold {limit}: raise that limit, shorten the prompt or lower max_new_tokens"
            )

    def add(self, *entries: Entry) -> None:
        """Queues samples for admission; samples of one job are added together, in order."""
        for entry in entries:
            if not entry.job.waiting:
                entry.job.turn = next(self._turns)
                self.waiting.append(entry.job)
            entry.job.waiting.append(entry)

    def advance(self) -> bool:
        """Runs one round: reads prompts, takes a step, retires ended samples; returns whether work remains.

        Raises:
            WeightsChanged: if weights changed that the batch reads.
        """
        if self.running:
            self.stepper.target.check_unchanged(self.state.cache)
        if portions := self.schedule():
            self.stepper.prefill(self.state, portions)
        if self.state.active and not (self.state.fixed_batch and self.state.prefilling):
            try:
                self.stepper.step(self.state)
            except SampleError as error:  # nothing was committed: the others take the step again
                self.state[error.number].fail(error.cause)
        self.finish()
        return self.busy

    def schedule(self) -> dict[int, int]:
        """Admits samples, copies cached beginnings of their prompts, and plans the next prompt reading.

        Returns:
            Number of prompt tokens to read, by the sample's number.
        """
        with self._mutex:
            self._sweep()
            outdated = not self.admit()
        if outdated and not self.running:
            self.stepper.close(self.state)
            self._open_again()  # may take seconds, so requests can be submitted meanwhile
            with self._mutex:
                self.admit()
        portions: dict[int, int] = {}
        prefilling: list[Entry] = []
        stateful = self.reuse and self.stepper.target.recurrent
        most, count = sys.maxsize if self.max_rows is None else self.max_rows, 0
        for entry in sorted(
            (entry for entry in self.running if entry.sample.num_unprefilled), key=lambda entry: entry.turn
        ):
            sample = entry.sample
            # Copied tokens have no target rows, and so no log-probabilities.
            if self.reuse and not sample.num_prefilled and sample.prompt_logprobs is None:
                source, common = self._longest(sample)
                ahead = max((self._expected(sample, other) for other in prefilling), default=0)
                if ahead >= common + _LEAST:
                    continue  # wait: another sample is about to read tokens that this one can then copy
                if source is not None:
                    self.stepper.share(self.state, source, sample, common)
                    if source.number in self._kept:
                        self._kept.move_to_end(source.number)
            portion = min(sample.num_unprefilled, most - count)
            if stateful and sample.num_prefilled < (branch := self._branch(entry)):
                portion = min(portion, branch + 1 - sample.num_prefilled)
            portions[sample.number] = portion
            count += portion
            prefilling.append(entry)
            if _PREFILL_DIVISOR * count >= most:
                break  # the first tokens of these prompts should not wait for further prompts
        self._done += count
        return portions

    def finish(self) -> None:
        """Retires samples that have ended and calls their ``finished`` callbacks."""
        for entry in [entry for entry in self.running if entry.sample.ended]:
            self._remove(entry)
            sample = entry.sample
            if self.reuse and not self.state.fixed_batch and sample.failure is None and not sample.num_unprefilled:
                self._kept[sample.number] = sample
                sample.drop_prediction()
                kept = 1 if self.stepper.target.recurrent else _KEPT  # states take the memory of many rows
                if len(self._kept) > kept * self.max_samples:
                    self.stepper.remove(self.state, self._kept.popitem(last=False)[1])
            else:
                self.stepper.remove(self.state, sample)
            entry.finished(sample)

    def fail_all(self, reason: Exception, include_waiting: bool = False) -> None:
        """Ends all admitted samples and opens a new state, since a failed step leaves the old one undefined.

        Args:
            reason: error with which the samples fail.
            include_waiting: end the waiting samples, too.
        """
        failed = self.running + (self._dequeue(self.waiting) if include_waiting else [])
        self._end(failed, reason)
        self._open_again()

    def _open_again(self) -> None:
        """Opens a new state without samples; nothing of the old one is kept."""
        self._kept.clear()
        old = self.state
        self.state = self.stepper.open(self.max_samples, old.cache.max_tokens, fixed_batch=old.fixed_batch)

    def close(self, reason: Exception) -> None:
        """Ends all samples, admitted and waiting, and closes the batch."""
        self._end(self.running + self._dequeue(self.waiting), reason)
        self.stepper.close(self.state)

    def _rows(self, sample: Sample) -> int:
        nodes = self.stepper.topology.num_nodes
        # With a limit, a sample reserves all rows it may need, or it waits: so it never runs out of room.
        likely = sample.budget if self.state.cache.max_tokens is not None else min(sample.budget, _AHEAD)
        return len(sample.tokens) + likely + nodes

    def _dequeue(self, jobs: list[Job]) -> list[Entry]:
        """Removes the waiting samples of jobs from the queue and returns them."""
        removed = [entry for job in jobs for entry in job.waiting]
        for job in jobs:
            job.waiting.clear()
        self.waiting = [job for job in self.waiting if job.waiting]
        return removed

    def _end(self, entries: list[Entry], reason: Exception) -> None:
        """Ends admitted or withdrawn samples with an error."""
        for entry in entries:
            self._remove(entry)
            entry.sample.fail(reason)
            entry.finished(entry.sample)

    def _remove(self, entry: Entry) -> None:
        """Frees the slot of a sample if it has one."""
        if entry in self.running:
            self.running.remove(entry)
            entry.job.running -= 1
            entry.job.turn = next(self._turns)

    def _sweep(self) -> None:
        """Drops the samples of cancelled jobs."""
        for entry in self._dequeue([job for job in self.waiting if job.cancelled()]):
            entry.finished(entry.sample)
        for entry in [entry for entry in self.running if entry.job.cancelled()]:
            self._remove(entry)
            entry.finished(entry.sample)
            self.stepper.remove(self.state, entry.sample)

    def admit(self) -> bool:
        """Gives free slots to waiting jobs by rank, as far as the cache has room.

        Returns:
            False if samples have to wait for a new state, since the model's weights or modules have changed. Admitted
            samples end with those that they began with.
        """
        current = False  # until it is asked
        free = self.max_samples - len(self.running)
        line = [(job.rank, job) for job in self.waiting] if free > 0 else []  # no two have the same turn
        heapq.heapify(line)
        while line and free > 0:
            job = line[0][1]
            sample = job.waiting[0].sample
            try:
                self.stepper.add(self.state, sample, self._rows(sample))
            except CacheOverflow:
                if not self._kept:
                    break  # until a sample leaves: no job overtakes the one with the lowest rank
                self.stepper.remove(self.state, self._kept.popitem(last=False)[1])
                continue
            try:
                current = current or self.stepper.current(self.state)
            finally:
                if not current:
                    self.stepper.remove(self.state, sample)
            if not current:
                return False
            entry = job.waiting.popleft()
            entry.due = self._done + sample.num_unprefilled
            self.running.append(entry)
            job.begun, job.running, free = True, job.running + 1, free - 1
            heapq.heappop(line)
            if job.waiting:
                heapq.heappush(line, (job.rank, job))
            else:
                self.waiting.remove(job)
        return True

    def _longest(self, sample: Sample) -> tuple[Sample | None, int]:
        """Returns the sample with the longest common beginning that was read, and how many tokens to copy from it."""
        best, most = None, _LEAST - 1
        for other in self.state.samples:
            if other is not None and other is not sample:
                known = other.num_prefilled if other.num_unprefilled else len(other.tokens) - 1
                common = self.state.cache.reusable(other.handle, _common(sample, other, known))
                if common > most:
                    best, most = other, common
        return best, most if best is not None else 0

    def _branch(self, entry: Entry) -> int:
        """Returns where a prompt is cut, so that texts with the same beginning find a state there; 0 for nowhere."""
        sample = entry.sample
        others = (other for other in self.state.samples if other is not None and other is not sample)
        entry.branch = max((_common(sample, other, len(other.tokens)) for other in others), default=0)
        if entry.branch:
            self.state.cache.keep(sample.handle, entry.branch)
        return entry.branch

    def _expected(self, sample: Sample, entry: Entry) -> int:
        """Returns how many tokens can be copied from the sample of an entry once that has read its prompt."""
        common = _common(sample, entry.sample, entry.sample.prompt)
        if not self.stepper.target.recurrent:
            return common
        ends = entry.branch, entry.sample.prompt - 2  # a state is kept one token before the last one that is read
        return max((end for end in ends if end <= common), default=0)


def _common(sample: Sample, other: Sample, known: int) -> int:
    """Returns how many tokens of a prompt can be copied from another sample, which has read ``known`` tokens.

    The token after the copied ones is equal, too. At least one token before the prompt's last remains to be read.
    """
    limit = min(known, sample.prompt - 2, len(other.tokens) - 1)
    if limit < _LEAST or sample.tokens[:_LEAST] != other.tokens[:_LEAST]:
        return 0
    pairs = zip(sample.tokens[: limit + 1], other.tokens, strict=False)
    equal = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), limit + 1)
    return min(limit, equal - 1)


__all__ = ["Entry", "Job", "Scheduler"]
