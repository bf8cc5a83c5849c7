"""Ragged tree attention and the row moves of the KV cache against naive implementations."""

import pytest
import torch
from support.ragged_case import Case
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import choice, native
from arbordraft.kernels.kv_cache import append, append_reference, compact
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention, ragged_tree_attention_reference

ATTENTION = [ragged_tree_attention_reference, ragged_tree_attention]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
SHAPES = {
    "chain and trees": [(6, TreeTopology.chain(3)), (3, TreeTopology.k_ary(2, 2)), (0, TreeTopology.fork(3, 2))],
    "plain decoding": [(5, TreeTopology.chain(0)), (9, TreeTopology.chain(0))],
    "several words": [(7, TreeTopology.k_ary(3, 4)), (2, TreeTopology.chain(1))],
}


OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": torch.linspace(-2, 2, 4)},
    "all": {"window": 3, "softcap": 1.5, "sinks": torch.linspace(2, -2, 4)},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("samples", SHAPES.values(), ids=SHAPES)
def test_attention_equals_the_naive_one(samples, options, attention):
    case = Case(samples)
    assert_close(case.run(attention, **options), case.naive(**options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_causal_rows_after_a_past(options):
    case = Case([(4, TreeTopology.chain(5)), (0, TreeTopology.chain(6)), (1, TreeTopology.chain(0))], causal=True)
    assert_close(case.run(ragged_tree_attention, **options), case.naive(**options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("last", [1, 2])
def test_rows_of_the_last_levels_only(last, window):
    case = Case([(5, TreeTopology.k_ary(3, 4)), (2, TreeTopology.k_ary(2, 2))], last=last)
    assert_close(case.run(ragged_tree_attention, window=window), case.naive(window=window), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_groups_of_heads_in_every_precision(group, dtype):
    for options in ({}, {"sinks": torch.linspace(-1, 1, 2 * group, dtype=dtype), "softcap": 2.0}):
        case = Case(SHAPES["chain and trees"], group=group, dtype=dtype)
        out = case.run(ragged_tree_attention, **options)
        assert out.dtype == dtype
        assert_close(out.double(), case.naive(**options), rtol=0, atol=TOLERANCE[dtype])


def test_values_may_be_of_another_size_than_keys():
    case = Case(SHAPES["chain and trees"])
    full = case.naive()
    case.values = case.values[..., :5]
    assert_close(case.run(ragged_tree_attention), full[..., :5], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "fault",
    [{"past": [6, 4, 0]}, {"starts": [2, 13, 30]}, {"words": None}, {"positions": torch.zeros(18, dtype=torch.int64)}],
    ids=lambda fault: next(iter(fault)),
)
def test_a_wrong_batch_would_be_seen(fault):
    """Negative control: one row too many, another sample's slab, siblings that see each other, wrong positions."""
    case = Case(SHAPES["chain and trees"])
    window = 3 if "positions" in fault else None
    expected = case.naive(window=window)
    for name, value in fault.items():
        object.__setattr__(case.batch, name, value)
    wrong = case.run(ragged_tree_attention, window=window)
    assert not torch.allclose(wrong, expected, atol=1e-3)


@pytest.mark.parametrize("run", [append, append_reference])
def test_append_writes_its_rows_only(run):
    pools = [torch.full((6, 2, size), float("nan")) for size in (3, 5)]
    rows = [torch.randn(2, 2, size) for size in (3, 5)]
    run(*pools, *rows, torch.tensor([4, 1]))
    for pool, written in zip(pools, rows, strict=True):
        assert torch.equal(pool[[4, 1]], written)
        assert pool[[0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("path", ["reference", "auto"])
def test_compact_moves_rows_over_each_other(path, dtype):
    """Rows of several samples move to places that other rows have left; all other rows stay."""
    pools = [torch.arange(9, dtype=dtype)[:, None, None].repeat(1, *sizes) for sizes in ((2, 3), (1, 5))]
    with choice.use(path):
        compact(pools, [[(3, 2), (4, 3)], [], [(7, 6), (8, 7)]])
    for pool in pools:
        assert torch.equal(pool, pool[:, :1, :1].expand_as(pool))
        assert pool[:, 0, 0].tolist() == [0, 1, 3, 4, 4, 5, 7, 8, 8]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("pool", "moves", "message"),
    [
        (torch.zeros(4, 2), [1, 4], "row 4 lies outside"),
        (torch.zeros(4, 2), [-1, 0], "row -1 lies outside"),
        (torch.zeros(4, 2), [1], "a source and a destination"),
        (torch.zeros(2, 4).t(), [1, 0], "contiguous"),
    ],
)
def test_impossible_moves_are_refused(pool, moves, message):
    assert native.load()
    with pytest.raises(RuntimeError, match=message):
        torch.ops.arbordraft.move_rows([pool], moves)
