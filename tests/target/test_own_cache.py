import pytest
import torch
from support.models import tiny
from torch import nn
from transformers import DynamicCache

from arbordraft.target.hf_cache import cache_argument, returned_cache


class Older(nn.Module):
    def forward(self, input_ids, past_key_values=None):
        return past_key_values


class Newer(nn.Module):
    def forward(self, input_ids, cache=None):
        return cache


@pytest.mark.parametrize("kind", [Older, Newer])
def test_each_model_gets_its_cache_under_its_own_name(kind):
    model, cache = kind(), DynamicCache()
    assert model(torch.zeros(1, 1), **{cache_argument(model): cache}) is cache


def test_a_model_of_transformers_goes_on_from_the_cache_it_returned():
    model, ids = tiny(), torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        cache = returned_cache(model(ids[:, :3], use_cache=True))
        assert cache.get_seq_length() == 3
        logits = model(ids[:, 3:], **{cache_argument(model): cache}).logits
        assert returned_cache(model(ids, use_cache=False)) is None
        assert torch.allclose(logits, model(ids).logits[:, 3:], atol=1e-5)
