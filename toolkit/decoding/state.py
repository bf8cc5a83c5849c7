"""What changes while a batch is decoded.

Shapes: B samples, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from arbordraft.decoding.metrics import DecodeStats
from arbordraft.sampling.noise import Noise, SharedSource
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.sampling.stateful import PathState
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import SampleTree
from arbordraft.trees.verdict import SampleVerdict

_NOT_FINITE = "the target's logits are NaN or infinite"
_ROWS = 64  # whose log-probabilities are computed at a time, which bounds their memory


class TokenLogprobs(NamedTuple):
    """Of a token of a prompt or an answer, by the target's own logits: no processor has changed them.

    Args:
        logprob: its log-probability.
        others: the most probable tokens with theirs, descending.
    """

    logprob: float
    others: tuple[tuple[int, float], ...]


class Emission(NamedTuple):
    """What a sample gained in a step.

    Args:
        tokens: committed ones.
        tree: what was drafted for it.
        verdict: what became of that.
        logprobs: one per token, if they are wanted.
    """

    tokens: Sequence[int]
    tree: SampleTree
    verdict: SampleVerdict
    logprobs: Sequence[TokenLogprobs] | None = None


def logprobs_of(logits: Tensor, tokens: Sequence[int], others: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens.

    Args:
        logits: ``[R, V]``, the rows behind which they stand.
        tokens: R of them.
        others: how many of the most probable ones are wanted besides.
    """
    found = list[TokenLogprobs]()
    for part in logits.split(_ROWS):
        rows = part.double().log_softmax(dim=-1)
        best = rows.topk(min(others, rows.shape[1]))
        ids = torch.tensor(tokens[len(found) : len(found) + len(part)], device=rows.device)
        own = rows.gather(1, ids[:, None]).flatten().tolist()
        known = zip(own, best.indices.tolist(), best.values.tolist(), strict=True)
        found += [TokenLogprobs(value, tuple(zip(*ranked, strict=True))) for value, *ranked in known]
    return found


@dataclass(eq=False)
class Sample:
    """One text and what is wanted of it: its settings are its own, whatever shares its batch.

    Args:
        tokens: committed tokens, prompt included, padding not.
        budget: tokens it may still emit; 0 when it is finished.
        seed: of its noise, 0 to 2**64 - 1.
        greedy: whether the target decodes at temperature 0; so it does where ``pipeline`` divides by one next to it.
        pipeline: its logits processors; samples that share one are processed together.
        stopping: whether it ends with a token, given that token and what returns all tokens so far.
        padding: left padding that the caller's batch has in front of the prompt.
        emit: is told what it gains.
        logprobs: log-probabilities of emitted tokens are wanted, and of as many of the most probable ones; ``None`` for
            none.
        prompt_logprobs: the same of its prompt's tokens behind the first.
        scored: is told these, portion by portion.

    Attributes:
        prompt: length of the prompt.
        num_unprefilled: tokens of the prompt that the target must read before decoding begins.
        number: its place in the batch.
        handle: the sample in the target's cache.
        memory: what the decider remembers of it.
        emitted: committed tokens behind the prompt.
        forwards: target forwards that it took part in.
        stopped: whether its criteria ended it.
        failure: why it was given up.
        following: ``[V]`` target row behind the committed tokens, for decoders that draft from it.
        path_state: its stateful processors behind the committed tokens; ``None`` if it has none.
    """

    tokens: list[int]
    budget: int
    seed: int
    greedy: bool
    pipeline: LogitsPipeline
    stopping: Callable[[int, Callable[[], list[int]]], bool]
    padding: int = 0
    emit: Callable[[Emission], None] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    scored: Callable[[Sequence[TokenLogprobs]], None] | None = None
    prompt: int = field(init=False)
    num_unprefilled: int = field(init=False)
    number: int = field(init=False, default=-1)
    handle: int = field(init=False, default=-1)
    memory: Any = field(init=False, default=None)
    emitted: int = field(init=False, default=0)
    forwards: int = field(init=False, default=0)
    stopped: bool = field(init=False, default=False)
    failure: Exception | None = field(init=False, default=None)
    following: Tensor | None = field(init=False, default=None)
    path_state: PathState | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)
        self.num_unprefilled = self.prompt - 1  # the last one is the root of the first tree
        self.greedy = self.greedy or self.pipeline.greedy
        if self.pipeline.stateful:
            self.path_state = PathState([template.fork() for template in self.pipeline.stateful])
        self._uniforms: npt.NDArray[np.float64] | None = None

    @property
    def active(self) -> bool:
        """Whether it takes part in the next step."""
        return self.budget > 0 and not self.num_unprefilled

    @property
    def num_prefilled(self) -> int:
        """Tokens of the prompt that the target has read."""
        return self.prompt - 1 - self.num_unprefilled

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be read or decoded for it."""
        return self.failure is not None or not (self.budget or self.num_unprefilled)

    @cached_property
    def _generator(self) -> np.random.Generator:
        return Noise.source(self.seed)

    def uniforms(self, nodes: int) -> "npt.NDArray[np.float64]":
        """``[3, N]`` noise of its own for this step: the same if the step has to be taken again."""
        if self._uniforms is None:
            self._uniforms = self._generator.random((3, nodes))
        return self._uniforms

    @cached_property
    def shared(self) -> SharedSource:
        """Source of the noise that target and drafter share."""
        return SharedSource(self.seed)

    def path(self, drafted: Sequence[int] = ()) -> list[int]:
        """Its own tokens with drafted ones behind: what logits processors and stopping criteria are told."""
        return [*self.tokens, *drafted]

    def state(self, drafted: Sequence[int]) -> PathState:
        """Its stateful processors behind drafted tokens."""
        assert self.path_state is not None
        return self.path_state.along(drafted)

    def append(self, gain: Emission) -> int:
        """Commits tokens one by one until the sample ends; returns how many.

        What its own criteria raise ends it, too, with the token that they were asked about; so does a processor that
        fails behind one.
        """
        kept, self._uniforms = 0, None
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
                    if self.path_state.failure is not None:  # what follows was not drawn by its processors
                        break
            self.emitted += kept
            if self.emit is not None:
                self.emit(gain._replace(tokens=gain.tokens[:kept], logprobs=gain.logprobs and gain.logprobs[:kept]))
            if self.budget and self.path_state is not None and self.path_state.failure is not None:
                self.fail(self.path_state.failure)
        except Exception as error:
            self.fail(error)
        return kept

    def score(self, logits: Tensor) -> None:
        """Tells the log-probabilities of the prompt's tokens behind those that are read next.

        Args:
            logits: ``[R, V]`` target rows of the next R unread tokens.
        """
        if not logits.amax(dim=-1).isfinite().all():  # NaN and +inf reach the maximum
            return self.fail(FloatingPointError(_NOT_FINITE))
        assert self.prompt_logprobs is not None
        assert self.scored is not None
        self.scored(logprobs_of(logits, self.tokens[self.num_prefilled + 1 :][: len(logits)], self.prompt_logprobs))

    def fail(self, reason: Exception) -> None:
        """Ends it."""
        self.failure, self.budget = reason, 0


@dataclass
class DecodeState:
    """A batch between two steps.

    Args:
        cache: the target's cache; it holds all committed tokens of a sample but the last, as far as they were read.
        drafts: the drafter's own state.
        stats: what is counted, all samples together.
        samples: by their numbers; ``None`` where a number is free.
        fixed_batch: whether nobody else will join.

    Attributes:
        most: samples that had not ended at a time, at most.
    """

    cache: RaggedKVCache
    drafts: Any
    stats: DecodeStats
    samples: list[Sample | None] = field(default_factory=list)
    fixed_batch: bool = False
    most: int = field(init=False, default=0)

    def __getitem__(self, number: int) -> Sample:
        """The sample with a number that is taken."""
        sample = self.samples[number]
        assert sample is not None
        return sample

    @property
    def active(self) -> list[Sample]:
        """Samples that take part in the next step."""
        return [sample for sample in self.samples if sample is not None and sample.active]

    @property
    def prefilling(self) -> bool:
        """Whether prompts wait to be read, so that steps are to be short."""
        return any(sample is not None and sample.num_unprefilled for sample in self.samples)

    def enter(self, sample: Sample) -> None:
        """Gives a sample the lowest free number."""
        sample.number = next((n for n, other in enumerate(self.samples) if other is None), len(self.samples))
        self.samples[sample.number : sample.number + 1] = [sample]
        self.most = max(self.most, sum(one is not None and not one.ended for one in self.samples))

    def seats(self) -> list[int]:
        """By place in a table of fixed shapes the number of a sample, -1 for none.

        Every number has a place. Beside texts that have ended and are kept, only samples that take part have one, so
        that tables are no wider than without them.
        """
        if len(self.samples) <= self.most:
            return list(range(len(self.samples)))
        numbers = [sample.number for sample in self.active]
        return numbers + [-1] * (self.most - len(numbers))

    def give_up(self, numbers: Sequence[int]) -> None:
        """Ends samples for which the target gave no numbers, and drops what this step wrote for them."""
        for number in numbers:
            self[number].fail(FloatingPointError(_NOT_FINITE))
            self.cache.drop([self[number].handle])
