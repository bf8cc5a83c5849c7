"""Children of a level, and truncation of rows without sorting, in Triton's interpreter against the references."""

import pytest
import torch
from torch import library
from torch.testing import assert_close

from arbordraft.kernels import choice
from arbordraft.kernels.tree_expand import tree_expand, tree_expand_reference
from arbordraft.kernels.verify import lowest_kept, lowest_kept_reference
from arbordraft.kernels.verify.truncation import DIRECT


def rows(vocabulary, dtype=torch.float32, count=3, seed=0):
    return torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


@pytest.mark.parametrize(
    ("vocabulary", "k", "dtype"),
    [
        (1, 1, torch.float32),
        (7, 7, torch.float16),
        (4096, 4, torch.float32),
        (4097, 3, torch.float32),
        (4097, 3, torch.float16),
        (8300, 1, torch.float32),
        (5000, 40, torch.float32),
    ],
    ids=str,
)
def test_the_most_probable_children(guarded, vocabulary, k, dtype):
    scores = rows(vocabulary, torch.float32, count=2)
    scores = (
        scores.argsort(dim=-1).argsort(dim=-1).to(dtype) / vocabulary if dtype == torch.float32 else scores.to(dtype)
    )
    with choice.use("triton"):
        tokens, chances = tree_expand(scores, k)
    expected = tree_expand_reference(scores, k)
    assert torch.equal(scores.gather(1, tokens), scores.gather(1, expected[0]))
    if dtype == torch.float32:  # no two scores are equal
        assert torch.equal(tokens, expected[0])
    assert_close(chances, expected[1])


def test_the_first_of_equal_scores_wins_and_nan_reaches_the_caller(guarded):
    scores = torch.zeros(3, 5000)
    scores[0, [4999, 4100, 3, 2]] = 1.0
    scores[1] = -torch.inf
    scores[1, 4500] = 2.0
    scores[2, 4800] = torch.nan
    with choice.use("triton"):
        tokens, chances = tree_expand(scores, 3)
    assert tokens[0].tolist() == [2, 3, 4100]
    assert tokens[1, 0] == 4500
    assert chances[1].tolist() == [0.0, -torch.inf, -torch.inf]
    assert chances[2].isnan().all()
    assert not chances[:2].isnan().any()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 2500])
@pytest.mark.parametrize(("count", "mass"), [(1, 0.0), (3, 0.0), (0, 0.3), (2, 0.9), (10_000, 0.0), (0, 0.999)])
def test_truncation_without_sorting(guarded, vocabulary, count, mass):
    scores = rows(vocabulary, seed=vocabulary)
    scores[1] = scores[1].round()  # many ties
    if vocabulary > 1:
        scores[2, : vocabulary // 2] = -torch.inf
    with choice.use("triton"):
        lowest = lowest_kept(scores, count, mass)
    expected = lowest_kept_reference(scores, count, mass)
    assert torch.equal(scores >= lowest[:, None], scores >= expected[:, None])
    assert torch.equal(lowest, expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("count", "mass"), [(50, 0.0), (0, 0.9), (40, 0.3)])
def test_truncation_of_large_vocabularies(guarded, count, mass, dtype):
    """Some rows have scores that fit into the lists, others have too many."""
    scores = rows(DIRECT + 1, count=6)
    scores[1] /= 30  # nearly flat: too many for the lists
    scores[2] = 0
    scores[3, 5:] -= 100  # few scores have any probability
    scores[4, : DIRECT - 20] = -torch.inf
    scores[5, 4000:4900] += 20  # exactly as many as the lists hold, all in one chunk
    scores = scores.to(dtype)
    with choice.use("triton"):
        lowest = lowest_kept(scores, count, mass)
    assert torch.equal(lowest, lowest_kept_reference(scores, count, mass))


@pytest.mark.parametrize("vocabulary", [7, DIRECT + 1])
@pytest.mark.parametrize(("count", "mass"), [(3, 0.0), (2, 0.9)])
def test_truncation_of_nan_and_infinity(guarded, vocabulary, count, mass):
    """NaN ranks above all scores, as in a sort; neither NaN nor infinity has a probability."""
    scores = rows(vocabulary, count=5)
    scores[0, 3] = torch.nan
    scores[1, 2:5] = torch.nan
    scores[2].view(torch.int32)[1:3] = -1  # NaN with a sign
    scores[3, 1] = torch.inf
    scores[4] = -torch.inf
    with choice.use("triton"):
        lowest = lowest_kept(scores, count, mass)
    assert_close(lowest, lowest_kept_reference(scores, count, mass), rtol=0, atol=0, equal_nan=True)


def test_the_operator_is_registered_properly_and_compiles():
    arguments = (rows(40, count=1), 3)
    operator = torch.ops.arbordraft.tree_expand.portable
    library.opcheck(operator, arguments)
    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    with choice.use("triton"):
        assert_close(compiled(*arguments), tree_expand(*arguments))
