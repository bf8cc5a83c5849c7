"""Kernels that grow whole trees refuse arguments that do not fit; test_growth.py tests their results."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from arbordraft import TreeTopology
from arbordraft.kernels.decoder_layers import LayerWeights, Matrix, Norm
from arbordraft.kernels.draft_tree import DraftRun, DraftWeights, Draws, Limits, TreesToGrow, draft_from_rows
from arbordraft.kernels.draft_tree.reference import Trees
from arbordraft.kernels.prepacked_linear import prepack
from arbordraft.trees.forest import Forest

pytestmark = pytest.mark.usefixtures("kernels")

VOCAB, STATES, HIDDEN, ROWS = 20, 24, 32, 40
CHAIN = TreeTopology.chain(2)


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


def planted(roots=(5,), shape=CHAIN, levels=None, limits=None, **changes):
    """Returns trees of roots alone, and how far they go on: to the end by default."""
    trees = Forest.of_roots(shape, roots, [None] * len(roots))
    trees.reach[:, 0] = 1
    known = Limits.everything([shape.max_depth] * len(roots) if levels is None else levels)
    fields = {"trees": trees, "slots": [*range(len(roots))], "limits": replace(known, **limits or {})}
    return TreesToGrow(**{**fields, "offsets": shape.child_offsets, "children": shape.child_order, **changes})


def drafted(run=None, trees=None, fed=None, **changes):
    """Drafts a chain of two after three tokens, in the first pool rows; returns trees, fed nodes and broken rows."""
    to_grow = planted(**trees or {})
    fed = np.full(to_grow.trees.token.shape, -1) if fed is None else fed
    given = {
        "tokens": torch.tensor([3, 4, 5]),
        "states": torch.randn(3, STATES),
        "pools": [(torch.zeros(ROWS, 1, 16), torch.zeros(ROWS, 1, 16))],
        "slabs": torch.tensor([[0], [0], [3]]),
    }
    broken = (run or draft_run())(**given | changes, trees=to_grow, fed=fed)
    return to_grow.trees, fed, broken


def drafts(found):
    return int((found[0].token[:, 1:] >= 0).sum())


def draws(seeds=1, positions=1, heat=1.0):
    return {"draws": Draws(torch.zeros(seeds, dtype=torch.int64), torch.zeros(positions, dtype=torch.int64), [heat])}


def test_arguments_that_fit_are_drafted():
    trees, fed, broken = found = drafted()
    assert trees.token[0, 0] == 5
    assert drafts(found) == 2
    assert fed.tolist() == [[-1, 0, -1]]
    assert ((trees.chance > 0) & (trees.chance <= 1)).tolist() == [[False, True, True]]
    assert trees.reach.tolist() == [[1, *np.cumprod(trees.chance[0, 1:])]]
    assert not broken
    assert drafts(drafted(draft_run(states=False), states=None)) == 2
    assert drafts(drafted(trees=draws())) == 2
    trees, fed, broken = drafted(trees={"levels": [0]})
    assert (trees.token.tolist(), trees.chance.tolist()) == ([[5, -1, -1]], [[0] * 3])
    assert (trees.reach.tolist(), fed.tolist(), broken) == ([[1, -1, -1]], [[-1] * 3], 0)
    assert drafts(drafted(trees={"levels": [9]})) == 2


def test_fed_rows_follow_the_committed_rows():
    """No other rows of the pools are read or written."""
    keys, values = (torch.full((ROWS, 1, 16), float("nan")) for _ in range(2))
    keys[7:9], values[7:9] = torch.randn(2, 2, 1, 16)
    before = keys.clone()
    found = drafted(pools=[(keys, values)], slabs=torch.tensor([[7], [2], [3]]))
    assert drafts(found) == 2
    assert not found[2]
    assert torch.equal(keys[7:9], before[7:9])
    assert keys[9:13].isfinite().all()  # the three missing rows and the first draft
    assert keys[:7].isnan().all()
    assert keys[13:].isnan().all()


def with_array(name, change):
    """Changes an array of trees that would fit."""
    arrays = {known: getattr(planted().trees, known) for known in ("token", "chance", "reach")}
    return {"trees": {"trees": Trees(**{**arrays, name: change(arrays[name])})}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": torch.tensor([3, VOCAB, 5])}, f"token {VOCAB} has no embedding"),
        ({"tokens": torch.tensor([3, -1, 5])}, "token -1 has no embedding"),
        ({"tokens": torch.tensor([3, 4])}, "expected 3 rows, got 2"),
        ({"states": torch.randn(2, STATES)}, "expected 3 rows"),
        ({"states": None}, "a drafter reads states"),
        ({"slabs": torch.tensor([[0, 9], [0, 0], [3, 0]])}, "do not fit"),
        ({"slabs": torch.tensor([[0, 9], [0, 0], [3, 0]]), "trees": {"roots": (5, 6)}}, "sample 1 lacks nothing"),
        ({"slabs": torch.tensor([[0], [-1], [3]])}, "lacks nothing"),
        ({"slabs": torch.tensor([[0], [0]])}, r"slabs of shape \[3, S\]"),
        ({"slabs": torch.tensor([[ROWS - 3], [0], [3]])}, "outside its pool"),
        ({"slabs": torch.tensor([[ROWS - 2], [0], [3]])}, "outside its pool"),
        ({"pools": [(torch.zeros(ROWS, 2, 16), torch.zeros(ROWS, 1, 16))]}, "a pool has the wrong shape"),
        ({"pools": [(torch.zeros(ROWS, 1, 16), torch.zeros(9, 1, 16))]}, "different sizes"),
        ({"pools": []}, "parameters of 0 layers"),
        ({"trees": {"slots": [0, 0]}}, "do not fit"),
        ({"trees": {"limits": {"calibration": np.ones((1, 2))}}}, "do not fit"),
        ({"trees": {"limits": {"expected": np.ones((1, 0))}}}, "do not fit"),
        ({"trees": {"children": [1]}}, "do not fit"),
        ({"trees": {"offsets": [0, 1, 2]}}, "do not fit"),
        ({"trees": {"levels": [2, 2]}}, "do not fit"),
        ({"trees": {"slots": [1]}}, "slot 1 has no root"),
        ({"trees": {"slots": [-1]}}, "slot -1 has no root"),
        ({"trees": {"roots": (None,)}}, "slot 0 has no root"),
        (with_array("token", lambda array: array[:, :2].copy()), "arrays of one shape"),
        (with_array("chance", lambda array: array[:, :2].copy()), "arrays of one shape"),
        (with_array("reach", lambda array: array[:, :2].copy()), "arrays of one shape"),
        (with_array("reach", lambda array: np.zeros((1, 6))[:, ::2]), "contiguous float64"),
        (with_array("chance", lambda array: array.astype(np.float32)), "contiguous float64"),
        ({"fed": np.full((1, 2), -1)}, "a place for every node"),
        ({"trees": draws(seeds=2)}, "noise needs places"),
        ({"trees": draws(positions=2)}, "noise needs places"),
        ({"trees": draws(heat=-1.0)}, "temperatures must not be negative"),
        ({"blocks": torch.tensor([], dtype=torch.int64)}, "at least one"),
        ({"blocks": torch.tensor([1, 0])}, "must ascend"),
        ({"blocks": torch.tensor([0, 0])}, "must ascend"),
        ({"blocks": torch.tensor([-1])}, "must ascend"),
        ({"blocks": torch.tensor([0, 2])}, "must ascend"),
        ({"blocks": torch.tensor([0]), "run": draft_run(vocabulary=torch.arange(VOCAB))}, "blocks are of all tokens"),
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


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("blocks", [[0], [1, 2, 4], [2], [0, 1, 2, 3, 4]], ids=str)
def test_only_some_blocks_of_tokens_are_drafted(blocks, noisy):
    """A head without the other rows gives the same drafts; the last block is not full."""
    many, shape = 70, TreeTopology.fork(3, 1)
    embedding, head, states = torch.randn(many, HIDDEN), torch.randn(many, HIDDEN), torch.randn(3, STATES)
    tokens = torch.tensor([token for token in range(many) if token // 16 in blocks])
    run = draft_run(embedding=embedding, head=Matrix(prepack(head)), outputs=many)
    cut = replace(run.weights, head=Matrix(prepack(head[tokens])), outputs=len(tokens), vocabulary=tokens)
    exact = replace(run.weights, exact=run.weights.head)
    given = {"trees": {"shape": shape, **(draws() if noisy else {})}, "states": states}
    expected, *_ = drafted(DraftRun(cut), **given)
    for weights in (run.weights, exact):
        found, *_ = drafted(DraftRun(weights), blocks=torch.tensor(blocks), **given)
        assert np.array_equal(found.token, expected.token)
        assert found.chance == pytest.approx(expected.chance, rel=1e-5)
    all_tokens, *_ = drafted(run, **given)
    assert np.array_equal(all_tokens.token, expected.token) == (len(tokens) == many)


SCORES = torch.log_softmax(torch.randn(2, 2, VOCAB, generator=torch.Generator().manual_seed(0)), dim=-1)


def from_rows(scores=SCORES, trees=None, **changes):
    to_grow = planted(**{"roots": (3, 4), **(trees or {})})
    broken = draft_from_rows(scores, to_grow, **changes)
    return to_grow.trees, broken


def test_the_likeliest_tokens_of_rows_are_drafted():
    trees, broken = from_rows()
    best = SCORES.max(dim=-1)
    assert trees.token.tolist() == [[3, *best.indices[0].tolist()], [4, *best.indices[1].tolist()]]
    assert trees.chance[:, 1:] == pytest.approx(best.values.exp().numpy(), rel=1e-5)
    assert not broken
    named, _ = from_rows(vocabulary=torch.arange(VOCAB) * 3)
    assert np.array_equal(named.token[:, 1:], 3 * trees.token[:, 1:])


def test_only_the_slots_that_draft_are_grown():
    """Every slot has limits of its own."""
    forest, _ = from_rows(trees={"roots": (3, None, 4, 5), "slots": [2, 0], "levels": [1, 2, 2, 2]})
    best = SCORES.argmax(dim=-1).tolist()
    assert forest.token.tolist() == [[3, best[1][0], -1], [-1] * 3, [4, *best[0]], [5, -1, -1]]
    assert forest.reach.min(axis=1).tolist() == [-1, -1, forest.reach[2, 2], -1]


def test_the_first_among_equals_is_drafted():
    trees, _ = from_rows(torch.zeros(2, 2, VOCAB))
    assert trees.token[:, 1:].tolist() == [[0, 0]] * 2
    assert trees.chance[:, 1:] == pytest.approx(np.full((2, 2), 1 / VOCAB))


def test_impossible_tokens_are_not_drafted():
    """A row may hold fewer possible tokens than a node has children, or none."""
    scores = torch.full((1, 1, VOCAB), -torch.inf)
    for possible in ([], [4], [9, 2]):
        scores[0, 0, possible] = torch.tensor([1.0, 2.0])[: len(possible)]
        trees, broken = from_rows(scores, {"roots": (3,), "shape": TreeTopology.fork(3, 1)})
        found = sorted(possible, key=lambda token: -scores[0, 0, token])
        assert trees.token.tolist() == [[3, *found, *[-1] * (3 - len(found))]]
        assert broken == (not possible)
        scores[:] = -torch.inf


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": SCORES[0]}, r"expected rows \[S, K, D\]"),
        ({"trees": {"roots": (3,)}}, "do not fit"),
        ({"trees": {"roots": (3, None)}}, "slot 1 has no root"),
        ({"trees": {"levels": [2, 3]}}, "rows for 2 depths only"),
        ({"trees": {"limits": {"calibration": np.ones((2, 3))}}}, "do not fit"),
        ({"vocabulary": torch.arange(3)}, "a token for each"),
        ({"table": torch.zeros(VOCAB, 16)}, "a correction needs its table"),
        ({"trees": draws(seeds=1)}, "noise needs places"),
        ({"trees": draws(seeds=2, positions=2)}, "a temperature for every sample"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rows_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(RuntimeError, match=message):
        from_rows(**changes)


@pytest.mark.parametrize("states", [True, False])
def test_forced_nodes_below_a_level_that_does_not_pay_are_not_fed(states):
    """Their parents were not fed either, so there is nothing that they could read."""
    shape = TreeTopology.chain(4)
    to_grow = planted(roots=(5, 6), shape=shape, limits={"row_cost": 0.1})
    limits = Limits.of([4, 4], [(1.0,)] * 2, [(0.9, 0.02, 0.7, 0.7), (0.9, 0.8, 0.7, 0.7)], row_cost=0.1)
    trees = to_grow.trees
    trees.token[:, 1:3], trees.chance[:, 1:3], trees.reach[:, 1:3] = 7, 1.0, 1.0
    fed = np.full(trees.token.shape, -1)
    pools = [(torch.zeros(ROWS, 1, 16), torch.zeros(ROWS, 1, 16))]
    broken = draft_run(states)(
        torch.tensor([3, 5, 4, 6]),
        torch.randn(4, STATES) if states else None,
        pools,
        torch.tensor([[0, 20], [0, 0], [2, 2]]),
        to_grow._replace(limits=limits),
        fed,
    )
    assert not broken
    assert fed[0].tolist() == [-1] * 5
    assert fed[1, 1:3].tolist() == [0, 1]
    assert trees.token[0].tolist() == [5, 7, 7, -1, -1]
    assert trees.token[1, 3] >= 0
