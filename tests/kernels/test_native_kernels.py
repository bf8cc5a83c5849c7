"""The C++ kernels agree with their references, and the bits of a row do not depend on the rows beside it."""

import copy
import itertools
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.native_checks import (
    ALL,
    BESIDE,
    CHOICES,
    GROUPED,
    KINDS,
    MIXERS,
    OPTIONS,
    PARTS,
    SIDE_BY_SIDE,
    TREES,
    UNROUNDED,
    Stack,
    bits_of_groups,
    check_attention,
    check_layers,
    check_linear,
    check_mixtures,
    check_norm,
    check_recurrent_layers,
    check_row_max,
    layers_of,
    linear_case,
    mixtures_of,
    random_layer,
    recurrent_layers,
    relative,
    turn_kernels_off,
)
from support.ragged_case import Case
from torch import library
from torch.testing import assert_close

from arbordraft import TreeTopology
from arbordraft.kernels import machine
from arbordraft.kernels.decoder_layers import Kept, LayerRun, Matrix, Norm, replay_layers
from arbordraft.kernels.decoder_layers.recurrences import replay_reference
from arbordraft.kernels.prepacked_linear import (
    ACTIVATIONS,
    BLOCKS,
    QUANTIZED,
    dequantize_blocks,
    interleave,
    pack,
    prepack,
    prepacked_linear,
    quantize,
    quantize_groups,
    restore,
    restore_blocks,
)
from arbordraft.kernels.prepacked_linear.groups import quantize_rows
from arbordraft.kernels.ragged_tree_attention import RaggedBatch, ragged_tree_attention
from arbordraft.kernels.recurrent_tree import Paths
from arbordraft.kernels.verify import row_max, row_max_reference

DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("kernels")


# Against the references


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_linears(kind, bias):
    for outputs, inputs in ((16, 16), (1, 1), (17, 2), (33, 19), (64, 96), (130, 65)):
        for rows in (0, 1, 2, 5, 8):
            check_linear(kind, outputs, inputs, rows, bias)
    for rows in range(41):
        check_linear(kind, 48, 31, rows, bias)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gated_linears(kind, activation):
    for outputs, inputs, rows in ((32, 7, 1), (96, 64, 3), (64, 33, 17)):
        for bias in (False, True):
            check_linear(kind, outputs, inputs, rows, bias, activation)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_of_any_shape_and_layout(kind):
    (x, *weights), options, _, _ = linear_case(kind, 48, 31, rows=24)
    together = prepacked_linear(x, *weights, **options)
    assert torch.equal(prepacked_linear(x[3], *weights, **options), together[3])
    assert torch.equal(prepacked_linear(x.view(2, 3, 4, -1), *weights, **options), together.view(2, 3, 4, 48))
    apart = x.T.contiguous().T
    assert not apart.is_contiguous()
    assert torch.equal(prepacked_linear(apart, *weights, **options), together)
    assert torch.equal(prepacked_linear(x[::3], *weights, **options), together[::3])
    assert prepacked_linear(x.view(4, 6, -1)[:, :0], *weights, **options).shape == (4, 0, 48)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_rows(kind):
    for activation in (None, *ACTIVATIONS):
        (x, *weights), options, _, _ = linear_case(kind, 64, 33, rows=20, activation=activation)
        sound = prepacked_linear(x, *weights, **options)
        bad = x.clone()
        bad[7, 3], bad[12, 5] = float("nan"), float("inf")
        found = prepacked_linear(bad, *weights, **options)
        others = [row for row in range(20) if row not in (7, 12)]
        assert torch.equal(found[others], sound[others])
        assert found[7].isnan().all()
        assert not found[12].isfinite().all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_extreme_gates(activation):
    """Each output has its own gate, and an up value of one; a NaN gate gives NaN."""
    gates = torch.tensor([-1e30, -200, -90, -30, -8, -1e-3, -0.0, 0.0, 1e-3, 8, 30, 90, 200, 1e30, 1.0, float("nan")])
    weight = interleave(torch.zeros(16, 1), torch.zeros(16, 1))
    bias = interleave(gates[:, None], torch.ones(16, 1)).flatten()
    found = prepacked_linear(torch.zeros(1, 1), prepack(weight), None, bias, outputs=32, activation=activation)[0]
    assert_close(found, ACTIVATIONS[activation](gates), rtol=1e-5, atol=1e-6, equal_nan=True)


SIZES = st.integers(1, 40)


@given(SIZES, SIZES, st.sampled_from([torch.float32, torch.bfloat16, torch.int8]))
def test_packing_loses_nothing(outputs, inputs, dtype):
    weight = torch.randint(-127, 128, (outputs, inputs)).to(dtype)
    prepacked = prepack(weight)
    pairs = dtype != torch.float32
    assert prepacked.shape == (-(-outputs // 16), -(-inputs // 2) if pairs else inputs, 16, *([2] if pairs else []))
    assert torch.equal(restore(prepacked, outputs, inputs), weight)
    assert prepacked.to(torch.float64).abs().sum() == weight.to(torch.float64).abs().sum()  # padding is zero


def test_prepacking_follows_the_layout():
    weight = torch.arange(32.0 * 6).view(32, 6)
    assert torch.equal(prepack(weight)[1, 4], weight[16:, 4])
    assert torch.equal(prepack(weight.bfloat16())[1, 2, :, 1], weight[16:, 5].bfloat16())


@given(st.integers(1, 3), st.integers(0, 3))
def test_interleaved_halves(blocks, inputs):
    gate, up = torch.randn(2, 16 * blocks, inputs)
    both = interleave(gate, up)
    assert torch.equal(both.view(blocks, 2, 16, inputs)[:, 0].flatten(0, 1), gate)
    assert torch.equal(both.view(blocks, 2, 16, inputs)[:, 1].flatten(0, 1), up)


@given(SIZES, SIZES, st.sampled_from(DTYPES))
def test_quantized_weights_are_within_half_a_step(outputs, inputs, dtype):
    weight = torch.randn(outputs, inputs).to(dtype) * 10.0 ** torch.randint(-3, 3, (outputs, 1))
    weight[0] = 0
    eight, scale = quantize(weight)
    assert (eight.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (outputs,))
    assert ((eight.double() * scale[:, None] - weight.double()).abs() <= scale[:, None] * 0.5001).all()
    assert not eight[0].any()
    assert (eight[1:].abs().amax(dim=1) == 127).all()  # the whole range is used


@given(SIZES, st.integers(1, 100), st.sampled_from(DTYPES), st.sampled_from([4, 8]))
def test_weights_in_groups_are_within_half_a_step(outputs, inputs, dtype, bits):
    weight = torch.randn(outputs, inputs).to(dtype) * 10.0 ** torch.randint(-3, 3, (outputs, 1))
    weight[0] = 0
    raw, kind = quantize_groups(weight, bits), QUANTIZED[bits]
    known = BLOCKS[kind]
    row, blocks = known.split(raw)
    assert blocks.shape == (outputs, -(-inputs // 32), known.nbytes)
    step = known.scales(known.parse(blocks)[1], row)[0].double().repeat_interleave(32, dim=1)[:, :inputs]
    # Rounding of scales and minima moves the ends of the range by a fraction of a step.
    moved = (0.002 if bits == 8 else 0.007) * weight.double().abs().amax(dim=1, keepdim=True)
    found = dequantize_blocks(raw, kind)
    assert ((found[:, :inputs].double() - weight.double()).abs() <= 0.51 * step + moved + 1e-6).all()
    assert not found[0].any()
    assert not found[:, inputs:].any() or bits == 4  # codes of 4 bits may have no zero
    assert torch.equal(restore_blocks(pack(weight, f"int{bits}")[0], outputs, inputs), found[:, :inputs])


def test_4_bits_take_less_than_5():
    """Scales and minima are bytes, multiplied by the factors of their output."""
    weight = torch.randn(64, 1024) * torch.logspace(-3, 3, 64)[:, None]
    packed = pack(weight, "int4")[0]
    assert packed.nbytes < 4.6 / 8 * weight.numel()
    error = (restore_blocks(packed) - weight).square().mean(dim=1).sqrt() / weight.square().mean(dim=1).sqrt()
    assert (error < 0.09).all()  # for outputs with large and small weights
    assert_close(restore_blocks(pack(torch.full((2, 32), 1e9), "int4")[0], 2), torch.full((2, 32), 1e9))


def test_weights_that_groups_cannot_keep_are_refused():
    for bits, most in ((8, 1e9), *itertools.product((4, 8), (float("nan"), float("inf")))):
        with pytest.raises(ValueError, match=f"cannot be kept in groups of {bits} bits"):
            quantize_groups(torch.full((2, 32), most), bits)


@pytest.mark.parametrize("kind", [kind for kind in GROUPED if kind not in UNROUNDED])
def test_inputs_in_8_bits_have_one_scale_per_group(kind):
    """Negative controls: the product differs from that of unrounded rows, and of rows with one scale for all groups."""
    (x, *weights), options, _, error = linear_case(kind, 48, 256, rows=9)
    x = x * torch.logspace(0, 2, 8).repeat_interleave(32)  # groups of different magnitude
    found = prepacked_linear(x, *weights, **options).double()
    kept = restore_blocks(weights[0], 48).double()
    scale = x.abs().amax(dim=1, keepdim=True).double() / 127
    bias = weights[2].double()
    for other in (x.double(), (x / scale).round() * scale):
        assert ((other @ kept.T + bias - found).abs() > 10 * error).any()
    groups, steps = quantize_rows(x)
    right = (groups * steps[..., None]).flatten(1) @ kept.T + bias
    assert relative(found, right) < 5e-3


def test_wrong_arguments_are_refused():
    x, prepacked = torch.randn(3, 32), prepack(torch.randn(40, 32))
    fours = pack(torch.randn(40, 32), "int4")[0]
    attention = Case(TREES["trees"], dtype=torch.float32, size=16)
    for call, message in (
        (lambda: prepacked_linear(x[:, :31], prepacked, outputs=40), "31 channels, the weights 32"),
        (lambda: prepacked_linear(x, prepacked, outputs=50), "not prepacked for 50 outputs"),
        (lambda: prepacked_linear(x.bfloat16(), prepacked, outputs=40), "expected"),
        (lambda: prepacked_linear(x.double(), prepacked, outputs=40), "expected"),
        (lambda: prepacked_linear(x, prepacked, None, torch.zeros(39), outputs=40), "one bias per output"),
        (lambda: prepacked_linear(x, prepacked.to(torch.int8)[..., None], outputs=40), "not prepacked"),
        (lambda: prepacked_linear(x, prepacked, outputs=40, activation="silu"), "halves of whole blocks"),
        (lambda: prepacked_linear(x, fours[:-64], outputs=40), "expected a matrix that pack_blocks returned"),
        (lambda: prepacked_linear(x, fours, torch.ones(39), outputs=40), "one scale per output"),
        (lambda: prepacked_linear(x, fours, outputs=50), "not prepacked for 50 outputs, but for 3 panels"),
        (lambda: prepacked_linear(torch.randn(3, 33), fours, outputs=40), "33 channels, the weights 32"),
        (lambda: attention_with(attention, starts=[0, 9, 900]), "outside the pool"),
        (lambda: attention_with(attention, rows=[4, 7, 6]), "describes 17 rows, got 18"),
        (lambda: attention_with(attention, words=torch.zeros(18, 1, dtype=torch.int64)), "sees no key"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()


def attention_with(case, **changes):
    batch = RaggedBatch(
        **{
            name: changes.get(name, getattr(case.batch, name))
            for name in ("rows", "starts", "past", "tree_positions", "positions", "slots", "words")
        }
    )
    return ragged_tree_attention(case.query, case.keys, case.values, batch, scale=0.3, use_native=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_row_maxima(dtype):
    check_row_max(dtype)
    with torch.inference_mode():
        assert row_max(torch.zeros(0, 5, dtype=dtype))[1].shape == (0,)
    values, tokens = row_max(torch.randn(5, 33, dtype=torch.float64)[:, ::2])  # kernels do not take float64
    assert (values.dtype, tokens.dtype) == (torch.float64, torch.int64)


def test_row_maxima_of_a_large_vocabulary():
    x = torch.randn(37, 5003)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for found, expected in zip(row_max(x), row_max_reference(x), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype):
    check_norm(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("samples", TREES.values(), ids=TREES)
def test_attention(samples, dtype):
    for options in OPTIONS.values():
        check_attention(Case(samples, dtype=dtype, size=16), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_of_prompts(options, dtype):
    for samples in (
        [(4, TreeTopology.chain(5)), (0, TreeTopology.chain(6)), (1, TreeTopology.chain(0))],
        [(120, TreeTopology.chain(15)), (0, TreeTopology.chain(140))],
    ):
        check_attention(Case(samples, causal=True, dtype=dtype, size=16), **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_attention_of_groups(group, dtype):
    case = Case(TREES["trees"], group=group, dtype=dtype, size=32)
    check_attention(case)
    check_attention(case, sinks=torch.linspace(-1, 1, 2 * group), softcap=2.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 48, 64, 80, 128, 256])
def test_attention_of_head_sizes(size, dtype):
    for value_size in {size, 16, 80, 256}:
        check_attention(Case(TREES["several chunks"][1:], dtype=dtype, size=size, value_size=value_size, group=3))


@pytest.mark.parametrize("last", [1, 2])
def test_attention_of_the_last_levels_only(last):
    case = Case([(5, TreeTopology.k_ary(3, 4)), (2, TreeTopology.k_ary(2, 2))], last=last, dtype=DTYPES[0], size=16)
    check_attention(case)
    check_attention(case, window=3)
    wide = torch.cat([case.batch.words, case.batch.words], dim=1)[:, : case.batch.words.shape[1]]
    assert not wide.is_contiguous()
    assert torch.equal(attention_with(case, words=wide), attention_with(case))


@pytest.mark.parametrize(
    ("part", "dtype"),
    [(part, dtype) for dtype in DTYPES for part in PARTS if dtype == torch.float32 or part not in CHOICES],
    ids=str,
)
def test_layers(part, dtype):
    for layers in ([part], ["base", part, "all"]):
        shared = {name: size for name, size in PARTS[part].items() if name in ("heads", "kv_heads", "dim")}
        weights = [random_layer(dtype, seed=seed, **{**PARTS[name], **shared}) for seed, name in enumerate(layers)]
        check_layers(weights, dtype)


@pytest.mark.parametrize("kind", [kind for kind, (_, weights) in KINDS.items() if weights])
def test_layers_with_weights_of_fewer_bits(kind):
    check_layers(layers_of(kind), KINDS[kind][0])
    check_mixtures(kind)


def bounds_of_experts(weight, count, experts):
    """Returns the first byte of each of these experts' rows, and the one after the last."""
    if weight.dtype == torch.uint8:
        panels = int(weight[8:16].view(torch.int64))
        places = weight[32 : 32 + 8 * (panels + 1)].view(torch.int64) // 64 * 64
        bounds = places[:: panels // count].tolist()
    else:
        bounds = [expert * weight.nbytes // count for expert in range(count + 1)]
    return [(bounds[expert], bounds[expert + 1]) for expert in experts]


@pytest.mark.parametrize("kind", KINDS)
def test_only_experts_that_a_row_takes_are_read(kind):
    """Weights of all other experts may be NaN; of quantised experts, the scales."""
    layer, dtype = mixtures_of(kind)[len(ALL)], KINDS[kind][0]
    expected = Stack([layer], dtype).text([[5]])[0]

    def without(experts):
        matrices = {}
        for name in ("gate_up", "down"):
            matrix = getattr(layer, name)
            parts = {key: None if part is None else part.clone() for key, part in vars(matrix).items()}
            lost = parts["weight"] if parts["scale"] is None else parts["scale"]
            for start, end in bounds_of_experts(lost, layer.experts.routed, experts):
                lost.view(torch.uint8).flatten()[start:end] = 255  # NaN in every type
            matrices[name] = Matrix(**parts)
        return Stack([replace(layer, **matrices)], dtype).text([[5]])[0]

    read = [expert for expert in range(layer.experts.routed) if without([expert]).isnan().any()]
    assert len(read) == layer.experts.chosen  # control: these experts matter
    others = [expert for expert in range(layer.experts.routed) if expert not in read]
    assert torch.equal(without(others), expected)


@pytest.mark.parametrize(
    "fault",
    [{"chosen": 1}, {"normalised": False}, {"shared": 1, "routed": 4}, {"gated": True, "shared": 1, "routed": 4}],
    ids=str,
)
def test_another_choice_of_experts_would_be_seen(fault):
    layer = random_layer(**PARTS["experts"])
    check_layers([layer])
    with pytest.raises(AssertionError):
        check_layers([layer], truth=[replace(layer, experts=replace(layer.experts, **fault))])


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8-float32", "int4-bfloat16", "int8-weight-only-float32"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_recurrent_layers(mixer, kind):
    """Prompts, trees and lone rows, between layers with attention."""
    check_recurrent_layers(recurrent_layers(mixer, kind), KINDS[kind][0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_accepted_rows_are_replayed_to_the_bit(dtype, threads):
    """Several layers and samples at once; states of other samples stay, and other rows would be seen."""
    torch.set_num_threads(threads)
    layers = [random_layer(dtype, seed=seed, mixer=mixer).recurrence for seed, mixer in enumerate(MIXERS)]
    generator, like = torch.Generator().manual_seed(0), torch.empty(0, dtype=dtype)
    kept = [
        Kept(*(torch.randn(part.shape, generator=generator).to(part) for part in layer.memory(9, like)))
        for layer in layers
    ]
    kept = [each._replace(gates=-each.gates.abs()) for each in kept]  # decays are at most 1
    pools = [
        (
            torch.randn(5, 3, layer.channels, generator=generator).to(dtype),
            torch.randn(5, *layer.state, generator=generator),
        )
        for layer in layers
    ]
    paths, slots = Paths.chains([3, 1], [4, 0]), torch.tensor([4, 0])

    def replayed(run, rows):
        found = [tuple(part.clone() for part in pool) for pool in pools]
        places = paths.windows([2, 3], 4)
        run(layers, found, kept, torch.tensor(rows), paths.schedule(commit=True), slots, places)
        return [part for pool in found for part in pool]

    rows = [0, 2, 5, 7]
    assert all(map(torch.equal, replayed(replay_layers, rows), replayed(replay_reference, rows)))
    for other in ([0, 2, 4, 7], [0, 1, 5, 7]):  # a leaf changes windows and states, another parent, too
        parts = zip(replayed(replay_layers, other), replayed(replay_layers, rows), strict=True)
        assert [torch.equal(*pair) for pair in parts if pair[0].numel()] == [False] * 7
    for before, after in zip(itertools.chain(*pools), replayed(replay_layers, rows), strict=True):
        assert torch.equal(before[[1, 2, 3]], after[[1, 2, 3]])
    with pytest.raises(RuntimeError, match="row 3 is none of 9 kept rows"):
        replayed(replay_layers, [0, 2, 5, 9])


@pytest.mark.parametrize(
    ("mixer", "fault"),
    [
        ("convolution", lambda m: {"taps": m.taps.flip(0)}),
        ("selective", lambda m: {"taps": m.taps.roll(1, 0)}),
        ("selective", lambda m: {"rates": m.rates * 1.01}),
        ("selective", lambda m: {"skip": m.skip * 1.01}),
        ("selective", lambda m: {"group": 96}),
        ("selective", lambda m: {"steps": (0.1, 2.0)}),
        ("selective", lambda m: {"step_bias": m.step_bias.flip(0)}),
        ("delta", lambda m: {"norm": m.norm.flip(0)}),
        ("delta", lambda m: {"rates": m.rates.flip(0)}),
        ("delta", lambda m: {"epsilon": 1e-2}),
    ],
)
def test_another_recurrence_would_be_seen(mixer, fault):
    layer = random_layer(mixer=mixer)
    check_recurrent_layers([layer])
    other = replace(layer.recurrence, **fault(layer.recurrence))
    with pytest.raises(AssertionError):
        check_recurrent_layers([layer], truth=[replace(layer, recurrence=other)])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": 20}, "channels do not fit the heads"),
        ({"key_heads": 4}, "heads must be a multiple of key heads"),
        ({"group": 40}, "a norm has the wrong size"),
        ({"rates": torch.ones(5)}, "rates and biases are numbers of heads"),
        ({"skip": None}, "expected a factor of every head's input"),
        ({"taps": torch.ones(4, 150)}, "channels must be a multiple of 16"),
    ],
)
def test_recurrences_that_do_not_fit_their_layer_are_refused(change, message):
    layer = random_layer(mixer="selective")
    with pytest.raises(RuntimeError, match=message):
        check_recurrent_layers([replace(layer, recurrence=replace(layer.recurrence, **change))])


def test_recurrent_layers_need_the_paths_of_their_rows():
    stack, batch = Stack([random_layer(mixer="delta")]), Case(TREES["trees"], dtype=torch.float32, size=16).batch
    pools = [(torch.zeros(1, 3, 192), torch.zeros(1, 4, 16, 32))]
    with pytest.raises(RuntimeError, match="recurrent layers need the paths of their rows"):
        stack.native(torch.randn(1, 18, 64), pools, None, batch)


def test_layers_that_rotate_some_channels():
    check_layers([random_layer(dim=32, heads=2)], rotary=8)


def test_layers_whose_rotation_is_more_exact():
    check_layers(layers_of("bfloat16"), torch.bfloat16, rotary_dtype=torch.float32)


@pytest.mark.parametrize(
    "fault",
    [
        *({"scale": 0.303}, {"epsilon": 1e-4}, {"window": 3}, {"rotary": False}, {"softcap": 30.0}),
        {"residual": 0.99},
    ],
    ids=str,
)
def test_another_layer_would_be_seen(fault):
    layer = random_layer()
    check_layers([layer])
    with pytest.raises(AssertionError):
        check_layers([layer], truth=[replace(layer, **fault)])


def test_blocks_that_follow_each_other_instead_of_standing_side_by_side_would_be_seen():
    one, other = [random_layer(seed=seed, **part) for seed, part in enumerate(SIDE_BY_SIDE)]
    check_layers([one, other])
    with pytest.raises(AssertionError):
        check_layers([one, other], truth=[one, replace(other, parallel=False, pre_mlp=one.pre_attention)])
    for mixer in MIXERS:
        before, beside = random_layer(mixer=mixer, inner=0), random_layer(parallel=True)
        check_recurrent_layers([before, beside])
        after = replace(beside, parallel=False, pre_attention=before.pre_attention)
        with pytest.raises(AssertionError):
            check_recurrent_layers([before, beside], truth=[before, after])


@pytest.mark.parametrize("name", ["qkv", "out", "gate_up", "down"])
@pytest.mark.parametrize("kind", ["float32", "int4-float32"])
def test_other_factors_of_outputs_would_be_seen(kind, name):
    layer = random_layer(*KINDS[kind], **PARTS["factors"])
    check_layers([layer])
    matrix = getattr(layer, name)
    with pytest.raises(AssertionError):
        check_layers([layer], truth=[replace(layer, **{name: replace(matrix, scale=matrix.scale.flip(0))})])


@pytest.mark.parametrize("place", ["pre_attention", "key_norm", "post_mlp"])
def test_a_norm_that_keeps_the_mean_would_be_seen(place):
    layer = random_layer(**PARTS["layer norms"])
    with pytest.raises(AssertionError):
        check_layers([layer], truth=[replace(layer, **{place: Norm(getattr(layer, place).weight)})])


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("base", {"parallel": True}, "a layer beside another needs one of one block before it"),
        ("norms over all heads", {"key_norm": Norm(torch.ones(16))}, "a norm has the wrong size"),
        ("base", {"pre_mlp": Norm(torch.ones(64), torch.ones(16))}, "a norm has the wrong size"),
        ("no gates", {"inner": 80}, "weights are not prepacked for 80 outputs"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(part, change, message):
    with pytest.raises(RuntimeError, match=message):
        Stack([replace(random_layer(**PARTS[part]), **change)]).text([[5, 6, 7]])


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ({}, "a layer beside another needs one of one block before it"),
        ({"inner": 0, "beside": BESIDE}, "which reads hidden states alone"),
        ({"inner": 0}, "a layer beside another reads what that reads"),
    ],
)
def test_layers_beside_others_that_do_not_fit_are_refused(before, message):
    own = random_layer(heads=0)  # has a norm of its own
    beside = own if "reads what" in message else replace(own, pre_mlp=None)
    with pytest.raises(RuntimeError, match=message):
        Stack([random_layer(**before), replace(beside, parallel=True)]).text([[5, 6, 7]])


def test_inputs_beside_the_hidden_states_are_used():
    """Layers use their norm and values. A layer that reads them needs one for each row, of the right size and type."""
    plain, reading = random_layer(), random_layer(**PARTS["beside"])
    check_layers([plain, reading])
    with pytest.raises(AssertionError):
        check_layers([reading], truth=[replace(reading, beside_norm=Norm(reading.beside_norm.weight.flip(0)))])
    hidden, batch = torch.randn(1, 18, 64), Case(TREES["trees"], dtype=torch.float32, size=16).batch
    pools, rotary = [(torch.zeros(60, 2, 16), torch.zeros(60, 2, 16))], torch.ones(2, 1, 18, 16)
    for layer, beside, message in (
        (reading, None, "nothing stands beside|a norm has the wrong size"),
        (reading, torch.randn(17, BESIDE), "expected something beside each of 18 rows"),
        (reading, torch.randn(18, 32), "a norm has the wrong size"),
        (reading, torch.randn(18, BESIDE).bfloat16(), "expected"),
    ):
        with pytest.raises(RuntimeError, match=message):
            LayerRun([layer])(hidden, pools, tuple(rotary), batch, (), beside)


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_the_same_with_kernels_off(kind, monkeypatch):
    dtype = KINDS[kind][0]
    turn_kernels_off(monkeypatch)
    if dtype == torch.float32:
        check_layers(layers_of(kind), dtype)
        check_mixtures(kind)
    check_linear(kind, 33, 19)
    check_linear(kind, 32, 7, activation="gelu")
    check_row_max(dtype)
    check_attention(Case(TREES["trees"], dtype=dtype, size=16), window=3)


# As operators of PyTorch


def operator_calls():
    """Returns every operator with arguments that exercise all of its schema."""
    ops = torch.ops.arbordraft
    (x, *weights), options, _, _ = linear_case("int8-weight-only-bfloat16", 48, 31)
    case = Case(TREES["trees"], dtype=torch.float32, size=16)
    batch = case.batch
    described, keys = (batch.layout, batch.region, batch.positions), (batch.words, batch.slots)
    run = LayerRun(layers_of("float32"))
    pools = [[torch.randn(len(case.keys), 2, 16) for _ in run.layers] for _ in range(2)]
    rotary = torch.randn(2, 1, 18, 16)
    return [
        (ops.prepacked_linear.default, (x, *weights, options["outputs"], -1)),
        (ops.prepacked_linear.default, (torch.randn(2, 3, 8), prepack(torch.randn(64, 8)), None, None, 64, 2)),
        (ops.prepacked_linear.default, (torch.randn(2, 3, 40), *pack(torch.randn(64, 40), "int4"), None, 64, -1)),
        (ops.norm.default, (torch.randn(2, 3, 32), torch.randn(32), torch.randn(32), 1e-5)),
        (ops.row_max.default, (torch.randn(5, 33).bfloat16(),)),
        (
            ops.ragged_tree_attention.default,
            (case.query, case.keys, case.values, *described, batch.words, 0.3, 4, 2.0, torch.randn(4), 9, 9, 0, None),
        ),
        (
            ops.decoder_layers.default,
            (
                torch.randn(1, 18, 64),
                run._tensors,
                run._integers,
                run._scalars,
                *pools,
                *rotary,
                *described,
                *keys,
                [1, 0],
                torch.randn(18, BESIDE),
                [],
                [],
                0,
            ),
        ),
    ]


@pytest.mark.parametrize("index", range(7))
def test_operators_are_registered_properly(index):
    operator, arguments = operator_calls()[index]
    library.opcheck(operator, arguments)


def test_operators_can_be_compiled():
    """Compiled operators give equal results and equal changes of the pools."""
    for operator, arguments in operator_calls():
        torch._dynamo.reset()
        compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
        plain, traced = copy.deepcopy((arguments, arguments))
        torch.manual_seed(0)
        assert_close(compiled(*traced), operator(*plain), rtol=0, atol=0, equal_nan=True)
        assert_close(traced, plain, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(traced[4][0], arguments[4][0])  # the call changed the pools


def test_inference_mode():
    stack, text = Stack(layers_of("float32")), [5, 9, 7]
    expected = stack.text([text])[0]
    with torch.inference_mode():
        found = Stack(layers_of("float32")).text([text])[0]
        assert torch.equal(stack.text([text])[0], expected)
    assert torch.equal(found, expected)


# Threads and processes


def test_two_threads_at_once():
    stacks = [Stack(layers_of(kind), KINDS[kind][0]) for kind in ("float32", "bfloat16")]
    texts = [[(3 * index + start) % 50 for index in range(40)] for start in range(2)]
    expected = [stack.text([text])[0] for stack, text in zip(stacks, texts, strict=True)]
    torch.set_num_threads(2)
    found = [[], []]

    def work(index):
        torch.set_num_threads(2)
        for _ in range(20):
            found[index].append(stacks[index].text([texts[index]])[0])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for rows, wanted in zip(found, expected, strict=True):
        assert len(rows) == 20
        assert all(torch.equal(row, wanted) for row in rows)


FORKS = """
import os, select
from functools import cache
import torch
from support.native_checks import Stack, layers_of
from arbordraft.kernels import native

@cache
def stack():  # here, because packing loads the kernels
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # in a child, torch itself would wait for the threads of its parent
    made = Stack(layers_of("float32"))
    torch.set_num_threads(threads)
    return made

def run():
    return stack().text([[index % 50 for index in range(40)]])[0].numpy().tobytes()

def run_in_a_child():
    reader, writer = os.pipe()
    if not (child := os.fork()):
        with os.fdopen(writer, "wb") as file:
            file.write(run())
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], 60)[0]:
        os.kill(child, 9)  # it hangs
    with os.fdopen(reader, "rb") as file:
        found = file.read()
    os.waitpid(child, 0)
    return found

torch.set_num_threads(2)
torch.randn(1_000_000).exp_()  # wakes a team of threads, which a child does not inherit
assert not torch._C._dispatch_has_kernel_for_dispatch_key("arbordraft::decoder_layers", "CPU")
itself = run_in_a_child()
assert native.load()
loaded = run_in_a_child()
expected = run()
after = run_in_a_child()
print(itself == expected, loaded == expected, after == expected, run() == expected)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children():
    """The parent has not loaded the kernels, has only loaded them, or has run them; at the end, it runs them again."""
    assert script("-c", FORKS).split() == ["True"] * 4


def script(*command, **variables):
    """Runs a fresh interpreter and returns its output."""
    here = str(Path(__file__).parents[1])
    environment = os.environ | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": here} | variables
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# Other processors


@pytest.mark.soak  # a build and all checks take two minutes; test_emulated.py checks AVX2 in short
@pytest.mark.parametrize("isa", [isa for isa in machine.NEEDED_BY if isa not in ("native", "off")])
def test_every_instruction_set(isa):
    """Sets run one after the other: with more threads than processors, teams of threads wait for each other."""
    if not machine.NEEDED_BY[isa] <= machine.cpu_features():
        pytest.skip("this CPU lacks it; test_emulated.py has some of those")
    here = Path(__file__).parents[1] / "support" / "native_checks.py"
    environment = os.environ | {"ARBORDRAFT_ISA": isa, "OMP_WAIT_POLICY": "passive"}
    environment["PYTHONPATH"] = str(here.parents[1])
    done = subprocess.run([sys.executable, str(here)], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [isa, bits_of_groups()]


REFUSED = """
import ctypes, os, torch
class Stack(ctypes.Structure):
    _fields_ = [("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(4096)
assert not ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, 4096)), None)
from arbordraft.kernels import native
from arbordraft.kernels.prepacked_linear.module import PrepackedLinear
print(native.isa(), native.problem())
linear, x = torch.nn.Linear(64, 48, bias=False, dtype=torch.bfloat16), torch.randn(9, 64).bfloat16()
prepacked = PrepackedLinear(linear)
with torch.inference_mode():
    torch.testing.assert_close(prepacked(x), linear(x))
    assert torch.equal(prepacked(x)[4:5], prepacked(x[4:5]))
os.environ["ARBORDRAFT_ISA"] = "amx_bf16"
try:
    native._loaded(False)
except native.Unavailable as error:
    print(error)
"""


@pytest.mark.skipif(machine.best_isa() != "amx_bf16", reason="this CPU has no tiles")
def test_refused_tiles():
    """Linux grants no tiles to a process whose signal stack is too small for them, as here."""
    first, second = script("-c", REFUSED).splitlines()
    assert first == "avx512_bf16 None"
    assert "grants this process no tiles" in second
