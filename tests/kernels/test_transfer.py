"""Tensors that are transferred together arrive unchanged."""

import torch
from support.pretended_gpu import DEVICE, pretended_gpu

from arbordraft.kernels.transfer import download, upload

INTS = torch.tensor([[1, -2], [3, 2**62]])
REALS = torch.tensor([0.1, -0.0, torch.inf], dtype=torch.float64)


def test_all_parts_are_transferred_at_once():
    with pretended_gpu() as counts:
        there = upload(DEVICE, INTS, REALS, torch.empty(0, 3))
        assert all(part.device == DEVICE for part in there)
        half = there[1][:2].to(torch.float16)
        assert counts.total == 1
        here = download(*there, half, half > 0)
        assert counts.total == 2
    assert [part.is_cpu for part in here] == [True] * 5
    assert torch.equal(here[0], INTS)
    assert torch.equal(here[1].view(torch.int64), REALS.view(torch.int64))
    assert here[2].shape == (0, 3)
    assert here[3].tolist() == REALS[:2].half().tolist()
    assert here[4].tolist() == [1.0, 0.0]


def test_nothing_is_transferred_within_the_host():
    assert upload(torch.device("cpu"), INTS)[0] is INTS
    assert download(INTS, REALS)[1] is REALS
