"""KV cache in which each sample has its own length.

Shapes: B samples, T packed rows, P pool rows, H key heads, D head size.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from arbordraft.kernels.fused_layers import rotate_append
from arbordraft.kernels.kv_cache import append, compact
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.states import MOST_STATES, RecurrentStates, StateRows
from arbordraft.utils.allocator import untouched_zeros
from arbordraft.utils.errors import UserError

_MEMORY_SHARE = 0.5  # of a GPU's free memory, for pools allocated whole: prompts and graphs need some, too


class CacheOverflow(UserError):
    """The cache would have to grow beyond the limit it was given."""


@dataclass
class _Slab:
    start: int
    capacity: int
    length: int = 0
    branch: int | None = None  # tokens whose state is to be kept
    tree_positions: list[int] = field(default_factory=list)


class RaggedKVCache(nn.Module):
    """Keys and values of a batch, without padding: one slab of consecutive pool rows per sample.

    A forward writes its rows *after* the committed length of each sample. :meth:`commit` then keeps some of them (the
    accepted path), closes the gaps in place and advances the length. The next step overwrites rejected rows.

    Slabs grow by doubling, so no step copies the cache. With a limit, pools get their final place at the start. No
    stream then waits for a copy of them, and graphs of steps are recorded once. On a CPU, such pools take memory as
    they are filled. On a GPU, they are allocated whole if they take at most half of its free memory, else they grow.

    If the model has recurrent layers, the cache also holds their windows and states (:mod:`arbordraft.target.states`).
    A state is there after some numbers of tokens only, so less can be shared and :meth:`shorten` may drop more. A
    sample's states count as the tokens whose keys and values take as many bytes.

    Args:
        max_tokens: greatest number of pool rows, draft trees and states of samples included; unlimited by default.
        state_tokens: tokens as which the states of a sample count; see :attr:`RaggedModel.state_tokens`.

    Source: EMS-SD (Ni et al., NAACL 2025), extended from chains to trees.
    """

    def __init__(self, max_tokens: int | None = None, state_tokens: int = 0) -> None:
        super().__init__()
        self.max_tokens, self.state_tokens = max_tokens, state_tokens
        self.weights: object = None  # the prepared model that computed the keys and values
        self._whole: dict[str, Tensor] = {}  # pools as large as the limit allows, of which the first rows are used
        self._settled = False
        self._states: RecurrentStates | None = None  # if the model has recurrent layers
        self._reading: set[int] = set()  # samples whose uncommitted rows are a text that they read
        self._slabs: dict[int, _Slab] = {}
        self._free: list[tuple[int, int]] = []  # (start, rows), ascending, never adjacent
        self._rows = 0  # rows of every pool
        self._next = 0

    @property
    def reserved(self) -> int:
        """Number of rows that no sample can use."""
        return 0

    def beside(self, owner: object) -> "RaggedKVCache":
        """Returns a cache with the same bound for a drafter, the ``owner``, that caches rows of the same samples."""
        return RaggedKVCache(self.max_tokens, self.state_tokens)

    def open(self, tokens: int = 0) -> int:
        """Adds a sample with room for ``tokens`` rows and returns its handle.

        Raises:
            CacheOverflow: if ``max_tokens`` does not allow it.
        """
        handle, self._next = self._next, self._next + 1
        capacity = max(tokens, 1)
        self._slabs[handle] = _Slab(self._allocate(capacity, len(self._slabs) + 1), capacity)
        if self._states is not None:
            self._states.open(handle)
        return handle

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values; known from the first forward on."""
        return sum(pool[:1].nbytes for pool in self._pools())

    @property
    def state_bytes(self) -> int:
        """Most bytes of a sample's windows and states; known from the first forward on."""
        return 0 if self._states is None else MOST_STATES * self._states.bytes_each

    def reusable(self, handle: int, tokens: int) -> int:
        """Returns how many of a sample's first ``tokens`` tokens :meth:`share` can copy.

        With recurrent layers, these are as many as the longest text within ``tokens`` after which a state is there.
        """
        length = self._slabs[handle].length
        if self._states is None:
            return min(tokens, length)
        return self._states.reusable(handle, length, tokens)

    def keep(self, handle: int, tokens: int) -> None:
        """Keeps a sample's state after ``tokens`` tokens, which others can copy, until the sample is closed.

        The sample must read a text that ends one token later, in a forward of its own.
        """
        self._slabs[handle].branch = tokens
        if self._states is not None:
            self._states.keep(handle, tokens)

    def branch(self, handle: int) -> int | None:
        """Returns the number of tokens after which a sample's state is kept, as :meth:`keep` was told, if any."""
        return self._slabs[handle].branch

    def state_rows(self, batch: RaggedBatch, device: torch.device) -> StateRows:
        """Plans a forward's rows in recurrent layers.

        Args:
            batch: the last layout of these samples.
            device: device of the model.
        """
        if self._states is None:
            if any(slab.length for slab in self._slabs.values()):
                raise RuntimeError("rows were committed without the states of recurrent layers")
            self._states = RecurrentStates()
            for handle, slab in self._slabs.items():
                self._states.open(handle)
                if slab.branch is not None:
                    self._states.keep(handle, slab.branch)
        handles = self._handles(batch)
        return self._states.lay_out(handles, batch, [handle in self._reading for handle in handles], device)

    def share(self, source: int, handle: int, tokens: int) -> None:
        """Copies the first committed rows of one sample into another, which is empty and has room for them.

        Args:
            source: handle of the sample to copy from.
            handle: handle of the sample to copy to.
            tokens: number of rows; with recurrent layers, a result of :meth:`reusable`.

        Raises:
            ValueError: if the source has fewer rows or no such state, or the destination is not empty or too small.
        """
        ours, theirs = self._slabs[handle], self._slabs[source]
        if not 0 <= tokens <= min(theirs.length, ours.capacity) or ours.length or ours.tree_positions:
            raise ValueError(
                f"cannot copy {tokens} of {theirs.length} rows to a sample with {ours.length} and room for "
                f"{ours.capacity}"
            )
        if self.reusable(source, tokens) != tokens:
            raise ValueError(f"no state is there after {tokens} tokens, but after {self.reusable(source, tokens)}")
        for pool in self._pools():
            pool[ours.start : ours.start + tokens] = pool[theirs.start : theirs.start + tokens]
        if self._states is not None:
            self._states.share(source, handle, theirs.length, tokens)
        ours.length = tokens

    def shorten(self, handle: int, tokens: int) -> None:
        """Drops all committed tokens of a sample after the first ``tokens``, or those before these without a state."""
        slab = self._slabs[handle]
        if tokens < slab.length:
            slab.length = tokens if self._states is None else self._states.shorten(handle, slab.length, tokens)

    def __contains__(self, handle: object) -> bool:
        return handle in self._slabs

    def close(self, handle: int) -> None:
        """Removes a sample and frees its slab."""
        slab = self._slabs.pop(handle)
        self._release(slab.start, slab.capacity)
        self._reading.discard(handle)
        if self._states is not None:
            self._states.close(handle)

    def length(self, handle: int) -> int:
        """Returns the number of committed tokens of a sample."""
        return self._slabs[handle].length

    def capacity(self, handle: int) -> int:
        """Returns the number of rows that a sample can hold without growing."""
        return self._slabs[handle].capacity

    def lay_out(
        self,
        handles: Sequence[int],
        depths: Sequence[Sequence[int]],
        words: Tensor | None = None,
        *,
        reading: bool = False,
    ) -> RaggedBatch:
        """Reserves rows after the committed ones and describes the forward that will fill them.

        Rows that were laid out earlier and are still uncommitted stay: they are shallower levels of the same tree.

        Args:
            handles: handles of the samples in this forward.
            depths: for every sample, the distance of each new row's position from the committed length.
            words: ``[T, W]`` ancestor words over each sample's uncommitted rows; ``None`` for causal order.
            reading: whether the rows are a text that will be committed whole.

        Raises:
            CacheOverflow: if a slab cannot grow; nothing has changed then.
        """
        slabs = [self._slabs[handle] for handle in handles]
        (self._reading.update if reading else self._reading.difference_update)(handles)
        for slab, offsets in zip(slabs, depths, strict=True):
            self._reserve(slab, slab.length + len(slab.tree_positions) + len(offsets))
        positions: list[int] = []
        slots: list[int] = []
        for slab, offsets in zip(slabs, depths, strict=True):
            first = slab.start + slab.length + len(slab.tree_positions)
            slots += range(first, first + len(offsets))
            new = [slab.length + depth for depth in offsets]
            positions += new
            slab.tree_positions += new
        places = np.array((positions, slots), dtype=np.int64)  # torch.tensor takes twice as long
        return RaggedBatch(
            rows=[len(offsets) for offsets in depths],
            starts=[slab.start for slab in slabs],
            past=[slab.length for slab in slabs],
            tree_positions=[tuple(slab.tree_positions) for slab in slabs],
            positions=torch.from_numpy(places[0]),
            slots=torch.from_numpy(places[1]),
            words=words,
        )

    def reserve(self, handles: Sequence[int], rows: Sequence[int]) -> list[tuple[int, int]]:
        """Makes room after the committed rows for a caller that writes these rows itself; see :meth:`wrote`.

        Args:
            handles: handles of the samples.
            rows: number of rows for each sample.

        Returns:
            The first pool row and the number of committed tokens of each sample.

        Raises:
            CacheOverflow: if a slab cannot grow.
        """
        slabs = [self._slabs[handle] for handle in handles]
        for slab, more in zip(slabs, rows, strict=True):
            self._reserve(slab, slab.length + more)
        return [(slab.start, slab.length) for slab in slabs]

    def wrote(self, handle: int, depths: Sequence[int]) -> None:
        """Records rows written into reserved room as uncommitted, ``depths`` positions after the committed length."""
        slab = self._slabs[handle]
        slab.tree_positions += [slab.length + depth for depth in depths]

    def pools(self, layer: int, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the ``[P, *shape]`` pools of one layer, of the dtype and on the device of ``like``."""
        try:
            return self._buffers[f"keys_{layer}"], self._buffers[f"values_{layer}"]  # type: ignore[return-value]
        except KeyError:
            row = like.new_empty(0, *shape)
            return self._pool(f"keys_{layer}", row), self._pool(f"values_{layer}", row)

    @property
    def attending(self) -> list[int]:
        """Layers that have keys and values, ascending; known from the first forward on."""
        return sorted(int(name.removeprefix("keys_")) for name in self._buffers if name.startswith("keys_"))

    def rows(self, number: int | None = None) -> list[Tensor]:
        """Returns the pools of layers that have keys and values: keys, then values, of each layer in turn.

        Pools in their final place are returned whole, so that recorded graphs stay valid as they fill.

        Args:
            number: number of first layers of the model, all by default.
        """
        layers = [layer for layer in self.attending if number is None or layer < number]
        names = [f"{kind}_{layer}" for layer in layers for kind in ("keys", "values")]
        return [self._whole[name] if name in self._whole else self._buffers[name] for name in names]  # type: ignore[misc]

    def settle(self) -> None:
        """Allocates pools on a GPU whole if memory allows. Acts at the first call with pools, when all must exist."""
        if self._settled or not (pools := list(self._pools())):
            return
        self._settled = True
        if self.max_tokens is None or not pools[0].is_cuda:
            return
        if self.max_tokens * self.row_bytes > _MEMORY_SHARE * torch.cuda.mem_get_info(pools[0].device)[0]:
            return
        with suppress(torch.OutOfMemoryError):  # free memory may be fragmented: the other pools grow on demand
            for name, pool in list(self._buffers.items()):
                if pool is not None:
                    self._whole[name] = pool.new_zeros(self.max_tokens, *pool.shape[1:])
                    self._whole[name][: len(pool)] = pool
                    self._buffers[name] = self._whole[name][: len(pool)]

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Stores the ``[T, H, D]`` keys and values of one layer and returns the layer's ``[P, H, D]`` pools."""
        key_pool = self._pool(f"keys_{layer}", keys)
        value_pool = self._pool(f"values_{layer}", values)
        append(key_pool, value_pool, keys, values, slots)
        return key_pool, value_pool

    def write_rotated(
        self, layer: int, query: Tensor, keys: Tensor, values: Tensor, tables: tuple[Tensor, Tensor], slots: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotates ``[T, H, D]`` queries and keys by ``[T, D]`` cosines and sines, and stores keys and values.

        Returns:
            The rotated queries, and the layer's pools of keys and values.
        """
        key_pool = self._pool(f"keys_{layer}", keys)
        value_pool = self._pool(f"values_{layer}", values)
        query = rotate_append(query, keys, values, *tables, key_pool, value_pool, slots)
        return query, key_pool, value_pool

    def commit(self, kept: Mapping[int, Sequence[int]]) -> None:
        """Keeps some uncommitted rows of each sample and drops the others.

        Args:
            kept: for every sample, ascending indices into its uncommitted rows: the accepted path.

        Raises:
            ValueError: if an index is out of range or out of order, or the rows of recurrent layers are no path.
        """
        self.settle()
        moves: list[list[tuple[int, int]]] = []
        for handle, rows in kept.items():
            slab = self._slabs[handle]
            if any(row >= after for row, after in pairwise((-1, *rows, len(slab.tree_positions)))):
                raise ValueError(f"rows {list(rows)} must ascend within 0..{len(slab.tree_positions) - 1}")
            first = slab.start + slab.length
            moves.append([(first + row, first + place) for place, row in enumerate(rows) if row != place])
        if self._states is not None:
            self._states.commit(kept, {handle: self._slabs[handle].length for handle in kept})
        if any(moves) and (pools := list(self._pools())):
            compact(pools, moves)
        self._lengthen(kept)

    def advance(self, kept: Mapping[int, Sequence[int]]) -> None:
        """Commits rows as :meth:`commit` does, if the device has moved them and computed their states already."""
        if self._states is not None:
            for handle, rows in kept.items():
                self._states.step_ahead(handle, len(rows))
        self._lengthen(kept)

    def _lengthen(self, kept: Mapping[int, Sequence[int]]) -> None:
        for handle, rows in kept.items():
            slab = self._slabs[handle]
            slab.length += len(rows)
            slab.tree_positions.clear()
        self._reading.difference_update(kept)

    def portions(
        self, tokens: Mapping[int, Sequence[int]], chunk: int
    ) -> Iterator[tuple[dict[int, Sequence[int]], Tensor, RaggedBatch]]:
        """Plans forwards that append tokens to several samples; each is committed before the next one is planned.

        Args:
            tokens: tokens to append to each sample; may be empty.
            chunk: bound on the rows of one forward, and so on its memory.

        Yields:
            The tokens of this forward by sample, all of them packed as ``[T]``, and their batch.
        """
        left = {handle: row for handle, row in tokens.items() if row}
        while left:
            room, part = chunk, {}
            for handle in list(left):
                if room == 0:
                    break
                part[handle] = left[handle][:room]
                room -= len(part[handle])
                left[handle] = left[handle][len(part[handle]) :]
                if not left[handle]:
                    del left[handle]
            batch = self.lay_out(list(part), [range(len(row)) for row in part.values()], reading=True)
            yield part, torch.tensor([token for row in part.values() for token in row]), batch
            self.commit({handle: range(len(row)) for handle, row in part.items()})

    def drop(self, handles: Sequence[int]) -> None:
        """Forgets all uncommitted rows of the samples."""
        self.commit(dict.fromkeys(handles, ()))

    def extra_repr(self) -> str:
        return f"samples={len(self._slabs)}, rows={self._rows}, max_tokens={self.max_tokens}"

    def _handles(self, batch: RaggedBatch) -> list[int]:
        """Returns the samples of a batch."""
        starts = {slab.start: handle for handle, slab in self._slabs.items()}
        return [starts[start] for start in batch.starts]

    def _pools(self) -> Iterator[Tensor]:
        return (pool for pool in self._buffers.values() if pool is not None)

    def _pool(self, name: str, like: Tensor) -> Tensor:
        if name not in self._buffers:
            if like.is_cpu and self.max_tokens is not None:
                whole = untouched_zeros(self.max_tokens, *like.shape[1:], dtype=like.dtype)
                if whole is not None:
                    self._whole[name] = whole
            self.register_buffer(name, self._resized(name, like[:0], self._rows), persistent=False)
        return self._buffers[name]  # type: ignore[return-value]

    def _resized(self, name: str, pool: Tensor, rows: int) -> Tensor:
        if (whole := self._whole.get(name)) is not None:
            return whole[:rows]
        return torch.cat([pool, pool.new_zeros(rows - len(pool), *pool.shape[1:])])

    def _reserve(self, slab: _Slab, tokens: int) -> None:
        if tokens <= slab.capacity:
            return
        try:
            capacity = 2 * tokens
            start = self._allocate(capacity, len(self._slabs))
        except CacheOverflow:
            capacity = tokens  # near the limit, doubling may fail although the exact need fits
            start = self._allocate(capacity, len(self._slabs))
        used = slab.length + len(slab.tree_positions)
        for pool in self._pools():
            pool[start : start + used] = pool[slab.start : slab.start + used]
        self._release(slab.start, slab.capacity)
        slab.start, slab.capacity = start, capacity

    def _allocate(self, rows: int, samples: int) -> int:
        """Returns the first free rows that fit; if none do, doubles the pools as far as the limit allows.

        Args:
            rows: number of rows.
            samples: number of samples, whose states count, too.
        """
        used = self._rows - sum(free for _, free in self._free) + samples * self.state_tokens
        if self.max_tokens is not None and used + rows > self.max_tokens:
            raise self._overflow(rows)
        for index, (start, free) in enumerate(self._free):
            if free >= rows:
                self._free[index : index + 1] = [(start + rows, free - rows)] if free > rows else []
                return start
        tail = self._free[-1] if self._free and sum(self._free[-1]) == self._rows else (self._rows, 0)
        total = tail[0] + rows
        if self.max_tokens is not None and total > self.max_tokens:
            raise self._overflow(rows)
        # Before the first write, growing copies nothing, so there is no need to grow ahead.
        ahead = 2 * self._rows if self._buffers else total
        grown = max(total, min(ahead, self.max_tokens or ahead))
        for name, pool in self._buffers.items():
            if pool is not None:
                self._buffers[name] = self._resized(name, pool, grown)
        if tail[1]:
            self._free.pop()
        self._rows = grown
        if grown > total:
            self._free.append((total, grown - total))
        return tail[0]

    def _overflow(self, rows: int) -> CacheOverflow:
        states = f"; each sample's states count as {self.state_tokens}" if self.state_tokens else ""
        return CacheOverflow(
            f"the KV cache may hold {self.max_tokens} tokens and cannot make room for {rows} more{states}; raise "
            "that limit, shorten the prompts, lower max_new_tokens or decode fewer samples at once"
        )

    def _release(self, start: int, rows: int) -> None:
        merged: list[tuple[int, int]] = []
        for region in sorted([*self._free, (start, rows)]):
            if merged and sum(merged[-1]) == region[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + region[1])
            else:
                merged.append(region)
        self._free = merged
