"""Blocks have the values that a file means, in rows and in packed matrices, and packing loses nothing."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.blocks import FILE_KINDS, extreme_blocks, ordinary_blocks

from arbordraft.kernels.prepacked_linear import (
    BLOCKS,
    QUANTIZED,
    check_finite_blocks,
    dequantize_blocks,
    dequantize_blocks_reference,
    interleave,
    pack_blocks,
    pack_blocks_reference,
    pack_numbers,
    pack_rows,
    prepack,
    prepacked_linear,
    prepacked_linear_reference,
    quantize,
    quantize_groups,
    restore_blocks,
    select_panels,
)

pytestmark = pytest.mark.usefixtures("kernels")
CASES = {"ordinary": lambda kind, source: ordinary_blocks(kind, 48, 512, source), "extreme": extreme_blocks}


def blocks(case, kind, seed=0):
    return CASES[case](kind, torch.Generator().manual_seed(seed))


def same_bits(first, second):
    """Returns whether float32 tensors are equal, signs of zeros included."""
    return torch.equal(first.view(torch.int32), second.view(torch.int32))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", FILE_KINDS)
def test_values_are_those_of_the_gguf_package(kind, case):
    gguf = pytest.importorskip("gguf")
    for seed in range(3):
        raw = blocks(case, kind, seed)
        truth = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
        assert truth.isfinite().all()
        assert same_bits(dequantize_blocks(raw, kind), truth)
        assert same_bits(dequantize_blocks_reference(raw, kind), truth)
        assert same_bits(restore_blocks(pack_blocks([raw], [kind])), truth)
        other = raw.clone()
        other[:, -40] ^= 1  # control: another bit in each row
        assert not same_bits(dequantize_blocks(other, kind), truth)


@pytest.mark.parametrize("kind", BLOCKS)
def test_packing_equals_its_reference(kind):
    source = torch.Generator().manual_seed(0)
    raw = ordinary_blocks(kind, 70, 768, source)
    for rows in (None, torch.randperm(70, generator=source), torch.tensor([3]), torch.tensor([5, 5, 69] * 11)):
        packed = pack_blocks([raw], [kind], rows)
        assert torch.equal(packed, pack_blocks_reference([raw], [kind], rows))
        kept = raw if rows is None else raw[rows]
        assert same_bits(restore_blocks(packed, len(kept)), dequantize_blocks(kept, kind))
    assert not torch.equal(pack_blocks([raw], [kind], torch.arange(70).flip(0)), pack_blocks([raw], [kind]))


@given(st.sampled_from(list(BLOCKS)), st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_packing_any_matrix_loses_nothing(kind, outputs, count, seed):
    source = torch.Generator().manual_seed(seed)
    raw = ordinary_blocks(kind, outputs, count * BLOCKS[kind].weights, source)
    packed = pack_blocks([raw], [kind])
    assert torch.equal(packed, pack_blocks_reference([raw], [kind]))
    assert same_bits(restore_blocks(packed, outputs), dequantize_blocks_reference(raw, kind))


@pytest.mark.parametrize("kind", BLOCKS)
def test_packed_blocks_take_little_more_than_the_file(kind):
    raw = ordinary_blocks(kind, 256, 1536, torch.Generator().manual_seed(0))
    assert 1 <= pack_blocks([raw], [kind]).nbytes / raw.nbytes < 1.03


def rows_of_kinds(inputs, source):
    """Returns matrices of blocks and of floats, and their kinds."""
    kinds = ("Q4_K", "F32", "BF16", "Q6_K", "F16") if inputs % 256 == 0 else ("F32", "BF16", "F16")
    return [floats_of(kind, 21, inputs, source) for kind in kinds], kinds


def floats_of(kind, outputs, inputs, source):
    """Returns ordinary blocks; rows of floats may have any number of inputs."""
    if BLOCKS[kind].dtype is None:
        return ordinary_blocks(kind, outputs, inputs, source)
    return torch.randn(outputs, inputs, generator=source).to(BLOCKS[kind].dtype).view(torch.uint8)


def dense(raws, kinds):
    return torch.cat([dequantize_blocks_reference(raw, kind) for raw, kind in zip(raws, kinds, strict=True)])


@pytest.mark.parametrize("inputs", [512, 77, 64], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_of_any_kind_are_rounded_as_the_reference_rounds(bits, inputs):
    """Rows are rounded from the numbers that a file means, with zeros at the ends of their last groups."""
    source = torch.Generator().manual_seed(inputs)
    raws, kinds = rows_of_kinds(inputs, source)
    wide = raws[kinds.index("F32")].view(torch.float32)
    wide[3] = 0
    wide[4:6] = torch.tensor([[1e-42], [-1e30 if bits == 4 else 2.0]])
    rows = torch.randperm(21 * len(kinds), generator=source)
    packed = pack_blocks(raws, kinds, rows, to=QUANTIZED[bits])
    expected = pack_blocks_reference([quantize_groups(dense(raws, kinds)[rows], bits)], [QUANTIZED[bits]])
    assert torch.equal(packed, expected)
    assert not torch.equal(pack_blocks(raws, kinds, rows.flip(0), to=QUANTIZED[bits]), expected)  # control


@pytest.mark.parametrize("inputs", [256, 77], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_numbers_are_those_of_the_reference(dtype, inputs):
    source = torch.Generator().manual_seed(inputs)
    raws, kinds = rows_of_kinds(inputs, source)
    for rows in (None, torch.randperm(21 * len(kinds), generator=source)):
        numbers, scale = pack_numbers(raws, kinds, dtype, rows)
        kept = dense(raws, kinds) if rows is None else dense(raws, kinds)[rows]
        eight, steps = quantize(kept) if dtype == torch.int8 else (kept.to(dtype), None)
        assert torch.equal(numbers, prepack(eight))
        assert (scale is None) == (steps is None)
        assert scale is None or torch.equal(scale, steps)
    assert not torch.equal(numbers, pack_numbers(raws, kinds, dtype)[0])  # control


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_that_few_bits_cannot_keep_are_refused(bits):
    for most in (float("inf"), float("-inf"), float("nan"), *([1e9] if bits == 8 else [])):
        weight = torch.ones(40, 64)
        pack_blocks([weight.view(torch.uint8)], ["F32"], to=QUANTIZED[bits])
        weight[33, 60] = most
        with pytest.raises(ValueError, match=f"cannot be kept in groups of {bits} bits"):
            pack_blocks([weight.view(torch.uint8)], ["F32"], to=QUANTIZED[bits])


def test_packed_weights_lie_where_they_are_asked_to():
    source = torch.Generator().manual_seed(0)
    raw = ordinary_blocks("Q4_K", 40, 512, source)
    for weights in (None, "int8-weight-only", "int8", "int4", "file"):
        place = torch.full((1 << 20,), 7, dtype=torch.uint8)
        found, _ = pack_rows([raw], ["Q4_K"], weights, torch.float32, empty=partial(in_place, place))
        assert found.data_ptr() == place.data_ptr()
        assert torch.equal(found, pack_rows([raw], ["Q4_K"], weights, torch.float32)[0])
        assert (place[found.nbytes :] == 7).all()


def in_place(place, *shape, dtype):
    return place[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floats_multiply_rows_that_are_not_rounded(kind):
    source = torch.Generator().manual_seed(0)
    raw, x = ordinary_blocks(kind, 40, 320, source), torch.randn(5, 320, generator=source)
    exact, packed = x.double() @ dequantize_blocks(raw, kind).double().T, pack_blocks([raw], [kind])
    found = prepacked_linear(x, packed, outputs=40)
    assert relative(found, exact) < 1e-6
    assert relative(prepacked_linear_reference(x, packed, None, None, 40), exact) < 1e-6
    rounded = prepacked_linear(x, pack_blocks([raw], [kind], to="Q8_0"), outputs=40)
    assert relative(rounded, exact) > 1e-3  # control: weights and rows in 8 bits


def relative(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def test_kinds_mix_by_16_rows():
    """Gates and inputs of different kinds are interleaved; each half has the values of its own kind."""
    source = torch.Generator().manual_seed(0)
    raws = [ordinary_blocks(kind, 48, 512, source) for kind in ("Q4_K", "Q6_K")]
    kinds, rows = ["Q4_K", "Q6_K"], interleave(torch.arange(48), torch.arange(48, 96))
    packed = pack_blocks(raws, kinds, rows)
    assert torch.equal(packed, pack_blocks_reference(raws, kinds, rows))
    truth = torch.cat([dequantize_blocks(raw, kind) for raw, kind in zip(raws, kinds, strict=True)])[rows]
    assert same_bits(restore_blocks(packed), truth)
    x = torch.randn(7, 512, generator=source)
    together = prepacked_linear(x, packed, outputs=96)
    for part, raw, kind in zip((0, 1), raws, kinds, strict=True):
        alone = prepacked_linear(x, pack_blocks([raw], [kind]), outputs=48)
        assert torch.equal(together.unflatten(1, (-1, 2, 16))[:, :, part].flatten(1), alone)
    third = select_panels(packed, 2, 1)
    assert same_bits(restore_blocks(third), truth[32:48])
    assert torch.equal(prepacked_linear(x, third, outputs=16), together[:, 32:48])


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_of_the_greatest_numbers_are_exact(kind):
    """All codes are the greatest or the least, and rows have the greatest codes of 8 bits."""
    known = BLOCKS[kind]
    source = torch.Generator().manual_seed(0)
    raw = ordinary_blocks(kind, 32, 256, source)
    if known.dtype is None:
        row, one = known.split(raw)
        fixed = one.clone()
        for number, rows in ((0, slice(0, 16)), (255, slice(16, 32))):
            fixed[rows] = number
        for place in known.halves:
            fixed[..., place : place + 2] = torch.tensor([1.0]).half().view(torch.uint8)
        if kind == "MXFP4":
            fixed[..., 0] = 128
        raw = torch.cat([row, fixed.flatten(1)], dim=1)
    packed = pack_blocks([raw], [kind])
    weight = restore_blocks(packed).double()
    for x in (torch.full((1, 256), 127.0), torch.full((1, 256), -127.0), 127.0 * (-1) ** torch.arange(256)[None]):
        found, exact = prepacked_linear(x, packed, outputs=32)[0].double(), x[0].double() @ weight.T
        assert ((found - exact).abs() <= 2**-22 * 8 * (x[0].abs().double() @ weight.abs().T)).all()
    assert exact.abs().max() < exact.new_tensor(math.inf)


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_scales_that_are_not_finite_are_found(kind):
    known, raw = BLOCKS[kind], blocks("extreme", kind)
    check_finite_blocks(raw, kind)
    for bad in (float("inf"), float("-inf"), float("nan")):
        for place in known.halves:
            damaged = raw.clone().unflatten(1, (-1, known.nbytes))
            damaged[47, -1, place : place + 2] = torch.tensor([bad]).half().view(torch.uint8)
            with pytest.raises(ValueError, match=f"{kind} blocks have scales that are infinite or NaN"):
                check_finite_blocks(damaged.flatten(1), kind)
        if known.dtype is not None:
            damaged = raw.view(known.dtype).clone()
            damaged[47, 511] = bad
            with pytest.raises(ValueError, match="infinite or NaN"):
                check_finite_blocks(damaged.view(torch.uint8), kind)
    if kind == "MXFP4":
        for exponent in (253, 255):
            damaged = raw.clone()
            damaged[3, 17] = exponent
            with pytest.raises(ValueError, match="infinite or NaN"):
                check_finite_blocks(damaged, kind)


def test_matrices_that_cannot_be_packed_are_refused():
    source = torch.Generator().manual_seed(0)
    four, six = (ordinary_blocks(kind, 24, 256, source) for kind in ("Q4_K", "Q6_K"))
    longer = ordinary_blocks("Q6_K", 16, 512, source)
    for pack in (pack_blocks, pack_blocks_reference):
        with pytest.raises((ValueError, RuntimeError), match="16 rows of a panel must be blocks of one kind"):
            pack([four, six], ["Q4_K", "Q6_K"])
        with pytest.raises((ValueError, RuntimeError), match="must have the same number of inputs"):
            pack([four[:16], longer], ["Q4_K", "Q6_K"])
        with pytest.raises(ValueError, match="rows must be among 0 to 23"):
            pack([four], ["Q4_K"], torch.tensor([24]))
    for kind, raw, message in (
        ("Q4_K", four[:, :-1], "rows of Q4_K have blocks of 144 bytes each"),
        ("Q4_K", four[0], "expected rows of blocks"),
        ("IQ2_XS", four, "kernels read blocks of .*, not of 'IQ2_XS'"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_blocks([raw], [kind])
        with pytest.raises(ValueError, match=message):
            dequantize_blocks(raw, kind)
    with pytest.raises(ValueError, match="no matrix that pack_blocks returned"):
        restore_blocks(pack_blocks([four], ["Q4_K"])[:-64])
