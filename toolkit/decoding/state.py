"""Mutable state of a batch and its samples.

Shapes: B samples, V vocabulary.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.decoding.metrics import AnswerStats, DecodeStats
from arbordraft.decoding.prediction import CommonTokens
from arbordraft.drafters.vocabulary import TextVocabulary
from arbordraft.sampling.corrections import Changes, TextCorrections
from arbordraft.sampling.noise import Noise, SharedSource
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import PathState
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.weight_watch import WeightWatch
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict

_NOT_FINITE = "the target's logits are NaN or infinite"
_ROWS = 64  # rows whose log-probabilities are computed at a time, which bounds their memory


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a token and of the most probable tokens in its place, under the target's raw logits.

    Args:
        logprob: log-probability of the token.
        others: most probable tokens with their log-probabilities, descending.
    """

    logprob: float
    others: tuple[tuple[int, float], ...]


class Emission(NamedTuple):
    """Tokens that a sample gains in a step, with their draft tree and verdict.

    Args:
        tokens: committed tokens.
        tree: draft tree of the sample.
        verdict: verdict about the tree.
        logprobs: one per token, if requested.
    """

    tokens: Sequence[int]
    tree: SampleTree
    verdict: SampleVerdict
    logprobs: Sequence[TokenLogprobs] | None = None


def logprobs_of(logits: Tensor, tokens: Sequence[int], others: int) -> list[TokenLogprobs]:
    """Computes log-probabilities of tokens.

    Args:
        logits: ``[R, V]``, one row per token, which predicts it.
        tokens: R tokens.
        others: number of most probable tokens to add to each token.
    """
    found = list[TokenLogprobs]()
    for part in logits.split(_ROWS):
        rows = part.double().log_softmax(dim=-1)
        best = rows.topk(min(others, rows.shape[1]))
        ids = torch.tensor(tokens[len(found) : len(found) + len(part)], device=rows.device)
        token_logprobs = rows.gather(1, ids[:, None]).flatten().tolist()
        known = zip(token_logprobs, best.indices.tolist(), best.values.tolist(), strict=True)
        found += [TokenLogprobs(value, tuple(zip(*ranked, strict=True))) for value, *ranked in known]
    return found


@dataclass(eq=False)
class Sample:
    """A request while it is decoded in a batch; its settings do not depend on the other samples.

    Args:
        tokens: committed tokens, prompt included, without padding.
        budget: tokens it may still emit; 0 when it is finished.
        seed: seed of its noise, 0 to 2**64 - 1.
        pipeline: its logits processors and temperature; samples that share one are processed together.
        stopping: called with a token and a function that returns all tokens so far; returns whether the sample ends.
        padding: left padding of the prompt in the caller's batch.
        emit: called in each step with the tokens that the sample gains.
        logprobs: number of most probable tokens to report with each emitted token; ``None`` reports no
            log-probabilities.
        prompt_logprobs: as ``logprobs``, for the prompt's tokens after the first.
        on_prompt_logprobs: called with the log-probabilities of the prompt, portion by portion.
        max_drafts: most drafts that it may have in a step; 0 drafts nothing, ``None`` sets no bound.
        prediction: tokens that its answer is expected to contain, for lookups.
        stats: its counts and times.

    Attributes:
        prompt: length of the prompt.
        num_unprefilled: prompt tokens that the target must still read before decoding begins.
        number: its place in the batch.
        handle: its handle in the target's cache.
        memory: the decider's memory of it.
        stopped: whether its stopping criteria ended it.
        failure: error that ended it, if any.
        following: ``[V]`` target row after the committed tokens, for decoders that draft from it.
        path_state: its stateful processors after the committed tokens; ``None`` if it has none.
    """

    tokens: list[int]
    budget: int
    seed: int
    pipeline: LogitsPipeline
    stopping: Callable[[int, Callable[[], list[int]]], bool]
    padding: int = 0
    emit: Callable[[Emission], None] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    on_prompt_logprobs: Callable[[Sequence[TokenLogprobs]], None] | None = None
    max_drafts: int | None = None
    prediction: Sequence[int] = ()
    stats: AnswerStats = field(default_factory=AnswerStats)
    prompt: int = field(init=False)
    num_unprefilled: int = field(init=False)
    number: int = field(init=False, default=-1)
    handle: int = field(init=False, default=-1)
    memory: Any = field(init=False, default=None)
    stopped: bool = field(init=False, default=False)
    failure: Exception | None = field(init=False, default=None)
    following: Tensor | None = field(init=False, default=None)
    path_state: PathState | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.num_unprefilled = self.prompt - 1  # the last token is the root of the first tree
        if self.pipeline.stateful:
            self.path_state = PathState([template.fork() for template in self.pipeline.stateful])
        self._uniforms: npt.NDArray[np.float64] | None = None
        self._common = CommonTokens(self.prediction) if self.prediction else None
        self.stats.rejected_prediction = len(self.prediction)

    @property
    def active(self) -> bool:
        """Whether it takes part in the next step."""
        return self.budget > 0 and not self.num_unprefilled

    @property
    def num_prefilled(self) -> int:
        """Number of prompt tokens that the target has read."""
        return self.prompt - 1 - self.num_unprefilled

    @property
    def ended(self) -> bool:
        """Whether it failed, or has no tokens left to read or decode."""
        return self.failure is not None or not (self.budget or self.num_unprefilled)

    def drop_prediction(self) -> None:
        """Drops the prediction of an ended sample, whose other tokens may still be copied."""
        self.prediction, self._common = (), None

    def take_copied(self, tokens: int) -> None:
        """Counts tokens of the prompt that were copied from another sample's cache."""
        self.num_unprefilled -= tokens
        self.stats.copied += tokens

    def take_read(self, tokens: int) -> None:
        """Counts tokens of the prompt that the target has read."""
        self.num_unprefilled -= tokens
        if not self.num_unprefilled:
            self.stats.prompt_read()

    @cached_property
    def vocabulary(self) -> TextVocabulary:
        """The tokens that its drafts are chosen from if there are many."""
        return TextVocabulary(self.tokens)

    @cached_property
    def _generator(self) -> np.random.Generator:
        return Noise.source(self.seed)

    def uniforms(self, nodes: int) -> "npt.NDArray[np.float64]":
        """Returns its ``[3, N]`` noise for this step; a repeated step gets the same noise."""
        if self._uniforms is None:
            self._uniforms = self._generator.random((3, nodes))
        return self._uniforms

    @cached_property
    def _corrections(self) -> TextCorrections:
        return TextCorrections(self.pipeline.processors)

    def corrections(self) -> Changes:
        """Returns the ``[n, 5]`` changes of draft scores that its processors make after the committed tokens."""
        return self._corrections(self.tokens)

    def changes_after(self, drafted: Sequence[int]) -> Changes:
        """Returns the ``[n, 3]`` changes of the target's scores after drafted tokens."""
        return self._corrections.after(self.tokens, drafted)

    @cached_property
    def shared(self) -> SharedSource:
        """Source of the noise shared by target and drafter."""
        return SharedSource(self.seed)

    def path(self, drafted: Sequence[int] = ()) -> list[int]:
        """Returns its tokens followed by drafted ones, as logits processors and stopping criteria see them."""
        return [*self.tokens, *drafted]

    def state(self, drafted: Sequence[int]) -> PathState:
        """Returns its stateful processors after drafted tokens."""
        assert self.path_state is not None
        return self.path_state.along(drafted)

    def append(self, gain: Emission) -> int:
        """Commits tokens one by one until the sample ends; returns how many were committed.

        If a criterion raises, the sample fails; its last token is the one that the criterion was called for. If a
        stateful processor fails after a token, the sample fails, too. All committed tokens are emitted.
        """
        kept, self._uniforms = 0, None
        failure: Exception | None = None
        try:
            for token in gain.tokens[: self.budget]:
                self.tokens.append(token)
                self.budget -= 1
                kept += 1
                if self.stopping(token, self.path):
                    self.budget, self.stopped = 0, True
                    break
                if self.path_state is not None:
                    self.path_state = self.path_state.commit(token)
                    if self.path_state.failure is not None:  # the next tokens were drawn without these processors
                        break
        except Exception as error:
            failure = error
        self.stats.record(len(gain.tree.rows) - 1, min(len(gain.verdict.path) - 1, kept), kept)
        if self._common is not None:
            self._common.add(gain.tokens[:kept])
            self.stats.accepted_prediction, self.stats.rejected_prediction = self._common.counts
        try:
            if self.emit is not None:
                self.emit(gain._replace(tokens=gain.tokens[:kept], logprobs=gain.logprobs and gain.logprobs[:kept]))
        except Exception as error:
            failure = failure or error
        if self.budget and self.path_state is not None:
            failure = failure or self.path_state.failure
        if failure is not None:
            self.fail(failure)
        return kept

    def score(self, logits: Tensor) -> None:
        """Reports the log-probabilities of the prompt tokens that these rows predict.

        Args:
            logits: ``[R, V]`` target rows of the next R unread tokens.
        """
        if not logits.amax(dim=-1).isfinite().all():  # NaN and +inf reach the maximum
            return self.fail(FloatingPointError(_NOT_FINITE))
        assert self.prompt_logprobs is not None
        assert self.on_prompt_logprobs is not None
        self.on_prompt_logprobs(
            logprobs_of(logits, self.tokens[self.num_prefilled + 1 :][: len(logits)], self.prompt_logprobs)
        )

    def fail(self, reason: Exception) -> None:
        """Ends the sample with an error."""
        self.failure, self.budget = reason, 0


@dataclass
class DecodeState:
    """A batch between two steps.

    Args:
        cache: the target's cache. It lacks each sample's last committed token, and prompt tokens that are not read yet.
        drafts: the drafter's state of this batch.
        stats: counts over all samples.
        samples: samples by number; ``None`` if a number is free.
        fixed_batch: whether no further sample joins.
        drafter_weights: the drafter's weights when the batch was opened; ``None`` for a fixed batch.

    Attributes:
        running: those that had not ended when the last one joined, in the order of their numbers. Most samples of a
            server have ended, and are kept for texts that begin like them.
        most: greatest number of samples that have run at the same time.
    """

    cache: RaggedKVCache
    drafts: Any
    stats: DecodeStats
    samples: list[Sample | None] = field(default_factory=list)
    fixed_batch: bool = False
    drafter_weights: WeightWatch | None = None
    running: list[Sample] = field(init=False, default_factory=list)
    most: int = field(init=False, default=0)

    def __getitem__(self, number: int) -> Sample:
        """Returns the sample with this number, which must be in use."""
        sample = self.samples[number]
        assert sample is not None
        return sample

    @property
    def active(self) -> list[Sample]:
        """Samples that take part in the next step."""
        return [sample for sample in self.running if sample.active]

    @property
    def prefilling(self) -> bool:
        """Whether prompts wait to be read, so that steps should be short."""
        return any(sample.num_unprefilled for sample in self.running)

    def enter(self, sample: Sample) -> None:
        """Gives a sample the lowest free number."""
        sample.number = next((n for n, other in enumerate(self.samples) if other is None), len(self.samples))
        self.samples[sample.number : sample.number + 1] = [sample]
        sample.stats.begin(sample.prompt)
        self.running = [one for one in self.running if not one.ended]
        insort(self.running, sample, key=lambda one: one.number)
        self.most = max(self.most, len(self.running))

    def leave(self, sample: Sample) -> None:
        """Frees the number of a sample."""
        self.samples[sample.number] = None
        self.running = [one for one in self.running if one is not sample]

    def give_up(self, numbers: Sequence[int]) -> None:
        """Ends samples with NaN or infinite logits, and drops the cache rows that this step wrote for them."""
        for number in numbers:
            self[number].fail(FloatingPointError(_NOT_FINITE))
            self.cache.drop([self[number].handle])
