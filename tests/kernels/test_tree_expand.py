"""Children of a level in plain PyTorch, and the tokens that top-k and top-p keep."""

import pytest
import torch
from torch.testing import assert_close
from transformers import TopKLogitsWarper, TopPLogitsWarper

from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.kernels.verify import lowest_kept

PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def test_the_most_probable_children():
    tokens, chances = tree_expand(PROBS.log().expand(2, 5), 3)
    assert tokens.tolist() == [[0, 1, 2]] * 2
    assert_close(chances.exp(), PROBS[:3].expand(2, 3))


def test_too_many_children_are_refused():
    for k in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 children"):
            tree_expand(PROBS[None], k)


@pytest.mark.parametrize("k", [1, 5, 40, 100])
def test_top_k_is_that_of_transformers(k):
    scores = torch.randn(6, 50)
    scores[0] = scores[0].round()
    expected = TopKLogitsWarper(k)(None, scores)
    assert torch.equal(scores.masked_fill(scores < lowest_kept(scores, k)[:, None], -torch.inf), expected)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_is_that_of_transformers(p):
    scores = torch.randn(6, 50)
    expected = TopPLogitsWarper(p, min_tokens_to_keep=2)(None, scores)
    assert torch.equal(scores.masked_fill(scores < lowest_kept(scores, 2, p)[:, None], -torch.inf), expected)


def test_keeping_nothing_is_refused():
    with pytest.raises(ValueError, match="must be kept"):
        lowest_kept(torch.zeros(1, 3))
