"""Kernels that grow whole trees refuse arguments that do not fit; test_growth.py tests their results."""

import pytest
import torch

from arbordraft import TreeTopology
from arbordraft.kernels.decoder_layers import LayerWeights, Matrix, Norm
from arbordraft.kernels.draft_tree import DraftRun, DraftWeights, Draws, Growth, draft_from_rows
from arbordraft.kernels.prepacked_linear import prepack

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB, STATES, HIDDEN, ROWS = 20, 24, 32, 40
CHAIN = TreeTopology.chain(2)
GROWTH = Growth(CHAIN.child_offsets, CHAIN.child_order, [2], [1.0], [1.0], [1.0], 0.0, 0.0, -1)


def matrix(outputs, inputs):
    return Matrix(prepack(torch.randn(outputs, inputs) * inputs**-0.5))


def draft_run(states=True, **changes):
    """Builds a drafter of one layer, which reads hidden states of a target beside its embeddings, or these alone."""
    beside = HIDDEN if states else 0
    layer = LayerWeights(
        pre_attention=Norm(torch.ones(HIDDEN)),
        qkv=matrix(4 * 16, HIDDEN + beside),
        query_norm=None,
        key_norm=None,
        sinks=None,
        out=matrix(HIDDEN, 2 * 16),
        post_attention=None,
        pre_mlp=Norm(torch.ones(HIDDEN)),
        gate_up=matrix(96, HIDDEN),
        down=matrix(HIDDEN, 48),
        post_mlp=None,
        heads=2,
        kv_heads=1,
        dim=16,
        inner=48,
        activation="silu",
        window=None,
        rotary=True,
        epsilon=1e-5,
        scale=0.25,
        softcap=None,
        beside_norm=Norm(torch.ones(HIDDEN)) if states else None,
        table=changes.pop("table", 0),
    )
    fields = {
        "embedding": torch.randn(VOCAB, HIDDEN),
        "fuse": matrix(HIDDEN, STATES) if states else None,
        "layers": [layer],
        "norm": Norm(torch.ones(HIDDEN)),
        "head": matrix(VOCAB, HIDDEN),
        "outputs": VOCAB,
        "vocabulary": None,
        "frequencies": 100.0 ** -(torch.arange(8) / 8)[None],
        "factors": [1.0],
        "epsilon": 1e-5,
    }
    return DraftRun(DraftWeights(**fields | changes))


def drafted(run=None, **changes):
    """Drafts a chain of two after three tokens at the first rows of the pools."""
    given = {
        "tokens": torch.tensor([3, 4, 5]),
        "states": torch.randn(3, STATES),
        "pools": [(torch.zeros(ROWS, 1, 16), torch.zeros(ROWS, 1, 16))],
        "slabs": torch.tensor([[0], [0], [3]]),
        "growth": GROWTH,
    }
    return (run or draft_run())(**given | changes)


PAIR = GROWTH._replace(levels=[1, 1], trust=[1.0] * 2, next=[1.0] * 2, weights=[1.0] * 2)


def growth(**changes):
    return {"growth": GROWTH._replace(**changes)}


def draws(seeds=1, positions=1, heat=1.0):
    return {"draws": Draws(torch.zeros(seeds, dtype=torch.int64), torch.zeros(positions, dtype=torch.int64), [heat])}


def test_arguments_that_fit_are_drafted():
    found = drafted()
    assert (found.samples, found.nodes) == ([0, 0], [1, 2])
    assert found.fed == [[0, 1]]
    assert all(0 < chance <= 1 for chance in found.chances)
    assert not found.broken
    assert len(drafted(draft_run(states=False), states=None).chances) == 2
    assert len(drafted(**draws()).chances) == 2
    assert drafted(**growth(levels=[0])) == ([], [], [], [], [], 0, False)
    assert len(drafted(**growth(levels=[9])).chances) == 2


def test_fed_rows_follow_the_committed_rows():
    """No other rows of the pools are read or written."""
    keys, values = (torch.full((ROWS, 1, 16), float("nan")) for _ in range(2))
    keys[7:9], values[7:9] = torch.randn(2, 2, 1, 16)
    before = keys.clone()
    found = drafted(pools=[(keys, values)], slabs=torch.tensor([[7], [2], [3]]))
    assert len(found.chances) == 2
    assert not found.broken
    assert torch.equal(keys[7:9], before[7:9])
    assert keys[9:13].isfinite().all()  # the three missing rows and the first draft
    assert keys[:7].isnan().all()
    assert keys[13:].isnan().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([3, VOCAB, 5])}, f"token {VOCAB} has no embedding"),
        ({"tokens": torch.tensor([3, -1, 5])}, "token -1 has no embedding"),
        ({"tokens": torch.tensor([3, 4])}, "expected 3 rows, got 2"),
        ({"states": torch.randn(2, STATES)}, "expected 3 rows"),
        ({"states": None}, "a drafter reads states"),
        ({"slabs": torch.tensor([[0, 9], [0, 0], [3, 0]])}, "do not fit"),
        ({"slabs": torch.tensor([[0, 9], [0, 0], [3, 0]]), "growth": PAIR}, "sample 1 lacks nothing"),
        ({"slabs": torch.tensor([[0], [-1], [3]])}, "lacks nothing"),
        ({"slabs": torch.tensor([[0], [0]])}, r"slabs of shape \[3, S\]"),
        ({"slabs": torch.tensor([[ROWS - 3], [0], [3]])}, "outside its pool"),
        ({"slabs": torch.tensor([[ROWS - 2], [0], [3]])}, "outside its pool"),
        ({"pools": [(torch.zeros(ROWS, 2, 16), torch.zeros(ROWS, 1, 16))]}, "a pool has the wrong shape"),
        ({"pools": [(torch.zeros(ROWS, 1, 16), torch.zeros(9, 1, 16))]}, "different sizes"),
        ({"pools": []}, "parameters of 0 layers"),
        (growth(levels=[2, 2]), "do not fit"),
        (growth(trust=[1.0, 1.0]), "do not fit"),
        (growth(next=[]), "do not fit"),
        (growth(children=[1]), "do not fit"),
        (growth(offsets=[0, 1, 2]), "do not fit"),
        (draws(seeds=2), "noise needs places"),
        (draws(positions=2), "noise needs places"),
        (draws(heat=-1.0), "temperatures must not be negative"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        drafted(**changes)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({"table": 1}, "a table that is not there"),
        ({"factors": [1.0, 1.0]}, "one for every rotary table"),
        ({"exact": matrix(50, HIDDEN)}, f"not prepacked for {VOCAB} outputs"),
        ({"exact": matrix(VOCAB, HIDDEN), "vocabulary": torch.arange(VOCAB)}, "an exact head knows all tokens"),
        ({"vocabulary": torch.arange(5)}, f"a token for each of {VOCAB} outputs"),
        ({"fuse": None}, "a drafter reads states"),
        ({"outputs": 50}, "not prepacked for 50 outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_that_do_not_fit_are_refused(run, message):
    with pytest.raises(RuntimeError, match=message):
        drafted(draft_run(**run))


SCORES = torch.log_softmax(torch.randn(2, 2, VOCAB, generator=torch.Generator().manual_seed(0)), dim=-1)
TWO = GROWTH._replace(levels=[2, 2], trust=[1.0] * 2, next=[1.0] * 2, weights=[1.0] * 2)


def from_rows(**changes):
    given = {"scores": SCORES, "growth": TWO, "roots": torch.tensor([3, 4])}
    return draft_from_rows(**given | changes)


def test_the_likeliest_tokens_of_rows_are_drafted():
    found = from_rows()
    best = SCORES.max(dim=-1)
    assert (found.samples, found.nodes) == ([0, 0, 1, 1], [1, 2, 1, 2])
    assert found.tokens == best.indices.flatten().tolist()
    assert found.chances == pytest.approx(best.values.exp().flatten().tolist(), rel=1e-5)
    named = from_rows(vocabulary=torch.arange(VOCAB) * 3)
    assert named.tokens == [3 * token for token in found.tokens]


def test_the_first_among_equals_is_drafted():
    found = from_rows(scores=torch.zeros(2, 2, VOCAB))
    assert found.tokens == [0] * 4
    assert found.chances == pytest.approx([1 / VOCAB] * 4)


def test_impossible_tokens_are_not_drafted():
    """A row may hold fewer possible tokens than a node has children, or none."""
    scores = torch.full((1, 1, VOCAB), -torch.inf)
    fork = TreeTopology.fork(3, 1)
    wide = Growth(fork.child_offsets, fork.child_order, [1], [1.0], [1.0], [1.0], 0.0, 0.0, -1)
    for possible in ([], [4], [9, 2]):
        scores[0, 0, possible] = torch.tensor([1.0, 2.0])[: len(possible)]
        found = draft_from_rows(scores, wide, roots=torch.tensor([3]))
        assert found.tokens == sorted(possible, key=lambda token: -scores[0, 0, token])
        assert found.broken == (not possible)
        scores[:] = -torch.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": SCORES[0]}, "a root for each sample"),
        ({"roots": torch.tensor([3])}, "a root for each sample"),
        ({"growth": TWO._replace(levels=[2, 3])}, "rows for 2 depths only"),
        ({"growth": TWO._replace(trust=[1.0] * 3)}, "do not fit"),
        ({"vocabulary": torch.arange(3)}, "a token for each"),
        ({"table": torch.zeros(VOCAB, 16)}, "a correction needs its table"),
        (draws(seeds=1), "noise needs places"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        from_rows(**changes)
