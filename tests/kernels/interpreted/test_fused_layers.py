"""Element-wise parts of decoder layers in Triton's interpreter, against the modules of transformers.

The interpreter does not round to bfloat16 as a GPU does, so that type is tested on GPUs only.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import library
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from arbordraft.kernels import choice, fused_layers
from arbordraft.kernels.fused_layers import (
    ACTIVATIONS,
    add_rms_norm,
    add_rms_norm_reference,
    gated_activation,
    gated_activation_reference,
    rms_norm,
    rms_norm_reference,
    rotate_append,
    rotate_append_reference,
    rotate_reference,
)

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if not choice.interpreted() else [])]
NORMS = {LlamaRMSNorm: (0.0, False), Gemma2RMSNorm: (1.0, True), Olmo2RMSNorm: (0.0, True)}
EPSILON = 1e-3  # large, so that errors show

each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_norm = pytest.mark.parametrize("kind", NORMS, ids=lambda kind: kind.__name__)


def triton(operator, *arguments):
    choice.ran.clear()
    with choice.use("triton"):
        found = operator(*arguments)
    assert [name.partition("/")[2] for name in choice.ran] == ["triton"]
    return found


def rows(dtype, *shape):
    """Draws rows of very different magnitudes."""
    return (torch.randn(*shape) * torch.logspace(-2, 2, shape[-2])[:, None]).to(dtype)


def module_of(kind, size, dtype):
    module = kind(size, eps=EPSILON).to(dtype)
    module.weight.data.copy_(torch.randn(size))
    return module.requires_grad_(False)


def tolerance(dtype, spacings):
    kind = torch.finfo(dtype)
    return {"rtol": spacings * kind.eps, "atol": spacings * kind.eps * kind.smallest_normal}


def near(found, expected, dtype):
    """Returns whether nearly all numbers are equal and the others adjacent; float32 sums may have another order."""
    spacings = 8.0 if dtype == torch.float32 else 2.1
    close = torch.allclose(found.float(), expected.float(), **tolerance(dtype, spacings))
    return close and (dtype == torch.float32 or (found != expected).float().mean() < 0.01)


@each_type
@each_norm
@pytest.mark.parametrize("size", [8, 64, 576])
def test_norms_are_those_of_the_modules(guarded, kind, dtype, size):
    module, x, residual = module_of(kind, size, dtype), rows(dtype, 2, 5, size), rows(dtype, 2, 5, size)
    found = triton(rms_norm, x, module.weight, EPSILON, *NORMS[kind])
    total, normed = triton(add_rms_norm, x, residual, module.weight, EPSILON, *NORMS[kind])
    assert near(found, module(x), dtype)
    assert torch.equal(total, residual + x)
    assert near(normed, module(residual + x), dtype)


@each_norm
def test_the_references_have_the_bits_of_the_modules(kind):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        module, x, residual = module_of(kind, 576, dtype), rows(dtype, 9, 576), rows(dtype, 9, 576)
        assert torch.equal(rms_norm_reference(x, module.weight, EPSILON, *NORMS[kind]), module(x))
        total, normed = add_rms_norm_reference(x, residual, module.weight, EPSILON, *NORMS[kind])
        assert torch.equal(total, residual + x)
        assert torch.equal(normed, module(residual + x))


def test_other_norms_would_be_told_apart():
    """Negative control: another offset, another epsilon, another place to round."""
    dtype = torch.float16
    module, x = module_of(LlamaRMSNorm, 576, dtype), rows(dtype, 9, 576)
    expected = module(x)
    for epsilon, offset, wide in ((EPSILON, 1.0, True), (EPSILON / 2, 0.0, False), (EPSILON, 0.0, True)):
        assert not near(triton(rms_norm, x, module.weight, epsilon, offset, wide), expected, dtype)


@each_type
@pytest.mark.parametrize("size", [3, 1536])
def test_silu_times_up(guarded, dtype, size):
    gate, up = rows(dtype, 1, 3, size), torch.randn(1, 3, size).to(dtype)
    expected = F.silu(gate) * up
    assert torch.equal(gated_activation_reference(gate, up, "silu"), expected)
    found = triton(gated_activation, gate, up)
    # Exponentials of libraries differ in their last places, which seldom shows in 16 bits. A GPU computes them to base
    # 2, so the relative error grows with the exponent.
    bounds = tolerance(dtype, 4)
    rtol = bounds["rtol"] * (1 + gate.float().abs() / 4)
    away = (found.float() - expected.float()).abs()
    assert (away <= rtol * expected.float().abs() + bounds["atol"]).all()
    assert dtype == torch.float32 or (found != expected).float().mean() < 0.002
    assert not torch.allclose(triton(gated_activation, up, gate), expected, rtol=0.1)  # negative control


@each_type
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_gelu_times_up(dtype, activation):
    gate, up = rows(dtype, 1, 9, 1536), torch.randn(1, 9, 1536).to(dtype)
    expected = F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
    assert torch.equal(gated_activation_reference(gate, up, activation), expected)
    found, bounds = triton(gated_activation, gate, up, activation), tolerance(dtype, 4)
    # For negative gates, 1 + erf and 1 + tanh cancel and lose most of their digits.
    lost = 4 * torch.finfo(torch.float32).eps * (gate.float() * up.float()).abs()
    away = (found.float() - expected.float()).abs()
    assert (away <= lost + bounds["rtol"] * expected.float().abs() + bounds["atol"]).all()
    assert dtype == torch.float32 or (found != expected).float().mean() < 0.03
    for other in {"silu", "gelu", "gelu_tanh"} - {activation}:  # negative control
        wrong = gated_activation_reference(gate, up, other)
        assert ((wrong.float() - expected.float()).abs() > lost + 4 * bounds["rtol"] * expected.float().abs()).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_have_their_limits(activation):
    gate = torch.tensor([[-1e4, -100.0, -0.0, 0.0, 100.0, 1e4, float("inf"), float("nan")]])
    found = triton(gated_activation, gate, torch.ones_like(gate), activation)
    assert torch.equal(found[:, :6], ACTIVATIONS[activation](gate)[:, :6])
    assert found[0, 6] == float("inf")  # torch's own GELU gives NaN on some CPUs
    assert found[0, 7].isnan()


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="activation"):
        gated_activation(torch.ones(1, 2), torch.ones(1, 2), "tanh")


def pools(key, value):
    """Returns pools of nine rows full of NaN, for heads of these sizes."""
    return [heads.new_full((9, *heads.shape[1:]), float("nan")) for heads in (key, value)]


@each_type
@pytest.mark.parametrize(("heads", "kv_heads", "size", "value_size"), [(9, 3, 64, 64), (2, 2, 12, 10), (33, 17, 4, 2)])
def test_rotations_have_the_bits_of_transformers(guarded, dtype, heads, kv_heads, size, value_size):
    query, key = (torch.randn(1, 5, n, size).to(dtype) for n in (heads, kv_heads))
    cosine, sine = (torch.randn(1, 5, size).to(dtype) for _ in range(2))
    value, slots = torch.randn(5, kv_heads, value_size).to(dtype), torch.tensor([7, 0, 3, 8, 4])
    wanted = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), cosine, sine)
    wanted_query, wanted_key = (turned[0].transpose(0, 1) for turned in wanted)
    given = query[0], key[0], value, cosine[0], sine[0]
    for run in (rotate_append_reference, lambda *arguments: triton(rotate_append, *arguments)):
        keys, values = pools(key[0], value)
        assert torch.equal(run(*given, keys, values, slots), wanted_query)
        assert torch.equal(keys[slots], wanted_key)
        assert torch.equal(values[slots], value)
        assert keys[[1, 2, 5, 6]].isnan().all()
        assert values[[1, 2, 5, 6]].isnan().all()
    # Negative control: rows of other positions.
    turned = triton(rotate_append, *given[:3], cosine[0].roll(1, 0), sine[0], keys, values, slots)
    assert not torch.equal(turned, wanted_query)
    assert not torch.equal(keys[slots], wanted_key)


@each_type
def test_channels_beyond_the_tables_are_not_rotated(guarded, dtype):
    query, key = (torch.randn(4, n, 10).to(dtype) for n in (9, 1))
    cosine, sine = (torch.randn(4, 6).to(dtype) for _ in range(2))
    (keys, values), slots = pools(key, key), torch.tensor([7, 0, 3, 8])
    turned = triton(rotate_append, query, key, key, cosine, sine, keys, values, slots)
    for found, given in ((turned, query), (keys[slots], key)):
        wanted, _ = rotate_reference(given[..., :6].contiguous(), key[..., :6], cosine, sine)
        assert torch.equal(found[..., :6], wanted)
        assert torch.equal(found[..., 6:], given[..., 6:])


def test_queries_keys_and_values_of_one_product_are_not_copied(monkeypatch):
    """They lie side by side in its rows."""
    heads, tables, slots = torch.randn(5, 7, 8), torch.randn(2, 5, 8), torch.tensor([4, 0, 2, 3, 1])
    parts = heads.split([3, 2, 2], dim=1)
    found, expected = pools(*parts[1:]), pools(*parts[1:])
    wanted = rotate_append_reference(*parts, *tables, *expected, slots)
    copied = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: copied.append(x.shape) or x.clone())
    assert torch.equal(triton(rotate_append, *parts, *tables, *found, slots), wanted)
    assert all(torch.equal(*(pool[slots] for pool in pair)) for pair in zip(found, expected, strict=True))
    assert {len(shape) for shape in copied} == {1, 2}  # slots and tables alone


def test_rows_that_are_not_contiguous():
    query, key = torch.randn(3, 5, 8).transpose(0, 1), torch.randn(5, 4, 8)[:, ::2]
    value = torch.randn(8, 2, 5).permute(2, 1, 0)
    tables = torch.randn(5, 16)[:, ::2], torch.randn(8, 5).T
    slots = torch.stack([torch.arange(5), torch.full((5,), 8)], dim=1)[:, 0]
    found, expected = pools(key, value), pools(key, value)
    assert torch.equal(
        triton(rotate_append, query, key, value, *tables, *found, slots),
        rotate_append_reference(query, key, value, *tables, *expected, slots),
    )
    assert all(torch.equal(*(pool[slots] for pool in pair)) for pair in zip(found, expected, strict=True))
    x, residual = torch.randn(8, 5).T, torch.randn(5, 16)[:, ::2]
    weight = torch.randn(8)
    found = triton(add_rms_norm, x, residual, weight, EPSILON)
    expected = add_rms_norm_reference(x, residual, weight, EPSILON, 0.0, False)
    assert all(near(*pair, torch.float32) for pair in zip(found, expected, strict=True))
    gate, up = torch.randn(5, 16).chunk(2, dim=-1)
    assert torch.allclose(triton(gated_activation, gate, up), F.silu(gate) * up, rtol=1e-6)


def test_no_rows():
    nothing, weight = torch.zeros(0, 8), torch.ones(8)
    assert triton(rms_norm, nothing, weight, EPSILON).shape == (0, 8)
    assert [part.shape for part in triton(add_rms_norm, nothing, nothing, weight, EPSILON)] == [(0, 8)] * 2
    assert triton(gated_activation, nothing, nothing).shape == (0, 8)
    heads, tables = torch.zeros(0, 1, 8), (nothing, nothing)
    keys, values = pools(heads, heads)
    slots = torch.zeros(0, dtype=torch.int64)
    assert triton(rotate_append, torch.zeros(0, 2, 8), heads, heads, *tables, keys, values, slots).shape == (0, 2, 8)
    assert keys.isnan().all()


def test_the_operators_are_registered_properly_and_compile():
    x, weight = torch.randn(3, 8), torch.randn(8)
    query, key, keys = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(9, 1, 8)
    slots = torch.tensor([4, 1, 7])
    calls = [
        (fused_layers._rms_norm, (x, weight, EPSILON, 0.0, False)),
        (fused_layers._add_rms_norm, (x, torch.randn(3, 8), weight, EPSILON, 1.0, True)),
        (fused_layers._gated_activation, (x, torch.randn(3, 8), "silu")),
        (fused_layers._rotate_append, (query, key, key.clone(), x, torch.randn(3, 8), keys, keys.clone(), slots)),
    ]
    for operator, arguments in calls:
        library.opcheck(operator.portable, arguments)
        torch.compile(operator.portable, fullgraph=True, backend="aot_eager")(*arguments)
