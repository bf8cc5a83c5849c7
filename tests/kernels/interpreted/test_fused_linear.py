"""Linears, fused with later operations, in Triton's interpreter against PyTorch in float64 and the references.

The interpreter does not round to bfloat16 as a GPU does, so that type is tested on GPUs only.
"""

import pytest
import torch
from torch import library

from arbordraft.kernels import choice, fused_linear
from arbordraft.kernels.fused_layers import ACTIVATIONS
from arbordraft.kernels.fused_linear import (
    gated_linear,
    gated_linear_reference,
    linear,
    project_rotate_append,
    project_rotate_append_reference,
)

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if not choice.interpreted() else [])]
ROWS = [1, 16, 17, 40]  # part of a tile, a full tile, the next size, several tiles

each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def triton(operator, *arguments):
    choice.ran.clear()
    with choice.use("triton"):
        found = operator(*arguments)
    assert [name.partition("/")[2] for name in choice.ran] == ["triton"]
    return found


def drawn(dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def near(found, expected, dtype, roundings=2):
    """Returns whether numbers differ only by the order of sums and by some roundings of their type."""
    bound = roundings * torch.finfo(dtype).eps * expected.double().abs() + 1e-5 * expected.double().abs().max()
    return ((found.double() - expected.double()).abs() <= bound).all()


@pytest.mark.one_in(3)
@each_type
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("size", "outputs"), [(8, 3), (150, 70), (256, 129)])
def test_products(guarded, rows, size, outputs, dtype):
    x, weight, bias = drawn(dtype, 2, rows, size), drawn(dtype, outputs, size, seed=1), drawn(dtype, outputs, seed=2)
    exact = x.double() @ weight.double().T
    assert near(triton(linear, x, weight), exact, dtype)
    assert near(triton(linear, x, weight, bias), exact + bias.double(), dtype)
    assert not near(triton(linear, x, weight), exact + bias.double(), dtype)  # negative control


@pytest.mark.one_in(2)
@each_type
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products(guarded, activation, biased, dtype):
    x, weights = drawn(dtype, 1, 5, 150), [drawn(dtype, 40, 150, seed=seed) / 8 for seed in (1, 2)]
    biases = [drawn(dtype, 40, seed=seed) for seed in (3, 4)] if biased else []
    expected = gated_linear_reference(x, weights, biases, activation)
    assert near(triton(gated_linear, x, weights, biases, activation), expected, dtype, roundings=8)
    swapped = triton(gated_linear, x, weights[::-1], biases[::-1], activation)  # negative control
    assert not near(swapped, expected, dtype, roundings=8)


def heads(dtype, rows, *, biased, normed, count=3, kv_count=1, dim=10, size=70):
    """Returns the arguments of a layer's queries, keys and values, and the slots of keys and values."""
    wide = [count * dim, kv_count * dim, kv_count * dim]
    weights = [drawn(dtype, n, size, seed=seed) / 8 for seed, n in enumerate(wide)]
    biases = [drawn(dtype, n, seed=seed) for seed, n in enumerate(wide, 3)] if biased else []
    norms = [drawn(dtype, dim, seed=seed) for seed in (6, 7)] if normed else []
    tables = [drawn(dtype, rows, dim, seed=seed) for seed in (8, 9)]
    slots = torch.randperm(rows + 4, generator=torch.Generator().manual_seed(10))[:rows]
    x = drawn(dtype, rows, size, seed=11)
    return (x, weights, biases, norms), (*tables,), slots, (rows + 4, kv_count, dim)


FORMS = {"llama": (0.0, False), "gemma": (1.0, True), "olmo": (0.0, True)}


@pytest.mark.one_in(4)
@each_type
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", [None, *FORMS])
def test_queries_keys_and_values(guarded, rows, biased, form, dtype):
    given, tables, slots, shape = heads(dtype, rows, biased=biased, normed=form is not None)
    how = (1e-3, *FORMS[form or "llama"])
    pools = [given[0].new_full(shape, float("nan")) for _ in range(4)]
    expected = project_rotate_append_reference(*given, *how, *tables, *pools[:2], slots)
    found = triton(project_rotate_append, *given, *how, *tables, *pools[2:], slots)
    for one, other in ((found, expected), *((pools[i + 2][slots], pools[i][slots]) for i in (0, 1))):
        assert near(one, other, dtype, roundings=8)
    untouched = sorted(set(range(shape[0])) - set(slots.tolist()))
    assert all(pool[untouched].isnan().all() for pool in pools)
    if form is not None:  # negative control
        other = FORMS["gemma" if form == "llama" else "llama"]
        wrong = triton(project_rotate_append, *given, 1e-3, *other, *tables, *pools[2:], slots)
        assert form == "olmo" or not near(wrong, expected, dtype, roundings=8)


def test_wide_heads():
    given, tables, slots, shape = heads(torch.float32, 20, biased=False, normed=True, dim=256)
    pools = [torch.zeros(shape) for _ in range(4)]
    expected = project_rotate_append_reference(*given, 1e-6, 0.0, False, *tables, *pools[:2], slots)
    found = triton(project_rotate_append, *given, 1e-6, 0.0, False, *tables, *pools[2:], slots)
    assert near(found, expected, torch.float32, roundings=8)
    assert near(pools[2], pools[0], torch.float32, roundings=8)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_a_rows_bits_do_not_depend_on_the_others(dtype):
    """Tests rows of integers, whose sums are exact in every order, so only the rows and outputs of a tile matter.

    On a GPU, any rows must pass.
    """
    rows = drawn(dtype, 40, 150)
    if choice.interpreted():
        rows = (4 * rows).round()
    weight = (4 * drawn(dtype, 48, 150, seed=1)).round() if choice.interpreted() else drawn(dtype, 48, 150, seed=1)
    given, tables, slots, shape = heads(dtype, 40, biased=True, normed=True)
    together = triton(linear, rows, weight)
    pools = [rows.new_zeros(shape) for _ in range(2)]
    query = triton(project_rotate_append, *given, 1e-3, 0.0, False, *tables, *pools, slots)
    for begin, end in ((0, 1), (3, 4), (0, 16), (5, 25)):
        some = slice(begin, end)
        assert torch.equal(triton(linear, rows[some], weight), together[some])
        if choice.interpreted():
            continue
        other = [torch.zeros_like(pool) for pool in pools]
        part = (given[0][some], *given[1:]), [table[some] for table in tables]
        alone = triton(project_rotate_append, *part[0], 1e-3, 0.0, False, *part[1], *other, slots[some])
        assert torch.equal(alone, query[some])
        assert all(torch.equal(a[slots[some]], b[slots[some]]) for a, b in zip(other, pools, strict=True))


def test_no_rows():
    weight = torch.ones(4, 8)
    assert triton(linear, torch.zeros(0, 8), weight).shape == (0, 4)
    assert triton(gated_linear, torch.zeros(1, 0, 8), [weight, weight]).shape == (1, 0, 4)
    nothing, pool = torch.zeros(0, 4), torch.zeros(3, 1, 4)
    empty = torch.zeros(0, dtype=torch.int64)
    arguments = [torch.zeros(0, 8), [weight] * 3, [], [], 1e-6, 0.0, False, nothing, nothing, pool, pool.clone(), empty]
    assert triton(project_rotate_append, *arguments).shape == (0, 1, 4)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation"):
        gated_linear(torch.ones(1, 2), [torch.ones(2, 2)] * 2, activation="tanh")


def test_the_operators_are_registered_properly_and_compile():
    given, tables, slots, shape = heads(torch.float32, 3, biased=False, normed=True)
    pools = [torch.zeros(shape) for _ in range(2)]
    calls = [
        (fused_linear._linear, (given[0], given[1][0], None)),
        (fused_linear._gated_linear, (given[0], [given[1][0]] * 2, [], "silu")),
        (fused_linear._project_rotate_append, (*given, 1e-6, 0.0, False, *tables, *pools, slots)),
    ]
    for operator, arguments in calls:
        library.opcheck(operator.portable, arguments)
        torch.compile(operator.portable, fullgraph=True, backend="aot_eager")(*arguments)
