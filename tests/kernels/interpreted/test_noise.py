"""The shared noise in Triton's interpreter: its bits are those of the definition, and so are the draws."""

import pytest
import torch
from support.gumbel_checks import DRAWS, POSITIONS, SEEDS, check_draws, check_noise
from torch import library

from arbordraft.kernels import choice
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax, gumbel_argmax_reference
from arbordraft.kernels.gumbel import triton as kernels
from arbordraft.kernels.gumbel.triton import DRAW_BLOCK, NOISE_BLOCK

SIZES = [1, 200, NOISE_BLOCK + 1]


@pytest.mark.parametrize("vocabulary", SIZES)
def test_the_noise(guarded, vocabulary):
    with choice.use("triton"):
        check_noise(vocabulary)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", DRAWS)
def test_draws(guarded, case, dtype):
    large = [] if case == "close" else [DRAW_BLOCK + 7]  # one program must then examine every token
    with choice.use("triton"):
        check_draws(case, dtype, rows=3, vocabularies=[1, 70, 200, *large], temperatures=(1.0,))


@pytest.mark.parametrize("temperature", [0.01, 0.3, 100.0])
def test_draws_from_truncated_scores_and_rows_with_gaps(guarded, temperature):
    scores, rows = torch.randn(4, 3, DRAW_BLOCK + 9)[:, 1], torch.arange(4)
    lowest = (scores / temperature).sort(dim=-1).values[:, -5]
    lowest[3] = torch.inf
    with choice.use("triton"):
        found = gumbel_argmax(scores, rows, rows, temperature, lowest)
    assert torch.equal(found, gumbel_argmax_reference(scores, rows, rows, temperature, lowest))
    assert found[3] == -1


def test_close_bounds_make_a_chunk_be_read_again(monkeypatch):
    """The bounds of large equal scores are equal, so the counter that a chunk names first is seldom the best."""
    scores, rows = torch.full((4, 200), 1e8), torch.arange(4)
    expected = gumbel_argmax_reference(scores, rows, rows, 1.0, None)
    with choice.use("triton"):
        assert torch.equal(gumbel_argmax(scores, rows, rows), expected)
        # Negative control: chunks without a second bound.
        launched = kernels.gumbel_draw

        class Forgetful:
            def __getitem__(self, grid):
                return lambda *given, **how: (given[4][..., 1].fill_(-torch.inf), launched[grid](*given, **how))

        monkeypatch.setattr(kernels, "gumbel_draw", Forgetful())
        assert not torch.equal(gumbel_argmax(scores, rows, rows), expected)


def test_float64_scores_keep_their_digits():
    scores, rows = torch.full((5, 9), 1e9, dtype=torch.float64), torch.arange(5)
    with choice.use("triton"):
        found = gumbel_argmax(scores, rows, rows)
    assert torch.equal(found, gumbel_argmax_reference(scores, rows, rows, 1.0, None))
    assert len(found.unique()) > 1


def test_no_rows():
    none = torch.empty(0, dtype=torch.int64)
    with choice.use("triton"):
        assert gumbel(none, none, 70).shape == (0, 70)
        assert gumbel_argmax(torch.empty(0, 70), none, none).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_operators_are_registered_properly_and_compile(dtype):
    calls = [
        (gumbel, (SEEDS, POSITIONS, 70)),
        (gumbel_argmax, (torch.randn(5, 70, dtype=dtype), SEEDS, POSITIONS, 0.7, None)),
        (gumbel_argmax, (torch.randn(5, 70, dtype=dtype), SEEDS, POSITIONS, 0.7, torch.zeros(5, dtype=dtype))),
    ]
    for entry, given in calls:
        operator = getattr(torch.ops.arbordraft, entry.__name__).portable
        library.opcheck(operator, given)
        with choice.use("triton"):
            assert torch.equal(torch.compile(operator, fullgraph=True, backend="aot_eager")(*given), entry(*given))
