"""Drafters with a network on a ragged cache, which runs level by level, or grows whole trees in one call.

Shapes: T packed rows, R rows to predict from or nodes of a depth, H hidden size, N nodes of the topology.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbordraft.drafters.base import Drafter, Predictions
from arbordraft.drafters.context import DraftContext, Frontier
from arbordraft.drafters.feeding import Missing, caught_up, feed, integers, part_of
from arbordraft.drafters.network import DraftNetwork, Outputs
from arbordraft.drafters.vocabulary import LARGE, blocks_of
from arbordraft.kernels.draft_tree import DraftRun, TreesToGrow
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree, Ints
from arbordraft.trees.topology import words_of
from arbordraft.trees.verdict import Verdict


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

    def drop(self) -> None:
        """Drops the keys and values of a step's nodes, and forgets these."""
        self.cache.drop(list(self.handles.values()))
        self.forget()


class ModelDrafter(Drafter):
    """Drafts with a network that attends to the committed text and to the ancestors of a node.

    Subclasses set the network, and say which committed tokens its cache lacks. Drafts leave nothing in the cache.
    """

    takes_candidates = True
    _network: DraftNetwork

    def missing(self, state: Any, context: DraftContext, sample: int) -> Missing:
        """Returns the committed tokens of a sample that the cache lacks; they are read next."""
        raise NotImplementedError

    def most_missing(self, committed: int) -> int:
        """Returns the most tokens that the cache lacks after a step that commits up to ``committed`` tokens."""
        return committed

    def caught_up(self, state: Any, missing: Mapping[int, Missing]) -> None:
        """Commits missing tokens, by handle, whose rows a recorded draft has written to the cache."""
        caught_up(state.cache, missing)

    def network(self, context: DraftContext) -> DraftNetwork | None:
        return self._network.recorded() if self._drafts_target_ids(context) else None

    def _drafts_target_ids(self, context: DraftContext) -> bool:
        """Tells whether the network's token ids are the target's, so that its drafts need no conversion."""
        return context.vocab_size in (None, self._network.vocab_size)

    def scores(self, state: Any, frontier: Frontier) -> Predictions:
        found = self._after_roots(state, frontier) if frontier.depth == 0 else self._after_level(state, frontier)
        state.out, state.rows = found.out, {place: row for row, place in enumerate(frontier.places)}
        return Predictions(self._network.widen(found.logits), found.final)

    def _after_roots(self, state: Any, frontier: Frontier) -> Outputs:
        """Reads committed tokens, the roots included."""
        found = self.catch_up(state, self._missing(state, frontier.context, frontier.samples))
        state.fed |= {sample: {} for sample in frontier.samples}
        return found

    def _after_level(self, state: Any, frontier: Frontier) -> Outputs:
        """Reads drafts whose ancestors have been read."""
        tokens, batch = self._lay_out(state, frontier)
        hidden = None
        if state.out is not None:  # row by row, as indexing would upload the index
            parents = frontier.context.topology.parent_list
            rows = [state.rows[sample, parents[node]] for sample, node in frontier.places]
            hidden = torch.stack([state.out[row] for row in rows])
        return self._network.run_batch(tokens, hidden, batch, state.cache)

    def _missing(self, state: Any, context: DraftContext, samples: Sequence[int]) -> dict[int, Missing]:
        return {state.handles[sample]: self.missing(state, context, sample) for sample in samples}

    def grow_natively(self, state: Any, context: DraftContext, trees: TreesToGrow) -> int | None:
        if not self._drafts_target_ids(context) or (run := self._network.native) is None:
            return None
        fed = np.full(trees.trees.token.shape, -1)
        missing = self._missing(state, context, trees.slots)
        broken = feed(run, state.cache, missing, trees, context.topology, fed, _blocks(run, context, trees))
        self.record_fed(state, context, trees, fed)
        return broken

    def record_fed(self, state: Any, context: DraftContext, trees: TreesToGrow, fed: Ints) -> None:
        """Records the nodes that a call has fed after the committed tokens, if their keys may stay.

        Args:
            state: the state from :meth:`open`.
            context: the step.
            trees: the trees.
            fed: of the shape of the trees: the place of each fed node after the committed keys, -1 for the others.
        """

    def all_but_last(self, state: Any, missing: Mapping[int, Missing], most: int) -> dict[int, Missing]:
        """Reads missing tokens until each sample lacks at most ``most``; returns these."""
        early, late = {}, {}
        for handle, part in missing.items():
            count = len(part[0])
            first = max(0, count - most)
            late[handle] = part_of(part, first, count)
            if first:
                early[handle] = part_of(part, 0, first)
        if early:
            self.catch_up(state, early)
        return late

    def catch_up(self, state: Any, missing: Mapping[int, Missing]) -> Outputs:
        """Reads and commits missing tokens, by handle; returns the predictions after the last token of each."""
        network = self._network
        states = [part for _, part in missing.values() if part is not None]
        lengths = [len(tokens) for tokens, _ in missing.values()]
        left: dict[int, Tensor] = {}
        if states:
            left = dict(zip(missing, network.fuse(torch.cat(states)).split(lengths), strict=True))
        last: dict[int, Outputs] = {}
        tokens = {handle: row for handle, (row, _) in missing.items()}
        for part, packed, batch in state.cache.portions(tokens, network.chunk):
            counts = [len(row) for row in part.values()]
            hidden = None
            if left:
                hidden = torch.cat([left[handle][:count] for handle, count in zip(part, counts, strict=True)])
                left |= {handle: left[handle][count:] for handle, count in zip(part, counts, strict=True)}
            found = network.run_batch(packed, hidden, batch, state.cache, torch.tensor(counts).cumsum(0) - 1)
            if counts != lengths:
                last |= {handle: _row(found, place) for place, handle in enumerate(part)}
        if not last:  # one portion had all tokens, the usual case
            return found
        rows = zip(*(last[handle] for handle in missing), strict=True)
        return Outputs(*(None if parts[0] is None else torch.stack(parts) for parts in rows))  # type: ignore[arg-type]

    def rollback(self, state: Any) -> None:
        state.drop()

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
        depth = words[0].bit_count() - 1  # distance from the committed tokens, which may include the roots
        batch = state.cache.lay_out(
            [state.handles[sample] for sample in by_sample],
            [[depth] * len(nodes) for nodes in by_sample.values()],
            words_of(words, max(len(state.fed[sample]) for sample in by_sample)),
        )
        return integers(frontier.tokens), batch


def _blocks(run: DraftRun, context: DraftContext, trees: TreesToGrow) -> Tensor | None:
    """Returns the blocks of tokens that the head scores; ``None`` for all."""
    if run.weights.vocabulary is not None or run.weights.outputs < LARGE:
        return None
    if trees.corrections is not None and trees.corrections.allowed is not None:  # a mask may allow rare tokens alone
        return None
    return blocks_of(context[sample].vocabulary for sample in trees.slots)


def _row(found: Outputs, row: int) -> Outputs:
    logits, final, out = found
    return Outputs(logits[row], None if final is None else final[row], None if out is None else out[row])


class OwnCacheDrafter(ModelDrafter):
    """Drafts with a model that reads tokens alone; keys and values of accepted drafts stay in its cache."""

    def commit(self, state: Any, tree: DraftTree, verdict: Verdict) -> None:
        kept: dict[int, list[int]] = {}
        for sample, handle in state.handles.items():
            fed, places = state.fed.get(sample), []
            # Leaves and nodes of other drafters were never fed: the next catch-up reads them.
            for row in verdict.paths[sample][1:] if fed else ():
                place, token = fed.get(int(tree.node[row]), (-1, -1))
                if token != int(tree.token[row]):
                    break
                places.append(place)
            kept[handle] = places
        state.cache.commit(kept)
        state.forget()

    def record_fed(self, state: Any, context: DraftContext, trees: TreesToGrow, fed: Ints) -> None:
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


class TargetCacheDrafter(ModelDrafter):
    """Drafts with layers of the target on the target's own cache, which lacks the roots alone.

    It writes its tree after the committed tokens, where verification overwrites it, so nothing is rolled back.
    """

    def missing(self, state: ModelState, context: DraftContext, sample: int) -> Missing:
        return context.tokens(sample)[-1:], None

    def most_missing(self, committed: int) -> int:
        return 1

    def caught_up(self, state: ModelState, missing: Mapping[int, Missing]) -> None:
        """Commits nothing, as verification writes these rows again."""

    def _after_roots(self, state: ModelState, frontier: Frontier) -> Outputs:
        return self._after_level(state, frontier)  # the target commits its own cache, the roots included

    def grow_natively(self, state: ModelState, context: DraftContext, trees: TreesToGrow) -> int | None:
        if (run := self._network.native) is None:
            return None
        fed = np.full(trees.trees.token.shape, -1)
        missing = self._missing(state, context, trees.slots)
        blocks = _blocks(run, context, trees)
        return feed(run, state.cache, missing, trees, context.topology, fed, blocks, commit=False)

    def open(self, target_cache: RaggedKVCache) -> ModelState:
        self._network.refresh()
        return ModelState(target_cache)

    def add(self, state: ModelState, sample: int, tokens: Sequence[int], handle: int) -> None:
        state.handles[sample] = handle

    def remove(self, state: ModelState, sample: int) -> None:
        del state.handles[sample]

    def proposed(self, state: ModelState) -> None:
        # No draft rows stay in the target's cache.
        state.cache.drop([state.handles[sample] for sample in state.fed])
        state.forget()

    def rollback(self, state: ModelState) -> None:
        state.forget()


__all__ = ["ModelDrafter", "ModelState", "OwnCacheDrafter", "TargetCacheDrafter"]
