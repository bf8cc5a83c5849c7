"""Ragged tree attention in Triton's interpreter against a naive implementation."""

import pytest
import torch
from support.ragged_case import Case
from torch import library
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, attend, ragged_tree_attention, row, tiling
from arbordraft.kernels.ragged_tree_attention.batch import ARRIVALS
from arbordraft.kernels.ragged_tree_attention.tiling import SPAN, choose

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


def counted(case):
    """Gives a batch counters that outlive a launch, as on a GPU, and returns them."""
    vars(case.batch)["arrivals"] = torch.zeros(ARRIVALS, dtype=torch.int32)
    return case.batch.arrivals


def check(case, dtype=torch.float32, **options):
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, case.query.shape[1])
    before = choice.ran["ragged_tree_attention/triton"]
    with choice.use("triton"):
        found = case.run(ragged_tree_attention, **options)
    assert choice.ran["ragged_tree_attention/triton"] == before + 1
    options.pop("row_invariant", None)
    assert found.dtype == dtype
    assert_close(found.double(), case.naive(**options), rtol=0, atol=TOLERANCE[dtype])


each_kernel = pytest.mark.parametrize("row_invariant", [False, True], ids=["in tiles", "row by row"])


@pytest.mark.one_in(2)
@each_kernel
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(guarded, options, dtype, row_invariant):
    check(Case(RAGGED, dtype=dtype, size=16), dtype, **options, row_invariant=row_invariant)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_groups_of_heads(guarded, group):
    check(Case(RAGGED, group=group, dtype=torch.float32, size=16))


@pytest.mark.parametrize(("size", "value_size"), [(8, 8), (24, 40), (80, 64), (192, 128), (256, 256)])
def test_head_sizes(guarded, size, value_size):
    check(Case([(70, TREE), (3, CHAIN(1))], dtype=torch.float32, size=size, value_size=value_size, key_heads=1))


@each_kernel
@pytest.mark.parametrize("last", [99, 1])
def test_trees_of_several_words(guarded, last, row_invariant):
    """Also tests the last level alone, whose ancestors are in the pool already."""
    trees = [(70, TreeTopology.k_ary(3, 4)), (5, CHAIN(100)), (0, CHAIN(0))]
    check(Case(trees, dtype=torch.float32, last=last), row_invariant=row_invariant)


@pytest.mark.one_in(2)
@each_kernel
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_prompts(guarded, options, row_invariant):
    case = Case([(0, CHAIN(70)), (30, CHAIN(9)), (64, CHAIN(0))], dtype=torch.float32, causal=True, value_size=24)
    check(case, **options, row_invariant=row_invariant)


@pytest.mark.parametrize(
    ("options", "causal"), [*[(options, index % 2 == 1) for index, options in enumerate(OPTIONS.values())]], ids=str
)
def test_split_prefixes(guarded, options, causal):
    case = Case([(700, TREE)], dtype=torch.float32, key_heads=1, causal=causal)
    assert choose(case.batch.rows[0], 2, 1, 700, 8, key_bytes=128).splits > 1
    arrivals = counted(case)
    for _ in range(2):  # the second launch counts on the zeros of the first
        check(case, **options)
        assert not arrivals.any()


def test_a_program_that_never_ran_would_be_seen(guarded):
    """Then no program combines: the output keeps its poison, and the counters are not 0."""
    case = Case([(700, TREE)], dtype=torch.float32, key_heads=1)
    arrivals = counted(case)
    arrivals[0] = -1
    with choice.use("triton"):
        found = case.run(ragged_tree_attention)
    assert not torch.allclose(found.double(), case.naive(), atol=1e-3)
    assert arrivals.any()


@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("all", "plain", "window over tiles")], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["trees", "prompts"])
def test_rows_in_segments(guarded, monkeypatch, options, causal):
    """One program per row and one per segment give the same bits; other segments give other bits."""
    case = Case([(2 * SPAN + 37, TREE), (SPAN - 3, CHAIN(2))], dtype=torch.float32, key_heads=1, causal=causal)
    arrivals = counted(case)
    check(case, row_invariant=True, **options)
    assert not arrivals.any()
    if options.get("sinks"):
        options = options | {"sinks": torch.linspace(-2, 2, case.query.shape[1])}
    found = []
    # Two programs are too few for three segments.
    for split, span in ((3, SPAN), (1, SPAN), (2, SPAN), (5, SPAN // 2)):
        monkeypatch.setattr(row, "split_rows", lambda *_, split=split: split)
        monkeypatch.setattr(tiling, "SPAN", span)
        with choice.use("triton"):
            found.append(case.run(ragged_tree_attention, row_invariant=True, **options))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    if options.get("window") is None:  # negative control
        assert not torch.equal(found[0], found[3])


def test_programs_of_rows():
    assert row.split_rows(8, 4096, 256, 132) == 16
    assert row.split_rows(8, 4097, 256, 132) == 17
    assert row.split_rows(2 * 132, 4096, 256, 132) == 1  # many rows keep all processors busy
    assert row.split_rows(8, 4096, tiling.row_tile(1, 256, 256, torch.float32)["SPAN"], 132) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", [OPTIONS[name] for name in ("all", "plain", "window over tiles")], ids=str)
def test_a_node_has_the_bits_of_plain_decoding(options):
    """The bits depend neither on the places of its ancestors nor on ends of tiles; those of the other kernel do."""
    options = dict(options)
    case = Case([(59, TREE), (126, TreeTopology.k_ary(2, 3)), (3, CHAIN(2))], dtype=torch.float32, size=16)
    if options.get("sinks"):
        options["sinks"] = torch.linspace(-2, 2, case.query.shape[1])
    different = 0
    with choice.use("triton"):
        together, otherwise = (
            case.run(ragged_tree_attention, row_invariant=one_by_one, **options) for one_by_one in (True, False)
        )
        for sample, (_, tree) in enumerate(case.samples):
            for node in range(tree.num_nodes):
                for chunk in (1, 3):
                    for plain, rows in case.path(sample, node, chunk):
                        found = plain.run(ragged_tree_attention, row_invariant=True, **options)
                        assert torch.equal(found, together[rows])
                        found = plain.run(ragged_tree_attention, **options)
                        different += not torch.equal(found, otherwise[rows])
    assert different  # negative control


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
    batch, settings = case.batch, {"window": 0, "softcap": 0.0, "sinks": None, "row_invariant": False} | options
    counters = torch.zeros(ARRIVALS, dtype=torch.int32) if options else None
    return (
        *(case.query, case.keys, case.values, batch.layout, batch.region, batch.positions, batch.words, 0.3),
        *(settings["window"], settings["softcap"], settings["sinks"], max(batch.rows), max(batch.past)),
        settings["row_invariant"],
        counters,
    )


@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 2.0, "sinks": torch.randn(4)}], ids=["plain", "all"])
def test_the_operator_is_registered_properly(options):
    # Pools hold NaN around the slabs, and opcheck compares inputs before and after the call.
    case = Case(RAGGED, dtype=torch.float32)
    case.keys, case.values = case.keys.nan_to_num(), case.values.nan_to_num()
    library.opcheck(attend.portable, arguments(case, **options))


def test_the_operator_can_be_compiled():
    case = Case(RAGGED, dtype=torch.float32)
    compiled = torch.compile(attend.portable, fullgraph=True, backend="aot_eager")
    with choice.use("triton"):
        assert torch.equal(compiled(*arguments(case)), attend(*arguments(case)))


def test_a_batch_is_restored_from_its_layout():
    batch = Case(RAGGED).batch
    again = RaggedBatch.from_layout(batch.layout, batch.region, batch.positions, batch.words)
    for name in ("rows", "starts", "past"):
        assert list(getattr(again, name)) == list(getattr(batch, name))
    assert [list(keys) for keys in again.tree_positions] == [list(keys) for keys in batch.tree_positions]
    unplaced = RaggedBatch.from_layout(batch.layout, None, batch.positions, batch.words)
    assert list(map(len, unplaced.tree_positions)) == list(map(len, batch.tree_positions))
