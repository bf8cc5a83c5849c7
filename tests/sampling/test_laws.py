"""Draft laws: draws have the enumerated law, and proposals multiply to its probabilities."""

import itertools
import math
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from support.pretended_gpu import pretended_gpu

from arbordraft import IID, Fixed, TopTail, WithoutReplacement
from arbordraft.drafters.children import draw_children, draw_together
from arbordraft.sampling.laws import AdaptiveTopTail, DraftLaw
from arbordraft.testing import random_rows, row

LAWS = [
    IID(2),
    IID(3),
    WithoutReplacement(2),
    WithoutReplacement(3),
    TopTail(1, 1),
    TopTail(2, 1),
    TopTail(1, 2),
    AdaptiveTopTail(2, 0.3),
    AdaptiveTopTail(3, 0.25),
    Fixed(2),
]
GRID = 40


def frequencies(law, draft, points):
    drawn = draw_together(draft.expand(len(points), -1), [law] * len(points), points).tolist()
    return Counter(tuple(token for token in tokens if token >= 0) for tokens in drawn)


def p_value(law, claimed, draft, draws=4000):
    """Returns the p-value of draws by ``law`` under the hypothesis that ``claimed`` drew them."""
    points = torch.rand(draws, law.k, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    found = frequencies(law, draft, points)
    expected = {}
    for chance, tokens in claimed.enumerate(draft):
        expected[tuple(tokens)] = expected.get(tuple(tokens), 0) + chance * draws
    if found.keys() - expected.keys():
        return 0.0
    return chisquare([found.get(tokens, 0) for tokens in expected], list(expected.values())).pvalue


@pytest.mark.parametrize("law", LAWS[:-1], ids=str)
def test_draws_have_the_enumerated_law(law):
    assert p_value(law, law, row(4, 3, 2, 1.5)) > 1e-3


@pytest.mark.parametrize(
    ("law", "claimed"),
    [(IID(2), WithoutReplacement(2)), (TopTail(1, 1), WithoutReplacement(2)), (WithoutReplacement(2), IID(2))],
    ids=str,
)
def test_another_law_is_caught(law, claimed):
    assert p_value(law, claimed, row(4, 3, 2, 1.5)) < 1e-9


@pytest.mark.parametrize("law", [IID(2), WithoutReplacement(2), TopTail(1, 2), TopTail(1, 1)], ids=str)
def test_inversion_on_a_grid_gives_the_probabilities(law):
    """Counting midpoints is exact for rows in units of the grid, otherwise within one cell per draw."""
    draft = row(4, 3, 2, 1)
    points = [[(2 * i + 1) / (2 * GRID) for i in place] for place in itertools.product(range(GRID), repeat=law.tails)]
    found = frequencies(law, draft, points)
    for chance, tokens in law.enumerate(draft):
        assert found[tuple(tokens)] / len(points) == pytest.approx(chance, abs=law.tails / GRID)
        if law.replacement or law.tails == 0:
            assert found[tuple(tokens)] / len(points) == pytest.approx(chance, abs=1e-12)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_proposals_multiply_to_the_enumerated_probability(law):
    draft = row(4, 3, 2, 1.5)
    total = 0.0
    for chance, tokens in law.enumerate(draft):
        product = 1.0
        for token, proposal in zip(tokens, law.proposals(draft, tokens), strict=True):
            if proposal is not None:
                assert proposal.sum() == pytest.approx(1)
                product *= proposal[token].item()
        assert product == pytest.approx(chance, abs=1e-12)
        total += chance
    assert total == pytest.approx(1, abs=1e-12)


def test_only_tops_are_certain():
    draft = row(1, 5, 2, 4)
    assert [proposal is None for proposal in TopTail(2, 1).proposals(draft, [0, 1, 3])] == [False, True, True]
    assert [proposal is None for proposal in TopTail(1, 2).proposals(draft, [0, 3])] == [False, False]
    assert list(IID(2).proposals(None, [0, 1])) == [None, None]


@pytest.mark.parametrize(
    ("law", "weights", "children"),
    [
        (IID(3), (0, 1, 0), 3),
        (WithoutReplacement(3), (1, 0, 2), 2),
        (TopTail(1, 1), (0, 1, 0), 1),
        (TopTail(2, 1), (0, 1, 1), 2),
        (TopTail(1, 2), (1, 0, 3), 2),
        (Fixed(3), (1, 0, 2), 2),
        (Fixed(3), (1, 2), 2),
    ],
    ids=str,
)
def test_tokens_without_probability_are_never_drafted(law, weights, children):
    draft = row(*weights)
    for uniform in (0.0, 0.5, 1 - 2**-53):
        tokens = law.draw(draft, [uniform] * 3)
        assert len(tokens) == children
        assert all(draft[token] > 0 for token in tokens)
        assert len(set(tokens)) == children or law.replacement


def test_equal_probabilities_put_the_smaller_token_first():
    draft = row(1, 2, 1, 2, 2)
    assert Fixed(1).draw(draft, []) == [1]
    assert Fixed(2).draw(draft, []) == [1, 3]
    assert Fixed(4).draw(draft, []) == [1, 3, 4, 0]
    assert TopTail(2, 1).draw(draft, [0.0]) == [0, 1, 3]


@pytest.mark.parametrize(
    ("law", "children", "tops", "tails"),
    [
        (IID(3), 2, 0, 2),
        (WithoutReplacement(3), 1, 0, 1),
        (TopTail(1, 2), 2, 1, 1),
        (TopTail(2, 1), 2, 1, 1),
        (TopTail(1, 1), 1, 0, 1),
        (Fixed(3), 2, 2, 0),
        (TopTail(1, 1), 2, 1, 1),
    ],
    ids=str,
)
def test_fewer_children_keep_the_random_draw(law, children, tops, tails):
    narrow = law.narrow(children)
    assert (narrow.tops, narrow.tails, narrow.replacement) == (tops, tails, law.replacement)


@pytest.mark.parametrize(
    "build",
    [lambda: IID(0), lambda: TopTail(-1, 2), lambda: Fixed(0), lambda: IID(2).narrow(3), lambda: IID(2).narrow(0)],
)
def test_impossible_counts_are_refused(build):
    with pytest.raises(ValueError, match=r"must be a whole number of at least [01]|draws 1 to"):
        build()


def test_tops_may_be_combined_with_independent_tails():
    law = DraftLaw(tops=1, tails=2, replacement=True)
    assert law.draw(row(1, 5, 2), [0.9, 0.9]) == [2, 2, 1]
    assert law.draw(row(0, 5, 0), [0.9, 0.9]) == [1]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_drawing_leaves_the_row_unchanged(law):
    for kind in ("random", "holes", "ties"):
        _, draft = random_rows(kind, 6, 1)
        before = draft.clone()
        list(law.proposals(draft, law.draw(draft, [0.1, 0.6, 0.9])))
        assert torch.equal(draft, before)


def test_adaptive_tops_are_the_tokens_the_drafter_is_sure_of():
    draft = row(5, 3, 1, 1)
    for threshold, tops in ((0.6, 0), (0.5, 1), (0.3, 2), (0.0, 2)):
        law, same = AdaptiveTopTail(3, threshold), DraftLaw(tops, 3 - tops, replacement=False)
        assert list(law.enumerate(draft)) == list(same.enumerate(draft))
        assert law.draw(draft, [0.7, 0.2, 0.4]) == same.draw(draft, [0.7, 0.2, 0.4])
    assert AdaptiveTopTail(3, 0.1).narrow(2).draw(draft, [0.99, 0.0]) == [3, 0]
    with pytest.raises(ValueError, match="threshold must be a number from 0 to 1, got -1"):
        AdaptiveTopTail(2, -1)


def test_first_draws_agree_across_laws():
    """The first tail token of all laws without tops is the inverse-CDF draw of the same uniform."""
    draft = row(4, 3, 2, 1.5)
    for uniform in (0.0, 0.3, 0.6, math.nextafter(1, 0)):
        assert IID(2).draw(draft, [uniform] * 2)[0] == WithoutReplacement(2).draw(draft, [uniform] * 2)[0]


class Backwards(DraftLaw):
    """Overrides ``draw`` to reverse the order of the children."""

    def __init__(self):
        super().__init__(0, 2, replacement=False)

    def draw(self, draft, uniforms):
        return super().draw(draft, uniforms)[::-1]


class OwnTops(TopTail):
    """Has one top if a row begins with a likely token, otherwise none."""

    def tops_of(self, draft):
        return int(draft[0] > 0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_drawn_together_are_drawn_as_each_alone(dtype):
    generator = torch.Generator().manual_seed(0)
    laws = [*LAWS, None, DraftLaw(1, 2, replacement=True), IID(1), OwnTops(1, 2)] * 12
    kinds = ("random", "holes", "ties", "peaked")
    drafts = torch.stack([random_rows(kinds[i % 4], 6, i)[1] for i in range(len(laws))]).to(dtype)
    uniforms = torch.rand(len(laws), 3, generator=generator, dtype=torch.float64).tolist()
    uniforms[:20] = [[0.0, 1 - 2**-53, 0.0]] * 20
    together = draw_together(drafts, laws, uniforms).tolist()
    alone = [law.draw(draft, some) if law else [] for law, draft, some in zip(laws, drafts, uniforms, strict=True)]
    assert [[token for token in tokens if token >= 0] for tokens in together] == alone
    assert {len(tokens) for tokens in alone} == {0, 1, 2, 3}


def test_overridden_draws_of_a_law_are_used():
    drafts, uniforms = torch.stack([row(4, 3, 2, 1)] * 3), [[0.1, 0.9]] * 3
    laws = [Backwards(), None, WithoutReplacement(2)]
    with pretended_gpu():
        found = draw_children(drafts.to("cuda"), laws, uniforms).tolist()
    assert found == [[3, 0], [-1, -1], [0, 3]] == draw_children(drafts, laws, uniforms).tolist()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nan_rows_give_no_children(device):
    drafts = torch.stack(
        [row(4, 3, 2, 1).float(), torch.full((4,), torch.nan), torch.full((4,), -torch.inf).softmax(0)]
    )
    with pretended_gpu():
        found = draw_children(drafts.to(device), [TopTail(1, 1)] * 3, [[0.5]] * 3).tolist()
    assert found == [[1, 0], [-1, -1], [-1, -1]]
