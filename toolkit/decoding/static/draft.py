"""The whole draft of a step in fixed shapes: every level of every tree, without asking the host.

Values that change from step to step are in one table: committed tokens that the drafter's cache lacks, and how far the
trees go on. All nodes of a level run for all samples. Nodes that a tree lacks run, too, but are not added to it.

Shapes: S samples, C rows to catch up with of each, K levels, N nodes of the topology down to these. At some depth m
nodes, n of which have children, k at most. R rows, H hidden size, V vocabulary, D outputs of the drafter's head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from arbordraft.decoding.static.recording import Pools
from arbordraft.decoding.static.step import StaticForward
from arbordraft.drafters.feeding import Missing
from arbordraft.drafters.network import DraftNetwork
from arbordraft.kernels.draft_tree import Limits, TreesToGrow
from arbordraft.kernels.draft_tree import reference as rule
from arbordraft.kernels.draft_tree.limits import Trees
from arbordraft.kernels.gumbel import gumbel
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.trees.masks import SlicedCausalMask
from arbordraft.trees.topology import TreeTopology
from arbordraft.utils.table import Table

_ANY_NUMBER = 2**62


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
    """

    inner: Tensor  # [n] nodes with children
    above: Tensor  # [n] places of their parents among the nodes with children one depth above
    parent: Tensor  # [m'] by node one depth below: place of its parent among the n
    rank: Tensor  # [m'] by node one depth below: its rank among its parent's children
    words: Tensor  # [n, W] ancestor words over the rows of this depth and those above, without the root
    depths: Tensor  # depths of these rows

    def __init__(self, topology: TreeTopology, mask: SlicedCausalMask, depth: int) -> None:
        super().__init__()
        parents, inner, level = topology.parent_list, topology.inner, topology.tree_levels[depth]
        here, before = inner[depth], inner[depth - 1] if depth else []
        fed = [node for nodes in inner[1 : depth + 1] for node in nodes]
        self.first, self.size = len(fed) - len(here), len(here)
        self.width, self.below = level.width, level.below
        numbers = {
            "inner": level.inner,
            "above": [before.index(parents[node]) for node in here] if depth else [],
            "parent": level.parent,
            "rank": level.rank,
            "depths": [topology.depth_list[node] for node in fed],
        }
        for name, values in numbers.items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)
        self.register_buffer("words", mask.select(here, fed).clone(), persistent=False)


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

    def __init__(
        self, network: DraftNetwork, topology: TreeTopology, bucket: DraftBucket, *, shared: bool, longest: int
    ) -> None:
        super().__init__()
        self.title = f"a draft of {network}"
        self.network, self.bucket, self.shared, self.longest = network, bucket, shared, longest
        mask = SlicedCausalMask(topology)
        self.nodes = topology.levels[bucket.depth].stop
        self.levels = nn.ModuleList(_Level(topology, mask, depth) for depth in range(bucket.depth))
        self.levels.to(network.device)

    def forward(self, table: Tensor, states: Tensor, pools: Pools) -> Tensor:
        """Runs one draft.

        Args:
            table: the table that :meth:`DraftBucket.fill` wrote.
            states: ``[S C, F]`` target states at the tokens, for a network that reads them; otherwise ``[0, 0]``.
            pools: pools of the drafter's cache, to which rows are appended.

        Returns:
            ``[2, S, N]`` float64: tokens, -1 where there is no node, and their draft probabilities. In place of a
            root's probability stands the number of the sample's rows whose scores were not numbers.
        """
        trees, broken = self.grow(self.bucket.read(table), states, pools)
        trees.chance[:, 0] = broken
        return torch.stack([trees.token.double(), trees.chance])

    def grow(self, part: Mapping[str, Tensor], states: Tensor, pools: Pools) -> tuple[Trees, Tensor]:
        """Grows the trees, given the parts of the table; also returns ``[S]`` numbers of rows that were no numbers."""
        logits, out = self._catch_up(part, states, pools)
        shape = self.bucket.samples, self.nodes
        trees = Trees(
            torch.full(shape, -1, device=logits.device),
            torch.zeros(shape, dtype=torch.float64, device=logits.device),
            torch.full(shape, -1.0, dtype=torch.float64, device=logits.device),
        )
        trees.token[:, 0], trees.reach[:, 0] = part["tokens"][:, -1], part["weight"]
        costs, broken = part["costs"], trees.chance[:, 0].clone()
        limits = Limits(
            part["levels"], part["calibration"], part["expected"], part["weight"], costs[0], costs[1], part["budget"]
        )
        for depth, level in enumerate(self.levels):
            assert isinstance(level, _Level)
            if depth:
                logits, out = self._feed(part, trees, out, depth, level, pools)
            tokens, chances = self._likeliest(part, logits, depth, level)
            going = rule.going(trees, limits, level, depth)
            broken = broken + (going & ~chances[:, :, 0].isfinite()).sum(dim=1)
            rule.add(trees, limits, level, depth, going, torch.where(chances > 0, tokens, -1), chances)
        return trees, broken

    def _catch_up(self, part: Mapping[str, Tensor], states: Tensor, pools: Pools) -> tuple[Tensor, Tensor | None]:
        """Feeds missing tokens; returns ``[S, D]`` logits after the roots and the network's ``[S, 1, H]`` output."""
        samples, rows = part["tokens"].shape
        numbers = torch.arange(rows, device=states.device)
        offsets = torch.minimum(numbers, part["missing"][:, None] - 1)
        positions = (part["committed"][:, None] + offsets).flatten()
        slots = (part["starts"] + part["committed"])[:, None] + numbers
        layout = _layout(part["starts"], part["committed"], rows, rows)
        run = StaticForward(pools, layout, positions, positions, slots.flatten(), None, rows, self.longest)
        hidden = self.network.fuse(states[part["source"].flatten()]) if len(states) else None
        last = torch.arange(0, samples * rows, rows, device=states.device) + part["missing"] - 1
        logits, _, out = self.network.run(part["tokens"].flatten(), hidden, positions, run, last)
        return logits, None if out is None else out[:, None]

    def _feed(
        self,
        part: Mapping[str, Tensor],
        trees: Trees,
        out: Tensor | None,
        depth: int,
        level: _Level,
        pools: Pools,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the nodes of a depth, missing ones with the root's token; returns ``[S n, D]`` and ``[S, n, H]``."""
        past = part["committed"] + part["missing"]
        tokens = trees.token[:, level.inner]
        tokens = torch.where(tokens < 0, trees.token[:, :1], tokens)
        # Below its last level a sample has no nodes, and the model may not have such positions.
        region = past[:, None] - 1 + torch.minimum(level.depths, part["levels"][:, None])
        positions = region[:, level.first :].flatten()
        slots = (part["starts"] + past + level.first)[:, None] + torch.arange(level.size, device=past.device)
        run = StaticForward(
            pools,
            _layout(part["starts"], past, level.size, len(level.depths)),
            region.flatten(),
            positions,
            slots.flatten(),
            level.words.repeat(len(past), 1),
            level.size,
            self.longest,
        )
        hidden = None if out is None else out[:, level.above].flatten(0, 1)
        logits, _, out = self.network.run(tokens.flatten(), hidden, positions, run)
        return logits, None if out is None else out.unflatten(0, (len(past), level.size))

    def _likeliest(
        self, part: Mapping[str, Tensor], logits: Tensor, depth: int, level: _Level
    ) -> tuple[Tensor, Tensor]:
        """Returns the ``[S, n, k]`` most probable tokens after nodes, and their float64 draft probabilities."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = scores.unflatten(0, (self.bucket.samples, level.size))
        vocabulary = self.network.vocabulary
        if self.shared:
            noise = gumbel(part["seeds"], part["positions"] + depth, self.network.vocab_size).to(scores.dtype)
            noise = noise if vocabulary is None else noise[:, vocabulary]
            temperature = part["temperature"].to(scores.dtype)[:, None, None]
            drawn = scores / torch.where(temperature > 0, temperature, 1) + noise[:, None]
            scores = torch.where(temperature > 0, drawn, scores)
        count = min(level.width, scores.shape[2])
        tokens, chances = tree_expand(scores.flatten(0, 1), count)
        tokens = tokens if vocabulary is None else vocabulary[tokens]
        lacking = (0, level.width - count)  # missing tokens have chance 0
        tops = F.pad(tokens, lacking), F.pad(chances.exp().double(), lacking)
        return tops[0].unflatten(0, (-1, level.size)), tops[1].unflatten(0, (-1, level.size))


def _layout(starts: Tensor, past: Tensor, rows: int, keys: int) -> Tensor:
    """Returns :attr:`RaggedBatch.layout` of samples with equally many rows, and with equally many uncommitted keys."""
    numbers = torch.arange(len(starts) + 1, device=starts.device)
    return torch.stack([numbers * rows, F.pad(starts, (0, 1)), F.pad(past, (0, 1)), numbers * keys])


__all__ = ["DraftBucket", "DraftStep"]
