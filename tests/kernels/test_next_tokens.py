"""Next tokens drawn in one call are those of transformers' processors and of the noise's definition."""

import math
import random

import pytest
import torch
from transformers.generation import logits_process as hf

from arbordraft.kernels import next_tokens as calls
from arbordraft.kernels.gumbel import gumbel_argmax
from arbordraft.kernels.next_tokens import UNDECIDED, RowSettings, next_tokens, next_tokens_reference
from arbordraft.kernels.next_tokens.reference import changed, truncated

pytestmark = pytest.mark.usefixtures("kernels")

TOP_K, TOP_P, MIN_P = (0, 1, 5, 40, 10**6), (1.0, 0.999, 0.9, 0.5, 0.05, 1e-5), (0.0, 0.05, 0.5, 1.0)


def logits_of(generator, rows=8, vocabulary=700):
    """Returns rows that are flat or steep, in either type; some have many equal scores."""
    seed, scale = generator.getrandbits(31), generator.choice([0.0, 0.3, 1, 2, 4, 30])
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale
    if generator.random() < 0.3:
        logits = (2 * logits).round() / 2
    return logits.to(generator.choice([torch.float32, torch.bfloat16]))


def settings_of(generator, rows, vocabulary, most_changes=20):
    changes, bounds = [], [0]
    for _ in range(rows):
        for _ in range(generator.choice([0, 3, most_changes])):
            bias = generator.choice([0.0, -1.0, 2.5, -math.inf])
            changes.append([generator.randrange(vocabulary + 2), generator.choice([1.0, 1.3, 0.8]), bias])
        bounds.append(len(changes))
    kept = [number for _ in range(rows) for number in map(generator.choice, (TOP_K, TOP_P, MIN_P))]
    return RowSettings(
        [generator.getrandbits(64) - 2**63 for _ in range(rows)],
        [generator.randrange(2**32) for _ in range(rows)],
        [generator.choice([0.0, 0.3, 0.7, 1.0, 1.9]) for _ in range(rows)],
        kept,
        torch.tensor(changes, dtype=torch.float64).reshape(-1, 3),
        bounds,
    )


@pytest.mark.parametrize("vocabulary", [3, 64, 700])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_kernel_is_the_reference_or_leaves_the_decision_to_it(vocabulary, threads):
    generator, decided, rows = random.Random(vocabulary + threads), 0, 8
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(60):
            logits, settings = logits_of(generator, rows, vocabulary), settings_of(generator, rows, vocabulary)
            order = generator.sample(range(rows), rows)
            found = calls._next_tokens.default(logits, order, *settings).tolist()
            expected = next_tokens_reference(logits, order, *settings).tolist()
            assert all(token in (UNDECIDED, true) for token, true in zip(found, expected, strict=True))
            assert next_tokens(logits, order, settings) == expected
            decided += sum(token != UNDECIDED for token in found)
    finally:
        torch.set_num_threads(before)
    assert decided > 0.7 * 60 * rows, "the kernel decides mostly, even if nearly all scores are equal"


@pytest.mark.parametrize("threads", [1, 2])
def test_a_large_vocabulary_takes_all_threads(threads):
    generator, before = random.Random(threads), torch.get_num_threads()
    logits, settings = logits_of(generator, 3, 60_000), settings_of(generator, 3, 60_000, 400)
    torch.set_num_threads(threads)
    try:
        assert next_tokens(logits, [2, 0, 1], settings) == next_tokens_reference(logits, [2, 0, 1], *settings).tolist()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(40))
def test_the_reference_truncates_as_transformers_does(seed):
    generator = random.Random(seed)
    scores = logits_of(generator, 1).float()[0]
    top_k, top_p, min_p = map(generator.choice, (TOP_K, TOP_P, MIN_P))
    chain = [hf.TopKLogitsWarper(top_k)] if top_k else []
    chain += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [hf.MinPLogitsWarper(min_p)] if min_p else []
    expected = scores[None]
    for one in chain:
        expected = one(torch.zeros(1, 1, dtype=torch.int64), expected)
    kept, wanted = (truncated(scores, top_k, top_p, min_p) > -math.inf), (expected[0] > -math.inf)
    if min_p < 1:  # of several tokens with the highest score transformers keeps at least one
        assert torch.equal(kept, wanted)
    assert kept.any()


def test_changes_are_made_in_their_order_and_in_float32():
    scores = torch.tensor([-0.1, 0.1, 0.0, 3.0])
    changes = torch.tensor([[0, 1.3, 0.0], [1, 1.3, 0.0], [2, 1.3, 0.7], [0, 1.0, 0.2], [9, 1.0, 5.0]]).double()
    factor = torch.tensor(1.3)
    expected = torch.stack([scores[0] * factor + torch.tensor(0.2), scores[1] / factor, torch.tensor(0.7), scores[3]])
    assert torch.equal(changed(scores, changes), expected)
    assert not torch.equal(changed(scores, changes.flip(0)), expected)


def test_rows_do_not_depend_on_each_other():
    generator = random.Random(5)
    logits, settings = logits_of(generator, 6), settings_of(generator, 6, 700)
    together = next_tokens(logits, range(6), settings)
    for row in range(6):
        assert next_tokens(logits[row : row + 1], [0], settings.of(row)) == together[row : row + 1]


def test_rows_without_a_token_are_told():
    banned = torch.tensor([[token, 1.0, -math.inf] for token in range(4)] * 2).double()
    settings = RowSettings([1, 1], [2, 2], [1.0, 0.0], [2, 0.9, 0.1] * 2, banned, [0, 4, 8])
    assert next_tokens(torch.zeros(2, 4), [0, 1], settings) == [-1, 0]


def test_plain_draws_are_those_of_the_noise():
    logits = logits_of(random.Random(3), 5)
    seeds, positions = [3, -4, 5, 6, 7], [0, 1, 2, 3, 2**31]
    settings = RowSettings(seeds, positions, [0.7] * 5, [0, 1, 0] * 5, torch.zeros(0, 3).double(), [0] * 6)
    drawn = gumbel_argmax(logits, torch.tensor(seeds), torch.tensor(positions), 0.7).tolist()
    assert next_tokens(logits, range(5), settings) == drawn
    other = settings._replace(positions=[1, 2, 3, 4, 5])
    assert next_tokens(logits, range(5), other) != drawn, "positions count"


@pytest.mark.parametrize(
    ("name", "value"),
    [("seeds", [1]), ("bounds", [0, 1]), ("bounds", [0, 1, 0]), ("temperatures", [1.0, -1.0]), ("kept", [0.0])],
)
def test_settings_that_do_not_fit_are_refused(name, value):
    settings = RowSettings([1, 2], [0, 0], [1.0, 1.0], [0, 1, 0] * 2, torch.zeros(0, 3).double(), [0, 0, 0])
    with pytest.raises(RuntimeError, match=r"expected settings|bounds must|changes need|temperatures must"):
        calls._next_tokens.default(torch.zeros(2, 8), [0, 1], *settings._replace(**{name: value}))
    with pytest.raises(RuntimeError, match="there is no row"):
        calls._next_tokens.default(torch.zeros(2, 8), [0, 2], *settings)
