"""Random packed rows for ragged tree attention, with the simplest possible reference."""

import torch

from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.trees.masks import stack_words
from arbordraft.trees.topology import ancestor_words


def poisoned_pool(lengths, heads, size, generator):
    """Returns a float64 pool with one random slab per length, and their starts; all other rows are NaN."""
    guard = 3
    pool = torch.full((sum(lengths) + guard * (len(lengths) + 1), heads, size), float("nan"), dtype=torch.float64)
    starts = [guard * (index + 1) + sum(lengths[:index]) for index in range(len(lengths))]
    for start, length in zip(starts, lengths, strict=True):
        pool[start : start + length] = torch.randn(length, heads, size, generator=generator, dtype=torch.float64)
    return pool, starts


class Case:
    """Random rows of some samples, each with its slab between guard bands of NaN.

    Args:
        samples: committed tokens and topology of each sample.
        group: query heads per key head.
        last: number of deepest levels whose rows are new; the levels above are in the pool already.
        causal: prompts rather than trees: every row sees all rows before it.
        value_size: channels of the values, by default those of the keys.
    """

    def __init__(
        self, samples, group=2, last=99, causal=False, dtype=torch.float64, key_heads=2, size=8, value_size=None, seed=0
    ):
        generator = torch.Generator().manual_seed(seed)
        lengths = [past + tree.num_nodes for past, tree in samples]
        self.keys, starts = poisoned_pool(lengths, key_heads, size, generator)
        self.values, _ = poisoned_pool(lengths, key_heads, value_size or size, generator)
        new = [range(tree.levels[max(0, len(tree.levels) - last)].start, tree.num_nodes) for _, tree in samples]
        total = sum(map(len, new))
        self.query = torch.randn(total, key_heads * group, size, generator=generator, dtype=torch.float64)
        self.keys, self.values, self.query = (x.to(dtype) for x in (self.keys, self.values, self.query))
        offsets = [list(range(tree.num_nodes)) if causal else list(tree.depth_list) for _, tree in samples]
        self.batch = RaggedBatch(
            rows=[len(nodes) for nodes in new],
            starts=starts,
            past=[past for past, _ in samples],
            tree_positions=[[past + o for o in offset] for (past, _), offset in zip(samples, offsets, strict=True)],
            positions=torch.tensor(
                [
                    past + offset[n]
                    for (past, _), offset, nodes in zip(samples, offsets, new, strict=True)
                    for n in nodes
                ]
            ),
            slots=torch.tensor(
                [start + past + n for start, (past, _), nodes in zip(starts, samples, new, strict=True) for n in nodes]
            ),
            words=None
            if causal
            else stack_words(
                [ancestor_words(tree.visible[list(nodes)]) for (_, tree), nodes in zip(samples, new, strict=True)]
            ),
        )
        self.samples, self.new, self.causal = samples, new, causal

    def run(self, attention, **options):
        return attention(self.query, self.keys, self.values, self.batch, scale=0.3, **options)

    def naive(self, window=None, softcap=None, sinks=None):
        """Computes one row and one head at a time in float64; the tree itself tells which keys a row sees."""
        query, keys, values = (x.double() for x in (self.query, self.keys, self.values))
        row, group = 0, query.shape[1] // keys.shape[1]
        out = query.new_zeros(*query.shape[:2], values.shape[2])
        for (past, tree), start, nodes in zip(self.samples, self.batch.starts, self.new, strict=True):
            for node in nodes:
                above = range(node + 1) if self.causal else tree.path(node)
                position = {past + above_node: past + order for order, above_node in enumerate(above)}
                seen = {start + slot: slot for slot in range(past)} | {start + s: p for s, p in position.items()}
                here = past + len(above) - 1
                slots = [slot for slot, p in seen.items() if window is None or here - p < window]
                for head in range(query.shape[1]):
                    scores = keys[slots, head // group] @ query[row, head] * 0.3
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    mass = scores.exp().sum() + (0 if sinks is None else sinks[head].double().exp())
                    out[row, head] = scores.exp() / mass @ values[slots, head // group]
                row += 1
        return out

    def subset(self, choice):
        """Returns a case with some rows, and their indices; ``choice`` lists samples and their rows in any order."""
        firsts = [sum(self.batch.rows[:sample]) for sample in range(len(self.samples))]
        rows = [firsts[sample] + row for sample, picked in choice for row in picked]
        other = object.__new__(Case)
        other.keys, other.values, other.query = self.keys, self.values, self.query[rows]
        other.batch = RaggedBatch(
            rows=[len(picked) for _, picked in choice],
            starts=[self.batch.starts[sample] for sample, _ in choice],
            past=[self.batch.past[sample] for sample, _ in choice],
            tree_positions=[self.batch.tree_positions[sample] for sample, _ in choice],
            positions=self.batch.positions[rows],
            slots=self.batch.slots[rows],
            words=self.batch.words[rows],
        )
        return other, rows

    def path(self, sample, node, chunk=None):
        """Yields cases with the rows on the path to a node, committed one by one or ``chunk`` at a time as in decoding.

        Each case has a pool of its own, and comes with the indices of its rows.
        """
        past, tree = self.samples[sample]
        nodes = tree.path(node)
        start, first = self.batch.starts[sample], sum(self.batch.rows[:sample])
        slots = [*range(start, start + past), *(start + past + n for n in nodes)]
        chunk = chunk or 1
        for begin in range(0, len(nodes), chunk):
            end = min(len(nodes), begin + chunk)
            other = object.__new__(Case)
            other.keys, other.values = (
                torch.cat([pool[:1].fill_(float("nan")), pool[slots], pool[:1]]) for pool in (self.keys, self.values)
            )
            other.query = self.query[[first + n for n in nodes[begin:end]]]
            positions = range(past + begin, past + end)
            other.batch = RaggedBatch(
                rows=[end - begin],
                starts=[1],
                past=[past + begin],
                tree_positions=[positions],
                positions=torch.tensor(positions),
                slots=torch.tensor(positions) + 1,
            )
            yield other, [first + n for n in nodes[begin:end]]
