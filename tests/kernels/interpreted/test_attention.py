"""Ragged tree attention in Triton's interpreter against the plainest thing that could be right."""

import pytest
import torch
from support.ragged_case import Case
from torch import library
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, attend, ragged_tree_attention
from arbordraft.kernels.ragged_tree_attention.tiling import choose

CHAIN, TREE, WIDE = TreeTopology.chain, TreeTopology.k_ary(2, 2), TreeTopology.from_k_config((3, 1))
RAGGED = [(37, TREE), (0, CHAIN(0)), (101, CHAIN(8)), (0, WIDE)]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
OPTIONS = {
    "plain": {},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "window over tiles": {"window": 40},
    "softcap": {"softcap": 0.8},
    "sinks": {"sinks": True},
    "all": {"window": 33, "softcap": 1.5, "sinks": True},
}


def check(case, dtype=torch.float32, **options):
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, case.query.shape[1])
    before = choice.ran["ragged_tree_attention/triton"]
    with choice.use("triton"):
        found = case.run(ragged_tree_attention, **options)
    assert choice.ran["ragged_tree_attention/triton"] == before + 1
    options.pop("split_size", None)
    assert found.dtype == dtype
    assert_close(found.double(), case.naive(**options), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(guarded, options, dtype):
    check(Case(RAGGED, dtype=dtype, size=16), dtype, **options)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_groups_of_heads(guarded, group):
    check(Case(RAGGED, group=group, dtype=torch.float32, size=16))


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (24, 40), (80, 64), (192, 128), (256, 256)])
def test_head_sizes(guarded, size, value_size):
    check(Case([(70, TREE), (3, CHAIN(1))], dtype=torch.float32, size=size, value_size=value_size, key_heads=1))


@pytest.mark.parametrize("last", [99, 1])
def test_trees_of_several_words(guarded, last):
    """And their last level alone, whose ancestors are in the pool already."""
    check(Case([(70, TreeTopology.k_ary(3, 4)), (5, CHAIN(100)), (0, CHAIN(0))], dtype=torch.float32, last=last))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prompts(guarded, options):
    check(Case([(0, CHAIN(70)), (30, CHAIN(9)), (64, CHAIN(0))], dtype=torch.float32, causal=True), **options)


@pytest.mark.parametrize(
    ("options", "causal"),
    [
        *[(options, index % 2 == 1) for index, options in enumerate(OPTIONS.values())],
        ({"split_size": 64}, True),
        ({"split_size": 192, "sinks": True}, False),
    ],
    ids=str,
)
def test_split_prefixes(guarded, options, causal):
    case = Case([(700, TREE)], dtype=torch.float32, key_heads=1, causal=causal)
    assert choose(case.batch.rows[0], 2, 1, 700, 8, key_bytes=128).splits > 1
    check(case, **options)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 2, 2)], ids=["plain", "sinks"])
def test_rows_do_not_depend_on_their_company_with_splits_of_a_size(sinks):
    """Bit for bit; without it the number of splits, and so the rounding, follows the longest prefix."""
    case = Case([(400, TREE), (100, CHAIN(2)), (1200, CHAIN(1))], dtype=torch.float32, key_heads=1)
    with choice.use("triton"):
        together = case.run(ragged_tree_attention, split_size=128, sinks=sinks)
        row = 0
        for sample, rows in enumerate(case.batch.rows):
            alone, _ = case.subset([(sample, range(rows))])
            assert torch.equal(
                alone.run(ragged_tree_attention, split_size=128, sinks=sinks), together[row : row + rows]
            )
            row += rows
        few, _ = case.subset([(0, range(7))])
        assert not torch.equal(few.run(ragged_tree_attention, sinks=sinks), together[:7])  # negative control


def test_no_rows():
    case = Case([(5, CHAIN(1))], dtype=torch.float32)
    empty, _ = case.subset([(0, [])])
    with choice.use("triton"):
        assert empty.run(ragged_tree_attention).shape == (0, 4, 8)


@pytest.mark.parametrize("fault", [{"past": [36, 0, 101, 0]}, {"starts": [4, 50, 53, 170]}, {"words": None}], ids=str)
def test_a_wrong_batch_would_be_seen(fault):
    case = Case(RAGGED, dtype=torch.float32)
    expected = case.naive()
    for name, value in fault.items():
        object.__setattr__(case.batch, name, value)
    with choice.use("triton"):
        found = case.run(ragged_tree_attention)
    assert not torch.allclose(found.double(), expected, atol=1e-3)


def arguments(case, **options):
    batch, settings = case.batch, {"window": 0, "softcap": 0.0, "sinks": None, "split_size": 0} | options
    return (
        *(case.query, case.keys, case.values, batch.layout, batch.region, batch.positions, batch.words, 0.3),
        *(settings["window"], settings["softcap"], settings["sinks"], max(batch.rows), max(batch.past)),
        settings["split_size"],
    )


@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 2.0, "sinks": torch.randn(4)}], ids=["plain", "all"])
def test_the_operator_is_registered_properly(options):
    # The pools are poisoned around the slabs, and opcheck compares what it is given with what comes back.
    case = Case(RAGGED, dtype=torch.float32)
    case.keys, case.values = case.keys.nan_to_num(), case.values.nan_to_num()
    library.opcheck(attend.portable, arguments(case, **options))


def test_the_operator_can_be_compiled():
    case = Case(RAGGED, dtype=torch.float32)
    compiled = torch.compile(attend.portable, fullgraph=True, backend="aot_eager")
    with choice.use("triton"):
        assert torch.equal(compiled(*arguments(case)), attend(*arguments(case)))


def test_a_layout_says_all_that_attention_reads():
    batch = Case(RAGGED).batch
    again = RaggedBatch.from_layout(batch.layout, batch.region, batch.positions, batch.words)
    for name in ("rows", "starts", "past"):
        assert list(getattr(again, name)) == list(getattr(batch, name))
    assert [list(keys) for keys in again.tree_positions] == [list(keys) for keys in batch.tree_positions]
    unplaced = RaggedBatch.from_layout(batch.layout, None, batch.positions, batch.words)
    assert list(map(len, unplaced.tree_positions)) == list(map(len, batch.tree_positions))
