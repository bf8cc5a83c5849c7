"""Ragged tree attention and the row moves of the KV cache against naive implementations."""

import pytest
import torch
from support.ragged_case import Case
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import choice, native
from arbordraft.kernels.kv_cache import append, append_reference, compact
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention

CHAIN, TREE = TreeTopology.chain, TreeTopology.k_ary
RAGGED = [(6, CHAIN(3)), (3, TREE(2, 2)), (0, TreeTopology.fork(3, 2))]
CASES = {
    "chain and trees": Case(RAGGED),
    "plain decoding": Case([(5, CHAIN(0)), (9, CHAIN(0))]),
    "several words": Case([(7, TREE(3, 4)), (2, CHAIN(1))]),
    "prompts": Case([(4, CHAIN(5)), (0, CHAIN(6)), (1, CHAIN(0))], causal=True),
    "last level": Case([(5, TREE(3, 4)), (2, TREE(2, 2))], last=1),
    "last two levels": Case([(5, TREE(3, 4)), (2, TREE(2, 2))], last=2),
    "small values": Case(RAGGED, value_size=5),
}
OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "window of one": {"window": 1},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": torch.linspace(-2, 2, 4)},
    "all": {"window": 3, "softcap": 1.5, "sinks": torch.linspace(2, -2, 4)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_the_naive_one(case, options):
    """Kernels do not take float64: this is the reference. ``test_native_kernels.py`` has the other types."""
    assert_close(case.run(ragged_tree_attention, **options), case.naive(**options), rtol=0, atol=1e-12)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_groups_of_heads(group):
    case = Case(RAGGED, group=group)
    for options in ({}, {"sinks": torch.linspace(-1, 1, 2 * group, dtype=torch.float64), "softcap": 2.0}):
        assert_close(case.run(ragged_tree_attention, **options), case.naive(**options), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "fault",
    [{"past": [6, 4, 0]}, {"starts": [2, 13, 30]}, {"words": None}, {"positions": torch.zeros(18, dtype=torch.int64)}],
    ids=lambda fault: next(iter(fault)),
)
def test_a_wrong_batch_would_be_seen(fault):
    """Negative control: one row too many, another sample's slab, siblings that see each other, wrong positions."""
    case = Case(RAGGED)
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
