"""Feeds committed tokens and their drafts to networks in native kernels.

Shapes: F hidden states side by side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arbordraft.kernels.draft_tree import DraftRun, Limits, TreesToGrow
from arbordraft.target.cache import RaggedKVCache
from arbordraft.target.prepacked.prepacked_modules import memory_of, recurrences_of
from arbordraft.trees.draft_tree import Ints
from arbordraft.trees.forest import Forest
from arbordraft.trees.topology import TreeTopology

CHUNK = 2048  # most rows of a call, to bound its memory

Missing = tuple[Sequence[int], Tensor | None]
"""Committed tokens that a cache lacks, and the target's ``[n, F]`` hidden states for them, if the network reads any."""


def part_of(missing: Missing, first: int, last: int) -> Missing:
    """Returns the missing tokens ``first`` to ``last - 1``, with their states."""
    tokens, states = missing
    return tokens[first:last], None if states is None else states[first:last]


def feed(
    run: DraftRun,
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    trees: TreesToGrow,
    topology: TreeTopology,
    fed: Ints,
    blocks: Tensor | None = None,
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
        blocks: the only blocks of tokens that are drafted, see :class:`~arbordraft.kernels.draft_tree.DraftRun`.
        commit: whether the cache keeps the missing tokens; if not, each sample must lack exactly one.

    Returns:
        The number of rows of scores that were no numbers.
    """
    if commit and sum(len(tokens) for tokens, _ in missing.values()) > CHUNK:
        missing = _read_ahead(run, cache, missing)
    return _call(run, cache, missing, trees, topology, fed, commit, blocks)


def _read_ahead(run: DraftRun, cache: RaggedKVCache, missing: Mapping[int, Missing]) -> dict[int, Missing]:
    """Lets a model read all missing tokens but the last one of each sample, in portions; returns these."""
    ends: dict[int, Missing] = {}
    shape = TreeTopology.chain(0)
    root = Forest.of_roots(shape, [0], [None])
    idle = TreesToGrow(root, [0], shape.child_offsets, shape.child_order, Limits.everything([0]))
    for handle, part in missing.items():
        last = len(part[0]) - 1
        for first in range(0, last, CHUNK):
            early = {handle: part_of(part, first, min(first + CHUNK, last))}
            _call(run, cache, early, idle, shape, np.full((1, 1), -1), True)
        ends[handle] = part_of(part, last, last + 1)
    return ends


def _call(
    run: DraftRun,
    cache: RaggedKVCache,
    missing: Mapping[int, Missing],
    trees: TreesToGrow,
    topology: TreeTopology,
    fed: Ints,
    commit: bool,
    blocks: Tensor | None = None,
) -> int:
    handles, counts = list(missing), [len(tokens) for tokens, _ in missing.values()]
    levels = trees.limits.levels[trees.slots].clip(max=topology.max_depth)
    most = topology.inner_counts[levels].tolist()
    places = cache.reserve(handles, [count + nodes for count, nodes in zip(counts, most, strict=True)])
    layers, like = run.weights.layers, run.weights.embedding
    rows, nodes = None, None
    if run.recurrent:
        rows = cache.state_rows(cache.lay_out(handles, [range(n) for n in counts], reading=commit), like.device)
        widths = [len(inner) for inner in topology.inner[1 : int(levels.max())]]
        nodes = rows.nodes(recurrences_of(layers), like, max(most), max(widths, default=0))
    pools, lineage = memory_of(cache, rows, layers, like)
    states = [part for _, part in missing.values() if part is not None]
    packed_states = (states[0] if len(states) == 1 else torch.cat(states)).to(like.dtype) if states else None
    broken = run(
        integers([token for tokens, _ in missing.values() for token in tokens]),
        packed_states,
        pools,
        integers([[start for start, _ in places], [length for _, length in places], counts]),
        trees,
        fed,
        blocks,
        lineage,
        nodes,
    )
    if rows is None:
        if commit:
            caught_up(cache, missing)
        return broken
    cache.commit({handle: range(count if commit else 0) for handle, count in zip(handles, counts, strict=True)})
    if commit:
        rows.drafted([_parents(topology, fed[slot]) for slot in trees.slots])
    return broken


def _parents(topology: TreeTopology, fed: Ints) -> list[int]:
    """Returns the parent of each fed node among them, in the order in which they were fed."""
    (nodes,) = (fed >= 0).nonzero()
    order = nodes[fed[nodes].argsort()].tolist()
    return [int(fed[parent]) if (parent := topology.parent_list[node]) else -1 for node in order]


def caught_up(cache: RaggedKVCache, missing: Mapping[int, Missing]) -> None:
    """Commits missing tokens whose rows have been written to a cache."""
    cache.advance({handle: range(len(tokens)) for handle, (tokens, _) in missing.items()})


def integers(values: Sequence[Any]) -> Tensor:
    """Returns an int64 tensor, made by numpy, which is faster for a few values."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


__all__ = ["CHUNK", "Missing", "caught_up", "feed", "integers", "part_of"]
