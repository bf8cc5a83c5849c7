"""A KV cache for steps of fixed shapes."""

from arbordraft.target.cache import RaggedKVCache

_SHORT = 512  # texts of up to this many rows share graphs


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

    def beside(self, owner: object) -> RaggedKVCache:
        """Returns the owner's cache, the same for every batch, since graphs are recorded for its pools."""
        if owner not in self._beside:
            self._beside[owner] = StaticCache(self.max_tokens, self.capacity(self.dummy) - 1, self.state_tokens)
        return self._beside[owner]


__all__ = ["StaticCache"]
