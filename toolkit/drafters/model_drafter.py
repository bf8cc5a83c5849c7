"""Drafters with a network on a ragged cache, which runs level by level, or grows whole trees in one call.

Shapes: T packed rows, R rows to predict from or nodes of a level, F hidden states side by side, H hidden size, D
outputs of a network, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from arbordraft.drafters.base import Drafter, Predictions
from arbordraft.drafters.context import DraftContext, Level, OneCallDrafts
from arbordraft.kernels.draft_tree import Drafted, DraftRun, Draws, Growth
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import Attending
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import words_of
from arbordraft.trees.verdict import Verdict

CHUNK = 2048  # most rows of a call, to bound its memory

# Committed tokens that a cache lacks, and the target's hidden states for them.
Missing = tuple[Sequence[int], Tensor | None]


class DraftNetwork(Protocol):
    """A drafting model for steps of fixed shapes, which runs operations on its device only.

    Attributes:
        device: its device.
        dtype: dtype of its inputs and outputs.
        states: F; 0 if it reads no states of the target.
        vocab_size: number of the target's token ids.
        vocabulary: ``[D]`` tokens of its outputs; ``None`` for 0 to D - 1.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def states(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def vocabulary(self) -> Tensor | None: ...

    def pools(self, cache: RaggedKVCache, dummy: int) -> list[Tensor]:
        """Returns its key and value pools in a cache; creates missing pools with a token of the sample ``dummy``."""

    def fuse(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` states of the target into the ``[T, H]`` that it reads, if it reads any."""

    def run(
        self, tokens: Tensor, hidden: Tensor | None, positions: Tensor, ragged: Attending, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Runs packed rows.

        Args:
            tokens: ``[T]``.
            hidden: ``[T, H]`` states for the tokens: the target's, or its own output for their parents.
            positions: ``[T]``.
            ragged: stores keys and values and attends to them.
            rows: ``[R]`` rows to predict from, all T by default.

        Returns:
            ``[R, D]`` logits, and the ``[R, H]`` output that its next rows read, if they read any.
        """


class Outputs(NamedTuple):
    """Outputs of a network for packed rows.

    Args:
        logits: ``[R, V]``.
        final: ``[R, H]`` states before the logits, if the network exposes them.
        out: ``[R, H]`` states that the rows of children read, if they read any.
    """

    logits: Tensor
    final: Tensor | None = None
    out: Tensor | None = None


@dataclass
class ModelState:
    """State of a batch.

    Args:
        cache: the network's cache.
        handles: by sample, its handle in the cache.
        fed: by sample, the token of each fed node, in order; -1 for rows that are no node of the tree. Their keys
            follow the committed ones.
        seen: by sample and fed node, a bit for each fed node that it sees.
        out: ``[R, H]`` states that the next level's nodes read, by row of the last level.
    """

    cache: RaggedKVCache
    handles: dict[int, int] = field(default_factory=dict)
    fed: dict[int, dict[int, int]] = field(default_factory=dict)
    seen: dict[int, dict[int, int]] = field(default_factory=dict)
    out: Tensor | None = None


class ModelDrafter(Drafter):
    """Drafts with a network that attends to the committed text and to the ancestors of a node.

    Subclasses define the inputs of the network and how it runs.
    """

    takes_candidates = True
    keeps = True  # whether keys and values of accepted drafts stay in its cache
    catches_up = True  # whether it reads committed tokens, the roots included, before it drafts
    chunk = CHUNK  # most rows of a forward, to bound its memory

    def run(
        self, state: Any, tokens: Tensor, hidden: Tensor | None, batch: RaggedBatch, rows: Tensor | None = None
    ) -> Outputs:
        """Runs the network.

        Args:
            state: the state from :meth:`open`.
            tokens: ``[T]``.
            hidden: ``[T, H]`` states for the tokens, if the network reads any.
            batch: places of the tokens in its cache.
            rows: ``[R]`` rows to predict from, all T by default.
        """
        raise NotImplementedError

    def missing(self, state: Any, context: DraftContext, sample: int) -> Missing:
        """Returns the committed tokens of a sample that the cache lacks; they are read next."""
        raise NotImplementedError

    def fuse(self, states: Tensor) -> Tensor:
        """Fuses ``[T, F]`` states of the target into the ``[T, H]`` that the network reads."""
        raise NotImplementedError

    def whole(self, context: DraftContext) -> DraftRun | DraftNetwork | None:
        """Returns the network that grows whole trees, natively or in fixed shapes, if there is one."""
        return None

    def propose(self, state: Any, level: Level) -> Predictions:
        if level.depth == 0 and self.catches_up:
            samples = [sample for sample, _ in level.places]
            found = self.catch_up(
                state, {state.handles[sample]: self.missing(state, level.context, sample) for sample in samples}
            )
            state.fed |= {sample: {} for sample in samples}
        else:
            tokens, batch = self._lay_out(state, level)
            # Row by row, as indexing would upload the index.
            hidden = None if state.out is None else torch.stack([state.out[parent] for parent in level.parents])
            found = self.run(state, tokens, hidden, batch)
        state.out = found.out
        return Predictions(found.logits, found.final)

    def propose_trees(
        self, state: Any, context: DraftContext, samples: Sequence[int], growth: Growth, draws: Draws | None
    ) -> Drafted | None:
        whole = self.whole(context)
        if whole is None:
            return None
        missing = {state.handles[sample]: self.missing(state, context, sample) for sample in samples}
        if isinstance(whole, DraftRun):
            drafted = feed(whole, state.cache, missing, growth, draws)
        else:
            assert context.static is not None
            prefill = partial(self.catch_up, state)
            drafted = feed_static(context.static, whole, prefill, state.cache, samples, missing, growth, draws)
        if self.keeps:
            self._record_fed(state, context, samples, drafted)
        return drafted

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        kept: dict[int, list[int]] = {}
        for sample, handle in state.handles.items():
            fed, places = list(state.fed.get(sample, {}).items()), []
            # Leaves and nodes of other drafters were never fed: the next catch-up reads them.
            for row in verdict.paths[sample][1:] if self.keeps and fed else ():
                accepted = int(tree.node[row]), int(tree.token[row])
                if accepted not in fed:
                    break
                places.append(fed.index(accepted))
            kept[handle] = places
        state.cache.commit(kept)
        state.fed, state.seen, state.out = {}, {}, None

    def catch_up(self, state: Any, missing: Mapping[int, Missing]) -> Outputs:
        """Reads and commits missing tokens, by handle; returns the predictions after the last token of each."""
        states = [part for _, part in missing.values() if part is not None]
        lengths = [len(tokens) for tokens, _ in missing.values()]
        left: dict[int, Tensor] = {}
        if states:
            left = dict(zip(missing, self.fuse(torch.cat(states)).split(lengths), strict=True))
        last: dict[int, Outputs] = {}
        tokens = {handle: row for handle, (row, _) in missing.items()}
        for part, packed, batch in state.cache.portions(tokens, self.chunk):
            counts = [len(row) for row in part.values()]
            hidden = None
            if left:
                hidden = torch.cat([left[handle][:count] for handle, count in zip(part, counts, strict=True)])
                left |= {handle: left[handle][count:] for handle, count in zip(part, counts, strict=True)}
            found = self.run(state, packed, hidden, batch, torch.tensor(counts).cumsum(0) - 1)
            if counts != lengths:
                last |= {handle: _row(found, place) for place, handle in enumerate(part)}
        if not last:  # one portion had all tokens, the usual case
            return found
        rows = zip(*(last[handle] for handle in missing), strict=True)
        return Outputs(*(None if parts[0] is None else torch.stack(parts) for parts in rows))  # type: ignore[arg-type]

    def _lay_out(self, state: Any, level: Level) -> tuple[Tensor, RaggedBatch]:
        """Plans the forward of a level, whose ``[R]`` tokens follow the nodes that were fed before."""
        parents = level.context.topology.parent_list
        words: list[int] = []
        for (sample, node), token in zip(level.places, level.tokens, strict=True):
            fed, seen = state.fed.setdefault(sample, {}), state.seen.setdefault(sample, {})
            seen[node] = seen.get(parents[node], 0) | 1 << len(fed)
            fed[node] = token
            words.append(seen[node])
        depth = level.depth - self.catches_up  # distance from the committed tokens, which may include the roots
        batch = state.cache.lay_out(
            [state.handles[sample] for sample in level.nodes],
            [[depth] * len(nodes) for nodes in level.nodes.values()],
            words_of(words, max(len(state.fed[sample]) for sample in level.nodes)),
        )
        return _integers(level.tokens), batch

    @staticmethod
    def _record_fed(state: Any, context: DraftContext, samples: Sequence[int], drafted: Drafted) -> None:
        """Records the nodes that a call has fed after the committed tokens."""
        drafts = zip(drafted.samples, drafted.nodes, drafted.tokens, strict=True)
        tokens = {(place, node): token for place, node, token in drafts}
        state.fed |= {sample: {} for sample in samples}
        for place, node in drafted.fed:
            state.fed[samples[place]][node] = tokens.get((place, node), -1)
        depths = context.topology.depth_list
        for sample in samples:
            state.cache.wrote(state.handles[sample], [depths[node] - 1 for node in state.fed[sample]])


def _row(found: Outputs, row: int) -> Outputs:
    logits, final, out = found
    return Outputs(logits[row], None if final is None else final[row], None if out is None else out[row])


class TargetCacheDrafter(ModelDrafter):
    """Drafts with layers of the target on the target's own cache.

    It writes its tree after the committed tokens, where verification overwrites it, so nothing is rolled back.
    """

    keeps = False
    catches_up = False  # the roots are its first nodes

    def open(self, target_cache: RaggedKVCache) -> ModelState:
        return ModelState(target_cache)

    def add(self, state: ModelState, sample: int, tokens: Sequence[int], handle: int) -> None:
        state.handles[sample] = handle

    def remove(self, state: ModelState, sample: int) -> None:
        del state.handles[sample]

    def proposed(self, state: ModelState) -> None:
        # No draft rows stay in the target's cache.
        state.cache.drop([state.handles[sample] for sample in state.fed])
        state.fed, state.seen = {}, {}

    def commit(self, state: ModelState, tree: DraftTree, verdict: Verdict) -> None:
        # The target commits its own cache. Entries remain only if growing has failed halfway.
        state.fed, state.seen = {}, {}


def feed(
    run: DraftRun,
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    growth: Growth,
    draws: Draws | None,
    *,
    commit: bool = True,
) -> Drafted:
    """Runs a model on the tokens that its cache lacks, and then on its own drafts.

    Args:
        run: the model.
        cache: its cache.
        missing: the tokens that the cache lacks, by handle, in the order of ``growth``.
        growth: how far trees go on.
        draws: how tokens are drawn.
        commit: whether the cache keeps the missing tokens; if not, each sample must lack exactly one.
    """
    if not commit or sum(len(tokens) for tokens, _ in missing.values()) <= CHUNK:
        return _call(run, cache, missing, growth, draws, commit)
    ends = {}  # last tokens of the prompts, whose other tokens are read first
    idle = growth._replace(levels=[0], trust=[1.0], next=[1.0], weights=[1.0])
    for handle, (tokens, states) in missing.items():
        for first in range(0, len(tokens) - 1, CHUNK):
            last = min(first + CHUNK, len(tokens) - 1)
            _call(run, cache, {handle: (tokens[first:last], _rows(states, first, last))}, idle, None)
        ends[handle] = tokens[-1:], _rows(states, len(tokens) - 1, len(tokens))
    return _call(run, cache, ends, growth, draws)


def _rows(states: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if states is None else states[first:last]


def _call(
    run: DraftRun,
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    growth: Growth,
    draws: Draws | None,
    commit: bool = True,
) -> Drafted:
    counts = [len(tokens) for tokens, _ in missing.values()]
    inner = _inner_nodes(tuple(growth.offsets), tuple(growth.children))
    fed = [inner[min(levels, len(inner) - 1)] for levels in growth.levels]
    places = cache.reserve(list(missing), [count + nodes for count, nodes in zip(counts, fed, strict=True)])
    like = run.weights.embedding
    states = [part for _, part in missing.values() if part is not None]
    packed_states = (states[0] if len(states) == 1 else torch.cat(states)).to(like.dtype) if states else None
    drafted = run(
        _integers([token for tokens, _ in missing.values() for token in tokens]),
        packed_states,
        [cache.pools(index, (layer.kv_heads, layer.dim), like) for index, layer in enumerate(run.weights.layers)],
        _integers([[start for start, _ in places], [length for _, length in places], counts]),
        growth,
        draws,
    )
    if commit:
        caught_up(cache, missing)
    return drafted


@lru_cache
def _inner_nodes(offsets: tuple[int, ...], children: tuple[int, ...]) -> list[int]:
    """Returns, by number of levels, how many nodes of a topology get children in them; the root counts, too."""
    depths = [0] * (len(offsets) - 1)
    for node, (first, last) in enumerate(pairwise(offsets)):
        for child in children[first:last]:
            depths[child] = depths[node] + 1
    inner = [depth for depth, (first, last) in zip(depths, pairwise(offsets), strict=True) if first < last]
    return [sum(depth < levels for depth in inner) for levels in range(max(depths) + 1)]


def caught_up(cache: RaggedKVCache, missing: Mapping[int, Missing]) -> None:
    """Commits missing tokens whose rows have been written to a cache."""
    cache.advance({handle: range(len(tokens)) for handle, (tokens, _) in missing.items()})


def _integers(values: Sequence[Any]) -> Tensor:
    """Returns an int64 tensor, made by numpy, which is faster for a few values."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def feed_static(
    static: OneCallDrafts,
    network: DraftNetwork,
    prefill: Callable[[dict[int, Missing]], object],
    cache: RaggedKVCache,
    samples: Sequence[int],
    missing: Mapping[int, Missing],
    growth: Growth,
    draws: Draws | None,
) -> Drafted:
    """Runs like :func:`feed`, in fixed shapes for the last missing tokens; ``prefill`` reads the tokens before them."""
    early, late = {}, {}
    for handle, (tokens, states) in missing.items():
        first = max(0, len(tokens) - static.rows)
        late[handle] = tokens[first:], _rows(states, first, len(tokens))
        if first:
            early[handle] = tokens[:first], _rows(states, 0, first)
    if early:
        prefill(early)
    return static(network, cache, samples, late, growth, draws)


__all__ = [
    "CHUNK",
    "DraftNetwork",
    "Missing",
    "ModelDrafter",
    "ModelState",
    "Outputs",
    "TargetCacheDrafter",
    "caught_up",
    "feed",
    "feed_static",
]
