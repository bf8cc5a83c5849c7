"""Children of a level, in plain PyTorch: what is drawn, how it is numbered, and what top-k and top-p keep."""

import math

import pytest
import torch
from scipy import stats
from torch.testing import assert_close
from transformers import TopKLogitsWarper, TopPLogitsWarper

from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.kernels.tree_expand.reference import uniforms
from arbordraft.kernels.verify import lowest_kept

PROBS = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])


def test_the_most_probable_children():
    tokens, chances, words = tree_expand(PROBS.log().expand(2, 5), 3)
    assert tokens.tolist() == [[0, 1, 2]] * 2
    assert_close(chances.exp(), PROBS[:3].expand(2, 3))
    assert words.numel() == 0


def test_children_see_their_parents_and_themselves():
    words = torch.tensor([[0b1, 0], [0b101, 0b10]])
    _, _, below = tree_expand(torch.randn(2, 9), 2, words=words, first_child=torch.tensor([1, 63]))
    assert below.tolist() == [[0b11, 0], [0b101, 0], [0b101 | -(2**63), 0b10], [0b101, 0b11]]


def test_too_many_children_are_refused():
    for k in (0, 6):
        with pytest.raises(ValueError, match="1 to 5 children"):
            tree_expand(PROBS[None], k)


def pair_law(probs):
    """Law of two draws without replacement, as a ``[V * V]`` row."""
    rest = probs[None] * (1 - torch.eye(len(probs)))
    return (probs[:, None] * rest / rest.sum(dim=1, keepdim=True)).flatten()


@pytest.mark.parametrize(("law", "fits"), [(PROBS, True), (PROBS.flip(0), False)], ids=["own", "control"])
def test_draws_follow_the_law_without_replacement(law, fits):
    count = 20_000
    tokens, _, _ = tree_expand(PROBS.log().expand(count, 5), 2, seeds=torch.arange(count))
    seen = torch.bincount(tokens[:, 0] * 5 + tokens[:, 1], minlength=25).double()
    expected = pair_law(law.double() / law.double().sum()) * count
    possible = expected > 0
    assert seen[~possible].sum() == 0
    assert (stats.chisquare(seen[possible], expected[possible]).pvalue > 1e-3) == fits


def test_uniforms_are_those_of_philox():
    """Known answer: counter and key 0 give 0x6627e8d5 (Random123's test vectors)."""
    first = uniforms(torch.tensor([0]), 1).item()
    assert math.isclose(first, 0x6627E8D5 * 4.6566127342e-10, rel_tol=1e-6)
    assert not torch.equal(uniforms(torch.tensor([1]), 8), uniforms(torch.tensor([1 << 32]), 8))


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
