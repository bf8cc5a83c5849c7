"""The padded batch that EMS-SD is measured against; for benchmarks only.

Shapes: T packed rows, padding included, R rows of real tokens, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from arbordraft.decoding.assemble import AssembledParts
from arbordraft.decoding.decoder import SpeculativeDecoder
from arbordraft.decoding.state import DecodeState
from arbordraft.decoding.step import Stepper
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.cache import RaggedKVCache
from arbordraft.trees.draft_tree import DraftTree
from arbordraft.trees.topology import ancestor_words


class PaddedDecoder(SpeculativeDecoder):
    """A :class:`~arbordraft.SpeculativeDecoder` for chains that pads as a rectangular batch must.

    Drafter, kernels, verification and output are those of the unpadded decoder.

    Args:
        pad_input: whether all samples, finished ones too, have as many rows in the target's forward as the longest
            draft.
        pad_cache: whether keys of all samples lie in the same columns. Shorter prompts, and steps in which another
            sample accepts more, leave columns that belong to no token. Such columns are masked, but read.
        *parts: arguments of a :class:`~arbordraft.SpeculativeDecoder`, as are ``options``.

    Raises:
        ValueError: if the topology is not a chain, or if ``buckets`` are given, whose steps have a runner of their own.

    Source: the "vanilla" method of EMS-SD (Ni et al., NAACL 2025) and its ablations.
    """

    def __init__(self, *parts: Any, pad_input: bool = True, pad_cache: bool = True, **options: Any) -> None:
        super().__init__(*parts, **{"buckets": None, **options})
        if self.static is not None:
            raise ValueError("padded batches have no steps of fixed shapes: leave buckets out")
        if self.topology.max_depth + 1 != self.topology.num_nodes:
            raise ValueError("padded batches are made for chains of drafts")
        runner = PaddedRunner(self.parts, pad_input, pad_cache)
        self.stepper = Stepper(self.parts, self.mask, expected_batch=self.expected_batch, runner=runner)


class PaddedRunner:
    """Runs the target over a rectangular batch.

    Args:
        parts: parts of the decoder.
        pad_input: see :class:`PaddedDecoder`.
        pad_cache: see :class:`PaddedDecoder`.
    """

    def __init__(self, parts: AssembledParts, pad_input: bool, pad_cache: bool) -> None:
        self.target, self.drafter, self.pad_input, self.pad_cache = parts.target, parts.drafter, pad_input, pad_cache

    def open(self, max_tokens: int | None) -> RaggedKVCache:
        return _PaddedCache(self.pad_cache)

    def __call__(self, state: DecodeState, tree: DraftTree) -> tuple[Tensor, Tensor]:
        cache, lengths = state.cache, tree.lengths
        assert isinstance(cache, _PaddedCache)
        cache.align()
        longest = max(lengths)
        rows = [longest if self.pad_input else length for length in lengths]
        taking = [number for number, count in enumerate(rows) if count]
        batch = cache.lay_out_padded(
            [cache.handles[number] for number in taking],
            [lengths[sample] for sample in taking],
            [rows[sample] for sample in taking],
        )
        needed = sum(len(state[number].tokens) - 1 + nodes for number, nodes in enumerate(lengths) if nodes)
        state.stats.count_forward(batch, rows=sum(lengths), keys=needed)
        tokens, start = torch.zeros(sum(rows), dtype=torch.int64), 0
        real: list[int] = []
        for count, length in zip(rows, lengths, strict=True):
            real += range(start, start + length)
            start += count
        tokens[real] = tree.tokens()
        logits, hidden = self.target.run(tokens, batch, cache, hidden=self.drafter.hidden_layers)
        return logits[real], hidden[real]


class _PaddedCache(RaggedKVCache):
    """Keeps all columns after the prompts uncommitted; mask words mark the columns that belong to a token.

    Finished samples stay, because a rectangular batch goes on with them.
    """

    def __init__(self, pad: bool) -> None:
        super().__init__()
        self.pad = pad
        self._real: dict[int, list[bool]] = {}  # per sample: whether columns after the prompt belong to a token
        self._finished: set[int] = set()

    @property
    def handles(self) -> list[int]:
        """Handles of all samples, finished ones too, in order of arrival."""
        return list(self._slabs)

    def align(self) -> None:
        """Makes the prompts end in the same column, unless they do already."""
        if self._real:
            return
        longest = max(slab.length for slab in self._slabs.values())
        for handle, slab in self._slabs.items():
            missing = longest - slab.length if self.pad else 0
            self._reserve(slab, slab.length + missing)
            slab.tree_positions += [0] * missing
            self._real[handle] = [False] * missing

    def __contains__(self, handle: object) -> bool:
        return super().__contains__(handle) and handle not in self._finished

    def close(self, handle: int) -> None:
        self._finished.add(handle)

    def lay_out_padded(self, handles: Sequence[int], lengths: Sequence[int], rows: Sequence[int]) -> RaggedBatch:
        """Plans chains of ``lengths`` rows, filled up to ``rows``; padding rows see only themselves."""
        offsets = [
            [sum(self._real[handle]) + min(row, max(length - 1, 0)) for row in range(count)]
            for handle, length, count in zip(handles, lengths, rows, strict=True)
        ]
        width = max(len(self._real[handle]) + count for handle, count in zip(handles, rows, strict=True))
        visible = []
        for handle, length, count in zip(handles, lengths, rows, strict=True):
            known = torch.tensor(self._real[handle], dtype=torch.bool)
            own = torch.eye(count, dtype=torch.bool)
            own[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril()
            seen = torch.cat([known.expand(count, -1), own], dim=1)
            visible.append(torch.nn.functional.pad(seen, (0, width - seen.shape[1])))
        return self.lay_out(handles, offsets, ancestor_words(torch.cat(visible)))

    def commit(self, kept: Mapping[int, Sequence[int]]) -> None:
        if not self._real:  # prompts
            super().commit(kept)
            return
        gained = max(map(len, kept.values()), default=0)
        for handle, real in self._real.items():
            count = len(kept.get(handle, ()))
            if list(kept.get(handle, ())) != list(range(count)):
                raise ValueError("a padded cache keeps the beginning of a chain")
            columns = gained if self.pad else count
            real += [True] * count + [False] * (columns - count)
            slab = self._slabs[handle]
            del slab.tree_positions[len(real) :]
            slab.tree_positions += [0] * (len(real) - len(slab.tree_positions))
