"""Recurrent layers along draft trees in Triton's interpreter against the references, and the bits of a path."""

from dataclasses import replace

import pytest
import torch
from support.recurrent_checks import (
    RAW,
    SHAPES,
    TREES,
    advanced,
    convolution_case,
    moved_windows,
    numbers,
    raw_rows,
    replayed,
    same,
    scan_case,
)
from torch import library
from torch.testing import assert_close

from arbordraft.kernels import choice
from arbordraft.kernels.recurrent_tree import (
    ACTIVATIONS,
    Paths,
    Schedule,
    advance_states,
    advance_windows,
    gate,
    tree_convolution,
)
from arbordraft.kernels.recurrent_tree.triton import _aligned, scan_blocks

LEAF, PATH, SAMPLE = 10, [8, 9, 10], 2


def compiled(call):
    with choice.use("triton"):
        return call()


@pytest.mark.parametrize("name", SHAPES)
def test_scans(guarded, name):
    case = scan_case(name)
    states = case.states.clone()
    found = compiled(lambda: case.run(states=states))
    with choice.use("reference"):
        assert_close(found, case.run(), rtol=1e-5, atol=1e-5)
    assert same(states, case.states)


@pytest.mark.parametrize("name", SHAPES)
def test_a_row_has_the_bits_of_its_path_alone(name):
    """Runs one path as a part of a tree, as a chain, and token by token with commits."""
    case = scan_case(name)
    packed, state = compiled(case.run), TREES.states[SAMPLE]
    alone = case.on(PATH, Paths.chains([3], [state]))
    assert torch.equal(compiled(alone.run), packed[PATH])
    after, states = case.states.clone(), case.states.clone()
    compiled(lambda: alone.run(alone.paths.schedule(commit=True), states=after))
    for row in PATH:
        one = case.on([row], Paths.chains([1], [state]))
        found = compiled(lambda one=one: one.run(one.paths.schedule(commit=True), states=states))
        assert torch.equal(found[0], packed[row])
    assert same(after, states)
    other = case.on([9, 10], Paths.chains([2], [state]))
    assert not torch.equal(compiled(other.run), packed[PATH[1:]])  # control: a path that lacks its root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "channels"), [(4, 37), (3, 600), (1, 5)])
def test_convolutions(guarded, width, channels, dtype):
    *arguments, bias = convolution_case(dtype, width, channels)
    for options in ({}, {"bias": bias}, {"bias": bias, "activate": True}):
        found = compiled(lambda options=options: tree_convolution(*arguments, **options))
        with choice.use("reference"):
            assert_close(found, tree_convolution(*arguments, **options))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(guarded, activation):
    x = numbers()
    x = x[x.abs() < 85][None]  # numpy warns where a GPU gives infinity
    channels = torch.rand(2, x.shape[1])
    for bias, scale in ((None, None), (channels[0], None), (channels[0], channels[1])):
        found = compiled(lambda bias=bias, scale=scale: gate(x, activation, bias, scale))
        with choice.use("reference"):
            assert_close(found, gate(x, activation, bias, scale), rtol=1e-6, atol=1e-37)
    rows = compiled(lambda: gate(x.half(), activation))
    assert torch.equal(compiled(lambda: gate(x[:, 100:].half(), activation)), rows[:, 100:])


def test_no_rows():
    case = scan_case("Mamba-2").on([], Paths([], [0], [1]))
    inputs, windows, _, weight, _ = convolution_case()
    assert compiled(lambda: case.run(case.paths.schedule())).shape == (0, 4, 16)
    assert compiled(lambda: tree_convolution(inputs[:0], windows, case.paths.history(4), weight)).shape == (0, 37)
    assert compiled(lambda: gate(inputs[:0], "silu")).shape == (0, 37)


def test_one_kernel_serves_all_calls():
    """Blocks follow the model's sizes; copies replace tensors at addresses that would be compiled for anew."""
    assert scan_blocks(128, 128) == {"BLOCK_K": 128, "BLOCK_V": 16}
    assert scan_blocks(16, 4096) == {"BLOCK_K": 16, "BLOCK_V": 128}
    assert scan_blocks(1, 40) == {"BLOCK_K": 2, "BLOCK_V": 64}
    x = torch.zeros(9)
    assert _aligned(x) is x
    assert _aligned(x[1:]).data_ptr() % 16 == 0


def test_the_operators_are_registered_properly_and_compile():
    case = scan_case("gated delta, odd sizes")
    case.states.nan_to_num_()
    schedule, rows = TREES.schedule(), case.rows
    places = schedule.first, schedule.read, schedule.write
    order = rows["query"], rows["key"], rows["value"], rows["log_decay"]
    inputs, windows, history, weight, bias = convolution_case()
    ops, accepted = torch.ops.arbordraft, [torch.tensor(part) for part in ([[13, 14]], [1], [6])]
    for operator, arguments in (
        (ops.tree_scan, (case.states, *places, *order, None, rows["beta"], 0.5, 1e-6, schedule.scratch)),
        (ops.tree_convolution, (inputs, windows.nan_to_num(), history, weight, bias, True)),
        (ops.recurrent_gate, (inputs, bias, None, 0)),
        (ops.advance_windows, (windows[None].nan_to_num(), inputs[None], *accepted)),
        (
            ops.advance_states,
            (case.states[None], *accepted, *(part[None] for part in order[1:]), *3 * [None], *3 * [0.0]),
        ),
        (ops.tree_selective, (case.states, *places, *order, torch.ones(3), None, None, 0.0, 1.0, schedule.scratch)),
    ):
        library.opcheck(operator.portable, arguments)
        found = torch.compile(operator.portable, fullgraph=True, backend="aot_eager")(*arguments)
        if found is not None:
            assert_close(found, operator.portable(*arguments))


@pytest.mark.parametrize(("name", "raw"), [*((name, False) for name in SHAPES), (RAW, True)])
def test_states_after_accepted_paths(name, raw):
    """They are those of the same kernel's scan, bit for bit, and close to the reference's."""
    states, scans, places = advanced(name, raw=raw)
    with choice.use("reference"):
        expected = replayed(states, scans)
    same_kernel, found = compiled(lambda: replayed(states, scans)), states.clone()
    compiled(lambda: advance_states(found, scans, *places))
    assert same(found, same_kernel)
    assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert not same(found, states)
    shifted = states.clone()
    compiled(lambda: advance_states(shifted, scans, places[0].roll(1, 0), *places[1:]))
    assert not same(shifted, same_kernel)  # control: the path of another sample


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "channels"), [(4, 37), (3, 600), (1, 5), (8, 16)])
def test_windows_after_accepted_paths(width, channels, dtype):
    windows, inputs, places, expected = moved_windows(dtype, width, channels)
    compiled(lambda: advance_windows(windows, inputs, *places))
    assert same(windows, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_of_mamba2(guarded, dtype):
    """Raw step sizes become steps and decays in the kernel, which also adds inputs that skip the state."""
    rows, case, schedule = raw_rows(), scan_case(RAW), TREES.schedule()
    names = ("query", "key", "value", "log_decay", "bias", "skip")
    rows = rows._replace(**{name: getattr(rows, name).to(dtype) for name in names})
    for given in (rows, rows._replace(bias=None, skip=None, steps=(0.0, float("inf")))):
        found = compiled(lambda given=given: given.run(case.states.clone(), schedule))
        with choice.use("reference"):
            expected = given.run(case.states.clone(), schedule)
        assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (
        compiled(lambda: rows._replace(log_decay=rows.log_decay * torch.nan).run(case.states.clone(), schedule))
        .isnan()
        .all()
    )


def test_a_convolution_reads_parts_of_wider_rows():
    inputs, windows, history, weight, bias = convolution_case(torch.bfloat16)
    wider, taps = torch.cat([inputs, inputs], dim=1), weight.bfloat16().T.contiguous().T
    found = compiled(lambda: tree_convolution(wider[:, : inputs.shape[1]], windows, history, taps, bias.bfloat16()))
    wide = taps.float().contiguous(), bias.bfloat16().float()
    assert torch.equal(found, compiled(lambda: tree_convolution(inputs, windows, history, *wide)))


def test_rows_of_any_type_and_distance():
    """Rows may lie apart, as parts of wider ones, in any type."""
    case, apart = scan_case("gated delta"), {}
    for name, part in case.rows.items():
        wider = torch.cat([part.flatten(1), part.flatten(1)], dim=1).bfloat16()
        apart[name] = wider[:, : wider.shape[1] // 2].unflatten(1, part.shape[1:])
    narrow = {name: part.float().contiguous() for name, part in apart.items()}
    assert torch.equal(compiled(replace(case, rows=apart).run), compiled(replace(case, rows=narrow).run))


def test_rows_of_no_sample_get_zeros(guarded):
    case, schedule = scan_case("Mamba-2"), TREES.schedule()
    fewer = Schedule(schedule.first - schedule.first.gt(12) * 3, schedule.read, schedule.write, schedule.scratch)
    found = compiled(lambda: case.run(fewer))
    assert torch.equal(found[:12], compiled(case.run)[:12])
    assert not found[12:].any()
