"""A batch that samples join and leave: who is admitted, whose prompt is read, who has ended.

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

_LEAST = 32  # tokens of a common beginning that are worth copying, or waiting for
_AHEAD = 256  # new tokens for which a sample has room from the start where nothing limits the cache
_KEPT = 4  # finished texts for every sample at a time
_PART = 4  # prompts are read together up to this part of what may be read between two steps


@dataclass(eq=False)
class Job:
    """A request as the batch sees it: free slots are shared out between jobs, not between their samples.

    Args:
        priority: a higher one is admitted first.
        cancelled: whether the request was given up.

    Attributes:
        waiting: its samples that are still to be admitted, in order.
        living: how many of its samples are in the batch.
        begun: whether one of its samples was admitted.
        turn: its place among jobs with as many living samples; the last one again whenever one of its samples ends.
    """

    priority: int = 0
    cancelled: Callable[[], bool] = lambda: False
    waiting: "deque[Entry]" = field(init=False, default_factory=deque)
    living: int = field(init=False, default=0)
    begun: bool = field(init=False, default=False)
    turn: int = field(init=False, default=0)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The job with the lowest one gets the next free slot."""
        return -self.priority, self.living, self.turn


@dataclass(eq=False)
class Entry:
    """A sample on its way.

    Args:
        sample: the sample.
        job: the request that it answers.
        finished: is told when it has ended.
        due: tokens of prompts that will have been read when its own is, if it is the next one.
    """

    sample: Sample
    job: Job = field(default_factory=Job)
    finished: Callable[[Sample], None] = lambda sample: None
    due: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """The prompt with the lowest one is read first: by priority, then those that would be done first if alone.

        So a short prompt need not wait for a long one; and a long one is overtaken only by those that are admitted
        before as many tokens were read as they are shorter, and not for ever.
        """
        return -self.job.priority, self.due


class Scheduler:
    """Samples from their arrival to their end.

    Args:
        stepper: does the steps.
        max_tokens: bound on the rows of each cache; ``None`` for none.
        max_samples: samples at a time.
        max_rows: tokens of prompts that are read between two steps; ``None`` for all.
        reuse: copy common beginnings.
        fixed_batch: whether all samples are there from the start. Their first step waits until all prompts are read.
        mutex: held while ``waiting`` and ``living`` change, other than at the end of a round.

    Attributes:
        waiting: jobs with samples that are still to be admitted.
        living: what was admitted and has not ended, in that order.
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
        self.living: list[Entry] = []
        self._mutex = mutex or threading.Lock()
        self._turns = itertools.count()
        self._done = 0  # tokens of prompts that were scheduled
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

    def add(self, *entries: Entry) -> None:
        """Lets samples wait for their admission; those of one job are added together, in their order."""
        for entry in entries:
            if not entry.job.waiting:
                entry.job.turn = next(self._turns)
                self.waiting.append(entry.job)
            entry.job.waiting.append(entry)

    def advance(self) -> bool:
        """Takes the batch a round further; returns whether there is more to do."""
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
        """Admits samples, copies the beginnings of their prompts where it can, and says what is read next.

        Returns:
            Tokens of prompts, by the sample's number.
        """
        with self._mutex:
            self._sweep()
            self.admit()
        portions: dict[int, int] = {}
        prefilling: list[Sample] = []
        most, count = sys.maxsize if self.max_rows is None else self.max_rows, 0
        for entry in sorted(
            (entry for entry in self.living if entry.sample.num_unprefilled), key=lambda entry: entry.turn
        ):
            sample = entry.sample
            # What is copied brings no rows, and so no log-probabilities.
            if self.reuse and not sample.num_prefilled and sample.prompt_logprobs is None:
                source, common = self._longest(sample)
                ahead = max((_common(sample, other, other.prompt) for other in prefilling), default=0)
                if ahead >= common + _LEAST:
                    continue  # another sample is about to read what this one could copy
                if source is not None:
                    self.stepper.share(self.state, source, sample, common)
                    if source.number in self._kept:
                        self._kept.move_to_end(source.number)
            portions[sample.number] = min(sample.num_unprefilled, most - count)
            count += portions[sample.number]
            prefilling.append(sample)
            if _PART * count >= most:
                break  # the step that follows brings first tokens, which wait for no further prompt
        self._done += count
        return portions

    def finish(self) -> None:
        """Retires samples that have ended, and tells those who wait for them."""
        for entry in [entry for entry in self.living if entry.sample.ended]:
            self._remove(entry)
            sample = entry.sample
            if self.reuse and not self.state.fixed_batch and sample.failure is None and not sample.num_unprefilled:
                self._kept[sample.number] = sample
                if len(self._kept) > _KEPT * self.max_samples:
                    self.stepper.remove(self.state, self._kept.popitem(last=False)[1])
            else:
                self.stepper.remove(self.state, sample)
            entry.finished(sample)

    def lose(self, reason: Exception, everybody: bool = False) -> None:
        """Ends all that was admitted, and begins anew: nobody knows where a step was left.

        Args:
            reason: what they are told.
            everybody: end those that wait, too.
        """
        lost = self.living + (self._withdraw(self.waiting) if everybody else [])
        self._end(lost, reason)
        self._kept.clear()
        old = self.state
        self.state = self.stepper.open(self.max_samples, old.cache.max_tokens, fixed_batch=old.fixed_batch)

    def close(self, reason: Exception) -> None:
        """Ends everything."""
        self._end(self.living + self._withdraw(self.waiting), reason)
        self.stepper.close(self.state)

    def _rows(self, sample: Sample) -> int:
        nodes = self.stepper.topology.num_nodes
        # Under a limit a sample gets all it can need at once, so that there is room for it or it waits.
        likely = sample.budget if self.state.cache.max_tokens is not None else min(sample.budget, _AHEAD)
        return len(sample.tokens) + likely + nodes

    def _withdraw(self, jobs: list[Job]) -> list[Entry]:
        """Takes the samples of jobs out of the queue."""
        gone = [entry for job in jobs for entry in job.waiting]
        for job in jobs:
            job.waiting.clear()
        self.waiting = [job for job in self.waiting if job.waiting]
        return gone

    def _end(self, entries: list[Entry], reason: Exception) -> None:
        """Ends samples, whether admitted or withdrawn, with an error."""
        for entry in entries:
            self._remove(entry)
            entry.sample.fail(reason)
            entry.finished(entry.sample)

    def _remove(self, entry: Entry) -> None:
        """Frees the slot of a sample, if it has one."""
        if entry in self.living:
            self.living.remove(entry)
            entry.job.living -= 1
            entry.job.turn = next(self._turns)

    def _sweep(self) -> None:
        """Drops the samples of cancelled jobs."""
        for entry in self._withdraw([job for job in self.waiting if job.cancelled()]):
            entry.finished(entry.sample)
        for entry in [entry for entry in self.living if entry.job.cancelled()]:
            self._remove(entry)
            entry.finished(entry.sample)
            self.stepper.remove(self.state, entry.sample)

    def admit(self) -> None:
        """Gives free slots to the jobs whose turn it is, as far as the cache has room."""
        free = self.max_samples - len(self.living)
        line = [(job.rank, job) for job in self.waiting] if free > 0 else []  # no two have the same turn
        heapq.heapify(line)
        while line and free > 0:
            job = line[0][1]
            sample = job.waiting[0].sample
            try:
                self.stepper.add(self.state, sample, self._rows(sample))
            except CacheOverflow:
                if not self._kept:
                    break  # until another sample leaves: nobody overtakes the job whose turn it is
                self.stepper.remove(self.state, self._kept.popitem(last=False)[1])
                continue
            entry = job.waiting.popleft()
            entry.due = self._done + sample.num_unprefilled
            self.living.append(entry)
            job.begun, job.living, free = True, job.living + 1, free - 1
            heapq.heappop(line)
            if job.waiting:
                heapq.heappush(line, (job.rank, job))
            else:
                self.waiting.remove(job)

    def _longest(self, sample: Sample) -> tuple[Sample | None, int]:
        """Who has read most of a prompt's beginning, and how much of it."""
        best, most = None, _LEAST - 1
        for other in self.state.samples:
            if other is not None and other is not sample:
                known = other.num_prefilled if other.num_unprefilled else len(other.tokens) - 1
                if (common := _common(sample, other, known)) > most:
                    best, most = other, common
        return best, most if best is not None else 0


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


__all__ = ["Entry", "Job", "Scheduler"]
