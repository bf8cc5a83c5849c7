"""Linears over weights of 4 bits in Triton's interpreter, against PyTorch in float64 and the reference.

The interpreter does not round to bfloat16 as a GPU does, so that type is tested on GPUs only.
"""

import pytest
import torch
from torch import library

from arbordraft.kernels import choice, grouped_linear
from arbordraft.kernels.fused_layers import ACTIVATIONS
from arbordraft.kernels.grouped_linear import grouped_linear as multiply
from arbordraft.kernels.grouped_linear import interleave, pack_panels, restore_panels, round_to_panels
from arbordraft.kernels.grouped_linear.panels import CODES, FIELDS, UNITS
from arbordraft.kernels.prepacked_linear.blocks import dequantize_blocks_reference
from arbordraft.kernels.prepacked_linear.groups import quantize_groups

DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if not choice.interpreted() else [])]
ROWS = [1, 8, 9, 17, 64]  # part of a tile, a full tile, the next two sizes, several tiles
SIZES = [(16, 32), (40, 150), (48, 600)]  # a panel; parts of panels and groups; more pairs of groups than one pass
KINDS = ["INT4", "MXFP4"]

each_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
each_kind = pytest.mark.parametrize("kind", KINDS)


def triton(*arguments, **options):
    choice.ran.clear()
    with choice.use("triton"):
        found = multiply(*arguments, **options)
    assert dict(choice.ran) == {"grouped_linear/triton": 1}
    return found


def drawn(dtype, *shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocks(kind, outputs, inputs, seed=1):
    """Returns rows of blocks: rounded noise, or random codes with powers of two from 2^-9 to 2^6."""
    if kind == "INT4":
        return quantize_groups(drawn(torch.float32, outputs, inputs, seed=seed), 4)
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (outputs, -(-inputs // 32), 17), generator=generator, dtype=torch.uint8)
    raw[..., 0] = 118 + raw[..., 0] % 16
    return raw.flatten(1)


def near(found, expected, dtype, roundings=2):
    """Returns whether numbers differ only by the order of sums and by some roundings of their type."""
    bound = roundings * torch.finfo(dtype).eps * expected.double().abs() + 1e-5 * expected.double().abs().max()
    return ((found.double() - expected.double()).abs() <= bound).all()


# Panels


@each_kind
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_panels_hold_the_weights_of_their_blocks(kind, outputs, inputs):
    raw = blocks(kind, outputs, inputs)
    panels, exact = pack_panels(raw, kind), dequantize_blocks_reference(raw, kind)[:, :inputs]
    assert torch.equal(restore_panels(panels, kind, outputs, inputs), exact)
    groups = 2 * -(-inputs // 64)
    assert panels.shape == (-(-outputs // 16), UNITS + groups * (FIELDS + CODES))
    other = panels.clone()
    other[0, -CODES] ^= 1  # negative control: a code of the first output
    assert inputs <= 32 or not torch.equal(restore_panels(other, kind, outputs, inputs), exact)


def test_smallest_powers_of_two():
    """The smallest scales of MXFP4 are below the smallest normal numbers of float32."""
    raw = blocks("MXFP4", 16, 128).unflatten(1, (4, 17))
    raw[..., 0] = torch.tensor([0, 1, 2, 252])
    found = restore_panels(pack_panels(raw.flatten(1), "MXFP4"), "MXFP4", 16, 128).unflatten(1, (4, 32))
    levels = dequantize_blocks_reference(blocks("MXFP4", 16, 128), "MXFP4").unflatten(1, (4, 32))
    powers = 2.0 ** (torch.tensor([0, 1, 2, 252.0]).double() - 127)
    scales = 2.0 ** (blocks("MXFP4", 16, 128).unflatten(1, (4, 17))[..., 0].double() - 127)
    assert torch.equal(found.double(), levels.double() / scales[..., None] * powers[:, None])


def test_rounding_is_that_of_groups():
    weight = drawn(torch.bfloat16, 40, 96)
    panels = round_to_panels(weight)
    assert torch.equal(panels, pack_panels(quantize_groups(weight, 4), "INT4"))
    restored = restore_panels(panels, "INT4", 40, 96)
    step = weight.float().unflatten(1, (3, 32)).aminmax(dim=2)
    step = (step.max - step.min) / 15
    error = (restored - weight.float()).unflatten(1, (3, 32)).abs().amax(dim=2)
    assert (error < step).all()
    assert (error > step / 8).any()  # negative control: four bits do lose something


# Products


@pytest.mark.one_in(3)
@each_kind
@each_type
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products(guarded, outputs, inputs, rows, dtype, kind):
    panels, x = pack_panels(blocks(kind, outputs, inputs), kind), drawn(dtype, 2, rows, inputs)
    bias = drawn(dtype, outputs, seed=2)
    exact = x.double() @ restore_panels(panels, kind, outputs, inputs).double().T
    assert near(triton(x, panels, outputs=outputs, kind=kind), exact, dtype)
    assert near(triton(x, panels, bias, outputs=outputs, kind=kind), exact + bias.double(), dtype)
    wrong = panels.clone()
    wrong[:, UNITS] ^= 1  # negative control: the least bit of a scale, or an exponent
    assert not near(triton(x, wrong, outputs=outputs, kind=kind), exact, dtype)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_multiplies_with_the_restored_weights(dtype, kind):
    panels, x = pack_panels(blocks(kind, 40, 150), kind), drawn(dtype, 3, 150)
    with choice.use("reference"):
        found = multiply(x, panels, outputs=40, kind=kind)
    assert found.dtype == dtype
    assert torch.equal(found, (x.float() @ restore_panels(panels, kind, 40, 150).T).to(dtype))


@pytest.mark.one_in(2)
@each_type
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_products(guarded, activation, biased, dtype):
    x, halves = drawn(dtype, 1, 9, 150), [drawn(torch.float32, 48, 150, seed=seed) / 8 for seed in (1, 2)]
    bias = interleave(*(drawn(dtype, 48, seed=seed) for seed in (3, 4))) if biased else None
    panels = round_to_panels(interleave(*halves))
    with choice.use("reference"):
        expected = multiply(x, panels, bias, outputs=96, activation=activation)
    found = triton(x, panels, bias, outputs=96, activation=activation)
    assert found.shape == (1, 9, 48)
    assert near(found, expected, dtype, roundings=8)
    swapped = triton(x, round_to_panels(interleave(*halves[::-1])), bias, outputs=96, activation=activation)
    assert not near(swapped, expected, dtype, roundings=8)  # negative control


def test_no_rows():
    panels = round_to_panels(torch.ones(32, 8))
    assert triton(torch.zeros(0, 8), panels, outputs=20).shape == (0, 20)
    assert triton(torch.zeros(1, 0, 8), panels, outputs=32, activation="silu").shape == (1, 0, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"outputs": 16}, "2 panels hold 32 outputs"),
        ({"outputs": 33}, "2 panels hold 32 outputs"),
        ({"outputs": 20, "activation": "silu"}, "in pairs of a gate and its input"),
        ({"outputs": 32, "activation": "tanh"}, "activation must be one of silu"),
        ({"outputs": 32, "kind": "Q4_0"}, "INT4 or MXFP4, not of 'Q4_0'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        multiply(torch.zeros(1, 8), round_to_panels(torch.ones(32, 8)), **options)


def test_other_blocks_are_refused():
    with pytest.raises(ValueError, match="INT4 or MXFP4, not of 'Q8_0'"):
        pack_panels(torch.zeros(16, 34, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ValueError, match="blocks of 17 bytes each"):
        pack_panels(torch.zeros(16, 33, dtype=torch.uint8), "MXFP4")


def test_the_operator_is_registered_properly_and_compiles():
    panels = round_to_panels(drawn(torch.float32, 32, 64))
    for outputs, activation in ((20, None), (32, "silu")):
        arguments = drawn(torch.float32, 3, 64), panels, None, outputs, activation, "INT4"
        library.opcheck(grouped_linear._linear.portable, arguments)
        torch.compile(grouped_linear._linear.portable, fullgraph=True, backend="aot_eager")(*arguments)
