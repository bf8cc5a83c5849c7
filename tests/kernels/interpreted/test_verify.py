"""Passes over rows of scores in Triton's interpreter against the references, and whole verifications with them."""

import pytest
import torch
from support.packed_forest import forest
from support.verdicts import COUPLINGS, check_verdicts
from torch import library
from torch.testing import assert_close
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from arbordraft.kernels import choice
from arbordraft.kernels.verify import (
    draw_behind,
    left_mass,
    left_pick,
    log_sum_exp,
    rejection_ends,
    row_max,
    row_stats,
    score_rows,
    take_tops,
)
from arbordraft.kernels.verify.reference import CHUNK, score_rows_reference
from arbordraft.sampling.processors import LogitsPipeline

SIZES = [1, 7, CHUNK, CHUNK + 1, 2 * CHUNK + 130]


def problem(vocabulary, dtype=torch.float32, seed=0):
    """Draws scores, draft rows and four nodes, one of which has no draft row."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, vocabulary, generator=generator)
    scores[1, : vocabulary // 2] = -torch.inf
    draft = torch.randn(3, vocabulary, generator=generator).softmax(dim=-1)
    special = torch.randint(vocabulary, (4, 3), generator=generator)
    special[1], special[2, 1:] = -1, -1
    return (
        *(scores.to(dtype), scores.to(dtype).float().logsumexp(dim=-1), draft, torch.tensor([0, 1, 4, 2])),
        *(torch.tensor([2, 0, -1, 1]), torch.tensor([1.0, 0.5, 0.9, 0.0]), torch.tensor([0.3, 1.0, 5.0, 0.2]), special),
    )


def both(operator, *arguments):
    """Returns the results of the operator in the interpreter and of its reference."""
    with choice.use("triton"):
        return operator(*arguments), operator.reference(*arguments)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_row_stats(guarded, vocabulary, dtype):
    scores = problem(vocabulary, dtype)[0]
    if vocabulary > 1:
        scores[2, vocabulary // 2 :] = scores[2].max()  # ties: the first token counts
    scores[3] = -torch.inf
    scores[4, -1] = torch.nan
    found, expected = both(row_stats, scores)
    sound = [0, 1, 2, 3]
    assert_close(found[0][sound], expected[0][sound])
    assert found[0][4].isnan().any()
    assert not found[0][sound].isnan().any()
    alive = expected[0][:3] > -torch.inf
    assert torch.equal(found[1][:3][alive], expected[1][:3][alive])
    assert_close(found[2][sound], expected[2][sound])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", SIZES)
def test_log_sum_exp(guarded, vocabulary, dtype):
    scores = problem(vocabulary, dtype)[0]
    scores[3] = -torch.inf
    scores[4, -1] = torch.nan
    with choice.use("triton"):
        found = log_sum_exp(scores)
    assert_close(found, scores.float().logsumexp(dim=-1), equal_nan=True)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_left_mass(guarded, vocabulary):
    found, expected = both(left_mass, *problem(vocabulary))
    assert_close(found, expected)
    nothing = both(left_mass, *problem(vocabulary)[:2], torch.empty(0, 0), *problem(vocabulary)[3:4],
                   torch.full((4,), -1), *problem(vocabulary)[5:])  # fmt: skip
    assert_close(*nothing)


@pytest.mark.parametrize("vocabulary", SIZES)
def test_left_pick(guarded, vocabulary):
    arguments = problem(vocabulary)
    mass = left_mass(*arguments)[0]
    for turn in range(8):
        chunk = torch.randint(mass.shape[1], (4,))
        level = torch.rand(4, dtype=torch.float64) * mass[torch.arange(4), chunk] * (1.2 if turn == 7 else 1)
        found, expected = both(left_pick, *arguments, chunk, level)
        assert torch.equal(found, expected)


def children(vocabulary):
    """Gives nodes of :func:`problem` three drawn children, a top and a drawn one, two equal tops, and none."""
    scores, lse, draft, _, draft_row, weight, _, _ = problem(vocabulary)
    tokens = torch.tensor([[3, 5, 6], [2, 4, -1], [1, 1, -1], [-1, -1, -1]])
    return scores, lse, draft, draft_row, weight.double(), tokens


KNOWN = [0, 1, 3, 4, 5, 7]  # places of nodes in a forest


@pytest.mark.one_in(3)
@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("laws", ["drawn", "tops", "sparse"])
@pytest.mark.parametrize(("vocabulary", "dtype"), [(7, torch.float32), (2 * CHUNK + 130, torch.float16)], ids=str)
def test_ends_by_recursive_rejection(guarded, vocabulary, dtype, laws, replacement, lifted):
    ends, weights = set(), set()
    for seed in range(6 if vocabulary == 7 else 1):
        given = *forest(vocabulary, dtype, laws, seed), replacement, lifted
        counters = torch.zeros(200, dtype=torch.int32)
        found, expected = both(rejection_ends, *given, counters)
        assert not counters.any()  # zeros for the next launch
        assert torch.equal(found[0], expected[0])
        for ours, theirs in zip(found[1:], expected[1:], strict=True):
            assert_close(ours[KNOWN], theirs[KNOWN], rtol=1e-5, atol=1e-6)
        ends.update(found[0].tolist())
        weights.update(found[1][KNOWN].tolist())
    # Negative control: the uniforms decide, and only lifted nodes have weights of their own.
    assert len(ends) > (3 if vocabulary == 7 else 1)
    assert (weights != {1.0}) == lifted


def test_counters_are_made_if_there_are_too_few(guarded):
    given = *forest(7, torch.float32, "drawn", 0), False, True
    few = torch.full((9,), 7, dtype=torch.int32)
    found, expected = both(rejection_ends, *given, few)
    assert torch.equal(found[0], expected[0])
    assert (few == 7).all()


def test_samples_without_drafts_end_at_their_roots(guarded):
    """All places of nodes are unused."""
    scores, lse, draft, inner, draft_row, children, tokens, tops, *others = forest(7, torch.float32, "drawn", 0)
    nothing = [torch.full_like(one, -1) for one in (inner, draft_row, children, tokens)]
    for lifted in (False, True):
        given = scores, lse, draft, *nothing, tops, *others, False, lifted, None
        assert both(rejection_ends, *given)[0][0].tolist() == [0, 9, 12]


@pytest.mark.parametrize("nodes", [0, 1, 4])
@pytest.mark.parametrize("vocabulary", [7, CHUNK + 1])
def test_draw_behind(guarded, vocabulary, nodes):
    scores, lse, draft, draft_row, weight, tokens = children(vocabulary)
    generator = torch.Generator().manual_seed(0)
    mass = torch.rand(4, -(-vocabulary // CHUNK), generator=generator, dtype=torch.float64)
    mass[2] = 0  # any mass is a rounding error
    of_nodes = (
        torch.tensor([0, -1, 4, 2]),
        draft_row,
        tokens,
        weight,
        torch.rand(4, generator=generator).double(),
        mass,
    )
    tokens = set()
    for _ in range(8):
        uniforms = torch.rand(5, generator=generator, dtype=torch.float64)
        ends = torch.randint(5, (6,), generator=generator)
        found, expected = both(draw_behind, scores, lse, draft, *(x[:nodes] for x in of_nodes), ends, uniforms)
        assert torch.equal(found, expected)
        tokens.update(found.tolist())
    assert len(tokens) > 2  # negative control: uniforms decide


@pytest.mark.parametrize("vocabulary", [7, CHUNK + 1])
def test_tops_are_taken(guarded, vocabulary):
    draft = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0)).mul(2).round().softmax(dim=-1)
    draft[2], draft[3] = 0, torch.nan
    draft[1, 3:5] = draft[1].max() * 2  # the first of equal ones is taken first
    most, threshold = torch.tensor([3, 2, 3, 3]), torch.tensor([0.0, 0.01, 0.0, 0.0], dtype=torch.float64)
    ours, theirs = draft.clone(), draft.clone()
    with choice.use("triton"):
        found = take_tops(ours, most, threshold, 3)
    assert torch.equal(found, take_tops.reference(theirs, most, threshold, 3))
    assert torch.equal(ours.nan_to_num(-1), theirs.nan_to_num(-1))
    assert found[1].tolist() == [3, 4, -1]
    assert (found[2:] == -1).all()
    assert (ours[0] != draft[0]).sum() == 3  # negative control: tops are removed


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", SIZES[1:])
def test_rows_are_read(guarded, vocabulary, dtype, divide):
    logits = torch.randn(7, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, vocabulary // 2 :] = logits[1].max()  # ties: the first token counts
    logits[2], logits[3, 1], logits[4, 0], logits[5, 2] = -torch.inf, torch.inf, torch.nan, torch.nan
    tokens = torch.tensor([3, 4, 5, 6, 7, -1, 8])
    sample, temperature = torch.tensor([0, 1, 1, 1, 1, 1, 2]), torch.tensor([0.7, 1.3, 0.0], dtype=torch.float64)
    with choice.use("triton"):
        best, broken, scores, lse = score_rows(logits, tokens, sample, temperature, divide=divide)
        plain = log_sum_exp(scores) if divide else None
    expected = score_rows_reference(logits, tokens, sample, temperature, divide)
    sound = [0, 1, 6]
    assert torch.equal(best[sound], expected[0][sound])
    assert broken.tolist() == expected[1].tolist() == [0, 3, 0]
    assert ((best >= 0) & (best < vocabulary)).all()
    assert scores.shape == expected[2].shape
    assert lse.shape == expected[3].shape
    if divide:
        assert torch.equal(scores[sound], expected[2][sound])
        assert torch.equal(lse[sound], plain[sound])
        assert_close(lse[sound], expected[3][sound])
        assert scores[6].isfinite().sum() == 1
        assert lse[4].isnan()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_verdicts(coupling, lifted):
    choice.ran.clear()
    check_verdicts(coupling, lifted, 7, 1, "triton")
    assert all(choice.ran[f"{name}/triton"] for name in ("log_sum_exp", "rejection_ends", "draw_behind"))


PROCESSORS = [TopKLogitsWarper(1), TopKLogitsWarper(5), TopPLogitsWarper(0.3), TopPLogitsWarper(0.9)]


@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda one: f"{type(one).__name__} {vars(one)}")
def test_float64_scores_keep_their_tokens(processor):
    """Float64 scores are not compared with float32 thresholds."""
    scores = torch.randn(200, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores[:, 7] = scores[:, 30] + 1e-12
    expected = processor(None, scores)
    with choice.use("triton"):
        found = LogitsPipeline([processor])(scores, lambda row: [])
        best = row_max(scores)[1]
    assert torch.equal(found, expected)
    assert torch.equal(best, scores.argmax(dim=-1))


def test_the_operators_are_registered_properly_and_compile():
    arguments = problem(300)
    calls = [
        (row_stats, arguments[:1]),
        (left_mass, arguments),
        (left_pick, (*arguments, torch.zeros(4, dtype=torch.int64), torch.full((4,), 0.1, dtype=torch.float64))),
    ]
    library.opcheck(take_tops.portable, (arguments[2].clone(), torch.tensor([1, 0, 2]), torch.zeros(3), 2))
    trees = *forest(300, torch.float32, "tops", 0), False, True, torch.zeros(200, dtype=torch.int32)
    library.opcheck(rejection_ends.portable, trees)
    rows = arguments[0], torch.arange(5), torch.arange(5) // 3, torch.tensor([0.7, 0.0], dtype=torch.float64)
    for divide in (False, True):
        library.opcheck(torch.ops.arbordraft.score_rows.portable, (*rows, divide))
    for operator, given in calls:
        library.opcheck(operator.portable, given)
        compiled = torch.compile(operator.portable, fullgraph=True, backend="aot_eager")
        with choice.use("triton"):
            assert_close(compiled(*given), operator(*given))
