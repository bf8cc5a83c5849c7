"""The bytes that kernels claim to move and their launches, against those in Triton's interpreter."""

import numpy as np
import pytest
import torch
from support.launches import LAUNCHES
from support.packed_forest import forest
from support.ragged_case import Case
from triton.runtime import interpreter

from arbordraft import TreeTopology
from arbordraft.kernels import choice
from arbordraft.kernels.accepted_paths import matching_ends
from arbordraft.kernels.fused_layers import add_rms_norm, gated_activation, rms_norm, rotate_append
from arbordraft.kernels.fused_linear import gated_linear, linear, project_rotate_append
from arbordraft.kernels.grouped_linear import grouped_linear, round_to_panels
from arbordraft.kernels.gumbel import gumbel, gumbel_argmax
from arbordraft.kernels.kv_cache import append, compact
from arbordraft.kernels.ragged_tree_attention import ragged_tree_attention
from arbordraft.kernels.ragged_tree_attention.tiling import SPAN, choose
from arbordraft.kernels.tree_expand import tree_expand
from arbordraft.kernels.verify import (
    draw_behind,
    keep_lowest,
    left_mass,
    left_pick,
    log_sum_exp,
    rejection_ends,
    row_stats,
    score_rows,
    take_tops,
)
from arbordraft.kernels.verify.reference import CHUNK
from arborlab import work

CHAIN, TREE = TreeTopology.chain, TreeTopology.k_ary(2, 2)


@pytest.fixture
def touched(monkeypatch):
    """Records the bytes that Triton kernels read and write, and the operations of matrix products."""
    found = {"read": set(), "written": set(), "products": 0}
    builder = interpreter.InterpreterBuilder
    load, store, dot = builder.create_masked_load, builder.create_masked_store, builder.create_dot

    def note(where, pointers, mask):
        size = pointers.get_element_ty().primitive_bitwidth // 8
        for address in np.unique(np.broadcast_to(pointers.data, mask.data.shape)[mask.data.astype(bool)]).tolist():
            found[where].update(range(address, address + size))

    def noted_load(self, pointers, mask, *rest):
        note("read", pointers, mask)
        return load(self, pointers, mask, *rest)

    def noted_store(self, pointers, value, mask, *rest):
        note("written", pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def noted_dot(self, a, b, *rest):
        found["products"] += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(self, a, b, *rest)

    monkeypatch.setattr(builder, "create_masked_load", noted_load)
    monkeypatch.setattr(builder, "create_masked_store", noted_store)
    monkeypatch.setattr(builder, "create_dot", noted_dot)
    with choice.use("triton"):
        yield found


def moved(touched):
    """Counts the bytes that were touched since the last count."""
    count = len(touched["read"]) + len(touched["written"])
    touched["read"].clear()
    touched["written"].clear()
    return count


@pytest.mark.parametrize("causal", [False, True], ids=["trees", "prompts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_attention(touched, causal, dtype):
    samples = [(37, TREE), (101, CHAIN(69)), (0, CHAIN(0))]
    case = Case(samples, group=3, causal=causal, dtype=dtype, size=8, value_size=16)
    case.run(ragged_tree_attention)
    past, rows = [past for past, _ in samples], [tree.num_nodes for _, tree in samples]
    sizes = {"heads": 6, "kv_heads": 2, "size": 8, "value_size": 16, "itemsize": dtype.itemsize, "causal": causal}
    assert moved(touched) == work.attention(rows, past, rows, **sizes).bytes


def test_attention_in_splits(touched):
    case = Case([(700, TREE)], dtype=torch.float32, key_heads=1)
    case.run(ragged_tree_attention)
    sizes = {"heads": 2, "kv_heads": 1, "size": 8, "value_size": 8, "itemsize": 4}
    splits = choose(7, 2, 1, 700, 8, key_bytes=128, exact=True).splits
    whole, split = (work.attention([7], [700], [7], **sizes, splits=parts) for parts in (1, splits))
    assert moved(touched) == split.bytes + 4  # and the counter of the only tile, which is set to 0 again
    assert splits > 1
    assert split.bytes - whole.bytes == 2 * 7 * 2 * splits * (8 + 1) * 4
    assert split.flops == whole.flops


def test_attention_row_by_row(touched):
    """Rows in segments write and read a softmax for each of them, as splits do."""
    case = Case([(2 * SPAN + 5, CHAIN(2))], dtype=torch.float32, key_heads=1)
    case.run(ragged_tree_attention, row_invariant=True)
    sizes = {"heads": 2, "kv_heads": 1, "size": 8, "value_size": 8, "itemsize": 4}
    segments = 3
    whole = work.attention([3], [2 * SPAN + 5], [3], **sizes)
    partial = 2 * 3 * 2 * segments * (8 + 2) * 4  # written and read, rows, heads, values and two numbers
    region = 3 * 8  # positions of the keys of the tree
    assert moved(touched) == whole.bytes + partial + region + 3 * 4  # and the counters of three rows


def test_operations_of_attention(touched):
    """All tiles are full: 128 committed keys, and a tree of 64 nodes whose last 8 rows are new, in 16 lanes."""
    tree = TreeTopology.from_parents([-1, *range(55), *[55] * 8])
    case = Case([(128, tree)], last=1, dtype=torch.float32, key_heads=1, size=16)
    case.run(ragged_tree_attention)
    sizes = {"heads": 2, "kv_heads": 1, "size": 16, "value_size": 16, "itemsize": 4}
    assert (
        touched["products"] == work.attention([8], [128], [64], **sizes).flops == 2 * (8 * 2) * (128 + 64) * (16 + 16)
    )


def test_cache(touched):
    keys, values, new_keys, new_values = (torch.randn(rows, 2, size) for rows in (9, 3) for size in (3, 5))
    append(keys, values, new_keys, new_values, torch.tensor([4, 1, 7]))
    assert moved(touched) == work.append(3, 2 * (3 + 5), 4).bytes
    pools = [torch.randn(20, 2, 3) for _ in range(4)]
    compact(pools, [[(3, 1), (4, 2)], [], [(15, 14)]])
    assert moved(touched) == work.compact(3, 3, 6, 4, pools=4).bytes


def test_layers(touched):
    x, residual, weight = torch.randn(5, 24).half(), torch.randn(5, 24).half(), torch.randn(24).half()
    calls = [
        (rms_norm, (x, weight, 1e-5), work.rms_norm(5, 24, 2)),
        (add_rms_norm, (x, residual, weight, 1e-5), work.rms_norm(5, 24, 2, added=True)),
        (gated_activation, (x, residual), work.gated_activation(5, 24, 2)),
    ]
    for operator, arguments, expected in calls:
        operator(*arguments)
        assert moved(touched) == expected.bytes


@pytest.mark.parametrize("turning", [8, 6])
def test_rotation(touched, turning):
    query, key, value = (torch.randn(3, heads, size).half() for heads, size in ((17, 8), (2, 8), (2, 5)))
    cosine, sine = torch.randn(3, turning).half(), torch.randn(3, turning).half()
    pools = [torch.zeros(9, *heads.shape[1:]).half() for heads in (key, value)]
    rotate_append(query, key, value, cosine, sine, *pools, torch.tensor([4, 1, 7]))
    assert moved(touched) == work.rotate_append(3, 17, 2, 8, 5, 2, turning).bytes


def test_products(touched):
    x, weights = torch.randn(5, 40).half(), [torch.randn(24, 40).half() for _ in range(2)]
    linear(x, weights[0])
    assert moved(touched) == work.linear(5, 40, 24, 2).bytes
    gated_linear(x, weights)
    assert moved(touched) == work.gated_linear(5, 40, 24, 2).bytes
    heads = [torch.randn(count * 8, 40).half() for count in (3, 1, 1)]
    tables, pools = torch.randn(2, 5, 8).half(), torch.zeros(2, 9, 1, 8).half()
    project_rotate_append(x, heads, [], [], 0.0, 0.0, False, *tables, *pools, torch.tensor([4, 1, 7, 0, 2]))
    assert moved(touched) == work.project_rotate_append(5, 40, 3, 1, 8, 2).bytes


def test_products_with_weights_of_4_bits(touched):
    x, panels = torch.randn(5, 150).half(), round_to_panels(torch.randn(64, 150))
    grouped_linear(x, panels, outputs=64)
    assert moved(touched) == work.grouped_linear(5, 150, 64, 2).bytes
    grouped_linear(x, panels, outputs=64, activation="silu")
    assert moved(touched) == work.grouped_linear(5, 150, 64, 2, gated=True).bytes


def test_operations_of_products(touched):
    """All tiles are full."""
    x, weight = torch.randn(16, 128).half(), torch.randn(32, 128).half()
    linear(x, weight)
    assert touched["products"] == work.linear(16, 128, 32, 2).flops


@pytest.mark.parametrize("vocabulary", [100, CHUNK + 7])
def test_verification(touched, vocabulary):
    scores, draft = torch.randn(5, vocabulary).half(), torch.rand(3, vocabulary)
    row_stats(scores)
    assert moved(touched) == work.row_stats(5, vocabulary, 2).bytes
    row, draft_row = torch.tensor([4, 1, 2, 0]), torch.tensor([2, -1, 0, 1])
    nodes = (row, draft_row, torch.rand(4), torch.rand(4), torch.randint(vocabulary, (4, 2)))
    left_mass(scores, torch.zeros(5), draft, *nodes)
    assert moved(touched) == work.left_mass(4, 3, vocabulary, 2, 2).bytes
    if vocabulary < CHUNK:
        return
    left_pick(
        scores, torch.zeros(5), draft, *nodes, torch.zeros(4, dtype=torch.int64), torch.rand(4, dtype=torch.float64)
    )
    assert moved(touched) == work.left_pick(4, 3, 2, 2).bytes


@pytest.mark.parametrize("vocabulary", [100, 1030])
def test_truncation(touched, vocabulary):
    keep_lowest(torch.randn(2, vocabulary).half(), torch.zeros(2), 5, 0.0)
    assert moved(touched) == work.lowest_kept(2, vocabulary, 2).bytes


@pytest.mark.parametrize(("count", "mass"), [(5, 0.0), (0, 0.9)])
def test_truncation_by_lists(touched, count, mass):
    """Seven scores of each row are collected; all others are far below."""
    vocabulary = 2 * CHUNK + 130
    scores = torch.full((2, vocabulary), -30.0).half()
    scores[:, ::1200] = -2.0
    keep_lowest(scores, scores.float().logsumexp(dim=-1), count, mass)
    collected = 2 * 2 * 7 * 2  # written and read, rows, scores, bytes
    assert moved(touched) == work.lowest_kept(2, vocabulary, 2).bytes + collected


@pytest.mark.parametrize("children", [1, 3])
def test_expansion(touched, children):
    rows, vocabulary = 2, CHUNK + 130
    tree_expand(torch.randn(rows, vocabulary).half(), children)
    assert moved(touched) == work.tree_expand(rows, vocabulary, children, 2).bytes


@pytest.mark.parametrize("truncated", [False, True], ids=["all", "truncated"])
def test_noise(touched, truncated):
    rows, vocabulary = torch.arange(2), 4096 + 130
    gumbel(rows, rows + 1, vocabulary)
    assert moved(touched) == work.gumbel_noise(2, vocabulary).bytes
    lowest = torch.zeros(2) if truncated else None
    gumbel_argmax(torch.randn(2, vocabulary).half(), rows, rows + 1, 1.0, lowest)
    assert moved(touched) == work.gumbel_draw(2, vocabulary, 2, truncated=truncated).bytes


def test_operators_take_as_many_launches_as_are_counted_elsewhere(monkeypatch):
    """The recorded step's test counts operators; this one counts the launches of each."""
    counted, run = [], interpreter.GridExecutor.__call__
    monkeypatch.setattr(
        interpreter.GridExecutor, "__call__", lambda *given, **how: (counted.append(given), run(*given, **how))[1]
    )
    made = []
    monkeypatch.setattr(torch.Tensor, "new_zeros", lambda *given, **how: made.append(given))
    vocabulary, four = 2 * CHUNK + 130, torch.arange(4)
    scores, lse, draft, inner, draft_row, children, tokens, *others = forest(vocabulary, torch.float32, "tops", 0)
    temperature, nodes = torch.ones(3, dtype=torch.float64), torch.ones(8, dtype=torch.float64)
    mass, counters = torch.ones(8, 3, dtype=torch.float64), torch.zeros(200, dtype=torch.int32)
    end, uniforms, sample = others[1], others[2], others[4]
    forward = scores, lse, draft, inner, draft_row, children, tokens, *others, False, True, counters
    behind = scores, lse, draft, inner, draft_row, tokens, nodes, nodes, mass, end, uniforms
    calls = {
        "score_rows": lambda: score_rows(scores, four[:1].expand(14), sample, temperature, divide=True),
        "score_rows, undivided": lambda: score_rows(scores, four[:1].expand(14), sample, temperature, divide=False),
        "log_sum_exp": lambda: log_sum_exp(scores),
        "take_tops": lambda: take_tops(draft.clone(), four.new_ones(5), temperature[0].expand(5), 3),
        "rejection_ends": lambda: rejection_ends(*forward),
        "draw_behind": lambda: draw_behind(*behind),
        "gumbel_argmax": lambda: gumbel_argmax(scores[:4], four, four),
        "matching_ends": lambda: matching_ends(four, four, four - 1, four[:1], 3),
    }
    for name, call in calls.items():
        counted.clear()
        with choice.use("triton"):
            call()
        assert len(counted) == LAUNCHES[name], name
    assert calls.keys() == LAUNCHES.keys()
    assert not made
