"""One step of decoding, which reads as the algorithm.

Shapes: B samples, n_b nodes of sample b, T = sum of n_b packed rows, R of them, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from arbordraft.deciders import Decider
from arbordraft.deciders.decisions import Plan, Situation
from arbordraft.decoding.assemble import assemble
from arbordraft.decoding.metrics import DecodeStats
from arbordraft.decoding.processing import draft_scores, finite_rows, target_rows
from arbordraft.decoding.sample_groups import SampleGroup, draft_temperature, group_samples, joined, verdicts_of
from arbordraft.decoding.settings import SOURCES, own_settings
from arbordraft.decoding.state import DecodeState, Emission, Sample, SampleError, logprobs_of
from arbordraft.decoding.static.runner import StaticStepping
from arbordraft.drafters import Drafter
from arbordraft.drafters.context import DraftContext
from arbordraft.drafters.none import roots
from arbordraft.grammars import GrammarCompiler
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.sampling.laws import Fixed
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.trees.draft_tree import DraftTree, SampleTree, SampleVerdict, Verdict
from arbordraft.trees.masks import SlicedCausalMask, stack_words
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.checks import check_int
from arbordraft.verifiers import matching_verdict
from arbordraft.verifiers.coupling import Coupling

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

_CHUNK = 2048  # rows of a forward over prompts, which bounds its memory
_SCORED_CHUNK = 256  # the same where their logits are wanted


class Stepper(nn.Module):
    """The parts of a decoder, assembled: takes a batch a step further, whatever its samples want.

    Its arguments are those of :class:`~arbordraft.SpeculativeDecoder`.
    """

    def __init__(
        self,
        target: "RaggedModel | PreTrainedModel",
        drafter: "Drafter | RaggedModel | PreTrainedModel",
        topology: TreeTopology | None = None,
        coupling: Coupling | None = None,
        decider: Decider | None = None,
        *,
        expected_batch: int = 1,
        max_cache_tokens: int | None = None,
        buckets: Sequence[int] | None = None,
        compiler: str | None = None,
        generation_config: str = "model",
    ) -> None:
        super().__init__()
        if generation_config not in SOURCES:
            raise ValueError(f"generation_config must be one of {', '.join(SOURCES)}, got {generation_config!r}")
        self.generation_config = generation_config
        parts = assemble(target, drafter, topology, coupling, decider)
        self.target, self.drafter, self.topology, self.coupling, self.decider = parts
        self.mask = SlicedCausalMask(self.topology)
        self.expected_batch = check_int("expected_batch", expected_batch, 1)
        self.max_cache_tokens = None if max_cache_tokens is None else check_int("max_cache_tokens", max_cache_tokens, 1)
        self.on_step: Callable[[DecodeState, DraftTree, Verdict], None] | None = None
        if compiler is not None and buckets is None:
            raise ValueError("compiler is for steps of fixed shapes: say which, with buckets=(8, 16, 32, 64)")
        self.static = None
        if buckets is not None:
            self.static = StaticStepping(*parts[:4], buckets, compiler)

    def open(self, samples: int, max_tokens: int | None = None, *, fixed_batch: bool = False) -> DecodeState:
        """A batch that nobody has joined yet.

        Args:
            samples: how many there will be at a time, at most.
            max_tokens: bound on the rows of each KV cache; by default the decoder's own.
            fixed_batch: whether all of them are there from the start and none follows: then it counts who ends last.
        """
        cache = self._open_cache(samples, self.max_cache_tokens if max_tokens is None else max_tokens)
        self.target.begin(cache)
        stats = DecodeStats(self.coupling.exactness.value, [0], [0])
        return DecodeState(cache, self.drafter.open(cache), stats, fixed_batch=fixed_batch)

    @property
    def own_settings(self) -> "GenerationConfig":
        """Settings of the model itself, for all that a request leaves open."""
        return own_settings(self.target.model, self.generation_config)

    def least_tokens(self, samples: int) -> int:
        """Fewest rows of a cache for some samples at a time in which one has room for a token behind another."""
        reserved = 0 if self.static is None else self.static.reserved(samples)
        return reserved + self.topology.num_nodes + 2

    @cached_property
    def compiler(self) -> GrammarCompiler:
        """Makes processors of grammars for the target."""
        return GrammarCompiler(self.target.tokenizer, self.target.vocab_size)

    def close(self, state: DecodeState) -> None:
        """Ends a batch."""
        for sample in state.samples:
            if sample is not None:
                self.remove(state, sample)
        if self.static is not None:
            self.static.close(state.cache)

    def _open_cache(self, samples: int, max_tokens: int | None) -> RaggedKVCache:
        if self.static is not None:
            return self.static.open(samples, max_tokens)
        return RaggedKVCache(max_tokens)

    def check(self, sample: Sample) -> None:
        """Raises ValueError if a sample wants what this decoder's kind of steps cannot do."""
        if self.static is not None:
            self.static.check(sample.pipeline, sample.greedy)
            if sample.logprobs is not None:
                raise ValueError("steps of fixed shapes download no log-probabilities: build it with buckets=None")

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
        shared, static = self.coupling.verifier.shared, self.static is not None
        groups = group_samples(state, self.topology.num_nodes, shared=shared, static=static)
        if self.static is not None:
            return self._static_step(self.static, state, groups)
        try:
            with state.stats.phase("draft"):
                tree = joined([self._propose(state, *group) for group in groups])
            with state.stats.phase("target"):
                logits, hidden = self._run_target(state, tree)
            with state.stats.phase("verify"):
                tree, logits, hidden, best = finite_rows(state, tree, logits, hidden)
                verdict = verdicts_of(
                    groups,
                    tree,
                    lambda part, rows, noise: self._judge(state, part, logits[rows], best[rows], noise),
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

    def _static_step(self, static: StaticStepping, state: DecodeState, groups: Sequence[SampleGroup]) -> Verdict:
        """The same in fixed shapes, group by group; forward, verification and compaction are one phase."""
        verdicts: list[SampleVerdict | None] = [None] * len(state.samples)
        for samples, noise in groups:
            with state.stats.phase("draft"):
                tree = self._propose(state, samples, noise)
            with state.stats.phase("target"):
                result = static(tree, self._lay_out(state, tree), noise, state.cache, samples[0].pipeline)
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
            for sample in samples:
                verdicts[sample.number] = result.verdict.samples[sample.number]
        return Verdict(tuple(verdicts))

    def _take_back(self, state: DecodeState) -> None:
        """Forgets what a step has written that did not come to its end."""
        active = state.active
        state.cache.drop([sample.handle for sample in active])
        nothing = (None,) * len(state.samples)
        self.drafter.commit(state.drafts, DraftTree(nothing), Verdict(nothing))

    def _propose(self, state: DecodeState, group: Sequence[Sample], noise: Noise | GumbelNoise | None) -> DraftTree:
        context = self._context(state, group, noise)
        idle = self._hurries(state, noise is None) or all(self.decider.rests(sample.memory) for sample in group)
        bound = context.candidates is not None or any(sample.path_state for sample in group)  # some drafts have to be
        if idle and not bound:
            return roots(context)
        return self.drafter.propose(state.drafts, self.drafter.within(context))

    def _context(self, state: DecodeState, group: Sequence[Sample], noise: Noise | GumbelNoise | None) -> DraftContext:
        shared = self.coupling.verifier.shared
        greedy = noise is None
        max_depth: list[int | None] = [None] * len(state.samples)
        temperatures = [0.0] * len(state.samples)
        told = True
        for sample in group:
            # The last token of a verdict is not drafted, so a tree need not be deeper than the budget less one.
            max_depth[sample.number] = sample.budget - 1
            temperature = draft_temperature(sample, shared)
            told = told and temperature is not None
            temperatures[sample.number] = temperature or 0.0
        return DraftContext(
            tokens=[sample.tokens if sample else () for sample in state.samples],
            max_depth=max_depth,
            topology=self.topology,
            mask=self.mask,
            law=Fixed(self.coupling.law.k) if greedy else self.coupling.law,
            pathwise=greedy or shared,
            process_logits=lambda logits, place_of: draft_scores(state, logits, place_of, untruncated=shared),
            temperatures=temperatures if told else None,
            plan=_nothing if self._hurries(state, greedy) else self._plan,
            decide=self.decider,
            memory=[sample.memory if sample else None for sample in state.samples],
            noise=noise,
            expected_batch=self.expected_batch,
            vocab_size=self.target.vocab_size,
            fixed_batch=state.fixed_batch,
            path_states=[sample.path_state if sample else None for sample in state.samples],
            static=None if self.static is None else self.static.drafts,
            extra_rows=len(state.active) - len(group),
        )

    @property
    def _plan(self) -> Callable[[Situation], Plan | None]:
        return self.decider.plan if self.decider.can_plan else _unplanned

    def _hurries(self, state: DecodeState, greedy: bool) -> bool:
        """Whether a step drafts nothing, as prompts wait for its end, where that changes no text."""
        return state.prefilling and (greedy or self.coupling.verifier.shared)

    def _lay_out(self, state: DecodeState, tree: DraftTree) -> RaggedBatch:
        depths = self.topology.depth_list
        living = [(state[number], drafted) for number, drafted in enumerate(tree.samples) if drafted]
        words = None  # of chains the causal order says all
        if self.static is not None or not all(drafted.is_chain for _, drafted in living):
            nodes = (list(drafted.tokens) for _, drafted in living)
            words = stack_words([self.mask.select(alive, alive) for alive in nodes])
        batch = state.cache.lay_out(
            [sample.handle for sample, _ in living],
            [[depths[node] for node in drafted.tokens] for _, drafted in living],
            words,
        )
        needed = sum(len(sample.tokens) - 1 + len(drafted.tokens) for sample, drafted in living)
        state.stats.count_forward(batch, rows=sum(tree.lengths), keys=needed)
        return batch

    def _run_target(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor]:
        batch = self._lay_out(state, tree)
        return self.target.run(tree.packed_tokens(), batch, state.cache, hidden=self.drafter.hidden_layers)

    def _judge(
        self, state: DecodeState, tree: DraftTree, logits: Tensor, best: Tensor, noise: Noise | GumbelNoise | None
    ) -> Verdict:
        target = target_rows(state, tree, logits, best)
        if noise is None:
            return matching_verdict(tree, lambda rows, _: target.most_probable(rows))
        try:
            return self.coupling(tree, target, noise)
        except ValueError as error:  # nothing can be drawn behind some sample: with equal noise it fails alone, too
            living = [number for number, drafted in enumerate(tree.samples) if drafted]
            if len(living) == 1:
                raise SampleError(living[0], error) from error
            shares, highest = logits.split(tree.lengths), best.split(tree.lengths)
            for one in living:
                alone = DraftTree(tuple(drafted if one == own else None for own, drafted in enumerate(tree.samples)))
                self._judge(state, alone, shares[one], highest[one], noise)
            raise

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
            if drafted.guesses or not (drafted.certain or self._hurries(state, sample.greedy)):
                self.decider.learn(sample.memory, drafted.outcome(judged))
            remaining[number] = judged if emitted == len(tokens) else _cut(drafted, judged, emitted)
            kept[sample.handle] = path[:emitted]
        keep(kept)
        self.drafter.commit(state.drafts, tree, Verdict(tuple(remaining)))
        if seen:
            self.drafter.take_hidden(state.drafts, seen)

    def check_positions(self, longest: int, budget: int) -> None:
        """Raises ValueError if a prompt with its answer is too long; the last token needs no position."""
        limit = self.target.max_positions
        if limit is not None and longest + budget - 1 > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and {budget} new ones exceed the target's {limit} positions; "
                "shorten the prompt or lower max_new_tokens"
            )


def _nothing(situation: Situation) -> Plan:
    return Plan.everything([0] * len(situation.max_depth))


def _unplanned(situation: Situation) -> None:
    """Has the decider asked before every level."""


def _picked(rows: Tensor, path: list[int]) -> Tensor:
    """Some rows; the first ones, as they are nearly always, without a copy."""
    return rows[: len(path)] if path[-1] == len(path) - 1 else rows[path]


def _cut(drafted: SampleTree, judged: SampleVerdict, emitted: int) -> SampleVerdict:
    """What is left of a verdict of which only the first tokens were committed, as the text ends there."""
    return SampleVerdict(judged.path[: emitted - 1], drafted.tokens[judged.path[emitted - 1]], recovered=False)
