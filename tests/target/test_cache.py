"""The ragged cache against plain lists, with poisoned pools: samples read only their own rows."""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule
from support.memory import resident
from support.pretended_gpu import OnDevice, pretended_gpu

from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention
from arbordraft.target.cache import CacheOverflow, RaggedKVCache

LAYERS, HEADS, SIZE = 2, 2, 3


def rows_of(numbers):
    """Returns ``[T, H, D]`` rows, each filled with its number."""
    return torch.tensor(numbers, dtype=torch.float32)[:, None, None].expand(-1, HEADS, SIZE).contiguous()


def poison(cache):
    """Fills every pool row that belongs to no sample with NaN."""
    for pool in cache.buffers():
        owned = torch.zeros(len(pool), dtype=torch.bool)
        for slab in cache._slabs.values():
            owned[slab.start : slab.start + slab.length + len(slab.tree_positions)] = True
        pool[~owned] = float("nan")


def fill(cache, batch, numbers):
    for layer in range(LAYERS):
        cache.write(layer, rows_of(numbers), -rows_of(numbers), batch.slots)


def write_rows(cache, first, numbers):
    """Writes rows into reserved places, from row ``first`` of the pools."""
    for layer in range(LAYERS):
        pools = cache.pools(layer, (HEADS, SIZE), torch.zeros(0))
        for pool, rows in zip(pools, (rows_of(numbers), -rows_of(numbers)), strict=True):
            pool[first : first + len(numbers)] = rows


def contents(cache, sample):
    """Returns the numbers of a sample's committed and uncommitted rows, from the keys of the last layer."""
    slab = cache._slabs[sample]
    if f"keys_{LAYERS - 1}" not in dict(cache.named_buffers()):
        return []
    pool = cache.get_buffer(f"keys_{LAYERS - 1}")
    return pool[slab.start : slab.start + slab.length + len(slab.tree_positions), 0, 0].tolist()


def attended_mean(cache, sample, beyond=0):
    """Returns a new row's attention over poisoned pools: the mean of its sample's values, if it reads no others."""
    batch = cache.lay_out([sample], [[0]])
    fill(cache, batch, [0.5])
    poison(cache)
    batch = replace(batch, past=[batch.past[0] + beyond])
    keys, values = cache.get_buffer("keys_0"), cache.get_buffer("values_0")
    return ragged_tree_attention(torch.zeros(1, HEADS, SIZE), keys, values, batch, scale=1.0).mean().item()


@dataclass
class Twin:
    """Expected rows of a sample."""

    committed: list[float] = field(default_factory=list)
    tree: list[float] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """Random calls in random order, after each of which the cache and the lists hold the same rows."""

    samples = Bundle("samples")

    @initialize(limit=st.sampled_from([None, 40, 90]))
    def create(self, limit):
        self.cache = RaggedKVCache(limit)
        self.twins = {}
        self.number = 0.0

    def fresh(self, count):
        numbers = [self.number + row for row in range(1, count + 1)]
        self.number += count
        return numbers

    @rule(target=samples, tokens=st.integers(0, 12))
    def open(self, tokens):
        try:
            sample = self.cache.open(tokens)
        except CacheOverflow:
            assert self.cache.max_tokens is not None
            return None
        self.twins[sample] = Twin()
        return sample

    @rule(first=samples, second=samples, sizes=st.tuples(st.integers(1, 9), st.integers(0, 9)))
    def write(self, first, second, sizes):
        """Lays out and writes rows; calls without a commit between them add the levels of one tree."""
        wanted = {sample: size for sample, size in zip((first, second), sizes, strict=True) if sample in self.twins}
        try:
            batch = self.cache.lay_out(list(wanted), [range(size) for size in wanted.values()])
        except CacheOverflow:
            assert self.cache.max_tokens is not None
            return
        assert len(set(batch.slots.tolist())) == sum(wanted.values())
        numbers = self.fresh(sum(wanted.values()))
        fill(self.cache, batch, numbers)
        for sample, size in wanted.items():
            self.twins[sample].tree += numbers[:size]
            numbers = numbers[size:]

    @rule(first=samples, second=samples, sizes=st.tuples(st.integers(1, 9), st.integers(0, 9)))
    def write_oneself(self, first, second, sizes):
        """Writes into reserved places without a layout, and leaves some of them unused."""
        wanted = {sample: size for sample, size in zip((first, second), sizes, strict=True) if sample in self.twins}
        self.cache.drop(list(wanted))
        for sample in wanted:
            self.twins[sample].tree = []
        try:
            places = self.cache.reserve(list(wanted), [size + 3 for size in wanted.values()])
        except CacheOverflow:
            assert self.cache.max_tokens is not None
            return
        for (sample, size), (start, length) in zip(wanted.items(), places, strict=True):
            assert length == len(self.twins[sample].committed)
            assert self.cache.capacity(sample) >= length + size + 3
            self.twins[sample].tree = self.fresh(size)
            write_rows(self.cache, start + length, self.twins[sample].tree)
            self.cache.wrote(sample, range(size))

    @rule(samples=st.sets(samples, max_size=3), data=st.data())
    def commit(self, samples, data):
        kept = {}
        for sample in samples & self.twins.keys():
            twin = self.twins[sample]
            kept[sample] = sorted(data.draw(st.sets(st.sampled_from(range(len(twin.tree))))) if twin.tree else [])
            twin.committed += [twin.tree[row] for row in kept[sample]]
            twin.tree = []
        self.cache.commit(kept)

    @rule(sample=samples)
    def drop(self, sample):
        if sample in self.twins:
            self.cache.drop([sample])
            self.twins[sample].tree = []

    @rule(sample=consumes(samples))
    def close(self, sample):
        if sample in self.twins:
            self.cache.close(sample)
            del self.twins[sample]

    @precondition(lambda self: any(twin.committed for twin in self.twins.values()))
    @rule(data=st.data())
    def attend(self, data):
        sample = data.draw(st.sampled_from([sample for sample, twin in self.twins.items() if twin.committed]))
        own = [*self.twins[sample].committed, *self.twins[sample].tree]
        try:
            mean = attended_mean(self.cache, sample)
        except CacheOverflow:
            return
        self.twins[sample].tree.append(0.5)
        assert mean == pytest.approx(-(sum(own) + 0.5) / (len(own) + 1), rel=1e-5)

    @invariant()
    def holds_what_it_should(self):
        for sample, twin in getattr(self, "twins", {}).items():
            assert self.cache.length(sample) == len(twin.committed)
            assert contents(self.cache, sample) == twin.committed + twin.tree

    @invariant()
    def slabs_and_free_rows_cover_the_pool_once(self):
        cache = getattr(self, "cache", RaggedKVCache())
        regions = sorted([*cache._free, *((slab.start, slab.capacity) for slab in cache._slabs.values())])
        assert [start for start, _ in regions] == [0, *(sum(region) for region in regions)][: len(regions)]
        assert sum(rows for _, rows in regions) == cache._rows <= (cache.max_tokens or cache._rows)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=30)


def opened(lengths, max_tokens=None):
    """Returns a cache whose sample ``i`` holds the numbers ``100 i``, ``100 i + 1``, ..., and its samples."""
    cache = RaggedKVCache(max_tokens)
    samples = [cache.open(length) for length in lengths]
    numbers = [100.0 * index + row for index, length in enumerate(lengths) for row in range(length)]
    fill(cache, cache.lay_out(samples, [range(length) for length in lengths]), numbers)
    cache.commit({sample: range(length) for sample, length in zip(samples, lengths, strict=True)})
    return cache, samples


def test_the_machine_would_notice_a_wrong_compaction(monkeypatch):
    """Negative control: moving rows of an overlapping path in the wrong order overwrites some of them."""

    def careless(pools, moves):
        for pool in pools:
            for row, target in reversed(moves[0]):
                pool[target] = pool[row]

    cache, (sample,) = opened([2])
    fill(cache, cache.lay_out([sample], [range(6)]), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    monkeypatch.setattr("arbordraft.target.cache.compact", careless)
    cache.commit({sample: [0, 2, 4, 5]})
    assert contents(cache, sample) != [0.0, 1.0, 1.0, 3.0, 5.0, 6.0]


def test_poison_would_be_noticed():
    """Negative control: attention that reads one row too many meets NaN."""
    cache, samples = opened([3, 4])
    assert attended_mean(cache, samples[0]) == pytest.approx(-(0 + 1 + 2 + 0.5) / 4)
    cache.drop(samples)
    assert math.isnan(attended_mean(cache, samples[0], beyond=1))


def test_a_step_never_copies_the_cache():
    """Within the planned room, pools keep their address; beyond it they grow by doubling."""
    cache, samples = opened([1, 1])
    moves, rows = 0, cache.get_buffer("keys_0").data_ptr()
    for _ in range(200):
        fill(cache, cache.lay_out(samples, [range(3)] * 2), [0.0] * 6)
        cache.commit(dict.fromkeys(samples, (0, 2)))
        here = cache.get_buffer("keys_0").data_ptr()
        moves, rows = moves + (here != rows), here
    assert moves <= 10
    fixed = RaggedKVCache()
    samples = [fixed.open(600), fixed.open(600)]
    pointers = set()
    for _ in range(200):
        fill(fixed, fixed.lay_out(samples, [range(3)] * 2), [0.0] * 6)
        fixed.commit(dict.fromkeys(samples, (0, 2)))
        pointers.add(tuple(pool.data_ptr() for pool in fixed.buffers()))
    assert len(pointers) == 1


def test_pools_with_a_limit_grow_in_place(monkeypatch):
    """They take memory only as they fill. The control has to copy when it grows."""

    def places():
        cache, samples = opened([1, 1], max_tokens=1 << 22)
        found = set()
        for step in range(100):
            fill(cache, cache.lay_out(samples, [range(3)] * 2), [step, 0.0, step + 0.5] * 2)
            cache.commit(dict.fromkeys(samples, (0, 2)))
            found.add(cache.get_buffer("keys_0").data_ptr())
        expected = [number for step in range(100) for number in (step, step + 0.5)]
        assert [contents(cache, sample)[1:] for sample in samples] == [expected] * 2
        return found

    before = resident()
    assert len(places()) == 1
    assert resident() - before < 50e6  # the limit is 4 times 100 MB
    monkeypatch.setattr("arbordraft.target.cache.untouched_zeros", lambda *_, **__: None)
    assert len(places()) > 3


@pytest.mark.parametrize(("limit", "settles"), [(1000, True), (2**15, True), (2**15 + 1, False), (None, False)])
def test_pools_on_a_gpu_keep_their_address_if_memory_allows(limit, settles):
    """All pools together may take half of the free memory; otherwise they grow and keep their rows."""
    with pretended_gpu():
        cache = RaggedKVCache(limit)
        samples = [cache.open(1), cache.open(1)]
        found, sizes = set(), set()
        for step in range(100):
            batch = cache.lay_out(samples, [range(3)] * 2)
            rows = torch.tensor([step, 0.0, step + 0.5] * 2)[:, None, None].expand(6, 1, 4).contiguous().to("cuda:0")
            for layer in range(2):
                cache.write(layer, rows, rows, batch.slots.to("cuda:0"))
            cache.commit(dict.fromkeys(samples, (0, 2)))
            found.add(tuple(pool.data_ptr() for pool in cache.buffers()))
            sizes.add(len(cache.get_buffer("keys_0")))
        kept = [slab.start + row for slab in map(cache._slabs.get, samples) for row in range(200)]
        for pool in cache.buffers():
            expected = [number for step in range(100) for number in (step, step + 0.5)] * 2
            assert pool[kept][:, 0, 0].tolist() == expected
    assert len(sizes) > 3
    assert (len(found) == 1) == settles


def test_fragmented_memory_causes_no_failure(monkeypatch):
    with pretended_gpu():
        cache = RaggedKVCache(1000)
        sample = cache.open(1)
        batch, rows = cache.lay_out([sample], [range(3)]), torch.ones(3, 1, 4, device="cuda:0")
        cache.write(0, rows, rows, batch.slots.to("cuda:0"))

        def refused(*_, **__):
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(OnDevice, "new_zeros", refused)
            cache.commit({sample: (0, 2)})
        assert cache.length(sample) == 2
        cache.lay_out([sample], [range(300)])
        assert len(cache.get_buffer("keys_0")) >= 302


def test_a_freed_slab_is_used_again():
    cache, (first, second, third) = opened([10, 10, 10])
    cache.close(second)
    assert cache._slabs[cache.open(10)].start == 10
    cache.close(third)
    cache.close(first)
    rows = cache._rows
    assert cache._slabs[cache.open(rows - 10 - 10)].start in (0, 20)
    assert cache._rows == rows


def test_overflow_names_the_limit_and_the_fix():
    cache, (first, second) = opened([10, 10], max_tokens=24)
    with pytest.raises(CacheOverflow, match=r"may hold 24 tokens and cannot make room for 15 more; raise .* fewer"):
        cache.lay_out([first], [range(5)])
    with pytest.raises(CacheOverflow, match="room for 5 more"):
        cache.open(5)
    assert (contents(cache, first), contents(cache, second)) == ([*range(10)], [*range(100, 110)])
    cache.close(second)
    fill(cache, cache.lay_out([first], [range(3)]), [7.0, 8.0, 9.0])  # the closed sample makes room
    assert contents(cache, first) == [*range(10), 7, 8, 9]


def test_reserved_rows_belong_to_no_sample_until_written():
    cache, samples = opened([3, 2])
    places = cache.reserve(samples, [4, 6])
    assert [length for _, length in places] == [3, 2]
    for sample, (start, length) in zip(samples, places, strict=True):
        write_rows(cache, start + length, [7.0, 8.0, 9.0])
        assert contents(cache, sample) == [*range(100 * sample, 100 * sample + length)]
        cache.wrote(sample, [0, 1, 1])
        assert contents(cache, sample)[length:] == [7.0, 8.0, 9.0]
    batch = cache.lay_out(samples, [[2], []])
    assert batch.tree_positions == [(3, 4, 4, 5), (2, 3, 3)]
    cache.commit({samples[0]: [0, 2], samples[1]: []})
    assert [contents(cache, sample) for sample in samples] == [[0, 1, 2, 7, 9], [100, 101]]
    assert cache.reserve(samples, [0, 0]) == [(places[0][0], 5), (places[1][0], 2)]


@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [3], [-1]])
def test_only_ascending_rows_of_the_tree_can_be_kept(rows):
    cache, (sample,) = opened([2])
    fill(cache, cache.lay_out([sample], [range(3)]), [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"must ascend within 0\.\.2"):
        cache.commit({sample: rows})
    assert contents(cache, sample) == [0.0, 1.0, 1.0, 2.0, 3.0]
