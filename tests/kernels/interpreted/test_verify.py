"""Passes over rows of scores in Triton's interpreter against the references, and whole verifications with them."""

import pytest
import torch
from support.verdicts import COUPLINGS, check_verdicts
from torch import library
from torch.testing import assert_close
from transformers.generation import TopKLogitsWarper, TopPLogitsWarper

from arbordraft.kernels import choice
from arbordraft.kernels.verify import (
    draw_behind,
    last_top_down,
    left_mass,
    left_pick,
    lift_level,
    lifted_ends,
    log_sum_exp,
    rejection_laws,
    row_max,
    row_stats,
)
from arbordraft.kernels.verify.reference import CHUNK
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
    scores, lse, draft, row, draft_row, weight, _, _ = problem(vocabulary)
    tokens = torch.tensor([[3, 5, 6], [2, 4, -1], [1, 1, -1], [-1, -1, -1]])
    certain = torch.tensor([[False, False, False], [True, False, False], [True, True, False], [False, False, False]])
    return scores, lse, draft, row, draft_row, weight.double(), tokens, tokens >= 0, certain


@pytest.mark.parametrize("replacement", [False, True], ids=["without replacement", "with replacement"])
@pytest.mark.parametrize("vocabulary", SIZES[1:])
def test_rejection_laws(guarded, vocabulary, replacement):
    found, expected = both(rejection_laws, *children(vocabulary), replacement)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def walked(generator, nodes=4):
    """Draws two trees of four and two nodes; one of four places is free, and the first ``nodes`` are known."""
    rows = torch.tensor([[1, 2, 3], [-1, -1, -1], [5, -1, -1], [-1, -1, -1]])
    inner = torch.tensor([0, -1, 4, 2])
    chances = torch.rand(4, 3, generator=generator, dtype=torch.float64) / 3
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    return chances[:nodes], rows[:nodes], inner[:nodes], torch.tensor([0, 4]), uniforms, 2


@pytest.mark.parametrize("nodes", [0, 1, 4])
def test_walks_from_the_roots(guarded, nodes):
    generator, ends = torch.Generator().manual_seed(0), set()
    for _ in range(20):
        found, expected = both(last_top_down, *walked(generator, nodes))
        assert torch.equal(found, expected)
        ends.update(found.tolist())
    assert ends == {0: {0, 4}, 1: {0, 1, 2, 3, 4}, 4: {0, 1, 2, 3, 4, 5}}[nodes]


@pytest.mark.parametrize("nodes", [0, 1, 4])
@pytest.mark.parametrize("vocabulary", [7, CHUNK + 1])
def test_draw_behind(guarded, vocabulary, nodes):
    scores, lse, draft, _, draft_row, weight, tokens, _, _ = children(vocabulary)
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


def lifting(seed):
    """Draws two trees of four and two rows, chances of the nodes of one depth, one of which is a free place."""
    generator = torch.Generator().manual_seed(seed)
    chance = torch.rand(6, generator=generator, dtype=torch.float64)
    reached = torch.tensor([True, seed % 2 == 0, True, False, True, False])
    accept = torch.rand(3, 3, generator=generator, dtype=torch.float64) / 3
    accept[0, 1], accept[2, 1:] = 0, 0
    stop = torch.rand(3, generator=generator, dtype=torch.float64) * (seed != 3)
    inner, children = torch.tensor([0, -1, 4]), torch.tensor([[1, 2, 3], [-1, -1, -1], [5, -1, -1]])
    weight = torch.tensor([1.0 if seed % 3 else 0.4, 0.5, 0.7], dtype=torch.float64)
    return chance, reached, weight, accept, stop, inner, children


@pytest.mark.parametrize("seed", range(6))
def test_chances_are_handed_on(guarded, seed):
    found, expected = lifting(seed), lifting(seed)
    with choice.use("triton"):
        lift_level(*found)
    lift_level.reference(*expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0], lifting(seed)[0])  # negative control: something was handed on
    order, sample, roots = torch.tensor([3, 0, 1, 2, 1, 0]), torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 4])
    ends = set()
    for turn in range(8):
        uniforms = torch.rand(6, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        given = *found[:2], uniforms, order, sample, roots
        ours, theirs = both(lifted_ends, *given)
        assert torch.equal(ours, theirs)
        ends.update(ours.tolist())
    assert len(ends) > 2


@pytest.mark.one_in(2)
@pytest.mark.parametrize("lifted", [False, True], ids=["top-down", "lifted"])
@pytest.mark.parametrize("coupling", COUPLINGS.values(), ids=COUPLINGS)
def test_verdicts(coupling, lifted):
    choice.ran.clear()
    check_verdicts(coupling, lifted, 7, 2, "triton")
    assert all(choice.ran[f"{name}/triton"] for name in ("log_sum_exp", "rejection_laws", "draw_behind"))
    assert choice.ran["lifted_ends/triton" if lifted else "last_top_down/triton"]
    assert not lifted or choice.ran["lift_level/triton"]


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
        (rejection_laws, (*children(300), False)),
        (last_top_down, walked(torch.Generator().manual_seed(0))),
        (
            lifted_ends,
            (*lifting(0)[:2], torch.rand(6).double(), torch.arange(6), torch.arange(6) // 4, torch.tensor([0, 4])),
        ),
    ]
    library.opcheck(lift_level.portable, lifting(0))
    for operator, given in calls:
        library.opcheck(operator.portable, given)
        compiled = torch.compile(operator.portable, fullgraph=True, backend="aot_eager")
        with choice.use("triton"):
            assert_close(compiled(*given), operator(*given))
