"""Drafters with a network on a ragged cache, which runs level by level, or grows whole trees in one call.

Shapes: T packed rows, R rows to predict from or nodes of a depth, F hidden states side by side, H hidden size, D
outputs of a network, V vocabulary, N nodes of the topology.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from arbordraft.drafters.base import Drafter, Predictions
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.kernels.draft_tree import DraftRun, Limits, TreesToGrow
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree, Ints
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import TreeTopology, words_of
from arbordraft.trees.verdict import Verdict

CHUNK = 2048  # most rows of a call, to bound its memory

# Committed tokens that a cache lacks, and the target's hidden states for them.
Missing = tuple[Sequence[int], Tensor | None]


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
        fed: by sample, the place of each fed node among its uncommitted keys, and its token.
        seen: by sample and fed node, a bit for each fed node that it sees.
        rows: by sample and node, the row of ``out``.
        out: ``[R, H]`` states that the nodes one depth below read.
    """

    cache: RaggedKVCache
    handles: dict[int, int] = field(default_factory=dict)
    fed: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    seen: dict[int, dict[int, int]] = field(default_factory=dict)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    out: Tensor | None = None

    def forget(self) -> None:
        """Forgets the nodes of a step."""
        self.fed, self.seen, self.rows, self.out = {}, {}, {}, None


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

    def native(self, context: DraftContext) -> DraftRun | None:
        """Returns the network that grows whole trees natively, if there is one."""
        return None

    def scores(self, state: Any, frontier: Frontier) -> Predictions:
        if frontier.depth == 0 and self.catches_up:
            missing = {
                state.handles[sample]: self.missing(state, frontier.context, sample) for sample in frontier.samples
            }
            found = self.catch_up(state, missing)
            state.fed |= {sample: {} for sample in frontier.samples}
        else:
            tokens, batch = self._lay_out(state, frontier)
            hidden = None
            if state.out is not None:  # row by row, as indexing would upload the index
                parents = frontier.context.topology.parent_list
                rows = [state.rows[sample, parents[node]] for sample, node in frontier.places]
                hidden = torch.stack([state.out[row] for row in rows])
            found = self.run(state, tokens, hidden, batch)
        state.out, state.rows = found.out, {place: row for row, place in enumerate(frontier.places)}
        return Predictions(found.logits, found.final)

    def grow_natively(self, state: Any, context: DraftContext, trees: TreesToGrow) -> int | None:
        if (run := self.native(context)) is None:
            return None
        missing = {state.handles[sample]: self.missing(state, context, sample) for sample in trees.slots}
        fed = np.full(trees.trees.token.shape, -1)
        broken = feed(run, state.cache, missing, trees, context.topology, fed)
        self.record_fed(state, context, trees, fed)
        return broken

    def all_but_last(self, state: Any, missing: Mapping[int, Missing], most: int) -> dict[int, Missing]:
        """Reads missing tokens until each sample lacks at most ``most``; returns these."""
        early, late = {}, {}
        for handle, (tokens, states) in missing.items():
            first = max(0, len(tokens) - most)
            late[handle] = tokens[first:], _rows(states, first, len(tokens))
            if first:
                early[handle] = tokens[:first], _rows(states, 0, first)
        if early:
            self.catch_up(state, early)
        return late

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        kept: dict[int, list[int]] = {}
        for sample, handle in state.handles.items():
            fed, places = state.fed.get(sample), []
            # Leaves and nodes of other drafters were never fed: the next catch-up reads them.
            for row in verdict.paths[sample][1:] if self.keeps and fed else ():
                place, token = fed.get(int(tree.node[row]), (-1, -1))
                if token != int(tree.token[row]):
                    break
                places.append(place)
            kept[handle] = places
        state.cache.commit(kept)
        state.forget()

    def rollback(self, state: Any) -> None:
        state.cache.drop(list(state.handles.values()))
        state.forget()

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

    def _lay_out(self, state: Any, frontier: Frontier) -> tuple[Tensor, RaggedBatch]:
        """Plans the forward of a depth, whose ``[R]`` tokens follow the nodes that were fed before."""
        parents = frontier.context.topology.parent_list
        words: list[int] = []
        for (sample, node), token in zip(frontier.places, frontier.tokens, strict=True):
            fed, seen = state.fed.setdefault(sample, {}), state.seen.setdefault(sample, {})
            seen[node] = seen.get(parents[node], 0) | 1 << len(fed)
            fed[node] = len(fed), token
            words.append(seen[node])
        by_sample = frontier.by_sample
        depth = frontier.depth - self.catches_up  # distance from the committed tokens, which may include the roots
        batch = state.cache.lay_out(
            [state.handles[sample] for sample in by_sample],
            [[depth] * len(nodes) for nodes in by_sample.values()],
            words_of(words, max(len(state.fed[sample]) for sample in by_sample)),
        )
        return _integers(frontier.tokens), batch

    def record_fed(self, state: Any, context: DraftContext, trees: TreesToGrow, fed: Ints) -> None:
        """Records the nodes that a call has fed after the committed tokens, if their keys may stay.

        Args:
            state: the state from :meth:`open`.
            context: the step.
            trees: the trees.
            fed: of the shape of the trees: the place of each fed node after the committed keys, -1 for the others.
        """
        if not self.keeps:
            return
        depths, token = context.topology.depth_array, trees.trees.token
        for sample in trees.slots:
            (nodes,) = (fed[sample] >= 0).nonzero()
            order = fed[sample, nodes].argsort()
            state.fed[sample] = {
                node: (place, known)
                for place, (node, known) in enumerate(
                    zip(nodes[order].tolist(), token[sample, nodes[order]].tolist(), strict=True)
                )
            }
            state.cache.wrote(state.handles[sample], (depths[nodes[order]] - 1).tolist())


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
        state.forget()

    def commit(self, state: ModelState, tree: DraftTree, verdict: Verdict) -> None:
        pass  # the target commits its own cache

    def rollback(self, state: ModelState) -> None:
        state.forget()


def feed(
    run: DraftRun,
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    trees: TreesToGrow,
    topology: TreeTopology,
    fed: Ints,
    *,
    commit: bool = True,
) -> int:
    """Runs a model on the tokens that its cache lacks, and then on its own drafts.

    Args:
        run: the model.
        cache: its cache.
        missing: the tokens that the cache lacks, by handle, in the order of the trees' slots.
        trees: grown in place.
        topology: their shape.
        fed: of the shape of the trees; gets the place of each fed node after the committed keys.
        commit: whether the cache keeps the missing tokens; if not, each sample must lack exactly one.

    Returns:
        The number of rows of scores that were no numbers.
    """
    if commit and sum(len(tokens) for tokens, _ in missing.values()) > CHUNK:
        missing = _read_ahead(run, cache, missing, trees)
    return _call(run, cache, missing, trees, topology, fed, commit)


def _read_ahead(
    run: DraftRun, cache: RaggedKVCache, missing: Mapping[int, Missing], trees: TreesToGrow
) -> dict[int, Missing]:
    """Lets a model read all missing tokens but the last one of each sample, in portions; returns these."""
    ends: dict[int, Missing] = {}
    shape, root = TreeTopology.chain(0), Forest.of_roots(TreeTopology.chain(0), [0], [None])
    idle = TreesToGrow(root, [0], shape.child_offsets, shape.child_order, Limits.everything([0]))
    for handle, (tokens, states) in missing.items():
        for first in range(0, len(tokens) - 1, CHUNK):
            last = min(first + CHUNK, len(tokens) - 1)
            part = tokens[first:last], _rows(states, first, last)
            _call(run, cache, {handle: part}, idle, shape, np.full((1, 1), -1), True)
        ends[handle] = tokens[-1:], _rows(states, len(tokens) - 1, len(tokens))
    return ends


def _rows(states: Tensor | None, first: int, last: int) -> Tensor | None:
    return None if states is None else states[first:last]


def _call(
    run: DraftRun,
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    trees: TreesToGrow,
    topology: TreeTopology,
    fed: Ints,
    commit: bool,
) -> int:
    counts = [len(tokens) for tokens, _ in missing.values()]
    most = topology.inner_counts[trees.limits.levels[trees.slots].clip(max=topology.max_depth)].tolist()
    places = cache.reserve(list(missing), [count + nodes for count, nodes in zip(counts, most, strict=True)])
    like = run.weights.embedding
    states = [part for _, part in missing.values() if part is not None]
    packed_states = (states[0] if len(states) == 1 else torch.cat(states)).to(like.dtype) if states else None
    broken = run(
        _integers([token for tokens, _ in missing.values() for token in tokens]),
        packed_states,
        [cache.pools(index, (layer.kv_heads, layer.dim), like) for index, layer in enumerate(run.weights.layers)],
        _integers([[start for start, _ in places], [length for _, length in places], counts]),
        trees,
        fed,
    )
    if commit:
        caught_up(cache, missing)
    return broken


def caught_up(cache: RaggedKVCache, missing: Mapping[int, Missing]) -> None:
    """Commits missing tokens whose rows have been written to a cache."""
    cache.advance({handle: range(len(tokens)) for handle, (tokens, _) in missing.items()})


def _integers(values: Sequence[Any]) -> Tensor:
    """Returns an int64 tensor, made by numpy, which is faster for a few values."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


__all__ = [
    "CHUNK",
    "Missing",
    "ModelDrafter",
    "ModelState",
    "Outputs",
    "TargetCacheDrafter",
    "caught_up",
    "feed",
]
