"""The kernels of the KV cache in Triton's interpreter."""

import pytest
import torch
from torch import library

from arbordraft.kernels import choice
from arbordraft.kernels.kv_cache import append, append_reference, append_rows, compact, compact_reference, compact_rows

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def pools(dtype, rows=40):
    return [torch.randn(rows, heads, size).to(dtype) for heads, size in ((2, 3), (2, 5), (3, 130))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_writes_its_rows_only(dtype):
    keys, values = (torch.full((9, 2, size), float("nan"), dtype=dtype) for size in (3, 130))
    new = [torch.randn(3, 2, 3).to(dtype), torch.randn(2, 3, 130).to(dtype).transpose(0, 1)]
    slots = torch.tensor([4, 1, 7])
    expected = keys.clone(), values.clone()
    append_reference(*expected, *new, slots)
    with choice.use("triton"):
        append(keys, values, *new, slots)
    for found, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(found[slots], wanted[slots])
        assert found[[0, 2, 3, 5, 6, 8]].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compact_moves_rows_over_each_other(dtype):
    moves = [[(11, 10), (12, 11), (17, 12)], [], [(30, 28), (31, 29), (33, 30)]]
    found, expected = pools(dtype), []
    for pool in found:
        wanted = pool.clone()
        for sample in moves:
            for source, destination in sample:
                wanted[destination] = pool[source]
        expected.append(wanted)
    with choice.use("triton"):
        compact(found, moves)
    assert all(map(torch.equal, found, expected))


def strided(*values):
    """Returns a tensor of these numbers, between which memory holds others."""
    return torch.tensor([values, [0] * len(values)]).T.reshape(-1)[::2]


def test_indices_need_not_be_contiguous():
    slots, source, destination = strided(4, 1, 7), strided(11, 12, 17), strided(10, 11, 12)
    assert not slots.is_contiguous()
    found, expected = pools(torch.float32)[:2], []
    expected = [pool.clone() for pool in found]
    new = torch.randn(3, 2, 3), torch.randn(3, 2, 5)
    moves = [source, destination, strided(0, 3)]
    append_reference(*expected, *new, slots)
    compact_reference(expected, *moves)
    with choice.use("triton"):
        append(*found, *new, slots)
        compact_rows(found, *moves)
    assert all(map(torch.equal, found, expected))


def test_pools_with_gaps_are_refused():
    """They could be written to only in place, and kernels would write between their rows."""
    keys, values = torch.zeros(9, 4, 3)[:, ::2], torch.zeros(9, 2, 5)
    new, slots = (torch.randn(1, 2, 3), torch.randn(1, 2, 5)), torch.tensor([4])
    with choice.use("triton"):
        with pytest.raises(ValueError, match="pools of keys and values must be contiguous"):
            append(keys, values, *new, slots)
        with pytest.raises(ValueError, match="pools of keys and values must be contiguous"):
            compact([values, keys], [[(2, 1)]])
    assert not keys.any()


def test_nothing_to_do():
    before = pools(torch.float32)
    after = [pool.clone() for pool in before]
    with choice.use("triton"):
        compact(after, [[], []])
        append(*after[:2], torch.randn(0, 2, 3), torch.randn(0, 2, 5), torch.zeros(0, dtype=torch.int64))
    assert all(map(torch.equal, before, after))


def test_the_operators_are_registered_properly_and_compile():
    slots, first = torch.tensor([4, 1, 7]), torch.tensor([0, 2, 2, 3])
    calls = [
        (append_rows, (*pools(torch.float32)[:2], torch.randn(3, 2, 3), torch.randn(3, 2, 5), slots)),
        (compact_rows, (pools(torch.float32), torch.tensor([5, 6, 9]), torch.tensor([4, 5, 8]), first)),
    ]
    for operator, arguments in calls:
        library.opcheck(operator.portable, arguments)
        compiled = torch.compile(operator.portable, fullgraph=True, backend="aot_eager")
        compiled(*arguments)
