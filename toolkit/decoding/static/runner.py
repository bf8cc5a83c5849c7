"""Runs steps of fixed shapes: chooses their shapes, fills their tables, reads their results.

Shapes: T rows of a bucket, S samples besides the dummy, F hidden states side by side.
"""

import functools
import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from arbordraft.decoding.runner import state_tokens
from arbordraft.decoding.static.bucket import Bucket, bucket_for, bucket_sizes, power_of_two
from arbordraft.decoding.static.cache import MemoryLayout, StaticCache
from arbordraft.decoding.static.drafted_step import DraftedBucket
from arbordraft.decoding.static.drafting import StaticDrafts
from arbordraft.decoding.static.recording import INSTEAD, Recorder, Recording
from arbordraft.decoding.static.step import StaticStep, StepKind
from arbordraft.drafters import Drafter
from arbordraft.kernels import choice
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.sampling.kinds import is_static
from arbordraft.sampling.noise import GumbelNoise, Noise
from arbordraft.sampling.processors import LogitsPipeline
from arbordraft.target.cache import CacheOverflow, RaggedKVCache
from arbordraft.target.model import RaggedModel
from arbordraft.target.prepacked.probing import hooked
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import TreeTopology
from arbordraft.trees.verdict import Verdict
from arbordraft.verifiers import Lifted, Rule, RuleVerifier
from arbordraft.verifiers.coupling import Coupling
from arbordraft.verifiers.packed import rows_drawn_from

# Default numbers of rows. On a GPU, a step of 64 rows takes little longer than a step of one row.
DEFAULT_BUCKETS = (1, 8, 16, 32, 64)
_ROOMY = 4  # least ratio of a cache's rows to its padding rows for these steps to run by default


class StepResult(NamedTuple):
    """The result of a step.

    Args:
        verdict: verdict on the samples; failed ones take no part in it.
        failed: samples whose logits are not numbers.
        hidden: ``[S + 1, depth + 1, F]`` hidden states of roots and accepted nodes, by sample that takes part.
        padding: number of the step's rows that hold no node.
    """

    verdict: Verdict
    failed: list[int]
    hidden: Tensor
    padding: int

    @classmethod
    def of(cls, tree: DraftTree, said: Sequence[Sequence[int]], hidden: Tensor, padding: int) -> "StepResult":
        """Builds the result from the integers of :meth:`StaticStep.forward`, whose ends are rows of ``tree``."""
        ends, failed = dict[int, tuple[int, int]](), list[int]()
        for sample, (end, token, broken) in zip(tree.living, said, strict=False):
            if broken:
                failed.append(sample)
            else:
                ends[sample] = end, token
        return cls(Verdict.of(tree, ends), failed, hidden, padding)


class StaticStepping:
    """Runs the steps of a decoder in buckets.

    The number of rows of a step is that of the smallest bucket that holds all trees of the batch. Above the largest
    bucket, it is the next power of two. The number of samples is that of the batch, rounded up to a power of two.

    Args:
        target: the target.
        drafter: proposes the trees.
        topology: the largest tree.
        coupling: judges them.
        buckets: numbers of rows.
        compiler: backend of ``torch.compile``, such as ``"inductor"``; by default the step is not compiled.
        automatic: whether steps of fixed shapes are a default that the user did not ask for. They then run only on a
            GPU, for batches and requests that allow them.

    Raises:
        ValueError: if the target has prepacked linears, or recurrent layers that are to be compiled. Also if a bucket
            is not positive.
    """

    def __init__(
        self,
        target: RaggedModel,
        drafter: Drafter,
        topology: TreeTopology,
        coupling: Coupling,
        buckets: Sequence[int],
        compiler: str | None = None,
        *,
        automatic: bool = False,
    ) -> None:
        if target.backend == "native":
            raise ValueError(f"buckets need a target with kernels='torch' or 'triton', not 'native': {INSTEAD}")
        if target.recurrent and compiler is not None:
            raise ValueError(
                "compile_backend cannot trace recurrent layers: leave it out, steps are recorded without it"
            )
        self.target, self.topology, self.coupling = target, topology, coupling
        self.buckets = bucket_sizes(buckets)
        self.recorder = Recorder(compiler)
        self._bucket = functools.cache(functools.partial(Bucket.of, topology))
        self.automatic = automatic
        self.hidden_layers = drafter.hidden_layers
        self._laws = [law for law in drafter.laws(coupling.law) if not law.deterministic]
        self.drafts = StaticDrafts(topology, self.recorder)
        self._drafter = drafter
        self._idle: StaticCache | None = None
        self._in_use: WeakSet[StaticCache] = WeakSet()  # weak, since a failed batch is never closed
        self._failed = False
        self._weights: tuple[object, ...] = ()
        self._lock = threading.Lock()

    @property
    def shapes(self) -> list[Bucket]:
        """Shapes of all steps so far."""
        buckets = {recording.step.bucket for recording in self.recorder.recordings.values()}
        shapes = {bucket.step if isinstance(bucket, DraftedBucket) else bucket for bucket in buckets}
        return sorted(
            (shape for shape in shapes if isinstance(shape, Bucket)), key=lambda bucket: (bucket.samples, bucket.rows)
        )

    def reset(self) -> None:
        """Drops all recordings, compiled code and the idle cache; steps are rebuilt when they are needed.

        At the start of a batch, weights that moved to another device or dtype are noticed. Other modules and attributes
        of a target, such as adapters that were switched on, are noticed, too. After any other change, call this method.
        """
        self.recorder.reset(self.target.device)
        self._idle = None

    @property
    def active(self) -> bool:
        """Whether batches take steps of fixed shapes: always if requested; by default, only on a GPU with Triton."""
        if not self.automatic:
            return True
        on_gpu = self.target.device.type == "cuda" and choice.triton_chosen(next(self.target.model.parameters()))
        return on_gpu and not self._failed

    def give_up(self, failure: Exception) -> None:
        """Takes no such step any more and logs a warning, since the model or the drafter cannot be recorded."""
        logging.getLogger("arbordraft").warning("steps run without CUDA graphs, which is slower: %s", failure)
        self._failed = True

    def obstacle(self, pipeline: LogitsPipeline) -> str | None:
        """Returns the reason why a request needs the host during a step; ``None`` if it does not."""
        if asking := [type(one).__name__ for one in pipeline.processors if not is_static(one)]:
            return f"{asking[0]} looks at more than the scores of a row, or asks the host"
        verifier = self.coupling.verifier
        if pipeline.temperature == 0 or verifier.shared:
            return None
        judge = verifier.rule if isinstance(verifier, RuleVerifier) else verifier
        if not (isinstance(judge, Rule) and judge.rejects_in_turn):
            name = type(judge).__name__
            return f"{name} samples on the host, which SharedMatching and RecursiveRejection need not"
        if any(law.asks for law in self._laws):
            return "a law that chooses its tops in a way of its own does so on the host"
        if len({law.replacement for law in self._laws}) > 1:
            return "trees are drawn both with and without replacement"
        return None

    def reserved(self, batch: int) -> int:
        """Returns the cache rows that no sample can use, for batches of this size: the dummy's, states included."""
        return self._padding(batch) + state_tokens(self.target, self._drafter)

    def _padding(self, batch: int) -> int:
        """Returns the most rows of the dummy: padding rows, and a committed one."""
        return 1 + max(bucket_for(self.buckets, batch * self.topology.num_nodes), self.drafts.spare(batch))

    def open(self, batch: int, max_tokens: int | None) -> StaticCache | None:
        """Returns a cache for this many samples; reuses the idle one, since graphs are recorded for its pools.

        If steps of fixed shapes are only a default, returns ``None`` in three cases:

        - Another batch is under way. Two batches would record each other's graphs anew in every step.
        - Padding would take much of the room.
        - A module has hooks, which graphs do not call.

        Raises:
            CacheOverflow: if ``max_tokens`` does not even allow the rows for padding.
        """
        reserved = self.reserved(batch)
        if self.automatic:
            cramped = max_tokens is not None and max_tokens < _ROOMY * reserved
            if self._in_use or cramped or hooked(self.target.model) or hooked(self._drafter):
                return None
        if max_tokens is not None and max_tokens < reserved:
            raise CacheOverflow(
                f"the KV cache may hold {max_tokens} tokens, and steps of fixed shapes set {reserved} aside for the "
                f"padding of {batch} samples at a time: raise that limit, or decode fewer samples at once"
            )
        parts = (self.target.model, self._drafter)
        tensors = (tensor for part in parts for tensor in (*part.parameters(), *part.buffers()))
        weights = self.target.network(), *(tensor.data_ptr() for tensor in tensors)
        with self._lock:
            if weights != self._weights:
                self.reset()
                self._weights = weights
            cache, self._idle = self._idle, None
        fits = cache is not None and cache.reserved >= reserved and cache.max_tokens == max_tokens
        if cache is None or not fits:
            cache = StaticCache(max_tokens, self._padding(batch) - 1, state_tokens(self.target, self._drafter))
            self.target.prefill({cache.dummy: [0]}, cache)
        cache.settle_states(batch)
        with self._lock:
            self._in_use.add(cache)
        return cache

    def close(self, cache: StaticCache) -> None:
        """Keeps a cache without samples for the next batch."""
        with self._lock:
            self._idle = cache
            self._in_use.discard(cache)

    def __call__(
        self,
        tree: DraftTree,
        batch: RaggedBatch,
        noise: Noise | GumbelNoise | None,
        cache: RaggedKVCache,
        pipeline: LogitsPipeline,
        temperatures: Sequence[float],
        samples: int,
    ) -> StepResult:
        """Runs one step.

        Args:
            tree: the drafts.
            batch: the layout that ``cache.lay_out`` returned for them.
            noise: noise of this step; ``None`` if all temperatures are 0.
            cache: the cache that :meth:`open` returned; :meth:`RaggedKVCache.advance` commits the accepted rows.
            pipeline: the request's processors.
            temperatures: temperatures of the samples that take part, if their processors only divide by them.
            samples: number of samples for which steps are recorded, at least as many as take part.

        Raises:
            ValueError: if the chosen kernels cannot do without the host.
        """
        assert isinstance(cache, StaticCache)
        layout, states = cache.layout(), cache.state_places(batch)
        bucket = self.bucket(tree, samples, layout)
        with self.recorder.turn(self.target.device):
            run = self._recording(bucket, layout, cache.longest, noise, pipeline)

            def fill(table: Tensor) -> None:
                drawn = bucket.fill(table, tree, batch, noise, cache.dummy_start, temperatures, states)
                if drawn:
                    run.inputs[: len(drawn)].copy_(rows_drawn_from(tree, drawn))

            def idle(table: Tensor) -> None:
                bucket.fill_idle(table, self.topology, cache.dummy_start, states)

            result, hidden = run(cache.memory(), fill, idle)
            found = result.tolist()
            if run.recorded:
                hidden = hidden.clone()  # the drafter may keep it; the next step overwrites this one
        done = StepResult.of(tree, found, hidden, bucket.rows - tree.rows)
        cache.computed(batch, [len(done.verdict.paths[number]) for number in tree.living])
        return done

    def bucket(self, tree: DraftTree, samples: int, layout: MemoryLayout) -> Bucket:
        """Returns the shapes of a step over these trees, for at most ``samples`` samples."""
        width = 0 if layout.states is None else layout.states.width
        return self._bucket(bucket_for(self.buckets, tree.rows), power_of_two(samples), width)

    def step(self, bucket: Bucket, kind: StepKind, pipeline: LogitsPipeline, layout: MemoryLayout) -> StaticStep:
        """Builds a step of these shapes; ``kind`` is the result of :meth:`kind` for the pipeline."""
        most_rows = min(bucket.rows, self.topology.num_nodes)
        return StaticStep(self.target, bucket, kind, pipeline, layout, most_rows, self.hidden_layers)

    def kind(self, longest: int, noise: Noise | GumbelNoise | None, pipeline: LogitsPipeline) -> StepKind:
        """Returns the fixed properties of a step besides its shapes."""
        sampled, shared = isinstance(noise, Noise), isinstance(noise, GumbelNoise)
        processors = () if pipeline.only_divides else pipeline.constants
        kind = StepKind(sampled, shared, processors=processors, longest=longest)
        if sampled:
            kind = replace(
                kind,
                lifted=isinstance(self.coupling.verifier, Lifted),
                replacement=any(law.replacement for law in self._laws),
                most_tops=min(max((law.most_tops for law in self._laws), default=0), self.target.vocab_size),
            )
        return kind

    def _recording(
        self,
        bucket: Bucket,
        layout: MemoryLayout,
        longest: int,
        noise: Noise | GumbelNoise | None,
        pipeline: LogitsPipeline,
    ) -> Recording:
        kind = self.kind(longest, noise, pipeline)

        def make() -> tuple[StaticStep, Tensor]:
            wide = torch.promote_types(self.target.model.dtype, torch.float32)
            shape = bucket.nodes if kind.sampled else 0, self.target.vocab_size
            return self.step(bucket, kind, pipeline, layout), torch.zeros(shape, dtype=wide, device=self.target.device)

        return self.recorder.recording((bucket, kind), make)


__all__ = ["StaticCache", "StaticStepping", "StepResult"]
