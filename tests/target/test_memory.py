"""Prepacked weights are moved together in memory."""

import itertools

import pytest
import torch

from arbordraft.target.prepacked.memory import move_together

LARGE = 1 << 21  # bytes of a large page


def matrices(rows):
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(rows, 33, 16, generator=generator)
    return [wide, wide.bfloat16()[:, :, None], wide.mul(40).to(torch.int8), torch.randn(3, 5, generator=generator)]


def gaps(tensors):
    """Returns the bytes between the end of each tensor and the beginning of the next one."""
    return [b.data_ptr() - a.data_ptr() - a.nbytes for a, b in itertools.pairwise(tensors)]


@pytest.mark.parametrize(("rows", "moved"), [(1000, True), (10, False)], ids=["several pages", "less than a page"])
def test_tensors_move_together_unchanged(rows, moved):
    tensors = matrices(rows)
    before, places = [tensor.clone() for tensor in tensors], [tensor.data_ptr() for tensor in tensors]
    assert (sum(tensor.nbytes for tensor in tensors) >= LARGE) == moved
    move_together(tensors)
    for tensor, old in zip(tensors, before, strict=True):
        assert tensor.dtype == old.dtype
        assert tensor.is_contiguous()
        assert torch.equal(tensor, old)
    if moved:
        assert all(0 <= gap < 64 for gap in gaps(tensors))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
    else:
        assert [tensor.data_ptr() for tensor in tensors] == places


def test_the_allocator_leaves_gaps_between_tensors():
    """Negative control: gaps distinguish moved tensors from others."""
    assert not all(0 <= gap < 64 for gap in gaps(matrices(1000)))
