"""Trees drawn in one call follow corrections, masks and truncations of scores as a reference in numpy does."""

import math

import numpy as np
import pytest
import torch

from arbordraft import TreeTopology
from arbordraft.kernels.draft_tree import Corrections, Draws, Limits, TreesToGrow, Truncation, draft_from_rows
from arbordraft.kernels.gumbel import gumbel
from arbordraft.trees.forest import Forest

pytestmark = pytest.mark.usefixtures("kernels")

SAMPLES, VOCAB = 3, 70
SHAPE = TreeTopology.k_ary(2, 3)
CHANGES = [
    [(5, 1.5, 0.0, 0, 99), (6, 1.5, 0.25, 0, 99), (5, 1.0, -math.inf, 0, 1)],
    [],
    [(9, 1.0, 4.0, 1, 3), (12, 2.0, -3.0, 0, 2), (66, 1.0, 30.0, 2, 99)],
]


def scores_of(seed):
    return torch.randn(SAMPLES, 3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def changed(changes, masks=None):
    table = torch.tensor([row for own in changes for row in own], dtype=torch.float64).reshape(-1, 5)
    bounds = [0, *np.cumsum([len(own) for own in changes]).tolist()]
    if masks is None:
        return Corrections(table, bounds)
    bits = [np.packbits(np.isin(np.arange(VOCAB), allowed), bitorder="little") for _, allowed in masks]
    return Corrections(table, bounds, torch.from_numpy(np.stack(bits)), [depth for depth, _ in masks])


def planted(**options):
    trees = Forest.of_roots(SHAPE, [1, 2, 3], [None] * SAMPLES)
    trees.reach[:, 0] = 1
    limits = Limits.everything([SHAPE.max_depth] * SAMPLES)
    return TreesToGrow(trees, range(SAMPLES), SHAPE.child_offsets, SHAPE.child_order, limits, **options)


def best(scores, changes=(), mask=None, vocabulary=None):
    """Returns the two best tokens of every depth."""
    found = []
    tokens = np.arange(VOCAB) if vocabulary is None else vocabulary
    for depth, row in enumerate(scores.double().numpy()):
        row = row.copy()
        for token, factor, bias, first, last in changes:
            if first <= depth < last and token in tokens:
                place = tokens.tolist().index(token)
                row[place] = (row[place] / factor if row[place] > 0 else row[place] * factor) + bias
        if mask is not None and mask[0] == depth:
            row[~np.isin(tokens, mask[1])] = -math.inf
        found.append(tokens[np.argsort(-row, kind="stable")[:2]].tolist())
    return found


def drafted(trees):
    """Returns the children of the first node of every depth, by sample."""
    children = [list(SHAPE.child_list[level.start]) for level in SHAPE.levels[:-1]]
    return [[trees.token[sample, own].tolist() for own in children] for sample in range(SAMPLES)]


@pytest.mark.parametrize("seed", range(8))
def test_changes_of_scores_are_followed(seed):
    scores = scores_of(seed)
    to_grow = planted(corrections=changed(CHANGES))
    assert not draft_from_rows(scores, to_grow)
    assert drafted(to_grow.trees) == [best(rows, own) for rows, own in zip(scores, CHANGES, strict=True)]


def test_changes_matter():
    """Otherwise the tests above could not fail."""
    scores, plain = scores_of(0), planted()
    draft_from_rows(scores, plain)
    assert drafted(plain.trees) == [best(rows) for rows in scores]
    assert drafted(plain.trees)[2] != best(scores[2], CHANGES[2])


@pytest.mark.parametrize("seed", range(4))
def test_changes_with_a_vocabulary_of_its_own(seed):
    vocabulary = torch.tensor([token for token in range(2 * VOCAB) if token % 2][:VOCAB])
    scores, changes = scores_of(seed), [[(5, 1.0, 9.0, 0, 99), (6, 1.0, 9.0, 0, 99)], [], [(139, 1.0, 20.0, 0, 99)]]
    to_grow = planted(corrections=changed(changes))
    draft_from_rows(scores, to_grow, vocabulary=vocabulary)
    expected = [best(rows, own, vocabulary=vocabulary.numpy()) for rows, own in zip(scores, changes, strict=True)]
    assert drafted(to_grow.trees) == expected
    assert 5 in expected[0][0], "6 is none of its tokens"


@pytest.mark.parametrize("seed", range(4))
def test_masks_are_followed_at_their_depth(seed):
    masks = [(0, [3, 4, 60, 69]), (-1, []), (2, [7, 8, 9])]
    scores, to_grow = scores_of(seed), planted(corrections=changed(CHANGES, masks))
    draft_from_rows(scores, to_grow)
    given = [mask if mask[0] >= 0 else None for mask in masks]
    assert drafted(to_grow.trees) == [
        best(rows, own, mask) for rows, own, mask in zip(scores, CHANGES, given, strict=True)
    ]


def test_a_mask_of_one_token_gives_one_child():
    to_grow = planted(corrections=changed([[], [], []], [(0, [7])] * SAMPLES))
    draft_from_rows(scores_of(0), to_grow)
    assert to_grow.trees.token[:, 1:3].tolist() == [[7, -1]] * SAMPLES


def kept(row, heat, truncation):
    """Returns the tokens that truncation keeps, in transformers' order: top-k, top-p, min-p."""
    order = np.argsort(-row, kind="stable")
    order = order[: truncation.top_k or VOCAB]
    chances = np.exp(row[order] / heat)
    chances /= chances.sum()
    order = order[: int(np.searchsorted(chances.cumsum(), truncation.top_p)) + 1] if truncation.top_p < 1 else order
    chances = np.exp((row[order] - row[order[0]]) / heat)
    return order[chances >= truncation.min_p]


@pytest.mark.parametrize(
    "truncation",
    [Truncation(top_k=3), Truncation(top_p=0.5), Truncation(min_p=0.3), Truncation(9, 0.7, 0.05), Truncation()],
    ids=str,
)
@pytest.mark.parametrize("heat", [0.5, 1.0, 2.0])
def test_drawn_tokens_are_those_that_truncation_keeps(heat, truncation):
    outside = strayed = free = total = 0
    for seed in range(30):
        scores = scores_of(seed)
        positions = torch.arange(SAMPLES)
        draws = Draws(torch.full((SAMPLES,), seed), positions, [heat] * SAMPLES, [truncation] * SAMPLES)
        to_grow = planted(draws=draws)
        draft_from_rows(scores, to_grow)
        for sample in range(SAMPLES):
            for depth in range(3):
                row = scores[sample, depth].double().numpy()
                noise = gumbel(torch.tensor([seed]), positions[sample : sample + 1] + depth, VOCAB)[0].double().numpy()
                tokens = kept(row, heat, truncation)
                wanted = tokens[np.argmax(row[tokens] / heat + noise[tokens])]
                drawn = drafted(to_grow.trees)[sample][depth][0]
                total += 1
                outside += drawn not in tokens
                strayed += drawn != wanted
                free += np.argmax(row / heat + noise) not in tokens
    assert total == 270
    assert strayed <= free / 3, "bins of a sixteenth decide only about tokens at the edge"
    assert outside <= strayed


def test_truncation_matters():
    scores, drawn = scores_of(3), []
    for truncation in (Truncation(), Truncation(top_k=1)):
        positions = torch.arange(SAMPLES)
        to_grow = planted(draws=Draws(positions, positions, [2.0] * SAMPLES, [truncation] * SAMPLES))
        draft_from_rows(scores, to_grow)
        drawn.append(drafted(to_grow.trees))
    assert drawn[0] != drawn[1]
    assert [[depth[0] for depth in own] for own in drawn[1]] == scores.argmax(dim=-1).tolist()


def test_rows_of_nan_stay_broken():
    scores = scores_of(0)
    scores[1, 0, 5] = float("nan")
    positions = torch.arange(SAMPLES)
    truncated = Draws(positions, positions, [1.0] * SAMPLES, [Truncation(3, 0.9, 0.1)] * SAMPLES)
    to_grow = planted(draws=truncated, corrections=changed(CHANGES))
    assert draft_from_rows(scores, to_grow) == 1
    assert (to_grow.trees.token[1, 1:] < 0).all()


def test_children_that_are_there_stay():
    to_grow = planted()
    to_grow.trees.token[:, 1], to_grow.trees.chance[:, 1], to_grow.trees.reach[:, 1] = 40, 1.0, 1.0
    scores = scores_of(0)
    draft_from_rows(scores, to_grow)
    assert to_grow.trees.token[:, 1:3].tolist() == [[40, -1]] * SAMPLES
    first = SHAPE.child_list[1]
    assert to_grow.trees.token[0, list(first)].tolist() == best(scores[0])[1]


@pytest.mark.parametrize(
    "corrections",
    [
        Corrections(torch.zeros(2, 5, dtype=torch.float64), [0, 1, 2]),
        Corrections(torch.zeros(2, 5, dtype=torch.float64), [0, 1, 1, 1]),
        Corrections(torch.zeros(2, 5, dtype=torch.float64), [0, 2, 1, 2]),
        Corrections(torch.zeros(0, 5, dtype=torch.float64), [0] * 4, torch.zeros(2, 9, dtype=torch.uint8), [0] * 3),
        Corrections(torch.zeros(0, 5, dtype=torch.float64), [0] * 4, torch.zeros(3, 9, dtype=torch.uint8), [0] * 2),
        Corrections(torch.zeros(0, 5, dtype=torch.float64), [0] * 4, torch.zeros(3, 9), [0] * 3),
    ],
)
def test_corrections_that_do_not_fit_are_refused(corrections):
    with pytest.raises(RuntimeError, match=r"corrections need|bounds must|allowed tokens need"):
        draft_from_rows(scores_of(0), planted(corrections=corrections))


def test_noise_needs_a_truncation_for_every_sample():
    zeros = torch.zeros(SAMPLES, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="noise needs a truncation"):
        draft_from_rows(scores_of(0), planted(draws=Draws(zeros, zeros, [1.0] * SAMPLES, [Truncation()])))
