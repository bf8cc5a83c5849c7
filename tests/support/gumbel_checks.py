"""Checks for every implementation of the shared noise: the bits of the definition, and equal draws."""

import torch

from arbordraft.kernels.gumbel import gumbel, gumbel_argmax, gumbel_argmax_reference, gumbel_reference

SEEDS = torch.tensor([0, 7, -1, -(2**63), 2**63 - 1])
POSITIONS = torch.tensor([0, 1, 2**32 - 1, 5, 2**31])
VOCABULARIES = [1, 2, 16, 17, 63, 64, 65, 200, 1000]


def check_noise(vocabulary):
    found = gumbel(SEEDS, POSITIONS, vocabulary)
    assert torch.equal(found, gumbel_reference(SEEDS, POSITIONS, vocabulary))
    assert (found.shape, found.dtype) == ((5, vocabulary), torch.float64)


def _keys(rows):
    return torch.arange(rows) - 2, torch.arange(rows) + 9


def _ordinary(rows, vocabulary):
    return 3 * torch.randn(rows, vocabulary)


def _flat(rows, vocabulary):
    return torch.zeros(rows, vocabulary)


def _huge(rows, vocabulary):
    return 1e4 * torch.randn(rows, vocabulary)


def _sparse(rows, vocabulary):
    return _ordinary(rows, vocabulary).masked_fill(torch.rand(rows, vocabulary) < 0.9, -torch.inf)


def _single(rows, vocabulary):
    scores = torch.full((rows, vocabulary), -torch.inf)
    return scores.scatter(1, torch.randint(vocabulary, (rows, 1)), -50.0)


def _without_any(rows, vocabulary):
    return torch.full((rows, vocabulary), -torch.inf)


def _equal(rows, vocabulary):
    """Makes scores so high that rounding loses the noise; the first of several equal scores wins."""
    scores = torch.where(torch.rand(rows, vocabulary) < 4 / vocabulary, 2.0**100, -(2.0**100))
    scores[:, -1] = 2.0**100
    return scores


def _close(rows, vocabulary):
    """Makes all sums of score and noise equal up to rounding: a bound that leaves one out leaves out the best."""
    return -gumbel_reference(*_keys(rows), vocabulary).float()


DRAWS = {make.__name__[1:]: make for make in (_ordinary, _flat, _huge, _sparse, _single, _without_any, _equal, _close)}


def check_draws(case, dtype, rows=40, vocabularies=VOCABULARIES, temperatures=(1.0, 0.01, 0.7, 100.0)):
    keys = _keys(rows)
    for vocabulary in vocabularies:
        scores = DRAWS[case](rows, vocabulary).to(dtype)
        for temperature in temperatures:
            found = gumbel_argmax(scores, *keys, temperature)
            assert torch.equal(found, gumbel_argmax_reference(scores, *keys, temperature, None))
            if case == "equal":
                assert torch.equal(found, scores.max(dim=-1).indices)
            if case == "single":
                assert torch.equal(found, scores.isfinite().int().argmax(dim=-1))
            if case == "without_any":
                assert (found == -1).all()
