"""A KV cache for steps of fixed shapes."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from arbordraft.decoding.static.states import StateLayout, StatePlaces
from arbordraft.kernels.ragged_tree_attention import RaggedBatch
from arbordraft.target.attention import UnsupportedModel
from arbordraft.target.cache import RaggedKVCache

_SHORT = 512  # texts of up to this many rows share graphs


class Memory(NamedTuple):
    """The tensors of caches that a step reads and writes.

    Args:
        rows: keys, then values, of every layer that has some: ``[P, Hkv, D]`` each.
        states: windows, then states, of recurrent layers: ``[L, slots, ...]`` each.
    """

    rows: Sequence[Tensor]
    states: Sequence[Tensor] = ()

    @property
    def addresses(self) -> tuple[int, ...]:
        """Places of all tensors."""
        return tuple(tensor.data_ptr() for tensor in (*self.rows, *self.states))


class MemoryLayout(NamedTuple):
    """The layers to which the tensors of a model's :class:`Memory` belong.

    Args:
        layers: layers that have keys and values, in order.
        states: recurrent layers, if there are any.
    """

    layers: tuple[int, ...]
    states: StateLayout | None = None


class StaticCache(RaggedKVCache):
    """A KV cache that includes the dummy sample and hands its pools to a step.

    Args:
        max_tokens: as for :class:`~arbordraft.target.cache.RaggedKVCache`; the dummy's rows count.
        rows: greatest number of padding rows at a time.
        state_tokens: as for :class:`~arbordraft.target.cache.RaggedKVCache`; the dummy's states count.
    """

    def __init__(self, max_tokens: int | None, rows: int, state_tokens: int = 0) -> None:
        super().__init__(max_tokens, state_tokens)
        self.dummy = self.open(1 + rows)
        self._beside: dict[object, StaticCache] = {}

    @property
    def reserved(self) -> int:
        return self.capacity(self.dummy) + self.state_tokens

    @property
    def dummy_start(self) -> int:
        """The dummy's first pool row."""
        return self._slabs[self.dummy].start

    @property
    def longest(self) -> int:
        """Rows of the largest slab, at least 512, rounded up to a power of eight; each value has its own graphs."""
        rows = max(_SHORT, *(slab.capacity for slab in self._slabs.values()))
        return 8 ** -(-(rows - 1).bit_length() // 3)

    def layout(self) -> MemoryLayout:
        """Describes :meth:`memory`; the same for every cache of a model that has run.

        Raises:
            UnsupportedModel: if convolutions have several widths.
        """
        states = self._states
        if states is None:
            return MemoryLayout(tuple(self.attending))
        windows, scanned = ([*pools] for pools in (states.windows_of_layers, states.states_of_layers))
        if len(widths := {pools.shape[2] + 1 for _, pools in windows}) != 1:
            raise UnsupportedModel(f"steps of fixed shapes need convolutions of one width, not of {sorted(widths)}")
        keys_of_windows, keys_of_states = (tuple(keys for keys, _ in kind) for kind in (windows, scanned))
        return MemoryLayout(tuple(self.attending), StateLayout(keys_of_windows, keys_of_states, widths.pop()))

    def memory(self) -> Memory:
        """Returns the pools that a step of the cache's model reads and writes."""
        states = self._states
        pools = () if states is None else (*states.windows_of_layers, *states.states_of_layers)
        return Memory(self.rows(), [pool for _, pool in pools])

    def settle_states(self, samples: int) -> None:
        """Gives the states of up to this many samples, besides the dummy, places that they keep."""
        if self._states is not None:
            self._states.settle(samples + 1)

    def state_places(self, batch: RaggedBatch) -> StatePlaces | None:
        """Returns the slots of states for a step over the last layout of its samples, if there are any."""
        states = self._states
        if states is None:
            return None
        places = [states.places(handle) for handle in self._handles(batch)]
        committed, _ = states.places(self.dummy)
        return StatePlaces([here for here, _ in places], [ahead for _, ahead in places], committed)

    def computed(self, batch: RaggedBatch, accepted: Sequence[int]) -> None:
        """Notes that the device has computed states after this many rows of each sample; :meth:`advance` commits."""
        if self._states is not None:
            for handle, rows in zip(self._handles(batch), accepted, strict=True):
                self._states.computed(handle, rows)

    def beside(self, owner: object) -> RaggedKVCache:
        """Returns the owner's cache, the same for every batch, since graphs are recorded for its pools."""
        if owner not in self._beside:
            self._beside[owner] = StaticCache(self.max_tokens, self.capacity(self.dummy) - 1, self.state_tokens)
        return self._beside[owner]


__all__ = ["Memory", "MemoryLayout", "StaticCache"]
