"""Counts and times of answers and of batches."""

import time
from collections import Counter
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.verdict import Verdict


@dataclass
class AnswerStats:
    """Counts and times of one answer; ``+`` adds those of several.

    Reading the prompt ends before its last token, which the first step of decoding reads. The times include waits for
    other answers of the batch, but not the wait for a slot.

    Args:
        prompt: tokens of the prompt.
        copied: tokens of the prompt that were copied from another text's cache, not read.
        emitted: committed tokens.
        forwards: target forwards that it took part in.
        drafted: tokens that were drafted for it, all of which were verified.
        acceptances: entry ``[j]``: number of steps with drafts in which j drafts were accepted.
        accepted_prediction: tokens of its prediction that it contains, in their order: the longest common subsequence.
        rejected_prediction: the other tokens of its prediction.
        prompt_seconds: time in which its prompt was read.
        decode_seconds: time from then to its last token.

    Examples:
        >>> AnswerStats(emitted=6, forwards=3, drafted=5, acceptances=[0, 1, 1]).accepted
        3
    """

    prompt: int = 0
    copied: int = 0
    emitted: int = 0
    forwards: int = 0
    drafted: int = 0
    acceptances: list[int] = field(default_factory=list)
    accepted_prediction: int = 0
    rejected_prediction: int = 0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    _since: float = field(default=0.0, init=False, repr=False, compare=False)

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return sum(accepted * steps for accepted, steps in enumerate(self.acceptances))

    def __add__(self, other: "AnswerStats") -> "AnswerStats":
        names = [each.name for each in fields(self) if each.init and each.name != "acceptances"]
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        pairs = zip_longest(self.acceptances, other.acceptances, fillvalue=0)
        return AnswerStats(**sums, acceptances=[ours + theirs for ours, theirs in pairs])

    def begin(self, prompt: int) -> None:
        """Starts the clock when the answer gets its slot; ``prompt`` is the length of its prompt."""
        self.prompt, self._since = prompt, time.perf_counter()

    def prompt_read(self) -> None:
        """Ends the time of reading the prompt."""
        now = time.perf_counter()
        self.prompt_seconds, self._since = now - self._since, now

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """Counts a step."""
        self.forwards += 1
        self.emitted += emitted
        self.drafted += drafted
        if drafted:
            self.acceptances += [0] * (accepted + 1 - len(self.acceptances))
            self.acceptances[accepted] += 1
        self.decode_seconds = time.perf_counter() - self._since

    def speculative_decoding(self) -> dict[str, Any]:
        """Returns the figures that vLLM calls ``metrics.speculative_decoding``; they cover the steps with drafts."""
        steps, accepted = sum(self.acceptances), self.accepted
        return {
            "mean_acceptance_length": 1 + accepted / max(1, steps),
            "draft_acceptance_rate": accepted / max(1, self.drafted),
            "acceptance_histogram": list(self.acceptances),
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": self.drafted,
        }

    def timings(self) -> dict[str, float]:
        """Returns the figures that llama.cpp's server calls ``timings``; speeds are 0 where nothing was timed."""
        return {
            "cache_n": self.copied,
            **_timed("prompt", self.prompt - self.copied, self.prompt_seconds),
            **_timed("predicted", self.emitted, self.decode_seconds),
            "draft_n": self.drafted,
            "draft_n_accepted": self.accepted,
        }


def _timed(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": 1e3 * seconds,
        f"{name}_per_token_ms": 1e3 * seconds / max(1, tokens),
        f"{name}_per_second": tokens / seconds if seconds else 0.0,
    }


@dataclass
class DecodeStats:
    """Counts and times of one batch.

    Args:
        exactness: the coupling's promise about the output law, such as ``exact``.
        emitted: new committed tokens of each sample.
        forwards: target forwards that each sample took part in.
        drafted: drafted tokens of all samples.
        tried: by depth, how often at least one child at that depth was tested.
        accepted: by depth, how often a child was accepted.
        accepted_rank: by rank among its siblings, how often a child was accepted.
        rows: packed rows of all target forwards.
        pad_rows: rows that belong to no token.
        pad_keys: attended cache columns that belong to no token.
        seconds: time by phase: prefill, draft, target, verify, commit.
        busy: the same without the time in which the decoding thread waited, for a processor or for another thread.

    Examples:
        >>> DecodeStats("exact", emitted=[6, 4], forwards=[3, 2]).tau
        2.0
    """

    exactness: str
    emitted: list[int]
    forwards: list[int]
    drafted: int = 0
    tried: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    accepted_rank: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    pad_rows: int = 0
    pad_keys: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)

    @property
    def tau(self) -> float:
        """Block efficiency: emitted tokens per target forward of a sample, recovered or bonus token included."""
        return sum(self.emitted) / max(1, sum(self.forwards))

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Entry ``[d - 1]``: share of tests at depth ``d`` in which a child was accepted."""
        return [self.accepted[depth] / self.tried[depth] for depth in sorted(self.tried)]

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        """Adds the counts of two batches; the samples of ``other`` come last."""
        names = ("emitted", "forwards", "drafted", "tried", "accepted", "accepted_rank", "rows", "pad_rows", "pad_keys")
        counts: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        for name in ("seconds", "busy"):
            mine, others = getattr(self, name), getattr(other, name)
            counts[name] = {phase: mine.get(phase, 0.0) + others.get(phase, 0.0) for phase in mine | others}
        return DecodeStats(self.exactness, **counts)

    def count_forward(self, batch: RaggedBatch, rows: int, keys: int) -> None:
        """Counts a target forward for which ``rows`` rows and ``keys`` cache columns were needed."""
        attended = sum(batch.past) + sum(map(len, batch.tree_positions))
        taken = sum(batch.rows)
        self.rows += taken
        self.pad_rows += taken - rows
        self.pad_keys += attended - keys

    def count_padding(self, rows: int) -> None:
        """Counts the padding rows of a forward; together they attend to one padding column."""
        self.rows += rows
        self.pad_rows += rows
        self.pad_keys += min(rows, 1)

    def record(self, tree: DraftTree, verdict: Verdict, sample: int, emitted: int) -> None:
        """Counts a sample's verdict and ``emitted`` committed tokens, in entry 0 of ``forwards`` and ``emitted``."""
        self.forwards[0] += 1
        self.emitted[0] += emitted
        self.drafted += tree.lengths[sample] - 1
        path = verdict.paths[sample]
        topology = tree.topology
        for depth, row in enumerate(path[1:], 1):
            node = tree.node[row]
            self.tried[depth] += 1
            self.accepted[depth] += 1
            self.accepted_rank[topology.child_list[topology.parent_list[node]].index(node)] += 1
        if verdict.recovered[sample]:
            self.tried[len(path)] += 1

    def phase(self, name: str, within: str | None = None) -> "_Phase":
        """Times a ``with`` block and adds the times to ``seconds[name]`` and ``busy[name]``.

        If the block lies within another phase, its times are taken from that.
        """
        return _Phase(self, name, within)


class _Phase:
    """Times a block; a class takes a third of a generator's time, and each step enters four."""

    __slots__ = ("busy", "name", "start", "stats", "within")

    def __init__(self, stats: DecodeStats, name: str, within: str | None) -> None:
        self.stats, self.name, self.within = stats, name, within

    def __enter__(self) -> None:
        self.start, self.busy = time.perf_counter(), time.thread_time()

    def __exit__(self, *_: object) -> None:
        seconds, busy = time.perf_counter() - self.start, time.thread_time() - self.busy
        for times, passed in ((self.stats.seconds, seconds), (self.stats.busy, busy)):
            times[self.name] = times.get(self.name, 0.0) + passed
            if self.within is not None:
                times[self.within] = times.get(self.within, 0.0) - passed
