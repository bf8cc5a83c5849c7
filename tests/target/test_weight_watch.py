"""Changes of weights are noticed for every type, layout and way to make them."""

import pytest
import torch
from torch import nn

from arbordraft.target.weight_watch import WeightWatch

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.int64]


class Holder(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_buffer("codes", torch.arange(8))
        self.register_buffer("frequencies", torch.ones(8), persistent=False)


def holder(dtype=torch.float32):
    return Holder((torch.arange(6 * 40).reshape(6, 40) % 50).to(dtype))


def write(module):
    module.weight.copy_(module.weight)


def write_unseen(module):
    """Changes the lowest bit of the first element, which torch does not count."""
    module.weight.data.view(torch.uint8)[0, 0] ^= 1


def replace(module):
    module.weight = nn.Parameter(module.weight.clone(), requires_grad=False)


def move(module):
    module.weight.data = module.weight.clone()


def write_buffer(module):
    module.codes[3] = 7


@pytest.mark.parametrize("change", [write, write_unseen, replace, move, write_buffer])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@torch.no_grad()
def test_changes_are_noticed(dtype, change):
    module = holder(dtype)
    watch = WeightWatch(module.modules())
    assert watch.current()
    change(module)
    assert not watch.current()
    assert watch.unchanged() == (change is write_unseen)
    assert WeightWatch(module.modules()).current()


@torch.no_grad()
def test_transposed_weights_are_sampled_where_they_lie():
    module = Holder(torch.zeros(40, 6).T)
    watch = WeightWatch(module.modules())
    module.weight.data[0, 0] = 1
    assert not watch.current()


@torch.no_grad()
def test_passing_buffers_and_weights_that_are_left_out_may_change():
    module = holder()
    watch = WeightWatch(module.modules(), leave={id(module.weight)})
    write(module)
    module.frequencies.mul_(2)
    module.frequencies = torch.zeros(3)
    assert watch.current()


@torch.no_grad()
def test_numbers_that_are_none_equal_themselves():
    module = Holder(torch.full((4, 4), torch.nan))
    watch = WeightWatch(module.modules())
    assert watch.current()
