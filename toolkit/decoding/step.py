"""One decoding step: draft, run the target, verify, commit.

Shapes: n_b nodes of sample b, V vocabulary.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from arbordraft.deciders.running_costs import StepTimes
from arbordraft.decoding.assemble import AssembledParts
from arbordraft.decoding.drafting import Candidates, Drafting, noise_of
from arbordraft.decoding.executors import EagerExecutor, Executor, Judged, RecordedExecutor
from arbordraft.decoding.judging import CouplingJudge, Judge
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.runner import PackedRunner, TargetRunner, state_tokens
from arbordraft.decoding.state import DecodeState, Emission, Sample, logprobs_of
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.recording import INSTEAD
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.drafters.grow import Growth
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.weight_watch import WeightWatch
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.verdict import Verdict

_CHUNK = 2048  # most rows of a forward over prompts, which bounds its memory
_MOST_READ = 16  # tokens of a sample that a drafter reads in a step whose times tell its costs
_USUAL_ROWS = 65_536  # of a cache
_SCORED_CHUNK = 256  # most rows if their logits are needed
# Most kinds of samples in a batch for which one recorded step per kind is faster than one eager step.
_MOST_KINDS = 2


class Stepper:
    """Runs the steps of batches: drafts, runs the target, verifies, commits.

    A decoder owns one stepper. Any number of batches may use it at a time.

    Args:
        parts: the decoder's parts.
        mask: mask of the topology.
        expected_batch: see :class:`~arbordraft.SpeculativeDecoder`.
        static: runs steps of fixed shapes, always or where possible; by default no step has fixed shapes.
        candidates: chooses the children of the roots; by default the drafter does.
        runner: runs the target; by default packed, without padding. Recorded steps do not use it.
        judge: verifies drafts; by default with the coupling. Recorded steps do not use it.

    Attributes:
        on_step: see :class:`~arbordraft.SpeculativeDecoder`.
    """

    def __init__(
        self,
        parts: AssembledParts,
        mask: SlicedCausalMask,
        *,
        expected_batch: int = 1,
        static: StaticStepping | None = None,
        candidates: Candidates | None = None,
        runner: TargetRunner | None = None,
        judge: Judge | None = None,
    ) -> None:
        self.target, self.drafter, self.topology, self.coupling, self.decider = parts
        self.mask, self.static, self.shared = mask, static, parts.coupling.verifier.shared
        self.drafting = Drafting(parts, expected_batch, candidates)
        self.eager = EagerExecutor(
            PackedRunner(parts, mask) if runner is None else runner,
            CouplingJudge(parts.coupling) if judge is None else judge,
        )
        self.recorded = None if static is None else RecordedExecutor(static, mask)
        self.on_step: Callable[[DecodeState, DraftTree, Verdict], None] | None = None

    def open(self, samples: int, max_tokens: int | None, *, fixed_batch: bool = False) -> DecodeState:
        """Opens a batch without samples.

        Args:
            samples: most samples of the batch at a time.
            max_tokens: most rows of each KV cache; ``None`` for no limit.
            fixed_batch: whether all samples are there from the start, so that it matters which one ends last.
        """
        fixed = self.static.open(samples, max_tokens) if self.static is not None and self.fixed else None
        cache = self.eager.runner.open(max_tokens) if fixed is None else fixed
        self.target.begin(cache)
        stats = DecodeStats(self.coupling.exactness.value, [0], [0])
        watch = None
        if not fixed_batch:  # the cache is tied to the target's weights
            watch = WeightWatch(self.drafter.modules(), leave={id(one) for one in self.target.parameters()})
        return DecodeState(cache, self.drafter.open(cache), stats, fixed_batch=fixed_batch, drafter_weights=watch)

    def current(self, state: DecodeState) -> bool:
        """Returns whether an open batch has the weights and modules that a new one would get, the drafter's included.

        A fixed batch, which no sample joins, always has.
        """
        watch = state.drafter_weights
        return watch is None or (watch.current() and self.target.current(state.cache))

    def close(self, state: DecodeState) -> None:
        """Closes a batch and removes its samples."""
        for sample in state.samples:
            if sample is not None:
                self.remove(state, sample)
        if self.static is not None and isinstance(state.cache, StaticCache):
            self.static.close(state.cache)

    @property
    def fixed(self) -> bool:
        """Whether batches may take steps of fixed shapes."""
        return self.static is not None and self.static.active

    @property
    def can_share(self) -> bool:
        """Whether prefixes copied from another sample have the same bits as computed ones."""
        return self.target.row_invariant

    def least_tokens(self, samples: int) -> int:
        """Returns the fewest cache rows that fit a one-token prompt and one new token, padding and states included.

        Args:
            samples: most samples of a batch at a time, for which padding is reserved.
        """
        reserved = 0 if self.static is None or self.static.automatic else self.static.reserved(samples)
        return reserved + self.topology.num_nodes + 2 + state_tokens(self.target, self.drafter)

    def usual_tokens(self, samples: int) -> int:
        """Returns the usual limit of a cache: 65,536 rows, and besides them the states of this many samples."""
        return _USUAL_ROWS + samples * state_tokens(self.target, self.drafter)

    def check(self, sample: Sample) -> None:
        """Raises ValueError if the decoder's steps do not support a sample's settings."""
        if sample.max_drafts is not None and self.drafting.candidates is not None:
            raise ValueError("max_drafts: each step of this decoder begins with candidates of the target: leave it out")
        if self.static is None or self.static.automatic:
            return
        if (obstacle := self._obstacle(self.static, sample)) is not None:
            raise ValueError(f"{obstacle}: {INSTEAD}")

    def _obstacle(self, static: StaticStepping, sample: Sample) -> str | None:
        """Returns why steps of fixed shapes cannot serve a sample, or ``None`` if they can."""
        if sample.logprobs is not None:
            return "steps of fixed shapes download no log-probabilities"
        return static.obstacle(sample.pipeline)

    def add(self, state: DecodeState, sample: Sample, rows: int) -> None:
        """Adds a sample whose prompt is still to be read.

        Args:
            state: the batch.
            sample: gets a number and a place in the cache.
            rows: cache rows to reserve for the sample. It gets more when needed, if rows are free.

        Raises:
            CacheOverflow: if fewer rows are free; the batch is unchanged then.
        """
        sample.handle = state.cache.open(rows)
        sample.memory = self.decider.start()
        state.enter(sample)
        try:
            self.drafter.add(state.drafts, sample.number, sample.tokens, sample.handle)
        except BaseException:
            state.cache.close(sample.handle)
            state.leave(sample)
            raise

    def share(self, state: DecodeState, source: Sample, sample: Sample, tokens: int) -> None:
        """Copies the first tokens of a prompt from the caches of another sample, instead of reading them.

        Args:
            state: the batch.
            source: sample with the same first ``tokens + 1`` tokens, of which it has read at least ``tokens``.
            sample: sample that has read no token. At least one token before its last remains to be read.
            tokens: number of tokens to copy.
        """
        state.cache.share(source.handle, sample.handle, tokens)
        self.drafter.share(state.drafts, source.number, sample.number, tokens)
        sample.take_copied(tokens)

    def prefill(self, state: DecodeState, tokens: Mapping[int, int]) -> None:
        """Lets the target and the drafter read the next tokens of prompts.

        Args:
            state: the batch.
            tokens: number of tokens to read, by the sample's number; at most its unread tokens.
        """
        with state.stats.phase("prefill"):
            samples = {state[number].handle: state[number] for number in tokens}
            parts = {
                number: state[number].tokens[state[number].num_prefilled :][:count] for number, count in tokens.items()
            }
            scored = [handle for handle, sample in samples.items() if sample.prompt_logprobs is not None]
            hidden: dict[int, list[Tensor]] = {}
            for portion in self.target.portions(
                {handle: parts[sample.number] for handle, sample in samples.items()},
                state.cache,
                chunk=_SCORED_CHUNK if scored else _CHUNK,
                hidden=self.drafter.hidden_layers,
                logits_of=scored,
            ):
                for handle, (states, logits) in portion.items():
                    sample = samples[handle]
                    if handle in scored:
                        sample.score(logits)
                    hidden.setdefault(sample.number, []).append(states)
                    sample.take_read(len(states))
            if self.drafter.hidden_layers:
                self.drafter.take_hidden(state.drafts, {number: torch.cat(seen) for number, seen in hidden.items()})
            read = self.drafting.reads(state, list(parts)) if self.drafter.reads_later else list(parts)
            if read:
                self.drafter.prefill(state.drafts, {number: parts[number] for number in read})

    def remove(self, state: DecodeState, sample: Sample) -> None:
        """Removes a sample and frees its cache rows and number."""
        self.drafter.remove(state.drafts, sample.number)
        state.cache.close(sample.handle)
        state.leave(sample)

    def step(self, state: DecodeState) -> Verdict:
        """Takes one step: drafts a tree per sample, runs the target once over all trees, commits accepted tokens.

        Args:
            state: the batch, updated in place; each active sample gains at least one token.

        Raises:
            SampleError: if a sample's processors fail. Nothing is committed then, and the step can be repeated
                without that sample.
        """
        active = state.active
        noise = noise_of(state, active, self.topology.num_nodes, shared=self.shared)
        executor = self._executor(state, active)
        # On a CPU, waits for threads that send tokens would look like costs of steps; a GPU's forwards are waits.
        clock, times = time.thread_time, state.stats.busy
        if self.target.device.type != "cpu":
            clock, times = time.perf_counter, state.stats.seconds
        begun, before = clock(), dict(times)
        begins = not all(sample.stats.forwards for sample in active)
        try:
            tree, judged = executor(state, lambda: self._drafts(state, active, noise), noise)
        except BaseException as failure:
            self._take_back(state, active)
            if isinstance(failure, UnsupportedModel) and self._given_up(executor, failure):
                return self.step(state)
            raise
        with state.stats.phase("commit"):
            self._commit(state, tree, judged)
        seconds = clock() - begun
        self.decider.stepped(tree.rows - len(active), seconds)
        # A drafter may have read a prompt, at first or later; a recorded run may have drafted and verified in one.
        if not begins and executor is self.eager and tree.read <= _MOST_READ * len(active):
            draft, target = (times[name] - before.get(name, 0.0) for name in ("draft", "target"))
            rest = seconds - draft - target
            self.decider.timed(StepTimes(len(active), tree.rows, tree.drafted, draft, target, rest, tree.read))
        return judged.verdict

    def _executor(self, state: DecodeState, active: Sequence[Sample]) -> Executor:
        """Chooses the executor of this batch's step."""
        static = self.static
        if static is None or not isinstance(state.cache, StaticCache) or not static.active:
            return self.eager
        assert self.recorded is not None
        if static.automatic:
            many = len(self.recorded.kinds(active)) > _MOST_KINDS
            if many or any(self._obstacle(static, sample) for sample in active):
                return self.eager
        return self.recorded

    def _drafts(
        self, state: DecodeState, active: Sequence[Sample], noise: Noise | GumbelNoise | None
    ) -> DraftTree | Growth:
        """Plans the trees of a step; returns lone roots if nothing is to be drafted."""
        static = self.static
        fixed = static is not None and static.active and isinstance(state.cache, StaticCache)
        return self.drafting(state, active, noise, static.drafts if static is not None and fixed else None)

    def _given_up(self, executor: Executor, failure: UnsupportedModel) -> bool:
        """Disables recorded steps after a failed recording if they are automatic; returns whether it did."""
        if executor is not self.recorded or self.static is None or not self.static.automatic:
            return False
        self.static.give_up(failure)
        return True

    def _take_back(self, state: DecodeState, active: Sequence[Sample]) -> None:
        """Drops the rows that a failed step wrote into the caches of target and drafter."""
        state.cache.drop([sample.handle for sample in active])
        self.drafter.rollback(state.drafts)

    def _commit(self, state: DecodeState, tree: DraftTree, judged: Judged) -> None:
        """Commits accepted tokens to samples, caches, statistics, decider and drafter."""
        verdict = judged.verdict
        if self.on_step is not None:
            self.on_step(state, tree, verdict)
        token, recovered = tree.token.tolist(), list(verdict.recovered)
        paths: list[Sequence[int]] = list(verdict.paths)
        following = list(verdict.tokens)
        kept: dict[int, list[int]] = {}
        seen: dict[int, Tensor] = {}
        waiting, forced = state.prefilling, any(tree.certain.tolist())
        for number in tree.living:
            path = paths[number]
            if not path:
                continue
            sample, first = state[number], tree.offsets[number]
            waits = waiting and self.drafting.waits(state, sample)
            tokens = [*(token[row] for row in path[1:]), following[number]]
            found = None
            if sample.logprobs is not None and judged.logits is not None:
                found = logprobs_of(judged.logits[list(path)], tokens, sample.logprobs)
            emitted = sample.append(Emission(tokens, tree[number], verdict[number], found))
            if self.drafter.hidden_layers:
                seen[number] = judged.hidden(number, path[:emitted])
            state.stats.record(tree, verdict, number, emitted)
            # Forced tokens, and steps in which drafting is suspended, tell the decider nothing about the drafter.
            drafts = tree.lengths[number] - 1
            guesses = tree[number].guesses if forced else drafts
            if guesses or not (drafts or waits or sample.max_drafts == 0):
                self.decider.learn(sample.memory, verdict.outcome(tree, number))
            if emitted < len(tokens):  # the sample ended among these tokens
                paths[number], following[number], recovered[number] = path[:emitted], tokens[emitted - 1], False
            kept[sample.handle] = [row - first for row in path[:emitted]]
        judged.keep(kept)
        self.drafter.commit(state.drafts, tree, Verdict(paths, following, recovered))
        if seen:
            self.drafter.take_hidden(state.drafts, seen)


__all__ = ["Stepper"]
