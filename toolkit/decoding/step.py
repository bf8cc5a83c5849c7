"""One step of decoding, which reads as the algorithm.

Shapes: n_b nodes of sample b, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from arbordraft.decoding.assemble import AssembledParts
from arbordraft.decoding.drafting import Candidates, Drafting
from arbordraft.decoding.judging import CouplingJudge, Judge
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.processing import finite_rows
from arbordraft.decoding.runner import PackedRunner, TargetRunner, lay_out
from arbordraft.decoding.sample_groups import SampleGroup, group_samples, joined, static_kind, verdicts_of
from arbordraft.decoding.state import DecodeState, Emission, Sample, logprobs_of
from arbordraft.decoding.static.cache import StaticCache
from arbordraft.decoding.static.recording import INSTEAD
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.target.attention import UnsupportedModel
from arbordraft.trees.draft_tree import DraftTree, SampleTree
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.verdict import Verdict

_CHUNK = 2048  # rows of a forward over prompts, which bounds its memory
_SCORED_CHUNK = 256  # the same where their logits are wanted
_MOST_GROUPS = 2  # groups of a batch whose steps of fixed shapes, one after another, take less than a step of them all


class Stepper:
    """Takes a batch a step further, whatever its samples want: drafts, runs the target, judges, commits.

    A decoder owns one, and any number of batches may use it at a time.

    Args:
        parts: those of the decoder.
        mask: the topology's.
        expected_batch: see :class:`~arbordraft.SpeculativeDecoder`.
        static: does steps of fixed shapes, always or where it can; by default steps have none.
        candidates: gives roots their children; by default the drafter does.
        runner: runs the target; by default packed, without padding. Steps of fixed shapes have their own.
        judge: judges drafts; by default by the coupling. Steps of fixed shapes have their own.

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
        self.mask, self.static = mask, static
        self.drafting = Drafting(parts, mask, expected_batch, None if static is None else static.drafts, candidates)
        self.runner = PackedRunner(parts, mask) if runner is None else runner
        self.judge = CouplingJudge(parts.coupling) if judge is None else judge
        self.on_step: Callable[[DecodeState, DraftTree, Verdict], None] | None = None

    def open(self, samples: int, max_tokens: int | None, *, fixed_batch: bool = False) -> DecodeState:
        """A batch that nobody has joined yet.

        Args:
            samples: how many there will be at a time, at most.
            max_tokens: bound on the rows of each KV cache; ``None`` for none.
            fixed_batch: whether all of them are there from the start and none follows: then it counts who ends last.
        """
        fixed = self.static.open(samples, max_tokens) if self.static is not None and self.fixed else None
        cache = self.runner.open(max_tokens) if fixed is None else fixed
        self.target.begin(cache)
        stats = DecodeStats(self.coupling.exactness.value, [0], [0])
        return DecodeState(cache, self.drafter.open(cache), stats, fixed_batch=fixed_batch)

    def close(self, state: DecodeState) -> None:
        """Ends a batch."""
        for sample in state.samples:
            if sample is not None:
                self.remove(state, sample)
        if self.static is not None and isinstance(state.cache, StaticCache):
            self.static.close(state.cache)

    @property
    def fixed(self) -> bool:
        """Whether batches take steps of fixed shapes."""
        return self.static is not None and self.static.active

    @property
    def can_share(self) -> bool:
        """Whether beginnings that are copied from another sample have the bits of those that are read."""
        return self.target.row_invariant and not self.fixed

    def least_tokens(self, samples: int) -> int:
        """Fewest rows of a cache for some samples at a time in which one has room for a token behind another."""
        reserved = 0 if self.static is None or self.static.automatic else self.static.reserved(samples)
        return reserved + self.topology.num_nodes + 2

    def check(self, sample: Sample) -> None:
        """Raises ValueError if a sample wants what this decoder's kind of steps cannot do."""
        if self.static is None or self.static.automatic:
            return
        if (obstacle := self._obstacle(self.static, sample)) is not None:
            raise ValueError(f"{obstacle}: {INSTEAD}")

    def _obstacle(self, static: StaticStepping, sample: Sample) -> str | None:
        """What a sample wants that steps of fixed shapes cannot do."""
        if sample.logprobs is not None:
            return "steps of fixed shapes download no log-probabilities"
        return static.obstacle(sample.pipeline, sample.greedy)

    def add(self, state: DecodeState, sample: Sample, rows: int) -> None:
        """Takes in a sample whose prompt is still to be read.

        Args:
            state: the batch.
            sample: gets a number and a place in the cache.
            rows: cache rows to set aside for it; it gets more as it needs them, if there are.

        Raises:
            CacheOverflow: if there are not as many rows left; nothing has changed then.
        """
        sample.handle = state.cache.open(rows)
        sample.memory = self.decider.start()
        state.enter(sample)
        try:
            self.drafter.add(state.drafts, sample.number, sample.tokens, sample.handle)
        except BaseException:
            state.cache.close(sample.handle)
            state.samples[sample.number] = None
            raise

    def share(self, state: DecodeState, source: Sample, sample: Sample, tokens: int) -> None:
        """Copies what is known of a prompt's first tokens from another sample, instead of reading them.

        Args:
            state: the batch.
            source: begins with the same ``tokens + 1`` tokens, and has read ``tokens`` of them.
            sample: has read none; at least one is left to read before the last.
            tokens: how many.
        """
        state.cache.share(source.handle, sample.handle, tokens)
        self.drafter.share(state.drafts, source.number, sample.number, tokens)
        sample.num_unprefilled -= tokens

    def prefill(self, state: DecodeState, tokens: Mapping[int, int]) -> None:
        """Lets the target read some more of prompts.

        Args:
            state: the batch.
            tokens: how many, by the sample's number; at most what each has not read yet.
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
                scored=scored,
            ):
                for handle, (states, logits) in portion.items():
                    sample = samples[handle]
                    if handle in scored:
                        sample.score(logits)
                    hidden.setdefault(sample.number, []).append(states)
                    sample.num_unprefilled -= len(states)
            if self.drafter.hidden_layers:
                self.drafter.take_hidden(state.drafts, {number: torch.cat(seen) for number, seen in hidden.items()})
            self.drafter.prefill(state.drafts, parts)

    def remove(self, state: DecodeState, sample: Sample) -> None:
        """Gives back all that a sample holds."""
        self.drafter.remove(state.drafts, sample.number)
        state.cache.close(sample.handle)
        state.samples[sample.number] = None

    def step(self, state: DecodeState) -> Verdict:
        """One round: draft a tree per sample, run the target once over all of them, keep what it accepts.

        Args:
            state: advanced in place; every active sample gains at least one token.

        Raises:
            SampleError: if a sample's own processors fail; nothing was committed then, and the step can be taken
                again without that sample.
        """
        shared = self.coupling.verifier.shared
        if (static := self._static_for(state)) is not None:
            groups = group_samples(state, self.topology.num_nodes, shared=shared, static=True)
            try:
                return self._static_step(static, state, groups)
            except UnsupportedModel as failure:  # a model that no graph can hold: noticed when it is recorded
                if not static.automatic:
                    raise
                static.give_up(failure)
                self._take_back(state)
        groups = group_samples(state, self.topology.num_nodes, shared=shared, static=False)
        try:
            with state.stats.phase("draft"):
                tree = joined([self.drafting(state, group) for group in groups])
            with state.stats.phase("target"):
                logits, hidden = self.runner(state, tree)
            with state.stats.phase("verify"):
                tree, logits, hidden, best = finite_rows(state, tree, logits, hidden)
                verdict = verdicts_of(
                    groups,
                    tree,
                    lambda part, rows, noise: self.judge(state, part, logits[rows], best[rows], noise),
                )
        except BaseException:
            self._take_back(state)
            raise
        with state.stats.phase("commit"):
            shares, own = hidden.split(tree.lengths), logits.split(tree.lengths)
            self._commit(
                state, tree, verdict, lambda number, path: _picked(shares[number], path), state.cache.commit, own
            )
        return verdict

    def _static_for(self, state: DecodeState) -> StaticStepping | None:
        """What takes this batch a step further in fixed shapes, if something does."""
        static = self.static
        if static is None or not isinstance(state.cache, StaticCache) or not static.active:
            return None
        if static.automatic:
            kinds = {static_kind(sample, self.coupling.verifier.shared) for sample in state.active}
            if len(kinds) > _MOST_GROUPS or any(self._obstacle(static, sample) for sample in state.active):
                return None
        return static

    def _static_step(self, static: StaticStepping, state: DecodeState, groups: Sequence[SampleGroup]) -> Verdict:
        """The same in fixed shapes, group by group; forward, verification and compaction are one phase."""
        verdicts: list[SampleVerdict | None] = [None] * len(state.samples)
        for group in groups:
            with state.stats.phase("draft"):
                tree = self.drafting(state, group)
            with state.stats.phase("target"):
                batch = lay_out(state, tree, self.mask, causal=False)
                temperatures = [one.pipeline.temperature or 1.0 if one else 1.0 for one in state.samples]
                result = static(tree, batch, group.noise, state.cache, group.samples[0].pipeline, temperatures)
                state.stats.count_padding(result.rows - sum(tree.lengths))
            with state.stats.phase("commit"):
                state.give_up(result.failed)
                accepted = result.hidden  # of roots and paths already
                self._commit(
                    state,
                    tree,
                    result.verdict,
                    lambda number, path, accepted=accepted: accepted[number, : len(path)],  # type: ignore[misc]
                    state.cache.advance,
                )
            for sample in group.samples:
                verdicts[sample.number] = result.verdict.samples[sample.number]
        return Verdict(tuple(verdicts))

    def _take_back(self, state: DecodeState) -> None:
        """Forgets what a step has written that did not come to its end."""
        active = state.active
        state.cache.drop([sample.handle for sample in active])
        nothing = (None,) * len(state.samples)
        self.drafter.commit(state.drafts, DraftTree(nothing), Verdict(nothing))

    def _commit(
        self,
        state: DecodeState,
        tree: DraftTree,
        verdict: Verdict,
        accepted: Callable[[int, list[int]], Tensor],
        keep: Callable[[Mapping[int, Sequence[int]]], None],
        logits: Sequence[Tensor] = (),
    ) -> None:
        """Takes over what was accepted.

        Args:
            state: the batch.
            tree: the drafts.
            verdict: what became of them.
            accepted: the hidden states of some of a sample's rows, which begin with its root and follow its path.
            keep: commits rows of the cache.
            logits: ``[n_b, V]`` of every sample.
        """
        if self.on_step is not None:
            self.on_step(state, tree, verdict)
        waits = {greedy: self.drafting.waits(state, greedy) for greedy in (False, True)}
        kept: dict[int, list[int]] = {}
        seen: dict[int, Tensor] = {}
        remaining: list[SampleVerdict | None] = []
        for number, (drafted, judged) in enumerate(zip(tree.samples, verdict.samples, strict=True)):
            remaining.append(None)
            if drafted is None or judged is None:
                continue
            sample = state[number]
            nodes = list(drafted.tokens)
            path = [0, *(nodes.index(node) for node in judged.path)]
            tokens = [*(drafted.tokens[node] for node in judged.path), judged.token]
            found = None
            if sample.logprobs is not None:
                found = logprobs_of(logits[number][path], tokens, sample.logprobs)
            emitted = sample.append(Emission(tokens, drafted, judged, found))
            if self.drafter.hidden_layers:
                seen[number] = accepted(number, path[:emitted])
            state.stats.record(drafted, judged, emitted)
            sample.forwards += 1
            # What had to be, or was not to be, tells nothing of who drafts.
            if drafted.guesses or not (drafted.certain or waits[sample.greedy]):
                self.decider.learn(sample.memory, drafted.outcome(judged))
            remaining[number] = judged if emitted == len(tokens) else _cut(drafted, judged, emitted)
            kept[sample.handle] = path[:emitted]
        keep(kept)
        self.drafter.commit(state.drafts, tree, Verdict(tuple(remaining)))
        if seen:
            self.drafter.take_hidden(state.drafts, seen)


def _picked(rows: Tensor, path: list[int]) -> Tensor:
    """Some rows; the first ones, as they are nearly always, without a copy."""
    return rows[: len(path)] if path[-1] == len(path) - 1 else rows[path]


def _cut(drafted: SampleTree, judged: SampleVerdict, emitted: int) -> SampleVerdict:
    """What is left of a verdict of which only the first tokens were committed, as the text ends there."""
    return SampleVerdict(judged.path[: emitted - 1], drafted.tokens[judged.path[emitted - 1]], recovered=False)
