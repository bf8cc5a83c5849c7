"""The whole draft of a step in fixed shapes: every level of every tree, without asking the host.

Values that change from step to step are in one table: committed tokens that the drafter's cache lacks, and how far the
trees go on. All nodes of a level run for all samples. Nodes that a tree lacks run, too, but are not added to it.

Shapes: S samples, C rows to catch up with of each, K levels, N nodes of the topology down to these. At some depth m
nodes, n of which have children, k at most. R rows, H hidden size, V vocabulary, D outputs of the drafter's head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from arbordraft.decoding.static.cache import Memory
from arbordraft.decoding.static.step import StaticForward, by_layer
from arbordraft.drafters.feeding import Missing
from arbordraft.drafters.network import DraftNetwork
from arbordraft.kernels.draft_tree import TreesToGrow
from arbordraft.kernels.draft_tree.limits import Trees
from arbordraft.kernels.grow_level import grow_level
from arbordraft.kernels.gumbel import gumbel
from arbordraft.kernels.ragged_tree_attention.batch import arrivals
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.table import Table

_ANY_NUMBER = 2**62
_Pools = Mapping[int, tuple[Tensor, Tensor]]  # of keys and of values, by layer


@dataclass(frozen=True)
class DraftBucket(Table):
    """The shapes of a draft.

    Args:
        samples: S.
        rows: C.
        depth: K, at least 1.
    """

    reals: ClassVar = frozenset({"temperature", "weight", "calibration", "expected", "costs"})

    samples: int
    rows: int
    depth: int

    @cached_property
    def fields(self) -> Mapping[str, tuple[int, ...]]:
        """The parts of the table with their shapes.

        - By row to catch up with: its token, and its place among the target's states.
        - By sample: its first pool row, its numbers of committed and missing rows, its levels, its seed.
        - Also by sample: the position after its root, its temperature (0 draws nothing), the weight of its tokens.
        - By sample and depth: the calibration of drafts, and how often some child is expected to be accepted.
        - ``costs``: tokens that a level must gain, and those that a node must gain.
        - ``budget``: greatest number of drafts of all samples.
        """
        samples = dict.fromkeys(("starts", "committed", "missing", "levels", "seeds", "positions"), (self.samples,))
        return {
            "tokens": (self.samples, self.rows),
            "source": (self.samples, self.rows),
            **samples,
            "temperature": (self.samples,),
            "weight": (self.samples,),
            "calibration": (self.samples, self.depth),
            "expected": (self.samples, self.depth),
            "costs": (2,),
            "budget": (1,),
        }

    def fill(
        self,
        table: Tensor,
        missing: Sequence[Missing],
        places: Sequence[tuple[int, int]],
        trees: TreesToGrow,
        spare: Sequence[int],
    ) -> None:
        """Writes a step into a table on the host.

        Args:
            table: ``[size]`` int64.
            missing: the 1 to C missing tokens of every sample that drafts.
            places: first pool row and number of committed rows of each such sample.
            trees: their trees, and how far they go on.
            spare: first pool rows for the unused samples of the bucket.
        """
        into, count = self.blank(table), len(missing)
        first = 0
        for sample, (tokens, _) in enumerate(missing):
            last = len(tokens) - 1
            rows = np.minimum(np.arange(self.rows), last)  # rows after the last one repeat it
            into.tokens[sample], into.source[sample] = np.asarray(tokens)[rows], first + rows
            into.missing[sample] = last + 1
            first += last + 1
        # Not token 0: without a mask, models warn about tokens that look like padding.
        into.tokens[count:], into.missing[count:] = into.tokens[0, 0], 1
        into.starts[:] = [*(start for start, _ in places), *spare]
        into.committed[:count] = [length for _, length in places]
        limits, slots = trees.limits, trees.slots
        into.levels[:count], into.weight[:count] = limits.levels[slots], limits.weight[slots]
        for name in ("calibration", "expected"):
            known = getattr(limits, name)[slots]
            getattr(into, name)[:count] = known[:, np.minimum(np.arange(self.depth), known.shape[1] - 1)]
        into.costs[:] = trees.costs
        into.budget[0] = trees.budget if trees.budget > 0 else _ANY_NUMBER
        if (draws := trees.draws) is not None:
            into.seeds[:count], into.positions[:count] = draws.seeds.numpy(), draws.positions.numpy()
            into.temperature[:count] = draws.temperatures


class _Level(nn.Module):
    """Constants of one depth at which nodes have children.

    Args:
        topology: the tree.
        mask: mask of the tree.
        depth: the depth.
        samples: S.
    """

    inner: Tensor  # [n] nodes with children
    above: Tensor  # [n] places of their parents among the nodes with children one depth above
    parent: Tensor  # [m'] by node one depth below: place of its parent among the n
    rank: Tensor  # [m'] by node one depth below: its rank among its parent's children
    fed: Tensor  # nodes one depth below that have children
    words: Tensor  # [S n, W] ancestor words over the rows of this depth and those above, without the root
    depths: Tensor  # depths of these rows
    layout: Tensor  # [4, S + 1] see RaggedBatch.layout, without the pool rows and the committed keys

    def __init__(self, topology: TreeTopology, mask: SlicedCausalMask, depth: int, samples: int) -> None:
        super().__init__()
        parents, inner, level = topology.parent_list, topology.inner, topology.tree_levels[depth]
        here, before = inner[depth], inner[depth - 1] if depth else []
        fed = [node for nodes in inner[1 : depth + 1] for node in nodes]
        self.first, self.size, self.below = len(fed) - len(here), len(here), level.below.start
        self.width = level.width
        firsts = [0] * (samples + 1), [0] * (samples + 1)
        numbers = {
            "inner": level.inner,
            "above": [before.index(parents[node]) for node in here] if depth else [],
            "parent": level.parent,
            "rank": level.rank,
            "fed": inner[depth + 1] if depth + 1 < len(inner) else [],
            "depths": [topology.depth_list[node] for node in fed],
            "layout": [_firsts(samples, self.size), *firsts, _firsts(samples, len(fed))],
        }
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)
        self.register_buffer("words", mask.select(here, fed).repeat(samples, 1), persistent=False)


class _Places(NamedTuple):
    """Places of all rows of a draft below the roots, and the temperatures of its samples.

    Args:
        region: ``[S, r]`` positions of the r rows of all depths.
        slots: ``[S, r]`` their pool rows.
        layouts: ``[K, 4, S + 1]`` see :attr:`RaggedBatch.layout`, by depth.
        arrivals: see :attr:`RaggedBatch.arrivals`.
        heat: ``[S, 1, 1]`` float32 divisors of the scores, if noise is shared.
        draws: ``[S, 1, 1]`` whether a sample draws.
        drawn: ``[K, S]`` positions of the draws, by depth.
    """

    region: Tensor
    slots: Tensor
    layouts: Tensor
    arrivals: Tensor | None
    heat: Tensor | None = None
    draws: Tensor | None = None
    drawn: Tensor | None = None


class DraftStep(nn.Module):
    """The device's part of a draft.

    It writes only to pool rows that are not committed, so running it again changes nothing.

    Args:
        network: the drafting model.
        topology: the trees' shape, of which K levels are drafted.
        bucket: the other shapes.
        shared: draw tokens with the noise that the target shares.
        longest: approximate longest prefix, which determines how attention is split.
    """

    operator = "static_draft"
    layouts: Tensor
    rows: Tensor
    caught_up: Tensor

    def __init__(
        self, network: DraftNetwork, topology: TreeTopology, bucket: DraftBucket, *, shared: bool, longest: int
    ) -> None:
        super().__init__()
        self.title = f"a draft of {network}"
        self.network, self.bucket, self.shared, self.longest = network, bucket, shared, longest
        mask = SlicedCausalMask(topology)
        self.nodes = topology.levels[bucket.depth].stop
        self.levels = nn.ModuleList(_Level(topology, mask, depth, bucket.samples) for depth in range(bucket.depth))
        self.levels.to(network.device)
        layouts = torch.stack([_level(level).layout for level in self.levels])
        self.register_buffer("layouts", layouts, persistent=False)
        self.register_buffer("rows", torch.arange(bucket.rows, device=layouts.device), persistent=False)
        rows = _firsts(bucket.samples, bucket.rows)
        caught_up = torch.tensor([rows, [0] * len(rows), [0] * len(rows), rows], device=layouts.device)
        self.register_buffer("caught_up", caught_up, persistent=False)  # layout of the rows to catch up with

    def forward(self, table: Tensor, states: Tensor, memory: Memory) -> Tensor:
        """Runs one draft.

        Args:
            table: the table that :meth:`DraftBucket.fill` wrote.
            states: ``[S C, F]`` target states at the tokens, for a network that reads them; otherwise ``[0, 0]``.
            memory: memory of the drafter's cache, to which rows are appended.

        Returns:
            ``[2, S, N]`` float64: tokens, -1 where there is no node, and their draft probabilities. In place of a
            root's probability stands the number of the sample's rows whose scores were not numbers.
        """
        trees, broken = self.grow(self.bucket.read(table), states, memory.rows)
        trees.chance[:, 0] = broken
        return torch.stack([trees.token.double(), trees.chance])

    def grow(self, part: Mapping[str, Tensor], states: Tensor, rows: Sequence[Tensor]) -> tuple[Trees, Tensor]:
        """Grows the trees, given the parts of the table and the drafter's pools.

        Returns:
            The trees, and ``[S]`` numbers of rows that were no numbers.
        """
        pools = by_layer(rows)
        logits, out = self._catch_up(part, states, pools)
        shape = self.bucket.samples, self.nodes
        trees = Trees(
            torch.full(shape, -1, device=logits.device),
            torch.zeros(shape, dtype=torch.float64, device=logits.device),
            torch.full(shape, -1.0, dtype=torch.float64, device=logits.device),
        )
        trees.token[:, 0], trees.reach[:, 0] = part["tokens"][:, -1], part["weight"]
        limits = part["levels"], part["calibration"], part["expected"], part["costs"], part["budget"]
        broken = torch.zeros(shape[0], dtype=torch.float64, device=logits.device)
        places, fed = self._places(part), None
        for depth, level in enumerate(map(_level, self.levels)):
            if fed is not None:
                logits, out = self._feed(places, fed, out, depth, level, pools)
            likeliest = self._likeliest(part, places, logits, depth, level)
            fed = grow_level(
                trees.token, trees.chance, trees.reach, broken, *limits, level.inner, level.parent, level.rank,
                level.fed, *likeliest, self.network.vocabulary, depth, level.below,
            )  # fmt: skip
        return trees, broken

    def _places(self, part: Mapping[str, Tensor]) -> _Places:
        """Returns the places of all rows below the roots, computed once for all depths."""
        past, last = part["committed"] + part["missing"], _level(self.levels[-1])
        layouts = self.layouts.clone()
        layouts[:, 1, :-1], layouts[:, 2, :-1] = part["starts"], past
        # Below its last level a sample has no nodes, and the model may not have such positions.
        region = past[:, None] - 1 + torch.minimum(last.depths, part["levels"][:, None])
        slots = (part["starts"] + past)[:, None] + torch.arange(len(last.depths), device=past.device)
        found = _Places(region, slots, layouts, arrivals(past))
        if not self.shared:
            return found
        heat = part["temperature"][:, None, None]
        draws, depths = heat > 0, torch.arange(len(self.levels), device=past.device)
        heat = torch.where(draws, heat, 1).float()
        return found._replace(heat=heat, draws=draws, drawn=part["positions"] + depths[:, None])

    def _catch_up(self, part: Mapping[str, Tensor], states: Tensor, pools: _Pools) -> tuple[Tensor, Tensor | None]:
        """Feeds missing tokens; returns ``[S, D]`` logits after the roots and the network's ``[S, 1, H]`` output."""
        offsets = torch.minimum(self.rows, part["missing"][:, None] - 1)
        positions = (part["committed"][:, None] + offsets).flatten()
        slots = (part["starts"] + part["committed"])[:, None] + self.rows
        layout = self.caught_up.clone()
        layout[1, :-1], layout[2, :-1] = part["starts"], part["committed"]
        run = StaticForward(pools, layout, positions, positions, slots.flatten(), None, self.bucket.rows, self.longest)
        hidden = self.network.fuse(states[part["source"].flatten()]) if len(states) else None
        last = self.caught_up[0, :-1] + part["missing"] - 1
        logits, _, out = self.network.run(part["tokens"].flatten(), hidden, positions, run, last)
        return logits, None if out is None else out[:, None]

    def _feed(
        self, places: _Places, tokens: Tensor, out: Tensor | None, depth: int, level: _Level, pools: _Pools
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the nodes of a depth, missing ones with the root's token; returns ``[S n, D]`` and ``[S, n, H]``."""
        # Contiguous, as kernels need it: a single column would be flattened to a view.
        here = slice(level.first, level.first + level.size)
        positions, slots = (part[:, here].contiguous().flatten() for part in (places.region, places.slots))
        run = StaticForward(
            pools,
            places.layouts[depth],
            places.region[:, : here.stop].contiguous().flatten(),
            positions,
            slots,
            level.words,
            level.size,
            self.longest,
            arrivals=places.arrivals,
        )
        hidden = None if out is None else out[:, level.above].flatten(0, 1)
        logits, _, out = self.network.run(tokens, hidden, positions, run)
        return logits, None if out is None else out.unflatten(0, (self.bucket.samples, level.size))

    def _likeliest(
        self, part: Mapping[str, Tensor], places: _Places, logits: Tensor, depth: int, level: _Level
    ) -> tuple[Tensor, Tensor]:
        """Returns the ``[S n, k]`` most probable outputs after nodes, and their log-probabilities."""
        count = min(level.width, logits.shape[1])
        if places.heat is None or places.draws is None or places.drawn is None:
            return tree_expand(logits, count)
        vocabulary, wide = self.network.vocabulary, torch.promote_types(logits.dtype, torch.float32)
        scores = logits.to(wide).unflatten(0, (self.bucket.samples, level.size))
        noise = gumbel(part["seeds"], places.drawn[depth], self.network.vocab_size).to(wide)
        noise = noise if vocabulary is None else noise[:, vocabulary]
        drawn = scores / places.heat + noise[:, None]
        return tree_expand(torch.where(places.draws, drawn, scores).flatten(0, 1), count)


def _firsts(samples: int, rows: int) -> list[int]:
    """Returns the first of ``rows`` rows of each sample, and their end."""
    return [sample * rows for sample in range(samples + 1)]


def _level(module: nn.Module) -> _Level:
    assert isinstance(module, _Level)
    return module


__all__ = ["DraftBucket", "DraftStep"]
